// The operators, as C++ functions. library.cpp registers them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace rankopt {

at::Tensor linear_int8(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scale,
                       const std::optional<at::Tensor>& bias,
                       const std::optional<at::Tensor>& negative_slope, int64_t num_outputs,
                       int64_t activation_bits, int64_t activation);

at::Tensor linear_fp32(const at::Tensor& x, const at::Tensor& packed,
                       const std::optional<at::Tensor>& bias,
                       const std::optional<at::Tensor>& negative_slope, int64_t num_outputs,
                       int64_t activation);

at::Tensor linear_fbgemm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale,
                         const std::optional<at::Tensor>& bias, const at::Tensor& handle);
int64_t fbgemm_pack(const at::Tensor& weight, const at::Tensor& scale);
void fbgemm_release(int64_t handle);

}  // namespace rankopt
