#include "lookup.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "target.h"

// Every CPU with AVX2 has F16C.
RANKOPT_TARGET_BEGIN("avx2,fma,f16c")

namespace rankopt {
namespace {

#include "lookup_tile.h"

struct Avx2Lookup {
  using Float = __m256;
  static constexpr int64_t kLanes = 8;

  static float half(const uint8_t* p) {
    return _cvtsh_ss(static_cast<unsigned short>(p[0] | p[1] << 8));
  }
  static __m256i mask_of(int64_t valid) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(valid)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  // A row's last bytes, zeros behind them: nothing past the row is read.
  static __m128i last_bytes(const uint8_t* p, int64_t count) {
    alignas(16) uint8_t bytes[16] = {};
    for (int64_t i = 0; i < count; ++i) bytes[i] = p[i];
    return _mm_load_si128(reinterpret_cast<const __m128i*>(bytes));
  }
  static __m128i four_bytes(const uint8_t* p) {
    int bits;
    std::memcpy(&bits, p, sizeof(bits));
    return _mm_cvtsi32_si128(bits);
  }
  static Float levels(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)); }
  static Float nibbles(__m128i bytes) {
    const __m128i mask = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(bytes, mask);
    const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
    return levels(_mm_unpacklo_epi8(low, high));
  }
  static Float pairs(int bits) {
    const __m256i places = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
    const __m256i shifted = _mm256_srlv_epi32(_mm256_set1_epi32(bits), places);
    return _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(3)));
  }

  static Float fp32(const uint8_t* values, int64_t i) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(values) + i);
  }
  static Float fp32(const uint8_t* values, int64_t i, int64_t valid) {
    return _mm256_maskload_ps(reinterpret_cast<const float*>(values) + i, mask_of(valid));
  }
  static Float fp16(const uint8_t* values, int64_t i) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values + 2 * i)));
  }
  static Float fp16(const uint8_t* values, int64_t i, int64_t valid) {
    return _mm256_cvtph_ps(last_bytes(values + 2 * i, 2 * valid));
  }
  static Float u8(const uint8_t* values, int64_t i) {
    return levels(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(values + i)));
  }
  static Float u8(const uint8_t* values, int64_t i, int64_t valid) {
    return levels(last_bytes(values + i, valid));
  }
  static Float u4(const uint8_t* values, int64_t i) { return nibbles(four_bytes(values + i / 2)); }
  static Float u4(const uint8_t* values, int64_t i, int64_t valid) {
    return nibbles(last_bytes(values + i / 2, (valid + 1) / 2));
  }
  static Float u2(const uint8_t* values, int64_t i) {
    return pairs(values[i / 4] | values[i / 4 + 1] << 8);
  }
  static Float u2(const uint8_t* values, int64_t i, int64_t valid) {
    return pairs(values[i / 4] | (valid > 4 ? values[i / 4 + 1] << 8 : 0));
  }

  static Float broadcast(float value) { return _mm256_set1_ps(value); }
  static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
  static void store(float* p, Float value) { _mm256_storeu_ps(p, value); }
  static void store(float* p, Float value, int64_t valid) {
    _mm256_maskstore_ps(p, mask_of(valid), value);
  }
};

}  // namespace

const Lookup& lookup_avx2() {
  static const Lookup kernels = make_lookup<Avx2Lookup>();
  return kernels;
}

}  // namespace rankopt

RANKOPT_TARGET_END
#endif
