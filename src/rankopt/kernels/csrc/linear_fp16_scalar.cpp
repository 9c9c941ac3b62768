#include "linear_fp16.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace rankopt {
namespace {

#include "exact_exp.h"
#include "activation.h"
#include "linear_fp32_plain.h"

struct PlainFp16 {
  using Weight = uint16_t;

  static float widen(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t magnitude = half & 0x7fffu;
    if (magnitude < 0x0400u) {  // zero or subnormal: a multiple of 2^-24
      const float value = static_cast<float>(magnitude) * 0x1p-24f;
      return sign != 0 ? -value : value;
    }
    // The exponent's bias is 15 there and 127 here; infinity and NaN have the largest exponent.
    const uint32_t rebias = magnitude >= 0x7c00u ? (255u - 31u) << 23 : (127u - 15u) << 23;
    const uint32_t bits = sign | ((magnitude << 13) + rebias);
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
};

}  // namespace

const LinearFp32& linear_fp16_scalar() {
  static const LinearFp32 kernels{wide<PlainFp16>, narrow<PlainFp16>};
  return kernels;
}

}  // namespace rankopt
