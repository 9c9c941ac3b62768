// What all linear kernels share. No torch in here.
#pragma once

#include <cstdint>

namespace rankopt {

constexpr int64_t kTileOutputs = 16;

constexpr int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

}  // namespace rankopt
