// Chains of linear layers, int8, fp16 and fp32 mixed: what linear_int8, linear_fp16, linear_fp32 and
// mlp_int8 run on.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <optional>

#include "linear_fp32.h"
#include "linear_int8.h"

namespace rankopt {

// The tensors of one layer as an operator gets them; null where an optional one is missing.
struct LayerTensors {
  const at::Tensor* packed;
  const at::Tensor* scale;  // null: fp32 sums, of weights in fp32 or fp16
  const at::Tensor* bias;
  const at::Tensor* slope;
  const at::Tensor* peak;  // one number that an int8 layer's inputs are scaled by; null: each row's own
  int64_t num_outputs;
  int64_t activation;  // kNone, kSigmoid or kSilu, of what the slope left
};

inline const at::Tensor* given(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() ? &*tensor : nullptr;
}

// Runs the layers one after the other on x float32 [..., K] and returns [..., N of the last]. A row
// goes through exactly the arithmetic of linear_int8.h and linear_fp32.h, so a chain gives the bits
// of its layers called one by one. Throws where a tensor does not fit; `op` names the operator.
at::Tensor run_layers(const char* op, const at::Tensor& x, c10::ArrayRef<LayerTensors> layers,
                      int64_t activation_bits);

}  // namespace rankopt
