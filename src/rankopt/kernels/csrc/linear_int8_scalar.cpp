// The plain C++ version: what a CPU without AVX2 runs, and what the others are compared with.
#include "linear_int8.h"

#include <cmath>
#include <cstring>

namespace rankopt {
namespace {

#include "exact_exp.h"
#include "activation.h"

float quantize_row(const float* x, int64_t num_inputs, int activation_bits, uint8_t* out) {
  uint32_t peak = 0;
  for (int64_t k = 0; k < num_inputs; ++k) {
    uint32_t bits;
    std::memcpy(&bits, x + k, sizeof(bits));
    bits &= 0x7fffffffu;
    peak = bits > peak ? bits : peak;
  }
  const RowScale row = row_scale(peak, levels_of(activation_bits));
  const int zero_point = 1 << zero_shift_of(activation_bits);
  const int64_t padded = divide_up(num_inputs, kTileInputs) * kTileInputs;
  if (row.inverse == 0.0f) {
    std::memset(out, zero_point, static_cast<size_t>(padded));
    return row.scale;
  }
  for (int64_t k = 0; k < num_inputs; ++k)
    out[k] = static_cast<uint8_t>(static_cast<int>(std::nearbyint(x[k] * row.inverse)) + zero_point);
  for (int64_t k = num_inputs; k < padded; ++k) out[k] = static_cast<uint8_t>(zero_point);
  return row.scale;
}

uint8_t to_level(float scaled, int activation_bits) {
  const float most = levels_of(activation_bits);
  const float clamped = std::fmin(std::fmax(scaled, -most), most);
  const int zero_point = 1 << zero_shift_of(activation_bits);
  return static_cast<uint8_t>(static_cast<int>(std::nearbyint(clamped)) + zero_point);
}

float quantize_row_fixed(const float* x, int64_t num_inputs, int activation_bits, RowScale fixed,
                         uint8_t* out) {
  bool spoiled = false;
  for (int64_t k = 0; k < divide_up(num_inputs, kTileInputs) * kTileInputs; ++k) {
    const float value = k < num_inputs ? x[k] : 0.0f;
    spoiled = spoiled || !std::isfinite(value);
    out[k] = to_level(value * fixed.inverse, activation_bits);
  }
  return spoiled ? __builtin_nanf("") : fixed.scale;
}

void quantize(const QuantizeBlock& block) {
  for (int64_t r = 0; r < block.num_rows; ++r)
    block.row_scales[r] = quantize_row(block.x + r * block.x_stride, block.num_inputs,
                                       block.activation_bits, block.rows + r * block.stride);
}

void quantize_fixed(const QuantizeBlock& block, RowScale fixed) {
  for (int64_t r = 0; r < block.num_rows; ++r)
    block.row_scales[r] =
        quantize_row_fixed(block.x + r * block.x_stride, block.num_inputs, block.activation_bits,
                           fixed, block.rows + r * block.stride);
}

void finish(const GemmBlock& block, int64_t row, int64_t tile, const int32_t* sums, int shift) {
  for (int64_t lane = 0; lane < kTileOutputs; ++lane) {
    const int64_t n = tile * kTileOutputs + lane;
    if (n >= block.num_outputs) {
      if (block.levels == nullptr) return;
      block.levels[row * block.levels_stride + n] = to_level(0.0f, block.activation_bits);
      continue;
    }
    int32_t column_sum;
    std::memcpy(&column_sum, block.column_sum + n * 4, sizeof(column_sum));
    const int32_t exact = sums[lane] - column_sum * (1 << shift);
    float y = static_cast<float>(exact) * (block.row_scales[row] * block.scale[n]);
    if (block.bias != nullptr) y = y + block.bias[n];
    if (block.slope != nullptr && !(y >= 0.0f)) y = y * block.slope[block.slope_per_output ? n : 0];
    activate(&y, 1, block.activation);
    if (block.levels == nullptr) {
      block.out[row * block.out_stride + n] = y;
      continue;
    }
    block.levels[row * block.levels_stride + n] =
        to_level(y * block.levels_inverse, block.activation_bits);
    if (!std::isfinite(y)) spoil_row(block, row);
  }
}

template <int kShift>
void gemm(const GemmBlock& block) {
  for (int64_t row = 0; row < block.num_rows; ++row) {
    for (int64_t tile = block.tile_begin; tile < block.tile_end; ++tile) {
      int32_t sums[kTileOutputs] = {};
      const int8_t* weights = block.tiles + tile * block.num_steps * kTileBytes;
      for (int64_t step = 0; step < block.num_steps; ++step, weights += kTileBytes) {
        const uint8_t* inputs = block.rows + row * block.stride + step * kTileInputs;
        for (int64_t lane = 0; lane < kTileOutputs; ++lane)
          for (int64_t k = 0; k < kTileInputs; ++k)
            sums[lane] += int32_t{inputs[k]} * int32_t{weights[lane * kTileInputs + k]};
      }
      finish(block, row, tile, sums, kShift);
    }
  }
}

}  // namespace

const LinearInt8& linear_int8_scalar() {
  static const LinearInt8 kernels{quantize, quantize_fixed, gemm<6>, gemm<7>};
  return kernels;
}

}  // namespace rankopt
