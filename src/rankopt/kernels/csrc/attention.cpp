// What the attention operators share, and the two that only move rows.
#include "attention.h"

#include <ATen/ops/empty.h>

#include "attention_parts.h"
#include "isa.h"
#include "target.h"

namespace rankopt {
namespace {

namespace plain {
#include "exact_exp.h"
#include "attention_gates.h"
}

#if defined(__x86_64__)
RANKOPT_TARGET_BEGIN("avx2,fma")
namespace avx2 {
#include "exact_exp.h"
#include "attention_gates.h"
}
RANKOPT_TARGET_END

RANKOPT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
namespace avx512 {
#include "exact_exp.h"
#include "attention_gates.h"
}
RANKOPT_TARGET_END
#endif

}  // namespace

AttentionSteps attention_steps() {
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx2:
      return {linear_fp32_avx2(), avx2::weigh, avx2::dice, avx2::row_dice,
              avx2::shares, avx2::dot, avx2::add_scaled, avx2::mix, avx2::interleave,
              avx2::columns};
    case Isa::kAvx512:
    case Isa::kAvx512Vnni:
      return {linear_fp32_avx512(), avx512::weigh, avx512::dice, avx512::row_dice,
              avx512::shares, avx512::dot, avx512::add_scaled, avx512::mix, avx512::interleave,
              avx512::columns};
#endif
    default:
      return {linear_fp32_scalar(), plain::weigh, plain::dice, plain::row_dice,
              plain::shares, plain::dot, plain::add_scaled, plain::mix, plain::interleave,
              plain::columns};
  }
}

RaggedLists ragged_lists(const char* op, const at::Tensor& lengths, int64_t num_values,
                         int64_t max_length) {
  TORCH_CHECK(lengths.scalar_type() == at::kLong && lengths.dim() == 1, op,
              ": lengths must be int64 [R]; got ", lengths.scalar_type(), " ", lengths.sizes());
  TORCH_CHECK(max_length >= 1, op, ": max_length must be at least 1; got ", max_length);
  const at::Tensor given = lengths.contiguous();
  const int64_t* length = given.const_data_ptr<int64_t>();
  const int64_t num_lists = given.size(0);
  RaggedLists lists;
  lists.first.resize(num_lists);
  lists.count.resize(num_lists);
  int64_t end = 0;
  for (int64_t r = 0; r < num_lists; ++r) {
    TORCH_CHECK(length[r] >= 0 && length[r] <= num_values - end, op, ": lengths[", r,
                "] must lie within 0 and the ", num_values - end, " ids that are left; got ",
                length[r]);
    end += length[r];
    lists.count[r] = std::min(length[r], max_length);
    lists.first[r] = end - lists.count[r];
    lists.total += lists.count[r];
  }
  TORCH_CHECK(end == num_values, op, ": lengths add up to ", end, " and there are ", num_values,
              " ids");
  return lists;
}

Rows rows_of(const char* op, const at::Tensor& tensor, const char* name, int64_t num_rows,
             int64_t width) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat && tensor.dim() == 2 &&
                  (num_rows < 0 || tensor.size(0) == num_rows) && tensor.size(1) == width,
              op, ": ", name, " must be float32 [", num_rows < 0 ? "N" : std::to_string(num_rows),
              ", ", width, "]; got ", tensor.scalar_type(), " ", tensor.sizes());
  Rows rows;
  rows.held = tensor.stride(1) == 1 || width <= 1 ? tensor : tensor.contiguous();
  rows.data = rows.held.const_data_ptr<float>();
  rows.stride = rows.held.stride(0);
  return rows;
}

ListOf::ListOf(const char* op, const std::optional<at::Tensor>& index, int64_t num_rows,
               int64_t num_lists) {
  if (!index.has_value() || !index->defined()) {
    TORCH_CHECK(num_rows == num_lists, op, ": without request_index there must be a list for each "
                "of the ", num_rows, " candidates; got ", num_lists);
    return;
  }
  TORCH_CHECK(index->scalar_type() == at::kLong && index->dim() == 1 && index->size(0) == num_rows,
              op, ": request_index must be int64 [", num_rows, "]; got ", index->scalar_type(),
              " ", index->sizes());
  held_ = index->contiguous();
  data_ = held_.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < num_rows; ++row)
    TORCH_CHECK(data_[row] >= 0 && data_[row] < num_lists, op, ": request_index[", row,
                "] must lie within 0 and ", num_lists - 1, "; got ", data_[row]);
}

at::Tensor ragged_rows(const at::Tensor& lengths, const at::Tensor& values) {
  TORCH_CHECK(values.dim() >= 1, "ragged_rows: values must have a dimension");
  const RaggedLists lists = ragged_lists("ragged_rows", lengths, values.size(0), INT64_MAX);
  at::Tensor out = at::empty({values.size(0)}, lengths.options());
  int64_t* to = out.mutable_data_ptr<int64_t>();
  for (size_t r = 0; r < lists.first.size(); ++r, to += lists.count[r - 1])
    std::fill_n(to, lists.count[r], static_cast<int64_t>(r));
  return out;
}

at::Tensor ragged_sum(const at::Tensor& weights, const at::Tensor& rows, const at::Tensor& lengths,
                      int64_t max_length) {
  const char* op = "ragged_sum";
  TORCH_CHECK(weights.scalar_type() == at::kFloat && weights.dim() == 1, op,
              ": weights must be float32 [L]; got ", weights.scalar_type(), " ", weights.sizes());
  const int64_t width = rows.dim() == 2 ? rows.size(1) : 0;
  const Rows given = rows_of(op, rows, "rows", weights.size(0), width);
  const RaggedLists lists = ragged_lists(op, lengths, weights.size(0), max_length);
  const at::Tensor held = weights.contiguous();
  const float* weight = held.const_data_ptr<float>();
  const int64_t num_lists = lengths.size(0);
  at::Tensor out =
      at::empty({num_lists, width}, rows.options().memory_format(at::MemoryFormat::Contiguous));
  float* to = out.mutable_data_ptr<float>();
  const AttentionSteps steps = attention_steps();
  struct None {};
  over_units<None>(num_lists, lists.total * width, [&](int64_t r, None&) {
    std::fill_n(to + r * width, width, 0.0f);
    for (int64_t i = lists.first[r]; i < lists.first[r] + lists.count[r]; ++i)
      steps.add_scaled(weight[i], given.at(i), width, to + r * width);
  });
  return out;
}

}  // namespace rankopt
