// Attention over ragged lists, as C++ functions. attention_op.cpp registers them.
//
// Ids of R lists lie one after the other, `lengths` [R] says how many belong to each; of a longer
// list the last `max_length` count. Nothing is computed for a place that no id stands in.
//
// A row's result is the same bit for bit whatever its batch, its neighbours, the number of threads
// and the instruction set: products add up as linear_fp32.h says, keys in their order.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "linear.h"

namespace rankopt {

// The list that each of the L values belongs to, int64 [L].
at::Tensor ragged_rows(const at::Tensor& lengths, const at::Tensor& values);

// out[r] = sum of weights[i] * rows[i] over the ids i of list r. weights [L], rows [L, D].
at::Tensor ragged_sum(const at::Tensor& weights, const at::Tensor& rows, const at::Tensor& lengths,
                      int64_t max_length);

// HSTU attention among the tokens of R sequences: C context tokens each, then a list's ids.
//   score  = (q[i] . k[j]) * score_scale + bias[head][p(j) - p(i) + S - 1],  S = C + max_length + 1
//   out[i] = sum over j of score * sigmoid(score) * weight_scale * v[j],  j <= i when causal
// p is the position: a context token's is its index; ids follow, or stand right-aligned before
// position S - 1. q, k, v are [R * C + L, heads * K], context tokens first; bias [heads, 2S - 1].
// The rows of ids that do not count are zero.
at::Tensor hstu_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& lengths, const std::optional<at::Tensor>& bias,
                          int64_t num_heads, int64_t num_context, int64_t max_length,
                          bool align_right, bool causal, double score_scale, double weight_scale);

// The same for one token at position S - 1 of each of B candidates, q [B, heads * K], which sees
// itself (own_k, own_v [B, heads * K]) and all tokens of sequence request_index[b], or b without.
at::Tensor hstu_candidate_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const at::Tensor& own_k, const at::Tensor& own_v,
                                    const at::Tensor& lengths,
                                    const std::optional<at::Tensor>& request_index,
                                    const std::optional<at::Tensor>& bias, int64_t num_heads,
                                    int64_t num_context, int64_t max_length, bool align_right,
                                    double score_scale, double weight_scale);

// Target attention (DIN): out[b] = sum of MLP(query[b], key) * key over the keys of its list.
// The first layer sees Wq query + Wk key + Wp (query * key): what an MLP of query, key, their
// difference and their product comes to. With M = Wk + Wp diag(query), made once per candidate, a
// key costs one product with M.
// weights is float32, one after the other: Wq, Wk, Wp packed as linear_fp32.h's wide layout, bias,
// slopes [widths[0]]; then per further layer its matrix packed by width, bias, slopes. Behind the
// slopes of a layer with kDice or kRowDice stand its scales and shifts, as many each. The last
// width is 1. activations, one per layer but the last: what Activation numbers.
at::Tensor target_attention(const at::Tensor& query, const at::Tensor& keys,
                            const at::Tensor& lengths,
                            const std::optional<at::Tensor>& request_index,
                            const at::Tensor& weights, at::IntArrayRef widths,
                            at::IntArrayRef activations, int64_t max_length);

// The same over keys in a rectangle [B, H, D], of which those at a true place of `mask` [B, H] are
// scored. Of the others the score is `fill`; a weight is the score itself, or with `softmax` the
// score's share of its row. Without softmax the fill must be 0 and other places are not read; with
// it they are where they have a share, as all places of a row without a true one do.
at::Tensor masked_target_attention(const at::Tensor& query, const at::Tensor& keys,
                                   const at::Tensor& mask, const at::Tensor& weights,
                                   at::IntArrayRef widths, at::IntArrayRef activations,
                                   bool softmax, double fill);

}  // namespace rankopt
