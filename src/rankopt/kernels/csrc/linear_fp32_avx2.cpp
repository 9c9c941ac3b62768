#include "linear_fp32.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "target.h"

RANKOPT_TARGET_BEGIN("avx2,fma")

namespace rankopt {
namespace {

#include "exact_exp.h"
#include "activation.h"
#include "linear_int8_avx2.h"
#include "linear_fp32_avx2.h"
#include "linear_fp32_tile.h"

}  // namespace

const LinearFp32& linear_fp32_avx2() {
  static const LinearFp32 kernels{wide<Avx2Fp32>, narrow<Avx2Fp32>};
  return kernels;
}

}  // namespace rankopt

RANKOPT_TARGET_END
#endif
