// Registration of the attention operators with torch, and their C entry points.
#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include "attention.h"

namespace rankopt {
namespace {

using Optional = std::optional<at::Tensor>;

at::Tensor dense(const at::Tensor& like, c10::SymIntArrayRef shape) {
  return at::empty_symint(shape, like.options().memory_format(at::MemoryFormat::Contiguous));
}

at::Tensor ragged_rows_shape(const at::Tensor& lengths, const at::Tensor& values) {
  return dense(lengths, {values.sym_size(0)});
}

at::Tensor ragged_sum_shape(const at::Tensor&, const at::Tensor& rows, const at::Tensor& lengths,
                            int64_t) {
  return dense(rows, {lengths.sym_size(0), rows.sym_size(1)});
}

at::Tensor hstu_attention_shape(const at::Tensor& q, const at::Tensor&, const at::Tensor&,
                                const at::Tensor&, const Optional&, int64_t, int64_t, int64_t,
                                bool, bool, double, double) {
  return dense(q, q.sym_sizes());
}

at::Tensor hstu_candidate_attention_shape(const at::Tensor& q, const at::Tensor&,
                                          const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                          const at::Tensor&, const Optional&, const Optional&,
                                          int64_t, int64_t, int64_t, bool, double, double) {
  return dense(q, q.sym_sizes());
}

at::Tensor target_attention_shape(const at::Tensor& query, const at::Tensor&, const at::Tensor&,
                                  const Optional&, const at::Tensor&, at::IntArrayRef,
                                  at::IntArrayRef, int64_t) {
  return dense(query, query.sym_sizes());
}

at::Tensor masked_target_attention_shape(const at::Tensor& query, const at::Tensor&,
                                         const at::Tensor&, const at::Tensor&, at::IntArrayRef,
                                         at::IntArrayRef, bool, double) {
  return dense(query, query.sym_sizes());
}

}  // namespace
}  // namespace rankopt

TORCH_LIBRARY_FRAGMENT(rankopt, m) {
  m.def("ragged_rows(Tensor lengths, Tensor values) -> Tensor");
  m.def("ragged_sum(Tensor weights, Tensor rows, Tensor lengths, int max_length) -> Tensor");
  m.def(
      "hstu_attention(Tensor q, Tensor k, Tensor v, Tensor lengths, Tensor? bias, int num_heads, "
      "int num_context, int max_length, bool align_right, bool causal, float score_scale, "
      "float weight_scale) -> Tensor");
  m.def(
      "hstu_candidate_attention(Tensor q, Tensor k, Tensor v, Tensor own_k, Tensor own_v, "
      "Tensor lengths, Tensor? request_index, Tensor? bias, int num_heads, int num_context, "
      "int max_length, bool align_right, float score_scale, float weight_scale) -> Tensor");
  m.def(
      "target_attention(Tensor query, Tensor keys, Tensor lengths, Tensor? request_index, "
      "Tensor weights, int[] widths, int[] activations, int max_length) -> Tensor");
  m.def(
      "masked_target_attention(Tensor query, Tensor keys, Tensor mask, Tensor weights, "
      "int[] widths, int[] activations, bool softmax, float fill) -> Tensor");
}

TORCH_LIBRARY_IMPL(rankopt, CPU, m) {
  m.impl("ragged_rows", rankopt::ragged_rows);
  m.impl("ragged_sum", rankopt::ragged_sum);
  m.impl("hstu_attention", rankopt::hstu_attention);
  m.impl("hstu_candidate_attention", rankopt::hstu_candidate_attention);
  m.impl("target_attention", rankopt::target_attention);
  m.impl("masked_target_attention", rankopt::masked_target_attention);
}

TORCH_LIBRARY_IMPL(rankopt, Meta, m) {
  m.impl("ragged_rows", rankopt::ragged_rows_shape);
  m.impl("ragged_sum", rankopt::ragged_sum_shape);
  m.impl("hstu_attention", rankopt::hstu_attention_shape);
  m.impl("hstu_candidate_attention", rankopt::hstu_candidate_attention_shape);
  m.impl("target_attention", rankopt::target_attention_shape);
  m.impl("masked_target_attention", rankopt::masked_target_attention_shape);
}

extern "C" {

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_ragged_rows(AtenTensorHandle lengths,
                                                            AtenTensorHandle values,
                                                            AtenTensorHandle* result) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(rankopt::ragged_rows(*tensor_handle_to_tensor_pointer(lengths),
                                                     *tensor_handle_to_tensor_pointer(values)));
  });
}

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_ragged_sum(AtenTensorHandle weights,
                                                           AtenTensorHandle rows,
                                                           AtenTensorHandle lengths,
                                                           int64_t max_length,
                                                           AtenTensorHandle* result) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(rankopt::ragged_sum(
        *tensor_handle_to_tensor_pointer(weights), *tensor_handle_to_tensor_pointer(rows),
        *tensor_handle_to_tensor_pointer(lengths), max_length));
  });
}

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_hstu_attention(
    AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle lengths,
    AtenTensorHandle* bias, int64_t num_heads, int64_t num_context, int64_t max_length,
    int32_t align_right, int32_t causal, double score_scale, double weight_scale,
    AtenTensorHandle* result) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(rankopt::hstu_attention(
        *tensor_handle_to_tensor_pointer(q), *tensor_handle_to_tensor_pointer(k),
        *tensor_handle_to_tensor_pointer(v), *tensor_handle_to_tensor_pointer(lengths),
        pointer_to_optional<at::Tensor>(bias), num_heads, num_context, max_length,
        align_right != 0, causal != 0, score_scale, weight_scale));
  });
}

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_hstu_candidate_attention(
    AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle own_k,
    AtenTensorHandle own_v, AtenTensorHandle lengths, AtenTensorHandle* request_index,
    AtenTensorHandle* bias, int64_t num_heads, int64_t num_context, int64_t max_length,
    int32_t align_right, double score_scale, double weight_scale, AtenTensorHandle* result) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(rankopt::hstu_candidate_attention(
        *tensor_handle_to_tensor_pointer(q), *tensor_handle_to_tensor_pointer(k),
        *tensor_handle_to_tensor_pointer(v), *tensor_handle_to_tensor_pointer(own_k),
        *tensor_handle_to_tensor_pointer(own_v), *tensor_handle_to_tensor_pointer(lengths),
        pointer_to_optional<at::Tensor>(request_index), pointer_to_optional<at::Tensor>(bias),
        num_heads, num_context, max_length, align_right != 0, score_scale, weight_scale));
  });
}

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_target_attention(
    AtenTensorHandle query, AtenTensorHandle keys, AtenTensorHandle lengths,
    AtenTensorHandle* request_index, AtenTensorHandle weights, const int64_t* widths,
    int64_t num_widths, const int64_t* activations, int64_t num_activations, int64_t max_length,
    AtenTensorHandle* result) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(rankopt::target_attention(
        *tensor_handle_to_tensor_pointer(query), *tensor_handle_to_tensor_pointer(keys),
        *tensor_handle_to_tensor_pointer(lengths), pointer_to_optional<at::Tensor>(request_index),
        *tensor_handle_to_tensor_pointer(weights),
        at::IntArrayRef(widths, static_cast<size_t>(num_widths)),
        at::IntArrayRef(activations, static_cast<size_t>(num_activations)), max_length));
  });
}

AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cpu_masked_target_attention(
    AtenTensorHandle query, AtenTensorHandle keys, AtenTensorHandle mask, AtenTensorHandle weights,
    const int64_t* widths, int64_t num_widths, const int64_t* activations,
    int64_t num_activations, int32_t softmax, double fill, AtenTensorHandle* result) {
  using namespace torch::aot_inductor;
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *result = new_tensor_handle(rankopt::masked_target_attention(
        *tensor_handle_to_tensor_pointer(query), *tensor_handle_to_tensor_pointer(keys),
        *tensor_handle_to_tensor_pointer(mask), *tensor_handle_to_tensor_pointer(weights),
        at::IntArrayRef(widths, static_cast<size_t>(num_widths)),
        at::IntArrayRef(activations, static_cast<size_t>(num_activations)), softmax != 0, fill));
  });
}

}  // extern "C"
