// What the instruction-set files of linear_fp16 share: fp32 sums of weights that are stored in half
// the bytes. No torch in here.
//
// Packed weights lie as linear_fp32.h says, each of them IEEE binary16. A weight is widened to float,
// which is exact, where it is read, and from there on the arithmetic is that of linear_fp32.h.
#pragma once

#include "linear_fp32.h"

namespace rankopt {

const LinearFp32& linear_fp16_scalar();
#if defined(__x86_64__)
const LinearFp32& linear_fp16_avx2();
const LinearFp32& linear_fp16_avx512();
#endif

}  // namespace rankopt
