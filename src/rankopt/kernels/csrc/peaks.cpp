// The machine's own peaks, all threads: what the speed of a kernel is held against.
#include "peaks.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>

#include "isa.h"

namespace rankopt {
namespace {

const Peaks& peaks() {
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx512Vnni:
      return peaks_avx512_vnni();
    case Isa::kAvx512:
      return peaks_avx512();
    case Isa::kAvx2:
      return peaks_avx2();
#endif
    default:
      return peaks_scalar();
  }
}

std::atomic<uint64_t> g_sink{0};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Runs run(part) once for every thread and returns the seconds until the last is done.
template <class Run>
double on_all_threads(const Run& run) {
  const int64_t num_threads = at::get_num_threads();
  const auto start = std::chrono::steady_clock::now();
  at::parallel_for(0, num_threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) run(part, num_threads);
  });
  return seconds_since(start);
}

// Operations a second of all threads; 0 where the CPU has no such instruction.
double peak_compute(const std::string& kind, int64_t num_rounds) {
  TORCH_CHECK(num_rounds >= 1, "peak_compute: num_rounds must be at least 1; got ", num_rounds);
  TORCH_CHECK(kind == "fp32" || kind == "int8" || kind == "bf16",
              "peak_compute: kind must be fp32, int8 or bf16; got ", kind);
  const Peaks& found = peaks();
  const auto loop = kind == "fp32" ? found.fp32 : kind == "int8" ? found.int8 : found.bf16;
  if (loop == nullptr) return 0.0;
  std::atomic<int64_t> num_operations{0};
  const double seconds = on_all_threads([&](int64_t, int64_t) {
    alignas(64) float sink[64];
    for (int i = 0; i < 64; ++i) sink[i] = 1e-3f * static_cast<float>(i);
    num_operations += loop(num_rounds, sink);
    g_sink += static_cast<uint64_t>(sink[0] != 0.0f);
  });
  return static_cast<double>(num_operations.load()) / seconds;
}

// Bytes a second of all threads, each reading its own share of the buffer in order.
double peak_read(const at::Tensor& buffer, int64_t num_rounds) {
  TORCH_CHECK(buffer.is_contiguous() && buffer.nbytes() > 0 && num_rounds >= 1,
              "peak_read: needs a contiguous buffer that is not empty, and at least one round");
  const auto* bytes = static_cast<const uint8_t*>(buffer.const_data_ptr());
  const auto size = static_cast<int64_t>(buffer.nbytes());
  const double seconds = on_all_threads([&](int64_t part, int64_t parts) {
    const int64_t begin = size * part / parts, end = size * (part + 1) / parts;
    for (int64_t round = 0; round < num_rounds; ++round)
      g_sink += peaks().read(bytes + begin, end - begin);
  });
  return static_cast<double>(size) * static_cast<double>(num_rounds) / seconds;
}

// Rows that lie anywhere in a block of bytes.
struct Rows {
  const uint8_t* base;
  const int64_t* offsets;
  const int64_t* sizes;
  int64_t stride;  // of sizes: 0 where all rows are of one
  int64_t count;
};

Rows rows_of(const char* op, const at::Tensor& storage, const at::Tensor& offsets,
             const at::Tensor& row_bytes) {
  TORCH_CHECK(storage.is_contiguous() && storage.element_size() == 1, op,
              ": storage must be contiguous bytes");
  TORCH_CHECK(offsets.scalar_type() == at::kLong && row_bytes.scalar_type() == at::kLong &&
                  offsets.is_contiguous() && row_bytes.is_contiguous() &&
                  (row_bytes.numel() == 1 || row_bytes.numel() == offsets.numel()),
              op, ": offsets and row_bytes must be contiguous int64, one size or one a row");
  const Rows rows{static_cast<const uint8_t*>(storage.const_data_ptr()),
                  offsets.const_data_ptr<int64_t>(), row_bytes.const_data_ptr<int64_t>(),
                  row_bytes.numel() == 1 ? 0 : 1, offsets.numel()};
  const auto size = static_cast<int64_t>(storage.nbytes());
  for (int64_t row = 0; row < rows.count; ++row) {
    const int64_t bytes = rows.sizes[row * rows.stride];
    TORCH_CHECK(rows.offsets[row] >= 0 && bytes >= 0 && rows.offsets[row] + bytes <= size, op,
                ": row ", row, " lies outside the storage");
  }
  return rows;
}

// Runs run(begin, end) over rows on all threads and returns the seconds until the last is done.
template <class Run>
double over_rows(int64_t num_rows, const Run& run) {
  // One thread does a handful of rows sooner than it could call another.
  constexpr int64_t kRowsPerThread = 256;
  if (num_rows <= kRowsPerThread) {
    const auto start = std::chrono::steady_clock::now();
    run(0, num_rows);
    return seconds_since(start);
  }
  return on_all_threads([&](int64_t part, int64_t parts) {
    run(num_rows * part / parts, num_rows * (part + 1) / parts);
  });
}

// Seconds that all threads take to read these rows, each its share of them.
double peak_gather(const at::Tensor& storage, const at::Tensor& offsets,
                   const at::Tensor& row_bytes) {
  const Rows rows = rows_of("peak_gather", storage, offsets, row_bytes);
  return over_rows(rows.count, [&](int64_t begin, int64_t end) {
    g_sink += peaks().gather(rows.base, rows.offsets + begin, rows.sizes + begin * rows.stride,
                             rows.stride, end - begin);
  });
}

// Seconds that all threads take to copy these rows as they are to the rows of `out`.
double peak_gather_copy(const at::Tensor& storage, const at::Tensor& offsets,
                        const at::Tensor& row_bytes, const at::Tensor& out) {
  const Rows rows = rows_of("peak_gather_copy", storage, offsets, row_bytes);
  TORCH_CHECK(out.dim() == 2 && out.is_contiguous() && out.element_size() == 1 &&
                  out.size(0) == rows.count,
              "peak_gather_copy: out must be contiguous bytes, one row for each that is read");
  const int64_t width = out.size(1);
  for (int64_t row = 0; row < rows.count; ++row)
    TORCH_CHECK(rows.sizes[row * rows.stride] <= width, "peak_gather_copy: row ", row,
                " is longer than a row of out");
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  return over_rows(rows.count, [&](int64_t begin, int64_t end) {
    peaks().gather_copy(rows.base, rows.offsets + begin, rows.sizes + begin * rows.stride,
                        rows.stride, end - begin, to + begin * width, width);
  });
}

// Seconds that all threads take to read these rows and to write as many floats of each to its place.
double peak_gather_write(const at::Tensor& storage, const at::Tensor& offsets,
                         const at::Tensor& row_bytes, const at::Tensor& places,
                         const at::Tensor& dims, const at::Tensor& out) {
  const Rows rows = rows_of("peak_gather_write", storage, offsets, row_bytes);
  TORCH_CHECK(out.is_contiguous() && out.scalar_type() == at::kFloat,
              "peak_gather_write: out must be contiguous float32");
  for (const at::Tensor* each : {&row_bytes, &places, &dims})
    TORCH_CHECK(each->scalar_type() == at::kLong && each->is_contiguous() &&
                    each->numel() == rows.count,
                "peak_gather_write: all that says where rows lie must be contiguous int64, one a row");
  const GatherWrite work{rows.base,
                         rows.offsets,
                         rows.sizes,
                         places.const_data_ptr<int64_t>(),
                         dims.const_data_ptr<int64_t>(),
                         out.mutable_data_ptr<float>()};
  for (int64_t row = 0; row < rows.count; ++row)
    TORCH_CHECK(work.places[row] >= -1 && work.dims[row] >= 0 &&
                    work.places[row] + work.dims[row] <= out.numel(),
                "peak_gather_write: row ", row, " lies outside the result");
  return over_rows(rows.count, [&](int64_t begin, int64_t end) {
    g_sink += peaks().gather_write(work, begin, end);
  });
}

}  // namespace
}  // namespace rankopt

TORCH_LIBRARY_FRAGMENT(rankopt, m) {
  m.def("peak_compute(str kind, int num_rounds) -> float",
        [](std::string kind, int64_t num_rounds) { return rankopt::peak_compute(kind, num_rounds); });
  m.def("peak_read(Tensor buffer, int num_rounds) -> float", rankopt::peak_read);
  m.def("peak_gather(Tensor storage, Tensor offsets, Tensor row_bytes) -> float",
        rankopt::peak_gather);
  m.def("peak_gather_copy(Tensor storage, Tensor offsets, Tensor row_bytes, Tensor(a!) out) -> float",
        rankopt::peak_gather_copy);
  m.def(
      "peak_gather_write(Tensor storage, Tensor offsets, Tensor row_bytes, Tensor places, Tensor "
      "dims, Tensor(a!) out) -> float",
      rankopt::peak_gather_write);
}
