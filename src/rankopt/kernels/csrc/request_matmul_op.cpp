// Products of candidates' rows with their requests' matrices, which are not copied for each
// candidate, and the check of the map between the two.
//
// A request's matrix is laid out once as a layer of linear_fp32.h and multiplied by the rows of all
// neighbouring candidates that name it. So the order of sums is that kernel's: a row's result is
// the same bits whatever stands beside it, and on every instruction set.
//
// Shapes: B candidates, R requests, A heads; M rows of a candidate, K inputs, N outputs.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "isa.h"
#include "linear_fp32.h"

namespace rankopt {
namespace {

const LinearFp32& kernels() {
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx2:
      return linear_fp32_avx2();
    case Isa::kAvx512:
    case Isa::kAvx512Vnni:
      return linear_fp32_avx512();
#endif
    default:
      return linear_fp32_scalar();
  }
}

// Candidates of one task: enough that laying the matrix out again for the next task is little work,
// few enough that two threads share a request.
constexpr int64_t kMostCandidates = 128;

struct Task {
  int64_t request, begin, end;  // candidates [begin, end)
};

std::vector<Task> tasks_of(const int64_t* index, int64_t num_candidates) {
  std::vector<Task> tasks;
  for (int64_t begin = 0; begin < num_candidates;) {
    int64_t end = begin + 1;
    while (end < num_candidates && end - begin < kMostCandidates && index[end] == index[begin]) ++end;
    tasks.push_back({index[begin], begin, end});
    begin = end;
  }
  return tasks;
}

// y [K, N] at any strides, as linear_fp32.h lays weights out.
void lay_out(const float* y, int64_t k_stride, int64_t n_stride, int64_t num_inputs,
             int64_t num_outputs, std::vector<float>& packed) {
  if (num_outputs <= kNarrowOutputs) {
    const int64_t width = divide_up(num_inputs, kLaneInputs) * kLaneInputs;
    packed.assign(num_outputs * width, 0.0f);
    for (int64_t n = 0; n < num_outputs; ++n)
      for (int64_t k = 0; k < num_inputs; ++k)
        packed[n * width + k] = y[k * k_stride + n * n_stride];
    return;
  }
  packed.assign(divide_up(num_outputs, kTileOutputs) * kTileOutputs * num_inputs, 0.0f);
  for (int64_t n = 0; n < num_outputs; ++n) {
    float* tile = packed.data() + n / kTileOutputs * kTileOutputs * num_inputs + n % kTileOutputs;
    for (int64_t k = 0; k < num_inputs; ++k)
      tile[k * kTileOutputs] = y[k * k_stride + n * n_stride];
  }
}

bool request_index_fits(const at::Tensor& index, int64_t num_requests) {
  if (index.dim() != 1 || index.scalar_type() != at::kLong || !index.is_contiguous() ||
      !index.device().is_cpu())
    return false;
  const int64_t* data = index.const_data_ptr<int64_t>();
  bool good = true;
  for (int64_t b = 0; b < index.numel(); ++b) good &= data[b] >= 0 && data[b] < num_requests;
  return good;
}

at::Tensor request_matmul(const at::Tensor& x, const at::Tensor& y, const at::Tensor& index) {
  TORCH_CHECK(x.dim() == 4 && x.scalar_type() == at::kFloat,
              "request_matmul: x must be float32 [B, A, M, K]; got ", x.scalar_type(), " ",
              x.sizes());
  TORCH_CHECK(y.dim() == 4 && y.scalar_type() == at::kFloat && y.size(1) == x.size(1) &&
                  y.size(2) == x.size(3),
              "request_matmul: y must be float32 [R, ", x.size(1), ", ", x.size(3), ", N]; got ",
              y.scalar_type(), " ", y.sizes());
  TORCH_CHECK(index.numel() == x.size(0) && request_index_fits(index, y.size(0)),
              "request_matmul: index must be contiguous int64 [", x.size(0), "] in [0, ", y.size(0),
              ")");
  const int64_t num_heads = x.size(1), num_rows = x.size(2), num_inputs = x.size(3);
  const int64_t num_outputs = y.size(3);
  at::Tensor out = at::empty({x.size(0), num_heads, num_rows, num_outputs},
                             x.options().memory_format(at::MemoryFormat::Contiguous));
  if (out.numel() == 0) return out;
  const bool strided = x.stride(3) == 1 || num_inputs <= 1;
  const at::Tensor rows = strided ? x : x.contiguous();
  const float* x_data = rows.const_data_ptr<float>();
  const float* y_data = y.const_data_ptr<float>();
  float* out_data = out.mutable_data_ptr<float>();
  const LinearFp32& kernel = kernels();
  const std::vector<Task> tasks = tasks_of(index.const_data_ptr<int64_t>(), x.size(0));

  Fp32Block whole{};
  whole.num_inputs = num_inputs;
  whole.num_outputs = num_outputs;
  whole.tile_end = divide_up(num_outputs, kTileOutputs);
  // One strided block holds the rows of several candidates when each brings a single row.
  const bool one_row = num_rows == 1;
  const int64_t count = static_cast<int64_t>(tasks.size()) * num_heads;
  at::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
    std::vector<float> packed;
    for (int64_t number = first; number < last; ++number) {
      const Task& task = tasks[number / num_heads];
      const int64_t head = number % num_heads;
      lay_out(y_data + task.request * y.stride(0) + head * y.stride(1), y.stride(2), y.stride(3),
              num_inputs, num_outputs, packed);
      Fp32Block block = whole;
      block.weights = packed.data();
      block.num_rows = one_row ? task.end - task.begin : num_rows;
      block.x_stride = one_row ? rows.stride(0) : rows.stride(2);
      block.out_stride = one_row ? num_heads * num_outputs : num_outputs;
      for (int64_t b = task.begin; b < task.end; b += one_row ? task.end - task.begin : 1) {
        block.x = x_data + b * rows.stride(0) + head * rows.stride(1);
        block.out = out_data + (b * num_heads + head) * num_rows * num_outputs;
        (num_outputs <= kNarrowOutputs ? kernel.narrow : kernel.wide)(block);
      }
    }
  });
  return out;
}

at::Tensor request_matmul_shape(const at::Tensor& x, const at::Tensor& y, const at::Tensor&) {
  return at::empty_symint({x.sym_size(0), x.sym_size(1), x.sym_size(2), y.sym_size(3)},
                          x.options().memory_format(at::MemoryFormat::Contiguous));
}

}  // namespace
}  // namespace rankopt

TORCH_LIBRARY_FRAGMENT(rankopt, m) {
  m.def("request_matmul(Tensor x, Tensor y, Tensor index) -> Tensor");
  m.def("request_index_fits(Tensor index, int num_requests) -> bool", rankopt::request_index_fits);
}

TORCH_LIBRARY_IMPL(rankopt, CPU, m) { m.impl("request_matmul", rankopt::request_matmul); }

TORCH_LIBRARY_IMPL(rankopt, Meta, m) { m.impl("request_matmul", rankopt::request_matmul_shape); }

extern "C" {

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_request_matmul(AtenTensorHandle x,
                                                               AtenTensorHandle y,
                                                               AtenTensorHandle index,
                                                               AtenTensorHandle* result) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(rankopt::request_matmul(*tensor_handle_to_tensor_pointer(x),
                                                        *tensor_handle_to_tensor_pointer(y),
                                                        *tensor_handle_to_tensor_pointer(index)));
  });
}

}  // extern "C"
