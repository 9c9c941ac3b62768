// The register-blocked product, written once and instantiated by each instruction-set file with its
// vector policy. Included after that file's target pragma, inside its own anonymous namespace, so
// that no function compiled for one instruction set is linked into another.
//
// A policy P gives: vector types Int, Float, Left (a prepared group of four inputs), Right (a
// prepared vector of weights); kLanes; max_rows(tiles); max_tiles; and the operations used below.

template <class P, int kRows, int kVectors>
inline void multiply_block(const GemmBlock& block, int64_t row, int64_t tile) {
  constexpr int kPerTile = static_cast<int>(kTileOutputs) / P::kLanes;
  const int64_t tile_bytes = block.num_steps * kTileBytes;
  const uint8_t* left = block.rows + row * block.stride;
  const int8_t* right = block.tiles + tile * tile_bytes;
  typename P::Int sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sums[r][v] = P::zero();

  for (int64_t step = 0; step < block.num_steps; ++step) {
    typename P::Right weights[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v)
      weights[v] = P::load_right(right + (v / kPerTile) * tile_bytes + (v % kPerTile) * P::kLanes * 4);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const typename P::Left inputs = P::load_left(left + r * block.stride);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sums[r][v] = P::dot(sums[r][v], inputs, weights[v]);
    }
    left += kTileInputs;
    right += kTileBytes;
  }

#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const int64_t n = tile * kTileOutputs + v * P::kLanes;
    const int64_t valid = block.num_outputs - n;
    if (valid <= 0) break;
    const typename P::Int correction = P::load_zero_correction(block.column_sum + n * 4);
    const typename P::Float scale = P::load(block.scale + n, valid);
    const typename P::Float bias = block.bias ? P::load(block.bias + n, valid) : P::broadcast(0.0f);
    typename P::Float slope = P::broadcast(0.0f);
    if (block.slope)
      slope = block.slope_per_output ? P::load(block.slope + n, valid) : P::broadcast(*block.slope);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const typename P::Float factor = P::multiply(P::broadcast(block.row_scales[row + r]), scale);
      typename P::Float y = P::multiply(P::to_float(P::subtract(sums[r][v], correction)), factor);
      if (block.bias) y = P::add(y, bias);
      if (block.slope) y = P::scale_negative(y, slope);
      if (block.levels) {
        P::store_levels(block.levels + (row + r) * block.levels_stride + n,
                        P::multiply(y, P::broadcast(block.levels_inverse)),
                        levels_of(block.activation_bits), 1 << zero_shift_of(block.activation_bits));
        if (P::any_not_finite(y)) spoil_row(block, row + r);
      } else {
        P::store(block.out + (row + r) * block.out_stride + n, y, valid);
      }
    }
  }
}

template <class P, int kVectors, int kRows>
inline void multiply_rows(const GemmBlock& block, int64_t row, int64_t tile, int64_t num_rows) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return multiply_rows<P, kVectors, kRows - 1>(block, row, tile, num_rows);
  }
  multiply_block<P, kRows, kVectors>(block, row, tile);
}

template <class P, int kVectors, int kMaxRows>
void multiply_vectors(const GemmBlock& block, int64_t tile) {
  // Even groups: 50 rows at most 8 at a time are 7 groups of 7 or 8, not 6 of 8 and one of 2.
  const int64_t num_groups = divide_up(block.num_rows, kMaxRows);
  for (int64_t group = 0, row = 0; group < num_groups; ++group) {
    const int64_t end = block.num_rows * (group + 1) / num_groups;
    multiply_rows<P, kVectors, kMaxRows>(block, row, tile, end - row);
    row = end;
  }
}

template <class P, int kTiles>
void multiply_tiles(const GemmBlock& block, int64_t tile, int64_t num_tiles) {
  if constexpr (kTiles > 1) {
    if (num_tiles < kTiles) return multiply_tiles<P, kTiles - 1>(block, tile, num_tiles);
  }
  constexpr int kVectors = kTiles * static_cast<int>(kTileOutputs) / P::kLanes;
  constexpr int kMaxRows = P::max_rows(kTiles);
  // With 40 outputs the second half of the third tile is padding.
  if constexpr (kVectors > kTiles) {
    if (block.num_outputs - tile * kTileOutputs <= (kVectors - 1) * P::kLanes)
      return multiply_vectors<P, kVectors - 1, kMaxRows>(block, tile);
  }
  multiply_vectors<P, kVectors, kMaxRows>(block, tile);
}

template <class P>
void multiply(const GemmBlock& block) {
  const int64_t num_tiles = block.tile_end - block.tile_begin;
  const int64_t num_groups = divide_up(num_tiles, P::max_tiles);
  for (int64_t group = 0, tile = 0; group < num_groups; ++group) {
    const int64_t end = num_tiles * (group + 1) / num_groups;
    multiply_tiles<P, P::max_tiles>(block, block.tile_begin + tile, end - tile);
    tile = end;
  }
}
