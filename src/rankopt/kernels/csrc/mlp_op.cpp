// rankopt::mlp_int8: a chain of linear layers in one call. Its registration, and the C entry point
// that a compiled artifact calls.
#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <vector>

#include "layers.h"

namespace rankopt {
namespace {

using OptionalTensors = c10::List<std::optional<at::Tensor>>;

void check_lengths(size_t num_layers, size_t scales, size_t biases, size_t slopes, size_t peaks,
                   size_t outputs, size_t activations) {
  TORCH_CHECK(num_layers == scales && num_layers == biases && num_layers == slopes &&
                  num_layers == peaks && num_layers == outputs &&
                  (num_layers == activations || activations == 0),
              "mlp_int8: packed, scale, bias, negative_slope, peak and num_outputs must have one "
              "entry for each layer; got ", num_layers, ", ", scales, ", ", biases, ", ", slopes,
              ", ", peaks, " and ", outputs, "; activation one too, or none at all; got ",
              activations);
}

at::Tensor mlp_int8(const at::Tensor& x, at::TensorList packed, const OptionalTensors& scale,
                    const OptionalTensors& bias, const OptionalTensors& negative_slope,
                    const OptionalTensors& peak, at::IntArrayRef num_outputs, int64_t activation_bits,
                    at::IntArrayRef activation) {
  check_lengths(packed.size(), scale.size(), bias.size(), negative_slope.size(), peak.size(),
                num_outputs.size(), activation.size());
  const auto scales = scale.vec(), biases = bias.vec(), slopes = negative_slope.vec(),
             peaks = peak.vec();
  c10::SmallVector<LayerTensors, 6> layers;
  for (size_t i = 0; i < packed.size(); ++i)
    layers.push_back({&packed[i], given(scales[i]), given(biases[i]), given(slopes[i]),
                      given(peaks[i]), num_outputs[i], activation.empty() ? kNone : activation[i]});
  return run_layers("mlp_int8", x, layers, activation_bits);
}

at::Tensor mlp_int8_shape(const at::Tensor& x, at::TensorList, const OptionalTensors&,
                          const OptionalTensors&, const OptionalTensors&,
                          const OptionalTensors&, at::IntArrayRef num_outputs, int64_t,
                          at::IntArrayRef) {
  std::vector<c10::SymInt> shape = x.sym_sizes().vec();
  TORCH_CHECK(!shape.empty() && !num_outputs.empty(),
              "mlp_int8: x must have at least one dimension, and there must be a layer");
  shape.back() = num_outputs.back();
  return at::empty_symint(shape, x.options().memory_format(at::MemoryFormat::Contiguous));
}

const at::Tensor* tensor_of(const AtenTensorHandle* handle) {
  return handle == nullptr ? nullptr
                           : torch::aot_inductor::tensor_handle_to_tensor_pointer(*handle);
}

}  // namespace
}  // namespace rankopt

TORCH_LIBRARY_FRAGMENT(rankopt, m) {
  m.def(
      "mlp_int8(Tensor x, Tensor[] packed, Tensor?[] scale, Tensor?[] bias, "
      "Tensor?[] negative_slope, Tensor?[] peak, int[] num_outputs, int activation_bits, "
      "int[] activation=[]) -> Tensor");
}

TORCH_LIBRARY_IMPL(rankopt, CPU, m) { m.impl("mlp_int8", rankopt::mlp_int8); }
TORCH_LIBRARY_IMPL(rankopt, Meta, m) { m.impl("mlp_int8", rankopt::mlp_int8_shape); }

extern "C" {

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_mlp_int8(
    AtenTensorHandle x, const AtenTensorHandle* packed, int64_t num_packed,
    const AtenTensorHandle** scale, int64_t num_scale, const AtenTensorHandle** bias,
    int64_t num_bias, const AtenTensorHandle** negative_slope, int64_t num_slope,
    const AtenTensorHandle** peak, int64_t num_peak, const int64_t* num_outputs,
    int64_t num_num_outputs, int64_t activation_bits, const int64_t* activation,
    int64_t num_activation, AtenTensorHandle* result) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    rankopt::check_lengths(num_packed, num_scale, num_bias, num_slope, num_peak,
                           num_num_outputs, num_activation);
    c10::SmallVector<rankopt::LayerTensors, 6> layers;
    for (int64_t i = 0; i < num_packed; ++i)
      layers.push_back({tensor_handle_to_tensor_pointer(packed[i]), rankopt::tensor_of(scale[i]),
                        rankopt::tensor_of(bias[i]), rankopt::tensor_of(negative_slope[i]),
                        rankopt::tensor_of(peak[i]), num_outputs[i],
                        num_activation == 0 ? int64_t{rankopt::kNone} : activation[i]});
    *result = new_tensor_handle(rankopt::run_layers("mlp_int8", *tensor_handle_to_tensor_pointer(x),
                                                    layers, activation_bits));
  });
}

}  // extern "C"
