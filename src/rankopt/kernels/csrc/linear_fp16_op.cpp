// rankopt::linear_fp16: one layer with fp16 weights and fp32 sums. Its registration, and the C entry
// point that a compiled artifact calls.
#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <vector>

#include "layers.h"

namespace rankopt {
namespace {

at::Tensor linear_fp16(const at::Tensor& x, const at::Tensor& packed,
                       const std::optional<at::Tensor>& bias,
                       const std::optional<at::Tensor>& negative_slope, int64_t num_outputs,
                       int64_t activation) {
  TORCH_CHECK(packed.scalar_type() == at::kHalf, "linear_fp16: packed must be float16; got ",
              packed.scalar_type());
  const LayerTensors layer{&packed, nullptr, given(bias), given(negative_slope), nullptr,
                           num_outputs, activation};
  return run_layers("linear_fp16", x, layer, 8);
}

at::Tensor linear_fp16_shape(const at::Tensor& x, const at::Tensor&,
                             const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                             int64_t num_outputs, int64_t) {
  std::vector<c10::SymInt> shape = x.sym_sizes().vec();
  TORCH_CHECK(!shape.empty(), "linear_fp16: x must have at least one dimension");
  shape.back() = num_outputs;
  return at::empty_symint(shape, x.options().memory_format(at::MemoryFormat::Contiguous));
}

}  // namespace
}  // namespace rankopt

TORCH_LIBRARY_FRAGMENT(rankopt, m) {
  m.def(
      "linear_fp16(Tensor x, Tensor packed, Tensor? bias, Tensor? negative_slope, int num_outputs, "
      "int activation=0) -> Tensor");
}

TORCH_LIBRARY_IMPL(rankopt, CPU, m) { m.impl("linear_fp16", rankopt::linear_fp16); }
TORCH_LIBRARY_IMPL(rankopt, Meta, m) { m.impl("linear_fp16", rankopt::linear_fp16_shape); }

extern "C" {

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_linear_fp16(
    AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle* bias,
    AtenTensorHandle* negative_slope, int64_t num_outputs, int64_t activation,
    AtenTensorHandle* result) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(rankopt::linear_fp16(
        *tensor_handle_to_tensor_pointer(x), *tensor_handle_to_tensor_pointer(packed),
        pointer_to_optional<at::Tensor>(bias), pointer_to_optional<at::Tensor>(negative_slope),
        num_outputs, activation));
  });
}

}  // extern "C"
