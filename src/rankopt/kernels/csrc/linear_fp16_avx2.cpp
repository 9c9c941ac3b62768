#include "linear_fp16.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "target.h"

RANKOPT_TARGET_BEGIN("avx2,fma,f16c")

namespace rankopt {
namespace {

#include "exact_exp.h"
#include "activation.h"
#include "linear_int8_avx2.h"
#include "linear_fp32_avx2.h"
#include "linear_fp32_tile.h"

struct Avx2Fp16 : Avx2Fp32 {
  using Weight = uint16_t;

  using Avx2Fp32::load;
  static Float load(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  using Avx2Fp32::load_sixteen;
  static Sixteen load_sixteen(const uint16_t* p) { return {load(p), load(p + 8)}; }
};

}  // namespace

const LinearFp32& linear_fp16_avx2() {
  static const LinearFp32 kernels{wide<Avx2Fp16>, narrow<Avx2Fp16>};
  return kernels;
}

}  // namespace rankopt

RANKOPT_TARGET_END
#endif
