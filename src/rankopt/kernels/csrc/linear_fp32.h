// What the instruction-set files of linear_fp32 share. No torch in here.
//
// Layout of packed weights, N outputs by K inputs, padded with zeros, the same for every
// instruction set. N and K alone choose it, so a row never meets another order of sums:
//   N > 4    wide    float [ceil(N / 16)][K][16]
//   N <= 4   narrow  float [N][16 * ceil(K / 16)]
//
// Arithmetic of one row, in this order on every instruction set, so that all of them give the same
// bits. Every product is added with a single rounding; where the CPU has no such instruction,
// std::fma computes it, slowly.
//   wide    sum = 0;  sum = fma(x[k], w[k], sum)  for k = 0, 1, ..., K - 1
//   narrow  sum[l] the same for k = l, l + 16, ... over the padding too (there x counts as 0);
//           then sum[l] += sum[l + h]  for l < h,  h = 8, 4, 2, 1;  sum = sum[0]
//   y       = sum + bias[n];  y >= 0 ? y : y * slope[n];  activation(y), by exact_exp.h
#pragma once

#include <cstdint>

#include "linear.h"

namespace rankopt {

constexpr int64_t kNarrowOutputs = 4;
constexpr int64_t kLaneInputs = 16;

// A block of rows against the tiles [tile_begin, tile_end); all outputs when narrow.
struct Fp32Block {
  const float* x;  // first row
  int64_t x_stride;
  int64_t num_rows;
  int64_t num_inputs;
  const void* weights;  // float; fp16 for the kernels of linear_fp16.h
  int64_t tile_begin;
  int64_t tile_end;
  int64_t num_outputs;
  const float* bias;   // [num_outputs] or null
  const float* slope;  // one or [num_outputs], or null: what negative outputs are scaled by
  bool slope_per_output;
  Activation activation;  // of what the slope left
  float* out;             // first row, output 0
  int64_t out_stride;
};

// All but the activation.
inline float finish(const Fp32Block& block, float sum, int64_t n) {
  float y = block.bias != nullptr ? sum + block.bias[n] : sum;
  if (block.slope != nullptr && !(y >= 0.0f)) y = y * block.slope[block.slope_per_output ? n : 0];
  return y;
}

// One implementation.
struct LinearFp32 {
  void (*wide)(const Fp32Block&);
  void (*narrow)(const Fp32Block&);
};

const LinearFp32& linear_fp32_scalar();
#if defined(__x86_64__)
const LinearFp32& linear_fp32_avx2();
const LinearFp32& linear_fp32_avx512();
#endif

}  // namespace rankopt
