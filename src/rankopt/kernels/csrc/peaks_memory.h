// Reading memory with the vectors of one instruction set. Included inside its target region, in an
// anonymous namespace; `Vector` loads `kBytes` bytes and folds them into a sum.
#pragma once

template <class Vector>
uint64_t read_bytes(const uint8_t* bytes, int64_t size_bytes) {
  typename Vector::Sum sums[4] = {Vector::zero(), Vector::zero(), Vector::zero(), Vector::zero()};
  const int64_t step = 4 * Vector::kBytes;
  int64_t i = 0;
  for (; i + step <= size_bytes; i += step)
    for (int64_t s = 0; s < 4; ++s)
      sums[s] = Vector::add(sums[s], bytes + i + s * Vector::kBytes);
  uint64_t total = Vector::fold(sums[0]) + Vector::fold(sums[1]) + Vector::fold(sums[2]) +
                   Vector::fold(sums[3]);
  for (; i < size_bytes; ++i) total += bytes[i];
  return total;
}

// Sends for the lines of a row.
inline void ask_for(const uint8_t* row, int64_t size) {
  for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(row + i);
}

template <class Vector>
uint64_t gather_rows(const uint8_t* base, const int64_t* offsets, const int64_t* row_bytes,
                     int64_t row_bytes_stride, int64_t num_rows) {
  typename Vector::Sum sum = Vector::zero();
  uint64_t total = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t next = row + kGatherAhead;
    if (next < num_rows) ask_for(base + offsets[next], row_bytes[next * row_bytes_stride]);
    const uint8_t* bytes = base + offsets[row];
    const int64_t size = row_bytes[row * row_bytes_stride];
    int64_t i = 0;
    for (; i + Vector::kBytes <= size; i += Vector::kBytes) sum = Vector::add(sum, bytes + i);
    for (; i + 4 <= size; i += 4) {
      uint32_t word;
      __builtin_memcpy(&word, bytes + i, sizeof(word));
      total += word;
    }
    for (; i < size; ++i) total += bytes[i];
  }
  return total + Vector::fold(sum);
}

// Copies the same rows to places one after the other, `stride` bytes apart.
template <class Vector>
void gather_copy_rows(const uint8_t* base, const int64_t* offsets, const int64_t* row_bytes,
                      int64_t row_bytes_stride, int64_t num_rows, uint8_t* out, int64_t stride) {
  for (int64_t row = 0; row < num_rows; ++row, out += stride) {
    const int64_t next = row + kGatherAhead;
    if (next < num_rows) ask_for(base + offsets[next], row_bytes[next * row_bytes_stride]);
    const uint8_t* bytes = base + offsets[row];
    const int64_t size = row_bytes[row * row_bytes_stride];
    int64_t i = 0;
    for (; i + Vector::kBytes <= size; i += Vector::kBytes) Vector::copy(out + i, bytes + i);
    for (; i + 4 <= size; i += 4) __builtin_memcpy(out + i, bytes + i, 4);
    for (; i < size; ++i) out[i] = bytes[i];
  }
}

// Reads the same rows, and writes of each, where it has a place, what a lookup would write there: as
// many floats, of whatever was read.
template <class Vector>
uint64_t gather_write_rows(const GatherWrite& work, int64_t begin, int64_t end) {
  typename Vector::Sum sum = Vector::zero();
  for (int64_t row = begin; row < end; ++row) {
    const int64_t next = row + kGatherAhead;
    if (next < end) ask_for(work.base + work.offsets[next], work.row_bytes[next]);
    const uint8_t* bytes = work.base + work.offsets[row];
    const int64_t size = work.row_bytes[row];
    int64_t i = 0;
    for (; i + Vector::kBytes <= size; i += Vector::kBytes) sum = Vector::add(sum, bytes + i);
    uint64_t rest = 0;
    for (; i + 4 <= size; i += 4) {
      uint32_t word;
      __builtin_memcpy(&word, bytes + i, sizeof(word));
      rest += word;
    }
    for (; i < size; ++i) rest += bytes[i];
    if (work.places[row] < 0) continue;
    auto* out = reinterpret_cast<uint8_t*>(work.out + work.places[row]);
    const int64_t written = work.dims[row] * int64_t{sizeof(float)};
    for (i = 0; i + Vector::kBytes <= written; i += Vector::kBytes) Vector::store(out + i, sum);
    for (; i < written; i += 4) __builtin_memcpy(out + i, &rest, 4);
  }
  return Vector::fold(sum);
}
