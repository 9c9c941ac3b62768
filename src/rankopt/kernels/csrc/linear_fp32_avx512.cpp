#include "linear_fp32.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "target.h"

RANKOPT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")

namespace rankopt {
namespace {

#include "exact_exp.h"
#include "activation.h"
#include "linear_int8_avx512.h"
#include "linear_fp32_avx512.h"
#include "linear_fp32_tile.h"

}  // namespace

const LinearFp32& linear_fp32_avx512() {
  static const LinearFp32 kernels{wide<Avx512Fp32>, narrow<Avx512Fp32>};
  return kernels;
}

}  // namespace rankopt

RANKOPT_TARGET_END
#endif
