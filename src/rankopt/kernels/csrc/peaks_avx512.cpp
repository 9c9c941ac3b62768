#include "peaks.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "target.h"

RANKOPT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq")

namespace rankopt {
namespace {

#include "peaks_memory.h"

struct Bytes64 {
  using Sum = __m512i;
  static constexpr int64_t kBytes = 64;
  static Sum zero() { return _mm512_setzero_si512(); }
  static Sum add(Sum sum, const uint8_t* p) {
    return _mm512_add_epi64(sum, _mm512_loadu_si512(p));
  }
  static void store(uint8_t* p, Sum sum) { _mm512_storeu_si512(p, sum); }
  static void copy(uint8_t* to, const uint8_t* from) { store(to, _mm512_loadu_si512(from)); }
  static uint64_t fold(Sum sum) {
    alignas(64) uint64_t words[8];
    _mm512_store_si512(words, sum);
    uint64_t total = 0;
    for (uint64_t word : words) total += word;
    return total;
  }
};

int64_t fp32(int64_t num_rounds, float* sink) {
  __m512 sums[kSums];
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  const __m512 a = _mm512_loadu_ps(sink), b = _mm512_loadu_ps(sink + 16);
  for (int64_t round = 0; round < num_rounds; ++round)
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_fmadd_ps(a, b, sums[i]);
  for (int i = 1; i < kSums; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  _mm512_storeu_ps(sink, sums[0]);
  return num_rounds * kSums * 16 * 2;
}

int64_t int8(int64_t num_rounds, float* sink) {
  __m512i sums[kSums];
  for (auto& sum : sums) sum = _mm512_setzero_si512();
  __m512i a = _mm512_loadu_si512(sink);
  const __m512i b = _mm512_set1_epi8(3), ones = _mm512_set1_epi16(1);
  for (int64_t round = 0; round < num_rounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) {
      asm volatile("" : "+v"(a));  // or the product would be computed once, before the loop
      const __m512i pairs = _mm512_maddubs_epi16(a, b);
      sums[i] = _mm512_add_epi32(sums[i], _mm512_madd_epi16(pairs, ones));
    }
  }
  for (int i = 1; i < kSums; ++i) sums[0] = _mm512_add_epi32(sums[0], sums[i]);
  _mm512_storeu_si512(sink, sums[0]);
  return num_rounds * kSums * 64 * 2;
}

}  // namespace

const Peaks& peaks_avx512() {
  static const Peaks peaks{fp32, int8, nullptr, read_bytes<Bytes64>, gather_rows<Bytes64>,
                           gather_copy_rows<Bytes64>, gather_write_rows<Bytes64>};
  return peaks;
}

}  // namespace rankopt

RANKOPT_TARGET_END
#endif
