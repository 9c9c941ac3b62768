// Training lookups: rows of many tables pooled into one matrix, and the step that adds gradients up
// by id and updates the rows, without a sparse gradient in between.
//
// The same code for every instruction set (train_lookup_tile.h) makes only lane-wise IEEE
// operations in a fixed order, so weights are the same bits on each of them and with any threads.
//
// Shapes: T tables, B bags of each table in a call, D_t columns of table t, W = sum of D_t.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace rankopt {

// The bags of one table in one call.
struct Bags {
  const int64_t* ids;      // of all bags
  int64_t id_stride;       // between the ids of successive bags, where each holds one
  const int64_t* offsets;  // [B + 1], null where each bag holds one id
  const float* weights;    // beside `ids`, or null
  int64_t count;           // B
  bool is_mean;
  int64_t padding;  // an id that counts for nothing; -1 for none

  int64_t begin(int64_t bag) const { return offsets == nullptr ? bag * id_stride : offsets[bag]; }
  int64_t end(int64_t bag) const {
    return offsets == nullptr ? bag * id_stride + 1 : offsets[bag + 1];
  }
};

struct PooledRows {
  const float* table;  // [num_rows, dim]
  int64_t num_rows, dim;
  Bags bags;
  float* out;  // bag b at out + b * out_stride
  int64_t out_stride;
};

// What one id of one bag adds to the gradient of its row: scale * grad[0:dim].
struct Contribution {
  const float* grad;
  float scale;
};

enum class TableOptimizer : int64_t { kAdagrad, kRowwiseAdagrad, kSgd };

struct TableStep {
  float* table;
  float* state;  // [num_rows, dim], [num_rows] for row-wise, null for SGD
  int64_t num_rows, dim;
  TableOptimizer optimizer;
  float learning_rate, eps;
};

// Scratch of one thread, kept from task to task.
struct StepScratch {
  std::vector<uint64_t> keys, sorted;
  std::vector<Contribution> contributions;
  std::vector<float> sum;
};

struct TrainLookup {
  // Pools bags [first, last), whose ids are in range.
  void (*pool)(const PooledRows& job, int64_t first, int64_t last);
  // Updates the rows named by sorted keys (id << 32 | index of the contribution).
  void (*step)(const TableStep& job, const StepScratch& scratch, float* sum);
};

const TrainLookup& train_lookup_scalar();
#if defined(__x86_64__)
const TrainLookup& train_lookup_avx2();
const TrainLookup& train_lookup_avx512();
#endif

}  // namespace rankopt
