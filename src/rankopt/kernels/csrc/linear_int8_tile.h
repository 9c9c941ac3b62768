// The register-blocked product, written once and instantiated by each instruction-set file with its
// vector policy. Included after that file's target pragma, inside its own anonymous namespace, so
// that no function compiled for one instruction set is linked into another.
//
// A policy P gives: vector types Int, Float, Left (a prepared group of four inputs), Right (a
// prepared vector of weights); kLanes; max_rows(tiles); max_tiles; and the operations used below.

// What the outputs from n on are scaled by and what is added. x + -0 is x and x * 1 is x, bit for
// bit: so a layer without bias or slope needs no branch.
template <class P>
struct Outputs {
  typename P::Int correction;
  typename P::Float scale, bias, slope;

  Outputs(const GemmBlock& block, int64_t n, int64_t valid)
      : correction(P::load_zero_correction(block.column_sum + n * 4)),
        scale(P::load(block.scale + n, valid)),
        bias(block.bias ? P::load(block.bias + n, valid) : P::broadcast(-0.0f)),
        slope(!block.slope             ? P::broadcast(1.0f)
              : block.slope_per_output ? P::load(block.slope + n, valid)
                                       : P::broadcast(*block.slope)) {}

  typename P::Float finish(typename P::Int sum, typename P::Float row_scale) const {
    const typename P::Float exact = P::to_float(P::subtract(sum, correction));
    const typename P::Float y = P::multiply(exact, P::multiply(row_scale, scale));
    return P::scale_negative(P::add(y, bias), slope);
  }

  Outputs twice() const {
    Outputs both = *this;
    both.correction = P::twice(correction);
    both.scale = P::twice(scale);
    both.bias = P::twice(bias);
    both.slope = P::twice(slope);
    return both;
  }
};

inline bool goes_straight(const GemmBlock& block) {
  return block.levels == nullptr && block.activation <= kSlope;
}

// Results that are not stored as they are: through the activation, or as levels for a next layer.
template <class P>
[[gnu::noinline]] void hand_on(const GemmBlock& block, float* values, int num_rows, int width,
                               int64_t row, int64_t first) {
  activate(values, int64_t{num_rows} * width, block.activation);
  for (int r = 0; r < num_rows; ++r)
    for (int64_t lane = 0; lane < width; lane += P::kLanes) {
      const int64_t n = first + lane;
      const typename P::Float y = P::load(values + r * width + lane, P::kLanes);
      if (block.levels == nullptr) {
        P::store(block.out + (row + r) * block.out_stride + n, y, block.num_outputs - n);
        continue;
      }
      P::store_levels(block.levels + (row + r) * block.levels_stride + n,
                      P::multiply(y, P::broadcast(block.levels_inverse)),
                      levels_of(block.activation_bits), 1 << zero_shift_of(block.activation_bits));
      if (P::any_not_finite(y)) spoil_row(block, row + r);
    }
}

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

  const bool straight = goes_straight(block);
  float held[kRows * kVectors * P::kLanes];
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const int64_t n = tile * kTileOutputs + v * P::kLanes;
    const int64_t valid = block.num_outputs - n;
    // Never so, but a branch here keeps GCC 12 from moving every sum to and fro in the loop above.
    if (valid <= 0) break;
    const Outputs<P> outputs(block, n, valid);
    float* to = straight ? block.out + row * block.out_stride + n : held + v * P::kLanes;
    const int64_t stride = straight ? block.out_stride : kVectors * P::kLanes;
    const int64_t width = straight ? valid : P::kLanes;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
      P::store(to + r * stride, outputs.finish(sums[r][v], P::broadcast(block.row_scales[row + r])),
               width);
  }
  if (!straight) hand_on<P>(block, held, kRows, kVectors * P::kLanes, row, tile * kTileOutputs);
}

template <class P, int kVectors, int kRows>
inline void multiply_rows(const GemmBlock& block, int64_t row, int64_t tile, int64_t num_rows) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return multiply_rows<P, kVectors, kRows - 1>(block, row, tile, num_rows);
  }
  multiply_block<P, kRows, kVectors>(block, row, tile);
}

template <class P, int kVectors, int kMaxRows>
[[gnu::noinline]] void multiply_vectors(const GemmBlock& block, int64_t tile) {
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

// Two rows share the vector of the last half tile: lanes 0 to 7 are one's outputs, 8 to 15 the
// other's. Half the padding's products are saved.
template <class P, int kRows, int kTiles>
inline void multiply_pairs(const GemmBlock& block, int64_t row, int64_t tile) {
  constexpr int kPairs = kRows / 2;
  const int64_t tile_bytes = block.num_steps * kTileBytes;
  const uint8_t* left = block.rows + row * block.stride;
  const int8_t* right = block.tiles + tile * tile_bytes;
  const int64_t n = tile * kTileOutputs, half = n + kTiles * kTileOutputs;
  typename P::Int sums[kRows][kTiles + 1], shared[kPairs];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kTiles; ++v) sums[r][v] = P::zero();
#pragma GCC unroll 16
  for (int p = 0; p < kPairs; ++p) shared[p] = P::zero();

  for (int64_t step = 0; step < block.num_steps; ++step) {
    typename P::Right weights[kTiles + 1];
#pragma GCC unroll 16
    for (int v = 0; v < kTiles; ++v) weights[v] = P::load_right(right + v * tile_bytes);
    const typename P::Right last = P::load_twice(right + kTiles * tile_bytes);
#pragma GCC unroll 16
    for (int p = 0; p < kPairs; ++p) {
      const typename P::Left even = P::load_left(left + 2 * p * block.stride);
      const typename P::Left odd = P::load_left(left + (2 * p + 1) * block.stride);
#pragma GCC unroll 16
      for (int v = 0; v < kTiles; ++v) {
        sums[2 * p][v] = P::dot(sums[2 * p][v], even, weights[v]);
        sums[2 * p + 1][v] = P::dot(sums[2 * p + 1][v], odd, weights[v]);
      }
      shared[p] = P::dot(shared[p], P::halves(even, odd), last);
    }
    left += kTileInputs;
    right += kTileBytes;
  }

  float* out = block.out + row * block.out_stride;
#pragma GCC unroll 16
  for (int v = 0; v < kTiles; ++v) {
    if (block.num_outputs <= n + v * kTileOutputs) break;  // never, as above
    const Outputs<P> outputs(block, n + v * kTileOutputs, kTileOutputs);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
      P::store(out + r * block.out_stride + n + v * kTileOutputs,
               outputs.finish(sums[r][v], P::broadcast(block.row_scales[row + r])), kTileOutputs);
  }
  const int64_t valid = block.num_outputs - half;
  if (valid <= 0) return;
  const Outputs<P> outputs = Outputs<P>(block, half, valid).twice();
#pragma GCC unroll 16
  for (int p = 0; p < kPairs; ++p) {
    const float* scales = block.row_scales + row + 2 * p;
    float* to = out + 2 * p * block.out_stride + half;
    P::store_halves(to, to + block.out_stride,
                    outputs.finish(shared[p], P::halves(P::broadcast(scales[0]),
                                                        P::broadcast(scales[1]))), valid);
  }
}

inline GemmBlock from_row(GemmBlock block, int64_t row) {
  block.rows += row * block.stride;
  block.row_scales += row;
  block.out += row * block.out_stride;
  block.num_rows -= row;
  return block;
}

// As many rows as go in whole groups; returns how many.
template <class P, int kRows, int kTiles>
[[gnu::noinline]] int64_t multiply_groups(const GemmBlock& block) {
  const int64_t whole = block.num_rows / kRows * kRows;
  for (int64_t row = 0; row < whole; row += kRows)
    multiply_pairs<P, kRows, kTiles>(block, row, block.tile_begin);
  return whole;
}

// Rows of a narrow layer whose last tile is half padding or more.
template <class P>
int64_t multiply_narrow(const GemmBlock& block) {
  const int64_t rest = block.num_outputs - (block.tile_end - 1) * kTileOutputs;
  if (rest > kTileOutputs / 2 || !goes_straight(block)) return 0;
  switch (block.tile_end - block.tile_begin) {
    case 1: return multiply_groups<P, 16, 0>(block);
    case 2: return multiply_groups<P, 12, 1>(block);
    case 3: return multiply_groups<P, 8, 2>(block);
    default: return 0;
  }
}

template <class P>
void multiply(const GemmBlock& whole) {
  GemmBlock block = whole;
  if constexpr (P::shares_vectors) block = from_row(whole, multiply_narrow<P>(whole));
  if (block.num_rows == 0) return;
  const int64_t num_tiles = block.tile_end - block.tile_begin;
  const int64_t num_groups = divide_up(num_tiles, P::max_tiles);
  for (int64_t group = 0, tile = 0; group < num_groups; ++group) {
    const int64_t end = num_tiles * (group + 1) / num_groups;
    multiply_tiles<P, P::max_tiles>(block, block.tile_begin + tile, end - tile);
    tile = end;
  }
}
