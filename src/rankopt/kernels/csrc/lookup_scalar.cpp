// The plain C++ version: what a CPU without AVX2 runs, and what the others are compared with.
#include <cstring>

#include "lookup.h"

namespace rankopt {
namespace {

#include "lookup_tile.h"

struct Scalar {
  using Float = float;
  static constexpr int64_t kLanes = 1;

  static float half(const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
    const uint32_t rest = bits & 0x7fffu;
    uint32_t wide;
    if (rest >= 0x7c00u) {
      // Infinity and NaN; a signalling NaN becomes a quiet one, as the CPU's instruction does it.
      wide = 0x7f800000u | ((rest & 0x3ffu) << 13);
      if (rest > 0x7c00u) wide |= 0x400000u;
    } else if (rest >= 0x400u) {
      wide = (rest << 13) + (112u << 23);
    } else {
      // Without a leading one: a whole number of 2^-24, which float32 holds exactly.
      const float value = static_cast<float>(rest) * 5.9604644775390625e-8f;
      std::memcpy(&wide, &value, 4);
    }
    wide |= sign;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }

  static float fp32(const uint8_t* values, int64_t i) {
    float value;
    std::memcpy(&value, values + 4 * i, 4);
    return value;
  }
  static float fp16(const uint8_t* values, int64_t i) { return half(values + 2 * i); }
  static float u8(const uint8_t* values, int64_t i) { return static_cast<float>(values[i]); }
  static float u4(const uint8_t* values, int64_t i) {
    return static_cast<float>(values[i / 2] >> (i % 2 * 4) & 15);
  }
  static float u2(const uint8_t* values, int64_t i) {
    return static_cast<float>(values[i / 4] >> (i % 4 * 2) & 3);
  }

  static float broadcast(float value) { return value; }
  static float add(float a, float b) { return a + b; }
  static float mul(float a, float b) { return a * b; }
  static float div(float a, float b) { return a / b; }
  static void store(float* p, float value) { *p = value; }
};

}  // namespace

const Lookup& lookup_scalar() {
  static const Lookup kernels = make_lookup<Scalar>();
  return kernels;
}

}  // namespace rankopt
