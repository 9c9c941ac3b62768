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

// Numbers [begin, begin + count) of every field, kLanes rows from `lane` on side by side.
template <class P>
inline void lay_out(const DotGroup& group, int64_t lane, int64_t begin, int64_t count) {
  const int64_t whole = count & ~int64_t{3};
  for (int64_t f = 0; f < group.num_fields; ++f) {
    const float* const* rows = group.fields + f * kRowGroup + lane;
    float* to = group.columns + f * kDotChunk * P::kLanes;
    for (int64_t k = 0; k < whole; k += 4)
      P::transpose_four(rows, begin + k, to + k * P::kLanes, P::kLanes);
    for (int64_t k = whole; k < count; ++k)
      for (int64_t r = 0; r < P::kLanes; ++r) to[k * P::kLanes + r] = rows[r][begin + k];
  }
}

// Which pairs of a block of fields are wanted.
enum class Pairs { kAll, kBelow, kBelowAndOwn };

template <Pairs kPairs>
constexpr bool is_wanted(int left, int right) {
  return kPairs == Pairs::kAll || right < left || (kPairs == Pairs::kBelowAndOwn && right == left);
}

// Where the sum of fields i >= j lies, in vectors.
inline int64_t place_of(const DotGroup& group, int64_t i, int64_t j) {
  const int64_t row = group.upper ? j : i, column = group.upper ? i : j;
  return triangle_start(group, row) - triangle_first(group, row) + column;
}

// Adds `count` numbers' products of fields [i, i + kLeft) and [j, j + kRight) to their sums.
template <class P, int kLeft, int kRight, Pairs kPairs>
[[gnu::noinline]] void add_products(const DotGroup& group, int64_t i, int64_t j, int64_t count,
                                    bool is_first) {
  typename P::Float sums[kLeft][kRight];
#pragma GCC unroll 8
  for (int r = 0; r < kLeft; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kRight; ++c)
      if (is_wanted<kPairs>(r, c))
        sums[r][c] = is_first ? P::broadcast(0.0f)
                              : P::load(group.sums + place_of(group, i + r, j + c) * P::kLanes);
  const float* left = group.columns + i * kDotChunk * P::kLanes;
  const float* right = group.columns + j * kDotChunk * P::kLanes;
  for (int64_t k = 0; k < count; ++k) {
    typename P::Float others[kRight];
#pragma GCC unroll 8
    for (int c = 0; c < kRight; ++c) others[c] = P::load(right + c * kDotChunk * P::kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kLeft; ++r) {
      const typename P::Float x = P::load(left + r * kDotChunk * P::kLanes);
#pragma GCC unroll 8
      for (int c = 0; c < kRight; ++c)
        if (is_wanted<kPairs>(r, c)) sums[r][c] = P::fma(x, others[c], sums[r][c]);
    }
    left += P::kLanes;
    right += P::kLanes;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kLeft; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kRight; ++c)
      if (is_wanted<kPairs>(r, c))
        P::keep(group.sums + place_of(group, i + r, j + c) * P::kLanes, sums[r][c]);
}

struct Fields {
  int64_t begin, count;
};

// A block beside the diagonal: all pairs of two runs of fields.
template <class P, int kLeft, int kRight>
inline void add_beside(const DotGroup& group, Fields left, Fields right, int64_t count, bool is_first) {
  if constexpr (kLeft > 1) {
    if (left.count < kLeft)
      return add_beside<P, kLeft - 1, kRight>(group, left, right, count, is_first);
  }
  if constexpr (kRight > 1) {
    if (right.count < kRight)
      return add_beside<P, kLeft, kRight - 1>(group, left, right, count, is_first);
  }
  add_products<P, kLeft, kRight, Pairs::kAll>(group, left.begin, right.begin, count, is_first);
}

// A block on the diagonal.
template <class P, int kCount>
inline void add_among(const DotGroup& group, Fields fields, int64_t count, bool is_first) {
  if constexpr (kCount > 1) {
    if (fields.count < kCount) return add_among<P, kCount - 1>(group, fields, count, is_first);
  }
  const int64_t i = fields.begin;
  if (group.diagonal)
    add_products<P, kCount, kCount, Pairs::kBelowAndOwn>(group, i, i, count, is_first);
  else if constexpr (kCount > 1)
    add_products<P, kCount, kCount, Pairs::kBelow>(group, i, i, count, is_first);
}

// From lanes to rows of the result.
template <class P>
inline void hand_out(const DotGroup& group, int64_t lane) {
  const int64_t num_pairs =
      triangle_start(group, group.num_fields - 1) +
      triangle_end(group, group.num_fields - 1) - triangle_first(group, group.num_fields - 1);
  const int64_t num_rows =
      group.num_rows - lane < P::kLanes ? group.num_rows - lane : P::kLanes;
  alignas(64) float rows[P::kLanes * P::kLanes];
  for (int64_t pair = 0; pair < num_pairs; pair += P::kLanes) {
    const float* sums[P::kLanes];
    for (int64_t p = 0; p < P::kLanes; ++p) sums[p] = group.sums + (pair + p) * P::kLanes;
    for (int64_t r = 0; r < P::kLanes; r += 4)
      P::transpose_four(sums, r, rows + r * P::kLanes, P::kLanes);
    const int64_t end = num_pairs - pair < P::kLanes ? num_pairs - pair : P::kLanes;
    for (int64_t r = 0; r < num_rows; ++r)
      P::store(group.out[lane + r] + pair, P::load(rows + r * P::kLanes), 0, end);
  }
}

// A pair's products need no reduction where each lane is a row, and no lane is idle: of 27 fields of
// 64 numbers 1,404 multiply-adds of 16 rows each, where a row by itself takes 2,304.
template <class P>
void dot_group(const DotGroup& group) {
  const int64_t num_runs = divide_up(group.num_fields, P::kRun);
  const auto run_of = [&](int64_t run) {
    const int64_t begin = group.num_fields * run / num_runs;
    return Fields{begin, group.num_fields * (run + 1) / num_runs - begin};
  };
  for (int64_t lane = 0; lane < group.num_rows; lane += P::kLanes) {
    for (int64_t begin = 0; begin < group.dim; begin += kDotChunk) {
      const int64_t count = group.dim - begin < kDotChunk ? group.dim - begin : kDotChunk;
      lay_out<P>(group, lane, begin, count);
      for (int64_t left = 0; left < num_runs; ++left) {
        for (int64_t right = 0; right < left; ++right)
          add_beside<P, P::kRun, P::kRun>(group, run_of(left), run_of(right), count, begin == 0);
        add_among<P, P::kRun>(group, run_of(left), count, begin == 0);
      }
    }
    hand_out<P>(group, lane);
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
