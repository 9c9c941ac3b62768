// The AVX2 policy of fp32 sums. Included behind linear_int8_avx2.h, like it.

struct Avx2Fp32 : Avx2 {
  using Weight = float;
  struct Sixteen {
    __m256 low, high;
  };
  // 12 sums, the weights of one step and one input fill the 16 registers. One row alone takes more
  // tiles instead, or each addition would wait for the one before.
  static constexpr int max_tiles(int64_t num_rows) { return num_rows == 1 ? 4 : 1; }
  static constexpr int max_rows(int tiles) { return tiles == 1 ? 6 : 1; }
  static constexpr int kNarrowRows = 4;

  using Avx2::load;
  static Float load(const float* p) { return _mm256_loadu_ps(p); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }

  static Sixteen zero_sixteen() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Sixteen load_sixteen(const float* p) { return {load(p), load(p + 8)}; }
  static Sixteen load_sixteen(const float* p, int64_t valid) {
    if (valid <= 8) return {load(p, valid), _mm256_setzero_ps()};
    return {load(p), load(p + 8, valid - 8)};
  }
  static Sixteen fma_sixteen(Sixteen a, Sixteen b, Sixteen c) {
    return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
  }
  static __m256 fold(Sixteen a) { return _mm256_add_ps(a.low, a.high); }
};
