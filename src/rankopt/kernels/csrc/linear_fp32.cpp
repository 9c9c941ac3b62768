// The operator of one fp32 layer.
#include "layers.h"
#include "ops.h"

namespace rankopt {

at::Tensor linear_fp32(const at::Tensor& x, const at::Tensor& packed,
                       const std::optional<at::Tensor>& bias,
                       const std::optional<at::Tensor>& negative_slope, int64_t num_outputs,
                       int64_t activation) {
  TORCH_CHECK(packed.scalar_type() != at::kHalf,
              "linear_fp32: packed must be float32; linear_fp16 takes float16");
  const LayerTensors layer{&packed, nullptr, given(bias), given(negative_slope), nullptr,
                           num_outputs, activation};
  return run_layers("linear_fp32", x, layer, 8);
}

}  // namespace rankopt
