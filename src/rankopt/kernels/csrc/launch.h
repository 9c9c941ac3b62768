// What the operators around the linear kernels share: optional vectors, and threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>

#include "linear.h"

namespace rankopt {

// Null where there is no tensor.
inline const float* float_vector(const char* op, const at::Tensor* tensor, const char* name,
                                 int64_t num_outputs, bool one_allowed) {
  if (tensor == nullptr) return nullptr;
  TORCH_CHECK(tensor->scalar_type() == at::kFloat && tensor->is_contiguous(), op, ": ", name,
              " must be contiguous float32; got ", tensor->scalar_type());
  TORCH_CHECK(tensor->numel() == num_outputs || (one_allowed && tensor->numel() == 1), op, ": ",
              name, " must hold ", num_outputs, one_allowed ? " values or one" : " values",
              "; got ", tensor->numel());
  return tensor->const_data_ptr<float>();
}

inline const float* float_vector(const char* op, const std::optional<at::Tensor>& tensor,
                                 const char* name, int64_t num_outputs, bool one_allowed) {
  const bool is_given = tensor.has_value() && tensor->defined();
  return float_vector(op, is_given ? &*tensor : nullptr, name, num_outputs, one_allowed);
}

struct Range {
  int64_t begin, end;
};

// Calls run(rows, tiles) for parts that cover all of both, on at most `wanted` threads. Threads
// share the rows; when there are fewer than about eight each, also the outputs.
template <class Run>
void share_out(int64_t wanted, int64_t num_rows, int64_t num_tiles, const Run& run) {
  const int64_t num_threads = std::clamp<int64_t>(wanted, 1, at::get_num_threads());
  if (num_threads == 1 || at::in_parallel_region())
    return run(Range{0, num_rows}, Range{0, num_tiles});
  const int64_t row_parts = std::min(num_threads, divide_up(num_rows, 8));
  const int64_t tile_parts = std::min(num_threads / row_parts, num_tiles);
  at::parallel_for(0, row_parts * tile_parts, 1, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      const int64_t row = part / tile_parts, tile = part % tile_parts;
      run(Range{num_rows * row / row_parts, num_rows * (row + 1) / row_parts},
          Range{num_tiles * tile / tile_parts, num_tiles * (tile + 1) / tile_parts});
    }
  });
}

}  // namespace rankopt
