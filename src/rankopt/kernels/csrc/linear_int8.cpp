// The operator of one int8 layer.
#include "layers.h"
#include "ops.h"

namespace rankopt {

at::Tensor linear_int8(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scale,
                       const std::optional<at::Tensor>& bias,
                       const std::optional<at::Tensor>& negative_slope, int64_t num_outputs,
                       int64_t activation_bits, int64_t activation) {
  const LayerTensors layer{&packed, &scale, given(bias), given(negative_slope), nullptr,
                           num_outputs, activation};
  return run_layers("linear_int8", x, layer, activation_bits);
}

}  // namespace rankopt
