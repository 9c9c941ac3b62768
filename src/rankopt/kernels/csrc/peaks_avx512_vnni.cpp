// AVX-512 with VNNI. A file of its own, so that no compiler can put VNNI into the version without.
#include "peaks.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "target.h"

RANKOPT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")

namespace rankopt {
namespace {

int64_t int8(int64_t num_rounds, float* sink) {
  __m512i sums[kSums];
  for (auto& sum : sums) sum = _mm512_setzero_si512();
  const __m512i a = _mm512_loadu_si512(sink), b = _mm512_set1_epi8(3);
  for (int64_t round = 0; round < num_rounds; ++round)
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_dpbusd_epi32(sums[i], a, b);
  for (int i = 1; i < kSums; ++i) sums[0] = _mm512_add_epi32(sums[0], sums[i]);
  _mm512_storeu_si512(sink, sums[0]);
  return num_rounds * kSums * 64 * 2;
}

}  // namespace

const Peaks& peaks_avx512_vnni() {
  static const Peaks peaks{peaks_avx512().fp32, int8,
                           __builtin_cpu_supports("avx512bf16") ? peak_bf16_avx512 : nullptr,
                           peaks_avx512().read, peaks_avx512().gather,
                           peaks_avx512().gather_copy, peaks_avx512().gather_write};
  return peaks;
}

}  // namespace rankopt

RANKOPT_TARGET_END
#endif
