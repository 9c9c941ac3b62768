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

struct FmRow {
  const float* const* fields;  // [num_fields]
  int64_t num_fields;
  int64_t dim;
  bool total;  // one sum instead of `dim` of them
  float* out;
};

// Where row i of the triangle begins in the output, and the first column it holds.
inline int64_t triangle_start(const DotRow& row, int64_t i) {
  const int64_t own = row.diagonal ? 1 : 0;
  if (!row.upper) return i * (i - 1) / 2 + own * i;
  return i * (row.num_fields - 1 + own) - i * (i - 1) / 2;
}
inline int64_t triangle_first(const DotRow& row, int64_t i) {
  return row.upper ? i + (row.diagonal ? 0 : 1) : 0;
}
inline int64_t triangle_end(const DotRow& row, int64_t i) {
  return row.upper ? row.num_fields : i + (row.diagonal ? 1 : 0);
}

// One implementation.
struct Interaction {
  void (*dot)(const DotRow&);
  void (*fm)(const FmRow&);
};

const Interaction& interaction_scalar();
#if defined(__x86_64__)
const Interaction& interaction_avx2();
const Interaction& interaction_avx512();
#endif

}  // namespace rankopt
