// exp and what is made of it, written once and compiled for each instruction set: no operation here may be fused or
// reordered, so a wider vector gives the same bits. Included inside a namespace, between
// RANKOPT_TARGET_BEGIN and RANKOPT_TARGET_END; calls no function of a standard header, since the
// linker could keep the copy compiled for the better CPU.

// By bits, not by ?:, which the compiler turns into a branch that stops it from vectorising.
inline float choose(bool condition, float yes, float no) {
  const int32_t mask = -static_cast<int32_t>(condition);
  return __builtin_bit_cast(float, (__builtin_bit_cast(int32_t, yes) & mask) |
                                       (__builtin_bit_cast(int32_t, no) & ~mask));
}

// Source of the polynomial: S. L. Moshier, Cephes, expf.c; about 2 ulp.
inline float exp_of(float x) {
  x = choose(x < -87.0f, -87.0f, x);  // NaN passes both
  x = choose(x > 88.0f, 88.0f, x);
  constexpr float kRound = 12582912.0f;  // adding it rounds to a whole number
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float mantissa = (p * (r * r) + r) + 1.0f;
  const int32_t exponent =
      __builtin_bit_cast(int32_t, shifted) - __builtin_bit_cast(int32_t, kRound) + 127;
  return mantissa * __builtin_bit_cast(float, exponent << 23);
}

inline float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }

// Below -88 the true value is under 1e-36, where exp_of no longer follows; -inf gives NaN.
inline float silu_of(float x) {
  return choose(x < -88.0f, x * 0.0f, x / (1.0f + exp_of(-x)));
}
