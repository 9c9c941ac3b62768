// Registration with torch, and the C entry points that a compiled artifact calls.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include "isa.h"
#include "ops.h"
#include "recurrent.h"

namespace rankopt {
namespace {

// The shape functions: what torch.export and the compiler run, with symbolic sizes.
at::Tensor like_with_outputs(const at::Tensor& x, c10::SymInt num_outputs) {
  std::vector<c10::SymInt> shape = x.sym_sizes().vec();
  TORCH_CHECK(!shape.empty(), "a linear layer's input must have at least one dimension");
  shape.back() = std::move(num_outputs);
  return at::empty_symint(shape, x.options().memory_format(at::MemoryFormat::Contiguous));
}

at::Tensor linear_int8_shape(const at::Tensor& x, const at::Tensor&, const at::Tensor&,
                             const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                             int64_t num_outputs, int64_t, int64_t) {
  return like_with_outputs(x, num_outputs);
}

at::Tensor linear_fp32_shape(const at::Tensor& x, const at::Tensor&,
                             const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                             int64_t num_outputs, int64_t) {
  return like_with_outputs(x, num_outputs);
}

at::Tensor linear_fbgemm_shape(const at::Tensor& x, const at::Tensor& weight, const at::Tensor&,
                               const std::optional<at::Tensor>&, const at::Tensor&) {
  return like_with_outputs(x, weight.sym_size(0));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> recurrence_shape(const at::Tensor& x,
                                                                const at::Tensor& w_hh) {
  TORCH_CHECK(x.dim() == 3, "a recurrence's input must be [B, T, I]; got ", x.dim(), " dimensions");
  const auto options = x.options().memory_format(at::MemoryFormat::Contiguous);
  const c10::SymInt num_rows = x.sym_size(0), num_hidden = w_hh.sym_size(1);
  return {at::empty_symint({num_rows, x.sym_size(1), num_hidden}, options),
          at::empty_symint({num_rows, num_hidden}, options),
          at::empty_symint({num_rows, num_hidden}, options)};
}

std::tuple<at::Tensor, at::Tensor> gru_shape(const at::Tensor& x, const at::Tensor&,
                                             const at::Tensor&, const at::Tensor& w_hh,
                                             const std::optional<at::Tensor>&,
                                             const std::optional<at::Tensor>&,
                                             const std::optional<at::Tensor>&, bool) {
  auto [out, last, _] = recurrence_shape(x, w_hh);
  return {std::move(out), std::move(last)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_shape(
    const at::Tensor& x, const at::Tensor&, const at::Tensor&, const at::Tensor& w_hh,
    const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
    const std::optional<at::Tensor>&, const std::optional<at::Tensor>&, bool) {
  return recurrence_shape(x, w_hh);
}

}  // namespace
}  // namespace rankopt

TORCH_LIBRARY(rankopt, m) {
  m.def(
      "linear_int8(Tensor x, Tensor packed, Tensor scale, Tensor? bias, Tensor? negative_slope, "
      "int num_outputs, int activation_bits, int activation=0) -> Tensor");
  m.def(
      "linear_fp32(Tensor x, Tensor packed, Tensor? bias, Tensor? negative_slope, int num_outputs, "
      "int activation=0) -> Tensor");
  m.def(
      "linear_fbgemm(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor handle) -> Tensor");
  m.def(
      "gru(Tensor x, Tensor lengths, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, "
      "Tensor? first, bool reverse) -> (Tensor, Tensor)");
  m.def(
      "lstm(Tensor x, Tensor lengths, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, "
      "Tensor? first, Tensor? memory, bool reverse) -> (Tensor, Tensor, Tensor)");
  m.def("fbgemm_pack(Tensor weight, Tensor scale) -> int", rankopt::fbgemm_pack);
  m.def("fbgemm_release(int handle) -> ()", rankopt::fbgemm_release);
  m.def("set_isa(str name) -> ()", [](std::string name) { rankopt::set_isa(name); });
  m.def("isa() -> str", [] { return rankopt::isa_name(rankopt::current_isa()); });
  m.def("supported_isas() -> str[]", [] { return rankopt::supported_isas(); });
}

TORCH_LIBRARY_IMPL(rankopt, CPU, m) {
  m.impl("linear_int8", rankopt::linear_int8);
  m.impl("linear_fp32", rankopt::linear_fp32);
  m.impl("linear_fbgemm", rankopt::linear_fbgemm);
  m.impl("gru", rankopt::gru);
  m.impl("lstm", rankopt::lstm);
}

TORCH_LIBRARY_IMPL(rankopt, Meta, m) {
  m.impl("linear_int8", rankopt::linear_int8_shape);
  m.impl("linear_fp32", rankopt::linear_fp32_shape);
  m.impl("linear_fbgemm", rankopt::linear_fbgemm_shape);
  m.impl("gru", rankopt::gru_shape);
  m.impl("lstm", rankopt::lstm_shape);
}

// A compiled artifact calls these straight, without boxing its arguments for the dispatcher. They
// own nothing but the tensor they return.
extern "C" {

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_linear_int8(
    AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle scale, AtenTensorHandle* bias,
    AtenTensorHandle* negative_slope, int64_t num_outputs, int64_t activation_bits,
    int64_t activation, AtenTensorHandle* result) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(rankopt::linear_int8(
        *tensor_handle_to_tensor_pointer(x), *tensor_handle_to_tensor_pointer(packed),
        *tensor_handle_to_tensor_pointer(scale), pointer_to_optional<at::Tensor>(bias),
        pointer_to_optional<at::Tensor>(negative_slope), num_outputs, activation_bits,
        activation));
  });
}

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_linear_fp32(
    AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle* bias,
    AtenTensorHandle* negative_slope, int64_t num_outputs, int64_t activation,
    AtenTensorHandle* result) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(rankopt::linear_fp32(
        *tensor_handle_to_tensor_pointer(x), *tensor_handle_to_tensor_pointer(packed),
        pointer_to_optional<at::Tensor>(bias), pointer_to_optional<at::Tensor>(negative_slope),
        num_outputs, activation));
  });
}

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_linear_fbgemm(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale, AtenTensorHandle* bias,
    AtenTensorHandle handle, AtenTensorHandle* result) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(rankopt::linear_fbgemm(
        *tensor_handle_to_tensor_pointer(x), *tensor_handle_to_tensor_pointer(weight),
        *tensor_handle_to_tensor_pointer(scale), pointer_to_optional<at::Tensor>(bias),
        *tensor_handle_to_tensor_pointer(handle)));
  });
}

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_gru(
    AtenTensorHandle x, AtenTensorHandle lengths, AtenTensorHandle w_ih, AtenTensorHandle w_hh,
    AtenTensorHandle* b_ih, AtenTensorHandle* b_hh, AtenTensorHandle* first, int32_t reverse,
    AtenTensorHandle* outputs, AtenTensorHandle* last) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    auto [all, end] = rankopt::gru(
        *tensor_handle_to_tensor_pointer(x), *tensor_handle_to_tensor_pointer(lengths),
        *tensor_handle_to_tensor_pointer(w_ih), *tensor_handle_to_tensor_pointer(w_hh),
        pointer_to_optional<at::Tensor>(b_ih), pointer_to_optional<at::Tensor>(b_hh),
        pointer_to_optional<at::Tensor>(first), reverse != 0);
    *outputs = new_tensor_handle(std::move(all));
    *last = new_tensor_handle(std::move(end));
  });
}

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_lstm(
    AtenTensorHandle x, AtenTensorHandle lengths, AtenTensorHandle w_ih, AtenTensorHandle w_hh,
    AtenTensorHandle* b_ih, AtenTensorHandle* b_hh, AtenTensorHandle* first,
    AtenTensorHandle* memory, int32_t reverse, AtenTensorHandle* outputs, AtenTensorHandle* last,
    AtenTensorHandle* last_memory) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    auto [all, end, held] = rankopt::lstm(
        *tensor_handle_to_tensor_pointer(x), *tensor_handle_to_tensor_pointer(lengths),
        *tensor_handle_to_tensor_pointer(w_ih), *tensor_handle_to_tensor_pointer(w_hh),
        pointer_to_optional<at::Tensor>(b_ih), pointer_to_optional<at::Tensor>(b_hh),
        pointer_to_optional<at::Tensor>(first), pointer_to_optional<at::Tensor>(memory),
        reverse != 0);
    *outputs = new_tensor_handle(std::move(all));
    *last = new_tensor_handle(std::move(end));
    *last_memory = new_tensor_handle(std::move(held));
  });
}

}  // extern "C"
