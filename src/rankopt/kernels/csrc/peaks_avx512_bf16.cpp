#include "peaks.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "target.h"

RANKOPT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")

namespace rankopt {

int64_t peak_bf16_avx512(int64_t num_rounds, float* sink) {
  __m512 sums[kSums];
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  const __m512 some = _mm512_loadu_ps(sink);
  const __m512bh a = _mm512_cvtne2ps_pbh(some, some);
  for (int64_t round = 0; round < num_rounds; ++round)
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], a, a);
  for (int i = 1; i < kSums; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  _mm512_storeu_ps(sink, sums[0]);
  return num_rounds * kSums * 32 * 2;
}

}  // namespace rankopt

RANKOPT_TARGET_END
#endif
