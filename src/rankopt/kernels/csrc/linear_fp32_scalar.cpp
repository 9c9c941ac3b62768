// The plain C++ version: what a CPU without AVX2 runs, and what the others are compared with.
#include "linear_fp32.h"

#include <algorithm>
#include <cmath>

namespace rankopt {
namespace {

#include "exact_exp.h"
#include "activation.h"

void wide(const Fp32Block& block) {
  for (int64_t row = 0; row < block.num_rows; ++row) {
    const float* x = block.x + row * block.x_stride;
    for (int64_t tile = block.tile_begin; tile < block.tile_end; ++tile) {
      float sums[kTileOutputs] = {};
      const float* weights = block.weights + tile * block.num_inputs * kTileOutputs;
      for (int64_t k = 0; k < block.num_inputs; ++k, weights += kTileOutputs)
        for (int64_t lane = 0; lane < kTileOutputs; ++lane)
          sums[lane] = std::fma(x[k], weights[lane], sums[lane]);
      const int64_t first = tile * kTileOutputs;
      const int64_t end = std::min(first + kTileOutputs, block.num_outputs);
      float* out = block.out + row * block.out_stride;
      for (int64_t n = first; n < end; ++n) out[n] = finish(block, sums[n - first], n);
      activate(out + first, end - first, block.activation);
    }
  }
}

void narrow(const Fp32Block& block) {
  const int64_t padded = divide_up(block.num_inputs, kLaneInputs) * kLaneInputs;
  for (int64_t row = 0; row < block.num_rows; ++row) {
    const float* x = block.x + row * block.x_stride;
    for (int64_t n = 0; n < block.num_outputs; ++n) {
      float sums[kLaneInputs] = {};
      for (int64_t k = 0; k < padded; ++k) {
        float& sum = sums[k % kLaneInputs];
        sum = std::fma(k < block.num_inputs ? x[k] : 0.0f, block.weights[n * padded + k], sum);
      }
      for (int64_t half = kLaneInputs / 2; half > 0; half /= 2)
        for (int64_t lane = 0; lane < half; ++lane) sums[lane] = sums[lane] + sums[lane + half];
      float* out = block.out + row * block.out_stride + n;
      *out = finish(block, sums[0], n);
      activate(out, 1, block.activation);
    }
  }
}

}  // namespace

const LinearFp32& linear_fp32_scalar() {
  static const LinearFp32 kernels{wide, narrow};
  return kernels;
}

}  // namespace rankopt
