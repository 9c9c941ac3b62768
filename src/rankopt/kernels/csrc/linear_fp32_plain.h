// The plain C++ loops. Included like linear_fp32_tile.h.
//
// activation.h stands in front of it. A policy P gives the type Weight that weights are stored in, and widen(), which makes a float of one.

template <class P>
void wide(const Fp32Block& block) {
  for (int64_t row = 0; row < block.num_rows; ++row) {
    const float* x = block.x + row * block.x_stride;
    for (int64_t tile = block.tile_begin; tile < block.tile_end; ++tile) {
      float sums[kTileOutputs] = {};
      const auto* weights = static_cast<const typename P::Weight*>(block.weights) +
                            tile * block.num_inputs * kTileOutputs;
      for (int64_t k = 0; k < block.num_inputs; ++k, weights += kTileOutputs)
        for (int64_t lane = 0; lane < kTileOutputs; ++lane)
          sums[lane] = std::fma(x[k], P::widen(weights[lane]), sums[lane]);
      const int64_t first = tile * kTileOutputs;
      const int64_t end = std::min(first + kTileOutputs, block.num_outputs);
      float* out = block.out + row * block.out_stride;
      for (int64_t n = first; n < end; ++n) out[n] = finish(block, sums[n - first], n);
      activate(out + first, end - first, block.activation);
    }
  }
}

template <class P>
void narrow(const Fp32Block& block) {
  const int64_t padded = divide_up(block.num_inputs, kLaneInputs) * kLaneInputs;
  const auto* weights = static_cast<const typename P::Weight*>(block.weights);
  for (int64_t row = 0; row < block.num_rows; ++row) {
    const float* x = block.x + row * block.x_stride;
    for (int64_t n = 0; n < block.num_outputs; ++n) {
      float sums[kLaneInputs] = {};
      for (int64_t k = 0; k < padded; ++k) {
        float& sum = sums[k % kLaneInputs];
        sum = std::fma(k < block.num_inputs ? x[k] : 0.0f, P::widen(weights[n * padded + k]), sum);
      }
      for (int64_t half = kLaneInputs / 2; half > 0; half /= 2)
        for (int64_t lane = 0; lane < half; ++lane) sums[lane] = sums[lane] + sums[lane + half];
      float* out = block.out + row * block.out_stride + n;
      *out = finish(block, sums[0], n);
      activate(out, 1, block.activation);
    }
  }
}
