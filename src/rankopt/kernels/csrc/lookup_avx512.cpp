#include "lookup.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "target.h"

RANKOPT_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")

namespace rankopt {
namespace {

#include "lookup_tile.h"

struct Avx512Lookup {
  using Float = __m512;
  static constexpr int64_t kLanes = 16;

  static float half(const uint8_t* p) {
    return _cvtsh_ss(static_cast<unsigned short>(p[0] | p[1] << 8));
  }
  static __mmask16 mask_of(int64_t valid) {
    return static_cast<__mmask16>((1u << static_cast<unsigned>(valid)) - 1u);
  }
  static __m128i bytes_of(const uint8_t* p, int64_t count) {
    return _mm_maskz_loadu_epi8(mask_of(count), p);
  }
  static Float levels(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }
  static Float nibbles(__m128i bytes) {
    const __m128i mask = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(bytes, mask);
    const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
    return levels(_mm_unpacklo_epi8(low, high));
  }
  static Float pairs(__m128i bytes) {
    const __m512i places =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i shifted = _mm512_srlv_epi32(_mm512_broadcastd_epi32(bytes), places);
    return _mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(3)));
  }

  static Float fp32(const uint8_t* values, int64_t i) {
    return _mm512_loadu_ps(reinterpret_cast<const float*>(values) + i);
  }
  static Float fp32(const uint8_t* values, int64_t i, int64_t valid) {
    return _mm512_maskz_loadu_ps(mask_of(valid), reinterpret_cast<const float*>(values) + i);
  }
  static Float fp16(const uint8_t* values, int64_t i) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + 2 * i)));
  }
  static Float fp16(const uint8_t* values, int64_t i, int64_t valid) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask_of(valid), values + 2 * i));
  }
  static Float u8(const uint8_t* values, int64_t i) {
    return levels(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values + i)));
  }
  static Float u8(const uint8_t* values, int64_t i, int64_t valid) {
    return levels(bytes_of(values + i, valid));
  }
  static Float u4(const uint8_t* values, int64_t i) {
    return nibbles(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(values + i / 2)));
  }
  static Float u4(const uint8_t* values, int64_t i, int64_t valid) {
    return nibbles(bytes_of(values + i / 2, (valid + 1) / 2));
  }
  static Float u2(const uint8_t* values, int64_t i) { return pairs(bytes_of(values + i / 4, 4)); }
  static Float u2(const uint8_t* values, int64_t i, int64_t valid) {
    return pairs(bytes_of(values + i / 4, (valid + 3) / 4));
  }

  static Float broadcast(float value) { return _mm512_set1_ps(value); }
  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
  static void store(float* p, Float value) { _mm512_storeu_ps(p, value); }
  static void store(float* p, Float value, int64_t valid) {
    _mm512_mask_storeu_ps(p, mask_of(valid), value);
  }
};

}  // namespace

const Lookup& lookup_avx512() {
  static const Lookup kernels = make_lookup<Avx512Lookup>();
  return kernels;
}

}  // namespace rankopt

RANKOPT_TARGET_END
#endif
