// Recurrences over padded lists, as C++ functions. library.cpp registers them.
//
// Arithmetic of one row, in this order on every instruction set, so that all of them give the same
// bits and no row depends on its neighbours:
//   i = W_ih x[t] + b_ih,  g = W_hh h + b_hh      as linear_fp32.h adds up
//   GRU, gates reset, update, new:
//     r = sigmoid(i_r + g_r),  z = sigmoid(i_z + g_z),  n = tanh(i_n + r * g_n)
//     h = n + z * (h - n)
//   LSTM, gates write, keep, new, show:
//     w = sigmoid(i_w + g_w),  k = sigmoid(i_k + g_k),  n = tanh(i_n + g_n),  s = sigmoid(i_s + g_s)
//     c = k * c + w * n,  h = s * tanh(c)
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace rankopt {

// x float32 [B, T, I]; lengths int64 [B], each at most T (below 1: an empty row); w_ih float32
// [3H, I]; w_hh [3H, H]; b_ih, b_hh [3H]; first [B, H], zeros where there is none. `reverse` runs
// each row from its own last step to its first. Returns [B, T, H], zero past each row's length, and
// the state after a row's last step [B, H]: `first` for an empty row.
std::tuple<at::Tensor, at::Tensor> gru(const at::Tensor& x, const at::Tensor& lengths,
                                       const at::Tensor& w_ih, const at::Tensor& w_hh,
                                       const std::optional<at::Tensor>& b_ih,
                                       const std::optional<at::Tensor>& b_hh,
                                       const std::optional<at::Tensor>& first, bool reverse);

// The same with 4H gates, and a memory [B, H] beside the state, in and out.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm(
    const at::Tensor& x, const at::Tensor& lengths, const at::Tensor& w_ih, const at::Tensor& w_hh,
    const std::optional<at::Tensor>& b_ih, const std::optional<at::Tensor>& b_hh,
    const std::optional<at::Tensor>& first, const std::optional<at::Tensor>& memory, bool reverse);

}  // namespace rankopt
