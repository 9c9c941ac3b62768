// What all linear kernels share. No torch in here.
#pragma once

#include <cstdint>

namespace rankopt {

constexpr int64_t kTileOutputs = 16;

// What follows a layer; a slope is a vector of its own. The kernels of a layer know sigmoid and SiLU,
// dice belongs to attention.
enum Activation : int64_t { kNone, kSlope, kSigmoid, kSilu, kDice, kRowDice };

constexpr int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

}  // namespace rankopt
