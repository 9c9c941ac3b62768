// int8 linear through fbgemm, with a scale per row.
//
// fbgemm's dynamic linear takes one activation scale per batch. Here each row is divided by its own
// largest absolute value, multiplied with the constant scale 1/63 and zero point 64 (7 bits: 8 would
// saturate fbgemm's 16-bit pair sums on AVX2), and scaled back.
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/native/quantized/PackedParams.h>
#include <ATen/ops/_make_per_channel_quantized_tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <shared_mutex>

#include "ops.h"

namespace rankopt {
namespace {

using Packed = c10::intrusive_ptr<LinearPackedParamsBase>;

// Who packs owns the handle and releases it. Handles count up and are never used again, so a stale
// one is an error and never another layer's weights.
struct Store {
  std::shared_mutex mutex;
  std::map<int64_t, Packed> packed;
  int64_t next = 1;
};

Store& store() {
  // Never destroyed: a loaded artifact may release after static destructors have begun.
  static Store* const instance = new Store;
  return *instance;
}

// torch warns that it will drop quantised tensors; nobody who runs an artifact can act on that.
class Silent : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

Packed pack(const at::Tensor& weight, const at::Tensor& scale) {
  TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == at::kChar,
              "linear_fbgemm: weight must be int8 [N, K]; got ", weight.scalar_type(), " ",
              weight.sizes());
  TORCH_CHECK(scale.scalar_type() == at::kFloat && scale.numel() == weight.size(0),
              "linear_fbgemm: scale must be float32 [", weight.size(0), "]; got ",
              scale.scalar_type(), " ", scale.sizes());
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  const at::Tensor zeros = at::zeros({weight.size(0)}, scale.options().dtype(at::kLong));
  const at::Tensor quantized = at::_make_per_channel_quantized_tensor(
      weight.contiguous(), scale.to(at::kDouble), zeros, /*axis=*/0);
  static const c10::OperatorHandle op =
      c10::Dispatcher::singleton().findSchemaOrThrow("quantized::linear_prepack", "");
  torch::jit::Stack stack{quantized, c10::IValue()};
  op.callBoxed(stack);
  return stack.back().toCustomClass<LinearPackedParamsBase>();
}

Packed find(int64_t handle) {
  std::shared_lock lock(store().mutex);
  const auto found = store().packed.find(handle);
  TORCH_CHECK(found != store().packed.end(), "linear_fbgemm: no packed weights with handle ", handle,
              ". It was released, or it belongs to another process; pack again with fbgemm_pack.");
  return found->second;
}

// The row over its largest absolute value, and that value: NaN for a row that holds NaN or infinity.
float normalise(const float* x, int64_t num_inputs, float* out) {
  float peak = 0.0f;
  bool finite = true;
  for (int64_t k = 0; k < num_inputs; ++k) {
    const float value = std::fabs(x[k]);
    finite = finite && value <= std::numeric_limits<float>::max();
    peak = value > peak ? value : peak;
  }
  if (!finite || peak < std::numeric_limits<float>::min()) {
    std::fill(out, out + num_inputs, 0.0f);
    return finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  for (int64_t k = 0; k < num_inputs; ++k) out[k] = x[k] / peak;
  return peak;
}

}  // namespace

int64_t fbgemm_pack(const at::Tensor& weight, const at::Tensor& scale) {
  Packed packed = pack(weight, scale);
  std::unique_lock lock(store().mutex);
  const int64_t handle = store().next++;
  store().packed.emplace(handle, std::move(packed));
  return handle;
}

void fbgemm_release(int64_t handle) {
  std::unique_lock lock(store().mutex);
  TORCH_CHECK(store().packed.erase(handle) == 1, "fbgemm_release: no packed weights with handle ",
              handle, ". It was released before.");
}

at::Tensor linear_fbgemm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale,
                         const std::optional<at::Tensor>& bias, const at::Tensor& handle) {
  TORCH_CHECK(x.dim() >= 1 && x.scalar_type() == at::kFloat && weight.dim() == 2 &&
                  x.size(-1) == weight.size(1),
              "linear_fbgemm: x must be float32 [..., K] with K the weight's columns; got ",
              x.scalar_type(), " ", x.sizes(), " and weight ", weight.sizes());
  TORCH_CHECK(handle.scalar_type() == at::kLong && handle.numel() == 1,
              "linear_fbgemm: handle must be int64 [1]; got ", handle.scalar_type(), " ",
              handle.sizes());
  const int64_t num_inputs = weight.size(1), num_outputs = weight.size(0);
  const bool has_bias = bias.has_value() && bias->defined();
  TORCH_CHECK(!has_bias || (bias->scalar_type() == at::kFloat && bias->numel() == num_outputs),
              "linear_fbgemm: bias must be float32 [", num_outputs, "]");
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = num_outputs;
  const int64_t key = *handle.const_data_ptr<int64_t>();
  const Packed packed = key == 0 ? pack(weight, scale) : find(key);
  const at::Tensor rows = x.contiguous();
  int64_t num_rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) num_rows *= x.size(d);
  if (num_rows == 0) return at::empty(shape, x.options());

  const at::Tensor scaled = at::empty({num_rows, num_inputs}, x.options());
  const at::Tensor peaks = at::empty({num_rows}, x.options());
  const float* source = rows.const_data_ptr<float>();
  float* target = scaled.mutable_data_ptr<float>();
  float* peak = peaks.mutable_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, num_inputs));
  at::parallel_for(0, num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      peak[row] = normalise(source + row * num_inputs, num_inputs, target + row * num_inputs);
  });

  at::Tensor out = packed->apply_with_input_q_dq_qweight_dq_output_fp32(scaled, 1.0 / 63.0, 64);
  const at::Tensor bias_values = has_bias ? bias->contiguous() : at::Tensor();
  const float* add = has_bias ? bias_values.const_data_ptr<float>() : nullptr;
  float* y = out.mutable_data_ptr<float>();
  const int64_t out_grain = std::max<int64_t>(1, 32768 / num_outputs);
  at::parallel_for(0, num_rows, out_grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int64_t n = 0; n < num_outputs; ++n) {
        const float value = y[row * num_outputs + n] * peak[row];
        y[row * num_outputs + n] = add ? value + add[n] : value;
      }
  });
  return out.reshape(shape);
}

}  // namespace rankopt
