// What the instruction-set files of linear_int8 share. No torch in here: the kernels also build
// alone, under a sanitizer.
//
// Layout of packed weights, N outputs by K inputs, the same bytes for every instruction set, so an
// artifact is mapped and shared as it lies:
//   int8  tiles[ceil(N / 16)][ceil(K / 4)][16][4]   output-major tiles of 16, inputs in fours
//   int32 column_sum[16 * ceil(N / 16)]             sum of each output's weights, little-endian
// Padding is zero. Weights lie in [-127, 127].
//
// Arithmetic of one row, in this order and rounding on every instruction set, so that all of them
// give the same bits (no fused multiply-add; the build passes -ffp-contract=off):
//   peak  = max |x|;  row_scale = peak / Q;  inverse = Q / peak            Q = 63 or 127
//   u     = round_half_even(x * inverse) + zero_point                      zero_point = 64 or 128
//   exact = sum u * w - zero_point * column_sum                            int32
//   y     = float(exact) * (row_scale * scale[n]) + bias[n];  y < 0 ? y * slope[n] : y
//   y     = activation(y), as exact_exp.h computes it
// A row whose peak is below 2^-100 counts as zero (Q / peak would overflow), one that holds NaN or
// infinity gets row_scale NaN and so NaN outputs.
//
// A layer may have a fixed peak instead (static activations). Then x * inverse is clamped to [-Q, Q]
// before it is rounded, and the layer before may write these levels itself, in its epilogue.
#pragma once

#include <cstdint>

#include "linear.h"

namespace rankopt {

constexpr int64_t kTileInputs = 4;
constexpr int64_t kTileBytes = kTileOutputs * kTileInputs;
// 255 * 127 * K must stay below 2^31.
constexpr int64_t kMaxInputs = 65536;
constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kTinyBits = 0x0d800000u;  // 2^-100

struct RowScale {
  float inverse;  // what a value is multiplied by before it is rounded
  float scale;    // what an integer stands for
};

// From the bits of the largest absolute value, so that NaN and infinity are seen as the largest.
inline RowScale row_scale(uint32_t peak_bits, float levels) {
  if (peak_bits >= kInfinityBits) return {0.0f, __builtin_nanf("")};
  if (peak_bits < kTinyBits) return {0.0f, 0.0f};
  float peak;
  __builtin_memcpy(&peak, &peak_bits, sizeof(peak));
  return {levels / peak, peak / levels};
}

constexpr float levels_of(int activation_bits) { return activation_bits == 7 ? 63.0f : 127.0f; }
// The zero point as a shift: 64 = 1 << 6, 128 = 1 << 7.
constexpr int zero_shift_of(int activation_bits) { return activation_bits == 7 ? 6 : 7; }

// A block of quantised rows against the tiles [tile_begin, tile_end).
struct GemmBlock {
  const uint8_t* rows;      // [num_rows][stride]
  int64_t stride;           // bytes; at least 4 * num_steps
  const float* row_scales;  // [num_rows]
  int64_t num_rows;
  const int8_t* tiles;
  int64_t num_steps;  // ceil(K / 4)
  int64_t tile_begin;
  int64_t tile_end;
  int64_t num_outputs;
  const int8_t* column_sum;  // int32, perhaps unaligned
  const float* scale;        // [num_outputs]
  const float* bias;         // [num_outputs] or null
  const float* slope;        // one or [num_outputs], or null: what negative outputs are scaled by
  bool slope_per_output;
  Activation activation;  // of what the slope left
  float* out;             // first row, output 0
  int64_t out_stride;
  // For a next layer with a fixed peak: the levels it reads are written in place of `out`, over the
  // padding up to a whole tile too.
  uint8_t* levels;  // first row, output 0, or null
  int64_t levels_stride;
  float levels_inverse;
  int activation_bits;  // of the levels
  float* next_scales;   // [num_rows]; becomes NaN for a row that holds NaN or infinity
};

// Threads that share a row's outputs may both find something there.
inline void spoil_row(const GemmBlock& block, int64_t row) {
  const float nan = __builtin_nanf("");
  __atomic_store(block.next_scales + row, &nan, __ATOMIC_RELAXED);
}

// Rows to quantise. At least ceil(K / 4) * 4 bytes of each are written (what lies past K meets zero
// weights), at most ceil(K / 64) * 64.
struct QuantizeBlock {
  const float* x;
  int64_t x_stride;
  int64_t num_rows;
  int64_t num_inputs;
  int activation_bits;
  uint8_t* rows;
  int64_t stride;  // bytes
  float* row_scales;
};

// One implementation.
struct LinearInt8 {
  void (*quantize)(const QuantizeBlock&);
  void (*quantize_fixed)(const QuantizeBlock&, RowScale fixed);
  void (*gemm7)(const GemmBlock&);
  void (*gemm8)(const GemmBlock&);
};

const LinearInt8& linear_int8_scalar();
#if defined(__x86_64__)
const LinearInt8& linear_int8_avx2();
const LinearInt8& linear_int8_avx512();
const LinearInt8& linear_int8_avx512_vnni();
#endif

}  // namespace rankopt
