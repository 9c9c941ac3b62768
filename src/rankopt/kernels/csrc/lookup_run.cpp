// From ids to rows: checks of ids, prefetching, and the order in which rows are read and written.
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>

#include "isa.h"
#include "lookup.h"
#include "lookup_entry.h"
#include "lookup_ops.h"

namespace rankopt {
namespace {

const Lookup& kernels() {
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx2:
      return lookup_avx2();
    case Isa::kAvx512:
    case Isa::kAvx512Vnni:
      return lookup_avx512();
#endif
    default:
      return lookup_scalar();
  }
}

// Rows of the result that are filled together. Half of a second-level cache: with an eighth of it,
// runs of lists of one table are so short that batch 512 takes a tenth longer.
constexpr int64_t kBlockBytes = 512 << 10;
constexpr int64_t kMinBlockRows = 8;
// Rows whose addresses are known, and on their way to the cache, before the ones before are read.
constexpr int64_t kChunkRows = 64;
// With single ids half as many do, and their lines are in the first-level cache until they are read.
constexpr int64_t kSingleRows = 32;
constexpr int64_t kMaxPrefetchedLines = 8;
constexpr int64_t kLine = 64;

// Ids may be whole numbers in float32, as a packed matrix holds them.
inline int64_t as_id(int64_t value) { return value; }
inline int64_t as_id(int32_t value) { return value; }
inline int64_t as_id(float value) {
  return value > -1.0f && value < 9.0e18f ? static_cast<int64_t>(value) : -1;
}

inline bool is_inside(int64_t id, int64_t table_rows) {
  return static_cast<uint64_t>(id) < static_cast<uint64_t>(table_rows);
}

// Tables this small stay in the first caches: sending for their rows costs more than it saves.
constexpr int64_t kNearBytes = 128 << 10;

// Sends for the lines of one row: kNone of them, the kEnds' or all of kMany.
enum class Lines { kNone, kEnds, kMany };

template <Lines kLines>
struct Prefetch {
  int64_t last_byte;
  void operator()(const uint8_t* row) const {
    if constexpr (kLines == Lines::kMany) {
      const int64_t lines = std::min(last_byte / kLine, kMaxPrefetchedLines - 1);
      for (int64_t line = 1; line <= lines; ++line) __builtin_prefetch(row + line * kLine);
    }
    if constexpr (kLines != Lines::kNone) {
      // A row of a whole number of lines lies on its own; any other may reach into one more.
      __builtin_prefetch(row);
      __builtin_prefetch(row + last_byte);
    }
  }
};

// Calls run(Prefetch) for rows of so many bytes out of tables of `table_bytes` in all.
template <class Run>
auto with_prefetch(int64_t row_bytes, int64_t table_bytes, const Run& run) {
  const int64_t last_byte = row_bytes - 1;
  if (table_bytes <= kNearBytes) return run(Prefetch<Lines::kNone>{last_byte});
  // Rows begin at whole words: up to four bytes more than a line are two lines at most.
  if (last_byte < kLine + 4) return run(Prefetch<Lines::kEnds>{last_byte});
  return run(Prefetch<Lines::kMany>{last_byte});
}

// Calls run(T{}) with the type of the ids.
template <class Run>
auto with_id_type(at::ScalarType type, const Run& run) {
  switch (type) {
    case at::kLong:
      return run(int64_t{});
    case at::kInt:
      return run(int32_t{});
    default:
      return run(float{});
  }
}

[[noreturn]] void refuse_id(int64_t number, int64_t table_rows) {
  TORCH_CHECK(false, "lookup: an id of lookup ", number, " lies outside of its table of ",
              table_rows, " rows");
}

// Where one lookup of a band finds its rows.
struct Column {
  const uint8_t* table;
  int64_t table_rows;
  const void* ids;  // of the first row of the result that is filled
  int64_t row_stride;
  int64_t number;
};

// Lookups of one id per row whose results lie side by side: they are read row after row of the
// result, since its lines are then written in order. (Table after table, batch 2048 of 26 tables
// takes 1.3 times as long: the result is larger than the cache.)
struct Band {
  const Entry* first;
  const Column* columns;
  int64_t num_columns;
  int64_t table_bytes;  // of all of them
};

// Finds the row of one id and sends for it; `good` stays true while all ids are in range.
template <typename T, class Prefetch>
inline const uint8_t* find_row(const uint8_t* table, int64_t table_rows, int64_t row_bytes, T value,
                               const Prefetch& prefetch, bool& good) {
  const int64_t id = as_id(value);
  const bool inside = is_inside(id, table_rows);
  good &= inside;
  const uint8_t* row = table + (inside ? id : 0) * row_bytes;
  prefetch(row);
  return row;
}

// Finds the rows of `count` rows of the result from `line` on, of a band.
template <typename T>
bool find_rows(const Band& band, int64_t line, int64_t count, const uint8_t** rows) {
  const int64_t row_bytes = band.first->row_bytes;
  return with_prefetch(row_bytes, band.table_bytes, [&](auto prefetch) {
    bool good = true;
    const uint8_t** place = rows;
    for (int64_t i = line; i < line + count; ++i) {
      for (int64_t c = 0; c < band.num_columns; ++c) {
        const Column& column = band.columns[c];
        const T id = static_cast<const T*>(column.ids)[i * column.row_stride];
        *place++ = find_row(column.table, column.table_rows, row_bytes, id, prefetch, good);
      }
    }
    return good;
  });
}

// Finds the rows of `count` ids of one lookup.
template <typename T>
bool find_rows(const Entry& entry, int64_t first, int64_t stride, int64_t count,
               const uint8_t** rows) {
  const T* ids = static_cast<const T*>(entry.ids) + first;
  return with_prefetch(entry.row_bytes, entry.table_bytes(), [&](auto prefetch) {
    bool good = true;
    for (int64_t i = 0; i < count; ++i)
      rows[i] = find_row(entry.table, entry.table_rows, entry.row_bytes, ids[i * stride], prefetch,
                         good);
    return good;
  });
}

template <typename T>
void refuse_ids(const Band& band, int64_t line, int64_t count) {
  for (int64_t c = 0; c < band.num_columns; ++c) {
    const Column& column = band.columns[c];
    const T* ids = static_cast<const T*>(column.ids);
    for (int64_t i = line; i < line + count; ++i)
      if (!is_inside(as_id(ids[i * column.row_stride]), column.table_rows))
        refuse_id(column.number, column.table_rows);
  }
}

// Some rows of the result in the columns of one band.
struct Patch {
  const Band* band;
  int64_t line, count;
  const uint8_t* rows[kChunkRows];
};

// Cuts the bands of a block into patches.
class Patches {
 public:
  Patches(c10::ArrayRef<Band> bands, int64_t num_lines) : bands_(bands), num_lines_(num_lines) {}

  // Returns false when nothing is left.
  bool fill(Patch& patch) {
    if (at_ == bands_.size()) return false;
    const Band& band = bands_[at_];
    const int64_t fitting = std::max<int64_t>(kSingleRows / band.num_columns, 1);
    patch.band = &band;
    patch.line = line_;
    patch.count = std::min(fitting, num_lines_ - line_);
    with_id_type(band.first->id_type, [&](auto type) {
      using T = decltype(type);
      if (!find_rows<T>(band, patch.line, patch.count, patch.rows)) [[unlikely]]
        refuse_ids<T>(band, patch.line, patch.count);
    });
    line_ += patch.count;
    if (line_ == num_lines_) {
      line_ = 0;
      ++at_;
    }
    return true;
  }

 private:
  c10::ArrayRef<Band> bands_;
  int64_t num_lines_;
  size_t at_ = 0;
  int64_t line_ = 0;
};

void copy_lines(c10::ArrayRef<Copy> copies, int64_t begin, int64_t end, float* out, int64_t width) {
  for (int64_t line = begin; line < end; ++line)
    for (const Copy& copy : copies)
      std::memcpy(out + line * width + copy.out, copy.piece + line * copy.row_stride,
                  copy.dim * sizeof(float));
}

// Fills the bands' columns of some rows of the result from `begin` on, and the copied ones.
void run_bands(const Lookup& kernel, c10::ArrayRef<Band> bands, c10::ArrayRef<Copy> copies,
               int64_t begin, int64_t num_lines, float* result, int64_t width) {
  float* out = result + begin * width;
  Patches patches(bands, num_lines);
  Patch both[2];
  int current = 0;
  bool more = patches.fill(both[0]);
  while (more) {
    more = patches.fill(both[1 - current]);
    const Patch& patch = both[current];
    if (patch.band == bands.data())
      copy_lines(copies, begin + patch.line, begin + patch.line + patch.count, result, width);
    const Entry& first = *patch.band->first;
    kernel.unpack[first.storage]({patch.rows, patch.count, patch.band->num_columns, first.dim,
                                  out + patch.line * width + first.out, width});
    current = 1 - current;
  }
}

// Rows of one table that go into one row of the result: a bag, or a part of it.
struct Piece {
  const Entry* entry;
  int64_t row;  // of the result
  int64_t count;
  int64_t bag_size;
  const float* weights;
  bool first, last;
};

struct Chunk {
  Piece pieces[kChunkRows];
  const uint8_t* rows[kChunkRows];
  int64_t num_pieces = 0;
};

// Cuts the bags of a block of rows into pieces: lookup after lookup, in a lookup row after row.
class Bags {
 public:
  Bags(c10::ArrayRef<const Entry*> entries, int64_t begin, int64_t end)
      : entries_(entries), begin_(begin), end_(end), row_(begin) {}

  // Returns false when nothing is left.
  bool fill(Chunk& chunk) {
    chunk.num_pieces = 0;
    int64_t filled = 0;
    while (at_ < entries_.size() && filled < kChunkRows && chunk.num_pieces < kChunkRows) {
      Piece& piece = chunk.pieces[chunk.num_pieces++];
      take_bag(*entries_[at_], piece, chunk.rows + filled, kChunkRows - filled);
      filled += piece.count;
      if (row_ == end_) {
        row_ = begin_;
        ++at_;
      }
    }
    return chunk.num_pieces > 0;
  }

 private:
  void take_bag(const Entry& entry, Piece& piece, const uint8_t** rows, int64_t room) {
    int64_t begin, stride, place;
    if (entry.length > 0) {
      piece.bag_size = entry.length;
      begin = row_ * entry.row_stride;
      stride = entry.id_stride;
      place = row_ * entry.length;
    } else {
      place = entry.offsets[row_];
      const bool closed = row_ + 1 < entry.num_offsets;
      const int64_t end = closed ? entry.offsets[row_ + 1] : entry.num_ids;
      TORCH_CHECK(0 <= place && place <= end && end <= entry.num_ids,
                  "lookup: the offsets of lookup ", entry.number, " say that list ", row_,
                  " is ids ", place, " to ", end, " of ", entry.num_ids);
      piece.bag_size = end - place;
      stride = entry.row_stride;
      begin = place * stride;
    }
    piece.entry = &entry;
    piece.row = row_;
    piece.first = taken_ == 0;
    piece.count = std::min(piece.bag_size - taken_, room);
    piece.weights = entry.weights == nullptr ? nullptr : entry.weights + place + taken_;
    with_id_type(entry.id_type, [&](auto type) {
      using T = decltype(type);
      if (!find_rows<T>(entry, begin + taken_ * stride, stride, piece.count, rows)) [[unlikely]]
        refuse_id(entry.number, entry.table_rows);
    });
    taken_ += piece.count;
    piece.last = taken_ == piece.bag_size;
    if (piece.last) {
      taken_ = 0;
      ++row_;
    }
  }

  c10::ArrayRef<const Entry*> entries_;
  int64_t begin_, end_, row_;
  size_t at_ = 0;
  int64_t taken_ = 0;  // ids of the current bag that an earlier piece took
};

void write(const Lookup& kernel, const Chunk& chunk, float* out, int64_t width) {
  const uint8_t* const* rows = chunk.rows;
  for (int64_t p = 0; p < chunk.num_pieces; ++p) {
    const Piece& piece = chunk.pieces[p];
    const Entry& entry = *piece.entry;
    float* place = out + piece.row * width + entry.out;
    const bool divides = entry.mode == kMean && piece.last && piece.bag_size > 1;
    const float divisor = divides ? static_cast<float>(piece.bag_size) : 0.0f;
    kernel.pool[entry.storage](
        {rows, piece.count, piece.weights, entry.dim, place, piece.first, divisor});
    rows += piece.count;
  }
}

void run_bags(const Lookup& kernel, c10::ArrayRef<const Entry*> entries, int64_t begin,
              int64_t end, float* out, int64_t width) {
  Bags bags(entries, begin, end);
  Chunk both[2];
  int current = 0;
  bool more = bags.fill(both[0]);
  while (more) {
    more = bags.fill(both[1 - current]);
    write(kernel, both[current], out, width);
    current = 1 - current;
  }
}

// Whether each of these lists, without weights, holds one id: its row is its own sum and mean.
bool holds_one_each(const Entry& entry, int64_t begin, int64_t end) {
  if (entry.offsets == nullptr || entry.weights != nullptr) return false;
  const int64_t* offsets = entry.offsets;
  const int64_t first = offsets[begin];
  const int64_t last = end < entry.num_offsets ? offsets[end] : entry.num_ids;
  if (first < 0 || last > entry.num_ids || last - first != end - begin) return false;
  int64_t differs = 0;
  for (int64_t row = begin; row < end; ++row) differs |= offsets[row] ^ (first + row - begin);
  return differs == 0;
}

// Sorts the lookups of a block of rows into bands and bags.
class Block {
 public:
  Block(c10::ArrayRef<Entry> entries, int64_t begin, int64_t end) {
    for (const Entry& entry : entries) {
      if (entry.single())
        add(entry, begin * entry.row_stride);
      else if (holds_one_each(entry, begin, end))
        add(entry, entry.offsets[begin] * entry.row_stride);
      else
        bags.push_back(&entry);
    }
    const Column* next = columns_.data();
    for (Band& band : bands) {
      band.columns = next;
      next += band.num_columns;
    }
  }

  c10::SmallVector<Band, 8> bands;
  c10::SmallVector<const Entry*, 32> bags;

 private:
  void add(const Entry& entry, int64_t first_id) {
    columns_.push_back({entry.table, entry.table_rows, entry.ids_from(first_id), entry.row_stride,
                        entry.number});
    if (bands.empty() || !continues(bands.back(), entry)) bands.push_back({&entry, nullptr, 0, 0});
    ++bands.back().num_columns;
    bands.back().table_bytes += entry.table_bytes();
  }

  static bool continues(const Band& band, const Entry& entry) {
    const Entry& first = *band.first;
    return entry.storage == first.storage && entry.dim == first.dim &&
           entry.id_type == first.id_type && band.num_columns < kChunkRows &&
           entry.out == first.out + band.num_columns * first.dim;
  }

  c10::SmallVector<Column, 32> columns_;
};

}  // namespace

void run_lookups(c10::ArrayRef<Entry> entries, c10::ArrayRef<Copy> copies, int64_t begin,
                 int64_t end, float* out, int64_t width) {
  const Lookup& kernel = kernels();
  const int64_t fitting = kBlockBytes / std::max<int64_t>(width * int64_t{sizeof(float)}, 1);
  const int64_t block_rows = std::max(fitting, kMinBlockRows);
  for (int64_t first = begin; first < end; first += block_rows) {
    const int64_t last = std::min(first + block_rows, end);
    const Block block(entries, first, last);
    if (block.bands.empty())
      copy_lines(copies, first, last, out, width);
    else
      run_bands(kernel, block.bands, copies, first, last - first, out, width);
    if (!block.bags.empty()) run_bags(kernel, block.bags, first, last, out, width);
  }
}

}  // namespace rankopt
