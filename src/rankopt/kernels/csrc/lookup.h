// What the instruction-set files of the table lookup share. No torch in here.
//
// A table is rows behind each other, as rankopt/tables.py packs them: float32, float16, or a scale
// and a bias in float16 and then integers of 8, 4 or 2 bits, low bits first.
//
// Arithmetic, the same on every instruction set, so that all of them give the same bits:
//   value  = float(level) * scale + bias   (exact but for the addition: 8 bits times 11 fit in 24)
//   pooled = weight[0] * value[0];  pooled = pooled + weight[r] * value[r]  for r = 1, 2, ...
//            where every product and every sum is rounded, and no weights are no product
#pragma once

#include <cstdint>

namespace rankopt {

enum class Storage : int64_t { kFp32, kFp16, kInt8, kInt4, kInt2 };
constexpr int64_t kNumStorages = 5;

// Rows that are each unpacked to a place of its own: of each line of the result some that lie side
// by side.
struct RowGrid {
  const uint8_t* const* rows;  // line after line
  int64_t num_lines, num_columns;
  int64_t dim;
  float* out;
  int64_t line_stride;
};

// Rows that are added up, or a part of them: `first` starts anew, otherwise `out` is added to.
struct RowSum {
  const uint8_t* const* rows;
  int64_t num_rows;
  const float* weights;  // [num_rows] or null
  int64_t dim;
  float* out;
  bool first;
  float divisor;  // of the sum; 0 for none
};

// One implementation, by Storage.
struct Lookup {
  void (*unpack[kNumStorages])(const RowGrid&);
  void (*pool[kNumStorages])(const RowSum&);
};

const Lookup& lookup_scalar();
#if defined(__x86_64__)
const Lookup& lookup_avx2();
const Lookup& lookup_avx512();
#endif

}  // namespace rankopt
