// The plain C++ version: what the compiler makes of it for the oldest CPU of the architecture.
#include "peaks.h"

namespace rankopt {
namespace {

#include "peaks_memory.h"

struct Words {
  using Sum = uint64_t;
  static constexpr int64_t kBytes = 8;
  static Sum zero() { return 0; }
  static Sum add(Sum sum, const uint8_t* p) {
    uint64_t word;
    __builtin_memcpy(&word, p, sizeof(word));
    return sum + word;
  }
  static void store(uint8_t* p, Sum sum) { __builtin_memcpy(p, &sum, sizeof(sum)); }
  static void copy(uint8_t* to, const uint8_t* from) { __builtin_memcpy(to, from, kBytes); }
  static uint64_t fold(Sum sum) { return sum; }
};

constexpr int kLanes = 16;

int64_t fp32(int64_t num_rounds, float* sink) {
  float sums[kLanes] = {}, a[kLanes], b[kLanes];
  for (int i = 0; i < kLanes; ++i) a[i] = sink[i] * 1e-3f, b[i] = sink[kLanes + i] * 1e-3f;
  for (int64_t round = 0; round < num_rounds; ++round)
    for (int i = 0; i < kLanes; ++i) sums[i] = sums[i] * a[i] + b[i];
  for (int i = 0; i < kLanes; ++i) sink[i] += sums[i];
  return num_rounds * kLanes * 2;
}

int64_t int8(int64_t num_rounds, float* sink) {
  int32_t sums[kLanes] = {};
  int8_t a[kLanes];
  for (int i = 0; i < kLanes; ++i) a[i] = static_cast<int8_t>(sink[i]);
  for (int64_t round = 0; round < num_rounds; ++round) {
    const auto b = static_cast<int8_t>(round);
    for (int i = 0; i < kLanes; ++i) sums[i] = (sums[i] + a[i] * b) & 0xffffff;
  }
  for (int i = 0; i < kLanes; ++i) sink[i] += static_cast<float>(sums[i]);
  return num_rounds * kLanes * 2;
}

}  // namespace

const Peaks& peaks_scalar() {
  static const Peaks peaks{fp32, int8, nullptr, read_bytes<Words>, gather_rows<Words>,
                           gather_copy_rows<Words>, gather_write_rows<Words>};
  return peaks;
}

}  // namespace rankopt
