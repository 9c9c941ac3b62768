// Unpacking and pooling, written once and instantiated by each instruction-set file with its vector
// policy. Included inside a namespace, between RANKOPT_TARGET_BEGIN and RANKOPT_TARGET_END; calls no
// function of a standard header, since the linker could keep the copy compiled for the better CPU.
//
// A policy P gives: a vector type Float; kLanes; half(p), a float16 as float; fp32, fp16, u8, u4 and
// u2 (values, i[, valid]), lanes i and on of a row's values; and the operations used below.

template <class P>
struct Fp32Row {
  const uint8_t* values;
  explicit Fp32Row(const uint8_t* row) : values(row) {}
  template <class... Valid>
  typename P::Float at(int64_t i, Valid... valid) const {
    return P::fp32(values, i, valid...);
  }
};

template <class P>
struct Fp16Row {
  const uint8_t* values;
  explicit Fp16Row(const uint8_t* row) : values(row) {}
  template <class... Valid>
  typename P::Float at(int64_t i, Valid... valid) const {
    return P::fp16(values, i, valid...);
  }
};

template <class P, int kBits>
struct LevelRow {
  typename P::Float scale, bias;
  const uint8_t* values;
  explicit LevelRow(const uint8_t* row)
      : scale(P::broadcast(P::half(row))), bias(P::broadcast(P::half(row + 2))), values(row + 4) {}
  template <class... Valid>
  typename P::Float at(int64_t i, Valid... valid) const {
    typename P::Float level;
    if constexpr (kBits == 8) level = P::u8(values, i, valid...);
    if constexpr (kBits == 4) level = P::u4(values, i, valid...);
    if constexpr (kBits == 2) level = P::u2(values, i, valid...);
    return P::add(P::mul(level, scale), bias);
  }
};

// Rows of kVectors whole vectors; 0: of any width.
template <class P, class Row, int kVectors>
void unpack_grid(const RowGrid& grid) {
  const int64_t whole = grid.dim / P::kLanes * P::kLanes, rest = grid.dim - whole;
  const uint8_t* const* rows = grid.rows;
  for (int64_t line = 0; line < grid.num_lines; ++line) {
    float* out = grid.out + line * grid.line_stride;
    for (int64_t c = 0; c < grid.num_columns; ++c, out += grid.dim) {
      const Row row(*rows++);
      if constexpr (kVectors > 0) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) P::store(out + v * P::kLanes, row.at(v * P::kLanes));
      } else {
        for (int64_t i = 0; i < whole; i += P::kLanes) P::store(out + i, row.at(i));
        if constexpr (P::kLanes > 1) {
          if (rest > 0) P::store(out + whole, row.at(whole, rest), rest);
        }
      }
    }
  }
}

template <class P, class Row>
void unpack(const RowGrid& grid) {
  if constexpr (P::kLanes > 1) {
    if (grid.dim == P::kLanes) return unpack_grid<P, Row, 1>(grid);
    if (grid.dim == 2 * P::kLanes) return unpack_grid<P, Row, 2>(grid);
    if (grid.dim == 4 * P::kLanes) return unpack_grid<P, Row, 4>(grid);
    if (grid.dim == 8 * P::kLanes) return unpack_grid<P, Row, 8>(grid);
  }
  unpack_grid<P, Row, 0>(grid);
}

// kVectors vectors from lane `start` on; with `valid`, one vector of so many lanes.
template <class P, class Row, int kVectors, bool kWeighted, class... Valid>
inline void pool_vectors(const RowSum& sum, int64_t start, Valid... valid) {
  typename P::Float sums[kVectors];
  int64_t r = 0;
  if (sum.first) {
    const Row row(sum.rows[0]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[v] = row.at(start + v * P::kLanes, valid...);
    if constexpr (kWeighted) {
      const typename P::Float weight = P::broadcast(sum.weights[0]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[v] = P::mul(weight, sums[v]);
    }
    r = 1;
  } else {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
      sums[v] = P::fp32(reinterpret_cast<const uint8_t*>(sum.out), start + v * P::kLanes, valid...);
  }
  for (; r < sum.num_rows; ++r) {
    const Row row(sum.rows[r]);
    typename P::Float weight = P::broadcast(0.0f);
    if constexpr (kWeighted) weight = P::broadcast(sum.weights[r]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      typename P::Float value = row.at(start + v * P::kLanes, valid...);
      if constexpr (kWeighted) value = P::mul(weight, value);
      sums[v] = P::add(sums[v], value);
    }
  }
  if (sum.divisor != 0.0f) {
    const typename P::Float divisor = P::broadcast(sum.divisor);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[v] = P::div(sums[v], divisor);
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) P::store(sum.out + start + v * P::kLanes, sums[v], valid...);
}

template <class P, class Row, bool kWeighted>
void pool_row(const RowSum& sum) {
  const int64_t whole = sum.dim / P::kLanes, rest = sum.dim - whole * P::kLanes;
  int64_t vector = 0;
  for (; vector + 8 <= whole; vector += 8)
    pool_vectors<P, Row, 8, kWeighted>(sum, vector * P::kLanes);
  if (whole - vector >= 4) {
    pool_vectors<P, Row, 4, kWeighted>(sum, vector * P::kLanes);
    vector += 4;
  }
  if (whole - vector >= 2) {
    pool_vectors<P, Row, 2, kWeighted>(sum, vector * P::kLanes);
    vector += 2;
  }
  if (whole > vector) pool_vectors<P, Row, 1, kWeighted>(sum, vector * P::kLanes);
  if constexpr (P::kLanes > 1) {
    if (rest > 0) pool_vectors<P, Row, 1, kWeighted>(sum, whole * P::kLanes, rest);
  }
}

template <class P, class Row>
void pool(const RowSum& sum) {
  if (sum.num_rows == 0) {
    if (sum.first)
      for (int64_t i = 0; i < sum.dim; ++i) sum.out[i] = 0.0f;
    return;
  }
  if (sum.weights != nullptr) return pool_row<P, Row, true>(sum);
  pool_row<P, Row, false>(sum);
}

template <class P>
constexpr Lookup make_lookup() {
  return Lookup{{unpack<P, Fp32Row<P>>, unpack<P, Fp16Row<P>>, unpack<P, LevelRow<P, 8>>,
                 unpack<P, LevelRow<P, 4>>, unpack<P, LevelRow<P, 2>>},
                {pool<P, Fp32Row<P>>, pool<P, Fp16Row<P>>, pool<P, LevelRow<P, 8>>,
                 pool<P, LevelRow<P, 4>>, pool<P, LevelRow<P, 2>>}};
}
