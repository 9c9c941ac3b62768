// What the instruction-set files of the interactions share. No torch in here.
//
// A row has F fields of D numbers each, anywhere in memory. Arithmetic of one row, in this order on
// every instruction set, so that all of them give the same bits and no row depends on its
// neighbours. `fma` rounds once; where the CPU has no such instruction, std::fma computes it, slowly.
//
// dot: the products of all pairs of fields, row by row of one triangle of the F x F matrix
//   p(i, j) = 0;  p = fma(x[i][k], x[j][k], p)  for k = 0, 1, ..., D - 1
//
// fm: the same products summed over the pairs, without the pairs, for each column d
//   before = x[0][d], y[d] = 0;  y = fma(x[f][d], before, y), before += x[f][d]  for f = 1, ..., F - 1
//   and over the columns:  sum[l] += y[d]  for d = l, l + 16, ... with zeros past D;
//   then sum[l] += sum[l + h]  for l < h,  h = 8, 4, 2, 1;  sum[0]
// Rendle's identity, half of (square of the sum - sum of the squares), is the same number and
// subtracts two large ones to get it.
#pragma once

#include <cstdint>

#include "linear.h"

namespace rankopt {

// Fields are transposed in groups of this many, the widest vector there is.
constexpr int64_t kFieldGroup = 16;

struct DotRow {
  const float* const* fields;  // [padded]; past the last field any that can be read
  int64_t num_fields;
  int64_t padded;  // num_fields up to a multiple of kFieldGroup
  int64_t dim;
  bool upper;     // pairs (i, j) with j > i in place of j < i
  bool diagonal;  // and j = i
  float* columns;  // [dim][padded], aligned to 64 bytes: where the fields are transposed to
  float* out;
};

// Rows that are multiplied side by side, one in each lane of a vector.
constexpr int64_t kRowGroup = 16;
// Numbers of each field that are laid out and multiplied before the next ones. With 16, which would
// stay in the first-level cache, taking the sums of all pairs up again costs more than it saves: 510
// against 390 ns a row of 27 fields of 64.
constexpr int64_t kDotChunk = 64;

// A group of rows of the same fields. Each row's sums are those of DotRow, to the bit.
struct DotGroup {
  const float* const* fields;  // [num_fields][kRowGroup]; past the last row any that can be read
  int64_t num_fields;
  int64_t dim;
  bool upper, diagonal;
  int64_t num_rows;  // at most kRowGroup
  float* columns;    // [num_fields][kDotChunk][kRowGroup], aligned to 64 bytes
  float* sums;       // [num_pairs up to a multiple of kRowGroup][kRowGroup], aligned likewise
  float* const* out;  // [num_rows]
};

struct FmRow {
  const float* const* fields;  // [num_fields]
  int64_t num_fields;
  int64_t dim;
  bool total;  // one sum instead of `dim` of them
  float* out;
};

// Where row i of the triangle begins in the output, and the first column it holds.
template <class Dot>
int64_t triangle_start(const Dot& dot, int64_t i) {
  const int64_t own = dot.diagonal ? 1 : 0;
  if (!dot.upper) return i * (i - 1) / 2 + own * i;
  return i * (dot.num_fields - 1 + own) - i * (i - 1) / 2;
}
template <class Dot>
int64_t triangle_first(const Dot& dot, int64_t i) {
  return dot.upper ? i + (dot.diagonal ? 0 : 1) : 0;
}
template <class Dot>
int64_t triangle_end(const Dot& dot, int64_t i) {
  return dot.upper ? dot.num_fields : i + (dot.diagonal ? 1 : 0);
}

// One implementation.
struct Interaction {
  void (*dot)(const DotRow&);
  void (*dot_group)(const DotGroup&);  // null where a row at a time is as good
  void (*fm)(const FmRow&);
};

const Interaction& interaction_scalar();
#if defined(__x86_64__)
const Interaction& interaction_avx2();
const Interaction& interaction_avx512();
#endif

}  // namespace rankopt
