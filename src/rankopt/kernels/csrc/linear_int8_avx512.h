// The vector policy that the AVX-512 files share. Included like linear_int8_tile.h.

struct Avx512 {
  using Int = __m512i;
  using Float = __m512;
  static constexpr int kLanes = 16;

  static Int zero() { return _mm512_setzero_si512(); }
  static Int subtract(Int a, Int b) { return _mm512_sub_epi32(a, b); }
  static Float to_float(Int a) { return _mm512_cvtepi32_ps(a); }
  static Float broadcast(float a) { return _mm512_set1_ps(a); }
  static Float multiply(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float scale_negative(Float y, Float slope) {
    const __mmask16 keep = _mm512_cmp_ps_mask(y, _mm512_setzero_ps(), _CMP_GE_OQ);
    return _mm512_mask_blend_ps(keep, _mm512_mul_ps(y, slope), y);
  }
  static __mmask16 lanes_below(int64_t valid) {
    return static_cast<__mmask16>(valid >= kLanes ? 0xffff : (1 << valid) - 1);
  }
  static Float load(const float* p, int64_t valid) {
    return _mm512_maskz_loadu_ps(lanes_below(valid), p);
  }
  static void store(float* p, Float y, int64_t valid) {
    if (valid >= kLanes)
      _mm512_storeu_ps(p, y);
    else
      _mm512_mask_storeu_ps(p, lanes_below(valid), y);
  }
  static bool any_not_finite(Float y) {
    const Float infinity = _mm512_set1_ps(__builtin_inff());
    return _mm512_cmp_ps_mask(_mm512_abs_ps(y), infinity, _CMP_NLT_UQ) != 0;
  }
  // Clamped as floats: out of an int's range a conversion would lose the sign.
  static __m128i to_levels(Float scaled, float largest, int zero_point) {
    const Float most = _mm512_set1_ps(largest);
    scaled = _mm512_min_ps(_mm512_max_ps(scaled, _mm512_sub_ps(_mm512_setzero_ps(), most)), most);
    return _mm_add_epi8(_mm512_cvtepi32_epi8(_mm512_cvtps_epi32(scaled)),
                        _mm_set1_epi8(static_cast<char>(zero_point)));
  }
  static void store_levels(uint8_t* p, Float scaled, float largest, int zero_point) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_levels(scaled, largest, zero_point));
  }
  static Int load_bytes(const int8_t* p) { return _mm512_loadu_si512(p); }
  static Int load_four(const uint8_t* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof(four));
    return _mm512_set1_epi32(four);
  }
};
