// The vector policy that the AVX2 files share. Included like linear_int8_tile.h.

struct Avx2 {
  using Int = __m256i;
  using Float = __m256;
  static constexpr int kLanes = 8;
  static constexpr bool shares_vectors = false;

  static Int zero() { return _mm256_setzero_si256(); }
  static Int subtract(Int a, Int b) { return _mm256_sub_epi32(a, b); }
  static Float to_float(Int a) { return _mm256_cvtepi32_ps(a); }
  static Float broadcast(float a) { return _mm256_set1_ps(a); }
  static Float multiply(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float scale_negative(Float y, Float slope) {
    const Float keep = _mm256_cmp_ps(y, _mm256_setzero_ps(), _CMP_GE_OQ);
    return _mm256_blendv_ps(_mm256_mul_ps(y, slope), y, keep);
  }
  static Int lanes_below(int64_t valid) {
    const Int index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(valid)), index);
  }
  static Float load(const float* p, int64_t valid) {
    return valid >= kLanes ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, lanes_below(valid));
  }
  // A masked store costs tens of cycles on AMD: only the last vector of a row pays it.
  static void store(float* p, Float y, int64_t valid) {
    if (valid >= kLanes)
      _mm256_storeu_ps(p, y);
    else
      _mm256_maskstore_ps(p, lanes_below(valid), y);
  }
  static bool any_not_finite(Float y) {
    const Float magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), y);
    const Float infinity = _mm256_set1_ps(__builtin_inff());
    return _mm256_movemask_ps(_mm256_cmp_ps(magnitude, infinity, _CMP_NLT_UQ)) != 0;
  }
  // Clamped as floats: out of an int's range a conversion would lose the sign.
  static void store_levels(uint8_t* p, Float scaled, float largest, int zero_point) {
    const Float most = _mm256_set1_ps(largest);
    scaled = _mm256_min_ps(_mm256_max_ps(scaled, _mm256_sub_ps(_mm256_setzero_ps(), most)), most);
    const Int levels = _mm256_cvtps_epi32(scaled);
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(levels), _mm256_extracti128_si256(levels, 1));
    const __m128i bytes = _mm_add_epi8(_mm_packs_epi16(words, words),
                                       _mm_set1_epi8(static_cast<char>(zero_point)));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), bytes);
  }
  static Int load_bytes(const int8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static Int load_four(const uint8_t* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof(four));
    return _mm256_set1_epi32(four);
  }
};
