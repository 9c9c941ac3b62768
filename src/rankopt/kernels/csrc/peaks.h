// What this CPU can do at most, for one thread: loops that hold nothing but the instruction in
// question. No torch in here.
#pragma once

#include <cstdint>

namespace rankopt {

// Rows that lie anywhere, and where as many floats as each holds are written.
struct GatherWrite {
  const uint8_t* base;
  const int64_t* offsets;
  const int64_t* row_bytes;
  const int64_t* places;  // floats from `out` on; -1: the row is read only
  const int64_t* dims;
  float* out;
};

// Each compute loop returns the operations it did: a multiply and an add are two. `sink` takes what
// was computed, so that no compiler can leave it out. `bf16` is null where the CPU has none.
struct Peaks {
  int64_t (*fp32)(int64_t num_rounds, float* sink);
  int64_t (*int8)(int64_t num_rounds, float* sink);
  int64_t (*bf16)(int64_t num_rounds, float* sink);
  // Reads every byte once, in order.
  uint64_t (*read)(const uint8_t* bytes, int64_t size_bytes);
  // Reads rows that lie anywhere, asking for a row some rows before it is read.
  uint64_t (*gather)(const uint8_t* base, const int64_t* offsets, const int64_t* row_bytes,
                     int64_t row_bytes_stride, int64_t num_rows);
  // Copies such rows to places `out_stride` bytes apart.
  void (*gather_copy)(const uint8_t* base, const int64_t* offsets, const int64_t* row_bytes,
                      int64_t row_bytes_stride, int64_t num_rows, uint8_t* out, int64_t out_stride);
  uint64_t (*gather_write)(const GatherWrite& work, int64_t begin, int64_t end);
};

// Rows that a gather asks for ahead: about the misses that one core keeps in flight.
constexpr int64_t kGatherAhead = 16;
// The registers that a loop sums in: enough to hide the latency of its instruction.
constexpr int kSums = 12;

const Peaks& peaks_scalar();
#if defined(__x86_64__)
const Peaks& peaks_avx2();
const Peaks& peaks_avx512();
const Peaks& peaks_avx512_vnni();
int64_t peak_bf16_avx512(int64_t num_rounds, float* sink);
#endif

}  // namespace rankopt
