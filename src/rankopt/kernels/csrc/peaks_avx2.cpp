#include "peaks.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "target.h"

RANKOPT_TARGET_BEGIN("avx2,fma")

namespace rankopt {
namespace {

#include "peaks_memory.h"

struct Bytes32 {
  using Sum = __m256i;
  static constexpr int64_t kBytes = 32;
  static Sum zero() { return _mm256_setzero_si256(); }
  static Sum add(Sum sum, const uint8_t* p) {
    return _mm256_add_epi64(sum, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store(uint8_t* p, Sum sum) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), sum);
  }
  static void copy(uint8_t* to, const uint8_t* from) {
    store(to, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static uint64_t fold(Sum sum) {
    alignas(32) uint64_t words[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(words), sum);
    return words[0] + words[1] + words[2] + words[3];
  }
};

int64_t fp32(int64_t num_rounds, float* sink) {
  __m256 sums[kSums];
  for (auto& sum : sums) sum = _mm256_setzero_ps();
  const __m256 a = _mm256_loadu_ps(sink), b = _mm256_loadu_ps(sink + 8);
  for (int64_t round = 0; round < num_rounds; ++round)
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sums[i] = _mm256_fmadd_ps(a, b, sums[i]);
  for (int i = 1; i < kSums; ++i) sums[0] = _mm256_add_ps(sums[0], sums[i]);
  _mm256_storeu_ps(sink, sums[0]);
  return num_rounds * kSums * 8 * 2;
}

// Without VNNI a byte product takes three instructions, as in the linear kernels.
int64_t int8(int64_t num_rounds, float* sink) {
  __m256i sums[8];
  for (auto& sum : sums) sum = _mm256_setzero_si256();
  __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sink));
  const __m256i b = _mm256_set1_epi8(3), ones = _mm256_set1_epi16(1);
  for (int64_t round = 0; round < num_rounds; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      asm volatile("" : "+x"(a));  // or the product would be computed once, before the loop
      const __m256i pairs = _mm256_maddubs_epi16(a, b);
      sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs, ones));
    }
  }
  for (int i = 1; i < 8; ++i) sums[0] = _mm256_add_epi32(sums[0], sums[i]);
  _mm256_storeu_ps(sink, _mm256_cvtepi32_ps(sums[0]));
  return num_rounds * 8 * 32 * 2;
}

}  // namespace

const Peaks& peaks_avx2() {
  static const Peaks peaks{fp32, int8, nullptr, read_bytes<Bytes32>, gather_rows<Bytes32>,
                           gather_copy_rows<Bytes32>, gather_write_rows<Bytes32>};
  return peaks;
}

}  // namespace rankopt

RANKOPT_TARGET_END
#endif
