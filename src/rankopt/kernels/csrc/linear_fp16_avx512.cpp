#include "linear_fp16.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "target.h"

RANKOPT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq")

namespace rankopt {
namespace {

#include "exact_exp.h"
#include "activation.h"
#include "linear_int8_avx512.h"
#include "linear_fp32_avx512.h"
#include "linear_fp32_tile.h"

struct Avx512Fp16 : Avx512Fp32 {
  using Weight = uint16_t;

  using Avx512Fp32::load;
  static Float load(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  using Avx512Fp32::load_sixteen;
  static Sixteen load_sixteen(const uint16_t* p) { return load(p); }
};

}  // namespace

const LinearFp32& linear_fp16_avx512() {
  static const LinearFp32 kernels{wide<Avx512Fp16>, narrow<Avx512Fp16>};
  return kernels;
}

}  // namespace rankopt

RANKOPT_TARGET_END
#endif
