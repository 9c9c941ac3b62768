// What the attention operators share: ragged lists, products, steps by instruction set.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "linear_fp32.h"

namespace rankopt {

// The steps of attention_gates.h for one instruction set, and its products.
struct AttentionSteps {
  const LinearFp32& linear;
  void (*weigh)(float*, int64_t, const float*, float, float);
  void (*dice)(float*, int64_t, int64_t, const float*, const float*, const float*);
  void (*row_dice)(float*, int64_t, int64_t, const float*, const float*);
  void (*shares)(float*, int64_t);
  float (*dot)(const float*, const float*, int64_t);
  void (*add_scaled)(float, const float*, int64_t, float*);
  void (*mix)(const float*, const float*, const float*, int64_t, int64_t, float*);
  void (*interleave)(const float*, int64_t, int64_t, int64_t, int64_t, float*);
  void (*columns)(const float*, int64_t, int64_t, int64_t, int64_t, int64_t, float*);
};

AttentionSteps attention_steps();

// Where the ids of each list that count begin, and how many they are.
struct RaggedLists {
  std::vector<int64_t> first, count;
  int64_t total = 0;  // of all that count
};

RaggedLists ragged_lists(const char* op, const at::Tensor& lengths, int64_t num_values,
                         int64_t max_length);

// A float32 matrix whose rows are contiguous; they may lie any stride apart.
struct Rows {
  at::Tensor held;
  const float* data = nullptr;
  int64_t stride = 0;

  const float* at(int64_t row) const { return data + row * stride; }
};

Rows rows_of(const char* op, const at::Tensor& tensor, const char* name, int64_t num_rows,
             int64_t width);

// The list of each candidate: int64 [B], or the candidate's own number.
class ListOf {
 public:
  ListOf(const char* op, const std::optional<at::Tensor>& index, int64_t num_rows,
         int64_t num_lists);
  int64_t operator[](int64_t row) const { return data_ == nullptr ? row : data_[row]; }

 private:
  at::Tensor held_;
  const int64_t* data_ = nullptr;
};

// As in linear_fp32.cpp.
constexpr int64_t kAttentionWorkPerThread = 1 << 17;

// Calls run(unit, scratch) for every unit, neighbours on different threads: lists that lie side by
// side are often alike.
template <class Scratch, class Run>
void over_units(int64_t num_units, int64_t work, const Run& run) {
  const int64_t num_threads = std::clamp<int64_t>(
      std::min(work / kAttentionWorkPerThread, num_units), 1, at::get_num_threads());
  at::parallel_for(0, num_threads, 1, [&](int64_t begin, int64_t end) {
    Scratch scratch;
    for (int64_t thread = begin; thread < end; ++thread)
      for (int64_t unit = thread; unit < num_units; unit += num_threads) run(unit, scratch);
  });
}

// A product of rows with a packed matrix; see linear_fp32.h.
inline Fp32Block product(const float* x, int64_t x_stride, int64_t num_rows, int64_t num_inputs,
                         const float* packed, int64_t num_outputs, float* out, int64_t out_stride) {
  Fp32Block block{};
  block.x = x;
  block.x_stride = x_stride;
  block.num_rows = num_rows;
  block.num_inputs = num_inputs;
  block.weights = packed;
  block.tile_end = divide_up(num_outputs, kTileOutputs);
  block.num_outputs = num_outputs;
  block.out = out;
  block.out_stride = out_stride;
  return block;
}

}  // namespace rankopt
