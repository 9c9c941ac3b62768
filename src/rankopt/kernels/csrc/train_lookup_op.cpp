// The training operators: `table_lookup` pools rows of many tables into one matrix, `table_step`
// adds the gradients of all lookups since the last step up by id and updates the rows in place.
//
// A step is cut into tasks of one table and one residue of the id, so every row is updated by one
// thread, from contributions in the order of the lookups and their bags: the same bits whatever the
// number of threads. Ids are brought together by a stable radix sort.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "isa.h"
#include "train_lookup.h"

namespace rankopt {
namespace {

constexpr int64_t kDigitBits = 11;
constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();

const TrainLookup& kernels() {
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx2:
      return train_lookup_avx2();
    case Isa::kAvx512:
    case Isa::kAvx512Vnni:
      return train_lookup_avx512();
#endif
    default:
      return train_lookup_scalar();
  }
}

bool is_plain(const at::Tensor& tensor, at::ScalarType type, int64_t dim) {
  return tensor.device().is_cpu() && tensor.scalar_type() == type && tensor.dim() == dim;
}

int64_t width_of(at::TensorList tables) {
  int64_t width = 0;
  for (const at::Tensor& table : tables) {
    TORCH_CHECK(is_plain(table, at::kFloat, 2) && table.is_contiguous(),
                "table_lookup: tables must be contiguous float32 [rows, D] on the CPU; got ",
                table.scalar_type(), " ", table.sizes());
    TORCH_CHECK(table.size(0) < kMost, "table_lookup: a table must have fewer than 2^32 - 1 rows");
    width += table.size(1);
  }
  return width;
}

// The bags of each table in one call: ids [B, T] hold one id each; ids [L] with offsets [T * B + 1]
// hold lists, table after table.
std::vector<Bags> bags_of(at::TensorList tables, const at::Tensor& ids, const at::Tensor& offsets,
                          const at::Tensor& weights, bool is_mean, int64_t padding) {
  const int64_t num_tables = static_cast<int64_t>(tables.size());
  const bool is_matrix = ids.dim() == 2;
  TORCH_CHECK(ids.device().is_cpu() && ids.scalar_type() == at::kLong && num_tables > 0,
              "table_lookup: ids must be int64 on the CPU; got ", ids.scalar_type());
  const float* weight_data = nullptr;
  if (weights.numel() > 0) {
    TORCH_CHECK(!is_matrix && is_plain(weights, at::kFloat, 1) && weights.is_contiguous() &&
                    weights.numel() == ids.numel(),
                "table_lookup: weights must be contiguous float32 beside the ids of lists");
    weight_data = weights.const_data_ptr<float>();
  }
  const int64_t* id_data = ids.const_data_ptr<int64_t>();
  std::vector<Bags> bags;
  bags.reserve(num_tables);
  if (is_matrix) {
    TORCH_CHECK(ids.size(1) == num_tables, "table_lookup: ids must be [B, ", num_tables, "]; got ",
                ids.sizes());
    for (int64_t t = 0; t < num_tables; ++t) {
      const int64_t* column = ids.size(0) == 0 ? id_data : id_data + t * ids.stride(1);
      bags.push_back(
          {column, ids.stride(0), nullptr, nullptr, ids.size(0), is_mean, padding});
    }
    return bags;
  }
  TORCH_CHECK(ids.dim() == 1 && ids.is_contiguous() && is_plain(offsets, at::kLong, 1) &&
                  offsets.is_contiguous() && offsets.numel() > 0 &&
                  (offsets.numel() - 1) % num_tables == 0,
              "table_lookup: lists need contiguous ids [L] and offsets int64 [T * B + 1]; got ",
              ids.sizes(), " and ", offsets.sizes());
  const int64_t* offset_data = offsets.const_data_ptr<int64_t>();
  const int64_t num_offsets = offsets.numel() - 1, count = num_offsets / num_tables;
  bool ascend = offset_data[0] >= 0 && offset_data[num_offsets] <= ids.numel();
  for (int64_t i = 0; i < num_offsets; ++i) ascend &= offset_data[i] <= offset_data[i + 1];
  TORCH_CHECK(ascend, "table_lookup: offsets must ascend from 0 to at most ", ids.numel());
  for (int64_t t = 0; t < num_tables; ++t)
    bags.push_back({id_data, 1, offset_data + t * count, weight_data, count, is_mean, padding});
  return bags;
}

void check_ids(at::TensorList tables, const std::vector<Bags>& bags) {
  const int64_t num_tables = static_cast<int64_t>(bags.size());
  for (int64_t t = 0; t < num_tables; ++t) {
    const Bags& some = bags[t];
    const uint64_t num_rows = static_cast<uint64_t>(tables[t].size(0));
    if (some.count == 0) continue;
    const int64_t stride = some.offsets == nullptr ? some.id_stride : 1;
    const int64_t first = some.offsets == nullptr ? 0 : some.offsets[0];
    const int64_t last = some.offsets == nullptr ? some.count : some.offsets[some.count];
    bool good = true;
    for (int64_t i = first; i < last; ++i)
      good &= static_cast<uint64_t>(some.ids[i * stride]) < num_rows;
    if (good) continue;
    for (int64_t i = first; i < last; ++i)
      TORCH_CHECK_INDEX(static_cast<uint64_t>(some.ids[i * stride]) < num_rows,
                        "table_lookup: table ", t, ": ids must lie in [0, ", num_rows, "); got ",
                        some.ids[i * stride]);
  }
}

at::Tensor table_lookup(at::TensorList tables, const at::Tensor& ids, const at::Tensor& offsets,
                        const at::Tensor& weights, bool is_mean, int64_t padding) {
  const int64_t width = width_of(tables);
  const std::vector<Bags> bags = bags_of(tables, ids, offsets, weights, is_mean, padding);
  check_ids(tables, bags);
  const int64_t num_bags = bags.front().count;
  at::Tensor out = at::empty({num_bags, width}, tables[0].options().requires_grad(false));
  if (out.numel() == 0) return out;
  std::vector<PooledRows> jobs;
  float* data = out.mutable_data_ptr<float>();
  int64_t column = 0;
  for (size_t t = 0; t < bags.size(); ++t) {
    const int64_t dim = tables[t].size(1);
    jobs.push_back(
        {tables[t].const_data_ptr<float>(), tables[t].size(0), dim, bags[t], data + column, width});
    column += dim;
  }
  const TrainLookup& kernel = kernels();
  const int64_t least = std::max<int64_t>(1, 4096 / std::max<int64_t>(width, 1));
  at::parallel_for(0, num_bags, least, [&](int64_t first, int64_t last) {
    for (const PooledRows& job : jobs) kernel.pool(job, first, last);
  });
  return out;
}

at::Tensor table_lookup_shape(at::TensorList tables, const at::Tensor& ids,
                              const at::Tensor& offsets, const at::Tensor&, bool, int64_t) {
  c10::SymInt width = 0;
  for (const at::Tensor& table : tables) width = width + table.sym_size(1);
  const c10::SymInt count = ids.dim() == 2
                                ? ids.sym_size(0)
                                : (offsets.sym_numel() - 1) / static_cast<int64_t>(tables.size());
  return at::empty_symint({count, width}, tables[0].options());
}

// One lookup since the last step: its bags by table, and the gradient of its result.
struct Use {
  std::vector<Bags> bags;
  const float* grad;
  int64_t grad_stride;
};

// Lists what the ids of one residue add to the rows of table `t`.
void collect(const std::vector<Use>& uses, size_t t, int64_t column, int64_t part,
             int64_t num_parts, StepScratch& scratch) {
  scratch.keys.clear();
  scratch.contributions.clear();
  for (const Use& use : uses) {
    const Bags& bags = use.bags[t];
    for (int64_t bag = 0; bag < bags.count; ++bag) {
      const float* grad = use.grad + bag * use.grad_stride + column;
      const int64_t begin = bags.begin(bag), end = bags.end(bag);
      float share = 1.0f;
      if (bags.is_mean && end - begin > 1) {
        int64_t num_added = end - begin;
        for (int64_t at = begin; at < end; ++at) num_added -= bags.ids[at] == bags.padding;
        share = 1.0f / static_cast<float>(std::max<int64_t>(num_added, 1));
      }
      for (int64_t at = begin; at < end; ++at) {
        const int64_t id = bags.ids[at];
        if (id == bags.padding || (num_parts > 1 && id % num_parts != part)) continue;
        const float scale = bags.weights == nullptr ? share : share * bags.weights[at];
        scratch.keys.push_back(static_cast<uint64_t>(id) << 32 | scratch.contributions.size());
        scratch.contributions.push_back({grad, scale});
      }
    }
  }
}

// Sorts by the upper half of the keys, below 2^num_bits, and keeps the order of equal ones.
void sort_keys(StepScratch& scratch, int64_t num_rows) {
  const size_t count = scratch.keys.size();
  scratch.sorted.resize(count);
  for (int64_t shift = 0; num_rows >> shift > 0; shift += kDigitBits) {
    std::array<uint32_t, (1 << kDigitBits) + 1> starts{};
    const auto digit = [shift](uint64_t key) {
      return key >> (32 + shift) & ((1 << kDigitBits) - 1);
    };
    for (const uint64_t key : scratch.keys) ++starts[digit(key) + 1];
    for (size_t i = 1; i < starts.size(); ++i) starts[i] += starts[i - 1];
    for (const uint64_t key : scratch.keys) scratch.sorted[starts[digit(key)]++] = key;
    scratch.keys.swap(scratch.sorted);
  }
}

void table_step(at::TensorList tables, at::TensorList states, at::TensorList ids,
                at::TensorList offsets, at::TensorList weights, at::TensorList grads, bool is_mean,
                int64_t padding, int64_t optimizer, double learning_rate, double eps) {
  const int64_t width = width_of(tables);
  const auto kind = static_cast<TableOptimizer>(optimizer);
  TORCH_CHECK(optimizer >= 0 && optimizer <= static_cast<int64_t>(TableOptimizer::kSgd),
              "table_step: no optimizer has the number ", optimizer);
  TORCH_CHECK(kind == TableOptimizer::kSgd ? states.empty() : states.size() == tables.size(),
              "table_step: needs one state per table, none for SGD; got ", states.size());
  TORCH_CHECK(ids.size() == offsets.size() && ids.size() == weights.size() &&
                  ids.size() == grads.size(),
              "table_step: ids, offsets, weights and gradients must be as many");
  std::vector<at::Tensor> kept;  // gradients laid out again, until the step is done
  std::vector<Use> uses;
  int64_t num_ids = 0;
  for (size_t k = 0; k < ids.size(); ++k) {
    Use use{bags_of(tables, ids[k], offsets[k], weights[k], is_mean, padding), nullptr, 0};
    check_ids(tables, use.bags);
    TORCH_CHECK(is_plain(grads[k], at::kFloat, 2) && grads[k].size(1) == width &&
                    grads[k].size(0) == use.bags.front().count,
                "table_step: a gradient must be float32 [", use.bags.front().count, ", ", width,
                "]; got ", grads[k].scalar_type(), " ", grads[k].sizes());
    const bool is_laid_out = grads[k].stride(1) == 1 || width == 1;
    kept.push_back(is_laid_out ? grads[k] : grads[k].contiguous());
    use.grad = kept.back().const_data_ptr<float>();
    use.grad_stride = kept.back().stride(0);
    uses.push_back(std::move(use));
    num_ids += ids[k].numel();
  }
  TORCH_CHECK(num_ids < kMost, "table_step: fewer than 2^32 - 1 ids fit into one step");
  std::vector<TableStep> jobs;
  std::vector<int64_t> columns;
  int64_t column = 0;
  for (size_t t = 0; t < tables.size(); ++t) {
    const int64_t num_rows = tables[t].size(0), dim = tables[t].size(1);
    float* state = nullptr;
    if (kind != TableOptimizer::kSgd) {
      const int64_t wanted = kind == TableOptimizer::kAdagrad ? num_rows * dim : num_rows;
      TORCH_CHECK(states[t].scalar_type() == at::kFloat && states[t].is_contiguous() &&
                      states[t].numel() == wanted,
                  "table_step: the state of table ", t, " must hold ", wanted, " float32 values");
      state = states[t].mutable_data_ptr<float>();
    }
    jobs.push_back({tables[t].mutable_data_ptr<float>(), state, num_rows, dim, kind,
                    static_cast<float>(learning_rate), static_cast<float>(eps)});
    columns.push_back(column);
    column += dim;
  }
  // Enough tasks that no thread waits for the last table; the bits do not depend on how many.
  const int64_t num_tables = static_cast<int64_t>(jobs.size());
  const int64_t wanted = at::get_num_threads() == 1 ? 1 : 2 * at::get_num_threads();
  const int64_t num_parts = std::max<int64_t>(1, (wanted + num_tables - 1) / num_tables);
  const TrainLookup& kernel = kernels();
  at::parallel_for(0, num_tables * num_parts, 1, [&](int64_t first, int64_t last) {
    StepScratch scratch;
    for (int64_t task = first; task < last; ++task) {
      const int64_t t = task / num_parts;
      collect(uses, t, columns[t], task % num_parts, num_parts, scratch);
      sort_keys(scratch, jobs[t].num_rows);
      scratch.sum.resize(std::max<size_t>(scratch.sum.size(), jobs[t].dim));
      kernel.step(jobs[t], scratch, scratch.sum.data());
    }
  });
}

}  // namespace
}  // namespace rankopt

TORCH_LIBRARY_FRAGMENT(rankopt, m) {
  m.def(
      "table_lookup(Tensor[] tables, Tensor ids, Tensor offsets, Tensor weights, bool is_mean, "
      "int padding) -> Tensor");
  m.def(
      "table_step(Tensor(a!)[] tables, Tensor(b!)[] states, Tensor[] ids, Tensor[] offsets, "
      "Tensor[] weights, Tensor[] grads, bool is_mean, int padding, int optimizer, "
      "float learning_rate, float eps) -> ()");
}

TORCH_LIBRARY_IMPL(rankopt, CPU, m) {
  m.impl("table_lookup", rankopt::table_lookup);
  m.impl("table_step", rankopt::table_step);
}

TORCH_LIBRARY_IMPL(rankopt, Meta, m) { m.impl("table_lookup", rankopt::table_lookup_shape); }
