// The register-blocked products, written once and instantiated by each instruction-set file with
// its vector policy. Included like linear_int8_tile.h.
//
// A policy P gives: the type Weight that weights are stored in, which its loads widen; vector types
// Float and Sixteen (sums of sixteen lanes); kLanes; max_tiles(num_rows); max_rows(tiles);
// kNarrowRows; and the operations used below.

[[gnu::noinline]] void activate_rows(const Fp32Block& block, int64_t row, int64_t num_rows,
                                     int64_t tile, int64_t num_tiles) {
  const int64_t first = tile * kTileOutputs, rest = block.num_outputs - first;
  const int64_t width = rest < num_tiles * kTileOutputs ? rest : num_tiles * kTileOutputs;
  for (int64_t r = row; r < row + num_rows; ++r)
    activate(block.out + r * block.out_stride + first, width, block.activation);
}

template <class P, int kRows, int kVectors>
inline void multiply_block(const Fp32Block& block, int64_t row, int64_t tile) {
  constexpr int kPerTile = static_cast<int>(kTileOutputs) / P::kLanes;
  const int64_t tile_size = block.num_inputs * kTileOutputs;
  const float* left = block.x + row * block.x_stride;
  const auto* right = static_cast<const typename P::Weight*>(block.weights) + tile * tile_size;
  typename P::Float sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sums[r][v] = P::broadcast(0.0f);

  for (int64_t k = 0; k < block.num_inputs; ++k) {
    typename P::Float weights[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v)
      weights[v] = P::load(right + (v / kPerTile) * tile_size + (v % kPerTile) * P::kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const typename P::Float input = P::broadcast(left[r * block.x_stride]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sums[r][v] = P::fma(input, weights[v], sums[r][v]);
    }
    ++left;
    right += kTileOutputs;
  }

#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const int64_t n = tile * kTileOutputs + v * P::kLanes;
    const int64_t valid = block.num_outputs - n;
    if (valid <= 0) break;
    typename P::Float bias = P::broadcast(0.0f), slope = bias;
    if (block.bias) bias = P::load(block.bias + n, valid);
    if (block.slope)
      slope = block.slope_per_output ? P::load(block.slope + n, valid) : P::broadcast(*block.slope);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      typename P::Float y = sums[r][v];
      if (block.bias) y = P::add(y, bias);
      if (block.slope) y = P::scale_negative(y, slope);
      P::store(block.out + (row + r) * block.out_stride + n, y, valid);
    }
  }
  if (block.activation > kSlope) activate_rows(block, row, kRows, tile, kVectors / kPerTile);
}

template <class P, int kTiles, int kRows>
inline void multiply_rows(const Fp32Block& block, int64_t row, int64_t tile, int64_t num_rows) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return multiply_rows<P, kTiles, kRows - 1>(block, row, tile, num_rows);
  }
  multiply_block<P, kRows, kTiles * static_cast<int>(kTileOutputs) / P::kLanes>(block, row, tile);
}

template <class P, int kTiles>
void multiply_tiles(const Fp32Block& block, int64_t tile, int64_t num_tiles) {
  if constexpr (kTiles > 1) {
    if (num_tiles < kTiles) return multiply_tiles<P, kTiles - 1>(block, tile, num_tiles);
  }
  constexpr int kMaxRows = P::max_rows(kTiles);
  // Even groups, as in linear_int8_tile.h.
  const int64_t num_groups = divide_up(block.num_rows, kMaxRows);
  for (int64_t group = 0, row = 0; group < num_groups; ++group) {
    const int64_t end = block.num_rows * (group + 1) / num_groups;
    multiply_rows<P, kTiles, kMaxRows>(block, row, tile, end - row);
    row = end;
  }
}

template <class P>
void wide(const Fp32Block& block) {
  const int64_t num_tiles = block.tile_end - block.tile_begin;
  const int64_t num_groups = divide_up(num_tiles, P::max_tiles(block.num_rows));
  for (int64_t group = 0, tile = 0; group < num_groups; ++group) {
    const int64_t end = num_tiles * (group + 1) / num_groups;
    multiply_tiles<P, P::max_tiles(1)>(block, block.tile_begin + tile, end - tile);
    tile = end;
  }
}

// Sums of kRows rows in sixteen lanes, folded to eight: lane l holds sum[l] + sum[l + 8].
template <class P, int kRows>
inline void sum_lanes(const Fp32Block& block, int64_t row, const typename P::Weight* weights,
                      __m256* folded) {
  const float* x = block.x + row * block.x_stride;
  typename P::Sixteen sums[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) sums[r] = P::zero_sixteen();
  const int64_t whole = block.num_inputs & ~(kLaneInputs - 1), rest = block.num_inputs - whole;
  for (int64_t k = 0; k < whole; k += kLaneInputs) {
    const typename P::Sixteen w = P::load_sixteen(weights + k);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
      sums[r] = P::fma_sixteen(P::load_sixteen(x + r * block.x_stride + k), w, sums[r]);
  }
  if (rest > 0) {
    const typename P::Sixteen w = P::load_sixteen(weights + whole);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
      sums[r] = P::fma_sixteen(P::load_sixteen(x + r * block.x_stride + whole, rest), w, sums[r]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) folded[r] = P::fold(sums[r]);
}

inline float total_of(__m256 sums) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

// total_of for eight rows at once: each row's lanes meet in the same order.
inline __m256 totals_of(const __m256* rows) {
  __m256 fours[4], twos[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    fours[i] = _mm256_add_ps(_mm256_permute2f128_ps(rows[2 * i], rows[2 * i + 1], 0x20),
                             _mm256_permute2f128_ps(rows[2 * i], rows[2 * i + 1], 0x31));
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    twos[i] = _mm256_add_ps(_mm256_shuffle_ps(fours[2 * i], fours[2 * i + 1], 0x44),
                            _mm256_shuffle_ps(fours[2 * i], fours[2 * i + 1], 0xee));
  const __m256 even_odd = _mm256_add_ps(_mm256_shuffle_ps(twos[0], twos[1], 0x88),
                                        _mm256_shuffle_ps(twos[0], twos[1], 0xdd));
  return _mm256_permutevar8x32_ps(even_odd, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

template <class P>
void narrow(const Fp32Block& block) {
  const int64_t padded = divide_up(block.num_inputs, kLaneInputs) * kLaneInputs;
  const auto* weights = static_cast<const typename P::Weight*>(block.weights);
  int64_t row = 0;
  for (; row + 8 <= block.num_rows; row += 8)
    for (int64_t n = 0; n < block.num_outputs; ++n) {
      __m256 folded[8];
#pragma GCC unroll 8
      for (int r = 0; r < 8; r += P::kNarrowRows)
        sum_lanes<P, P::kNarrowRows>(block, row + r, weights + n * padded, folded + r);
      float totals[8];
      _mm256_storeu_ps(totals, totals_of(folded));
      for (int r = 0; r < 8; ++r) totals[r] = finish(block, totals[r], n);
      activate(totals, 8, block.activation);
      for (int r = 0; r < 8; ++r) block.out[(row + r) * block.out_stride + n] = totals[r];
    }
  for (; row < block.num_rows; ++row)
    for (int64_t n = 0; n < block.num_outputs; ++n) {
      __m256 folded;
      sum_lanes<P, 1>(block, row, weights + n * padded, &folded);
      float* out = block.out + row * block.out_stride + n;
      *out = finish(block, total_of(folded), n);
      activate(out, 1, block.activation);
    }
}
