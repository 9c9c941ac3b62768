// The vector policy that the AVX-512 files share. Included like linear_int8_tile.h.

struct Avx512 {
  using Int = __m512i;
  using Float = __m512;
  static constexpr int kLanes = 16;
  static constexpr bool shares_vectors = false;

  static Int zero() { return _mm512_setzero_si512(); }
  static Int subtract(Int a, Int b) { return _mm512_sub_epi32(a, b); }
  static Float to_float(Int a) { return _mm512_cvtepi32_ps(a); }
  static Float broadcast(float a) { return _mm512_set1_ps(a); }
  static Float multiply(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float scale_negative(Float y, Float slope) {
    return _mm512_mask_mul_ps(y, _mm512_cmp_ps_mask(y, _mm512_setzero_ps(), _CMP_NGE_UQ), y, slope);
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
  // Lanes 0 to 7 in both halves, of two vectors each the first lanes, and back.
  static Int twice(Int a) { return _mm512_shuffle_i64x2(a, a, 0x44); }
  static Float twice(Float a) { return _mm512_shuffle_f32x4(a, a, 0x44); }
  static Int load_twice(const int8_t* p) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Int halves(Int low, Int high) { return _mm512_mask_blend_epi32(0xff00, low, high); }
  static Float halves(Float low, Float high) { return _mm512_mask_blend_ps(0xff00, low, high); }
  static void store_halves(float* low, float* high, Float y, int64_t valid) {
    const __m256 upper = _mm512_extractf32x8_ps(y, 1);
    if (valid == 8) {
      _mm256_storeu_ps(low, _mm512_castps512_ps256(y));
      _mm256_storeu_ps(high, upper);
    } else {
      _mm512_mask_storeu_ps(low, lanes_below(valid), y);
      _mm512_mask_storeu_ps(high, lanes_below(valid), _mm512_castps256_ps512(upper));
    }
  }
};
