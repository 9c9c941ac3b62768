// The interactions, written once and instantiated by each instruction-set file with its vector
// policy. Included like linear_int8_tile.h.
//
// A policy P gives: vector types Float and Sixteen (sixteen lanes); kLanes; kMaxRows; and the
// operations used below.

// Lays the fields out as columns, so that one vector holds number k of kLanes fields.
template <class P>
inline void to_columns(const DotRow& row) {
  const int64_t whole = row.dim & ~int64_t{3};
  for (int64_t first = 0; first < row.padded; first += P::kLanes) {
    const float* const* fields = row.fields + first;
    float* to = row.columns + first;
    for (int64_t k = 0; k < whole; k += 4) P::transpose_four(fields, k, to + k * row.padded, row.padded);
    for (int64_t k = whole; k < row.dim; ++k)
      for (int64_t lane = 0; lane < P::kLanes; ++lane) to[k * row.padded + lane] = fields[lane][k];
  }
}

// Fields [i, i + kRows) against the kLanes fields from `lane` on.
template <class P, int kRows>
inline void dot_block(const DotRow& row, int64_t i, int64_t lane) {
  typename P::Float sums[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) sums[r] = P::broadcast(0.0f);
  const float* left = row.columns + i;
  const float* right = row.columns + lane;
  for (int64_t k = 0; k < row.dim; ++k) {
    const typename P::Float others = P::load(right);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) sums[r] = P::fma(P::broadcast(left[r]), others, sums[r]);
    left += row.padded;
    right += row.padded;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const int64_t first = triangle_first(row, i + r), end = triangle_end(row, i + r);
    P::store(row.out + triangle_start(row, i + r) - first + lane, sums[r],
             first > lane ? first - lane : 0, end - lane < P::kLanes ? end - lane : P::kLanes);
  }
}

template <class P, int kRows>
inline void dot_rows(const DotRow& row, int64_t i, int64_t lane, int64_t num_rows) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return dot_rows<P, kRows - 1>(row, i, lane, num_rows);
  }
  dot_block<P, kRows>(row, i, lane);
}

template <class P>
void dot(const DotRow& row) {
  to_columns<P>(row);
  const int64_t own = row.diagonal ? 1 : 0, num_fields = row.num_fields;
  for (int64_t lane = 0; lane < num_fields; lane += P::kLanes) {
    // The fields that have a pair among these lanes.
    const int64_t last_lane = lane + P::kLanes < num_fields ? lane + P::kLanes : num_fields;
    const int64_t begin = row.upper ? 0 : lane + 1 - own;
    const int64_t end = row.upper ? last_lane - 1 + own : num_fields;
    const int64_t num_rows = end - begin;
    if (num_rows <= 0) continue;
    // Even groups: thirteen and thirteen, not fourteen and twelve.
    const int64_t num_groups = divide_up(num_rows, P::kMaxRows);
    for (int64_t group = 0, i = 0; group < num_groups; ++group) {
      const int64_t next = num_rows * (group + 1) / num_groups;
      dot_rows<P, P::kMaxRows>(row, begin + i, lane, next - i);
      i = next;
    }
  }
}

template <class P>
inline typename P::Sixteen pair_sums(const FmRow& row, int64_t d, int64_t valid) {
  typename P::Sixteen sums = P::zero_sixteen();
  if (row.num_fields == 0) return sums;
  typename P::Sixteen before = P::load_sixteen(row.fields[0] + d, valid);
  for (int64_t field = 1; field < row.num_fields; ++field) {
    const typename P::Sixteen x = P::load_sixteen(row.fields[field] + d, valid);
    sums = P::fma_sixteen(x, before, sums);
    before = P::add_sixteen(before, x);
  }
  return sums;
}

template <class P>
void fm(const FmRow& row) {
  typename P::Sixteen total = P::zero_sixteen();
  for (int64_t d = 0; d < row.dim; d += 16) {
    const int64_t valid = row.dim - d < 16 ? row.dim - d : 16;
    const typename P::Sixteen sums = pair_sums<P>(row, d, valid);
    if (row.total)
      total = P::add_sixteen(total, sums);
    else
      P::store_sixteen(row.out + d, sums, valid);
  }
  if (!row.total) return;
  const __m256 eight = P::fold(total);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  *row.out = _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
