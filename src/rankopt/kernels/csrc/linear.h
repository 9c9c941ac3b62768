// What all linear kernels share. No torch in here.
#pragma once

#include <cstdint>

namespace rankopt {

constexpr int64_t kTileOutputs = 16;

// What follows a layer; a slope is a vector of its own.
enum Activation : int64_t { kNone = 0, kSlope = 1, kSigmoid = 2, kSilu = 3 };

constexpr int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

}  // namespace rankopt
