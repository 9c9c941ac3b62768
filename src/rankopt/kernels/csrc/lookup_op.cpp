// Registration of the lookup operators, and the C entry points that a compiled artifact calls.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include "lookup_ops.h"

namespace rankopt {
namespace {

at::TensorOptions result_options(const at::Tensor& store) {
  return store.options().dtype(at::kFloat).memory_format(at::MemoryFormat::Contiguous);
}

at::Tensor lookup_rows_shape(const at::Tensor& store, const at::Tensor&,
                             const std::vector<at::Tensor>&, c10::SymInt num_rows, int64_t width) {
  return at::empty_symint({std::move(num_rows), width}, result_options(store));
}

at::Tensor lookup_sequences_shape(const at::Tensor& store, const at::Tensor&,
                                  const std::vector<at::Tensor>& inputs, int64_t width) {
  c10::SymInt num_ids = 0;
  for (const at::Tensor& ids : inputs) num_ids = num_ids + ids.sym_numel();
  return at::empty_symint({std::move(num_ids), width}, result_options(store));
}

std::vector<at::Tensor> tensors_of(const AtenTensorHandle* handles, int64_t count) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(count);
  for (int64_t i = 0; i < count; ++i)
    tensors.push_back(*torch::aot_inductor::tensor_handle_to_tensor_pointer(handles[i]));
  return tensors;
}

}  // namespace
}  // namespace rankopt

TORCH_LIBRARY_FRAGMENT(rankopt, m) {
  m.def(
      "lookup_rows(Tensor store, Tensor plan, Tensor[] inputs, SymInt num_rows, int width) -> "
      "Tensor");
  m.def("lookup_sequences(Tensor store, Tensor plan, Tensor[] inputs, int width) -> Tensor");
}

TORCH_LIBRARY_IMPL(rankopt, CPU, m) {
  m.impl("lookup_rows", rankopt::lookup_rows);
  m.impl("lookup_sequences", rankopt::lookup_sequences);
}

TORCH_LIBRARY_IMPL(rankopt, Meta, m) {
  m.impl("lookup_rows", rankopt::lookup_rows_shape);
  m.impl("lookup_sequences", rankopt::lookup_sequences_shape);
}

extern "C" {

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_lookup_rows(
    AtenTensorHandle store, AtenTensorHandle plan, const AtenTensorHandle* inputs,
    int64_t num_inputs, int64_t num_rows, int64_t width, AtenTensorHandle* result) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(rankopt::lookup_rows(
        *tensor_handle_to_tensor_pointer(store), *tensor_handle_to_tensor_pointer(plan),
        rankopt::tensors_of(inputs, num_inputs), num_rows, width));
  });
}

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_lookup_sequences(
    AtenTensorHandle store, AtenTensorHandle plan, const AtenTensorHandle* inputs,
    int64_t num_inputs, int64_t width, AtenTensorHandle* result) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(rankopt::lookup_sequences(
        *tensor_handle_to_tensor_pointer(store), *tensor_handle_to_tensor_pointer(plan),
        rankopt::tensors_of(inputs, num_inputs), width));
  });
}

}  // extern "C"
