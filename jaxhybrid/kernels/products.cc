// Products of few rows with a weight stored [out, in], at the speed of memory.
//
// Every weight is read once and serves all rows. It becomes float32 in registers, except where both sides are int8 and
// the sums are integers. Vectors are GCC's and Clang's own; only the widening of small integers names a processor,
// because GCC 12 widens them one by one.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512BW__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kBlock = 32;  // weights handled at a time, and those that share a scale
constexpr int kVectors = kBlock / kLanes;
constexpr int64_t kMostRows = 8;          // whose sums fit the registers
constexpr int64_t kPieceBytes = 1 << 17;  // of a weight, which a thread takes at a time
constexpr int64_t kNearBytes = 1 << 15;   // of rows x, which the nearest cache holds beside the weights that pass

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Integers __attribute__((vector_size(kLanes * 4)));

template <class T>
auto load(const T* from) {  // kLanes numbers anywhere in memory
  typedef T Numbers __attribute__((vector_size(kLanes * sizeof(T)), aligned(1), may_alias));
  return *reinterpret_cast<const Numbers*>(from);
}

#if defined(__AVX512BW__)
Integers widened(const int8_t* from) { return (Integers)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)); }
Integers widened(const uint8_t* from) { return (Integers)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)); }
Integers widened(const uint16_t* from) {
  return (Integers)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
}
#elif defined(__AVX2__)
Integers widened(const int8_t* from) { return (Integers)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
Integers widened(const uint8_t* from) { return (Integers)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
Integers widened(const uint16_t* from) {
  return (Integers)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
}
#else
template <class T>
Integers widened(const T* from) {
  return __builtin_convertvector(load(from), Integers);
}
#endif

#if defined(__AVX512BW__)
float total(Floats sums) { return _mm512_reduce_add_ps((__m512)sums); }
int32_t total(Integers sums) { return _mm512_reduce_add_epi32((__m512i)sums); }
#else
template <class Sums>
auto total(Sums sums) {
  auto sum = sums[0];
  for (int lane = 1; lane < kLanes; ++lane) sum += sums[lane];
  return sum;
}
#endif

Floats real(Integers integers) { return __builtin_convertvector(integers, Floats); }

struct Matrix {  // [out, in], with float32 scales [out, in / kBlock] where the format has some
  const void* values;
  const float* scales;
  int64_t n_out, n_in;
};

// ---------------------------------------------------------------------------------------------- formats
// A format knows one row of a weight: its blocks, and how the parts of a block and of a row x are multiplied and added.

struct Real {  // what formats that become float32 share
  using X = float;
  using PackedX = float;
  using Y = float;
  using Sum = Floats;
  static constexpr int kParts = kVectors;
  struct Block {
    Floats vectors[kVectors];
  };
  static Floats part(const float* x, int v) { return load(x + v * kLanes); }
  static void add(Sum& sum, const Block& block, int v, Floats x) { sum += block.vectors[v] * x; }
};

struct Float32 : Real {
  static constexpr int kBits = 32;
  const float* row;
  Float32(const Matrix& w, int64_t o) : row(static_cast<const float*>(w.values) + o * w.n_in) {}
  Block block(int64_t b) const {
    Block out;
    for (int v = 0; v < kVectors; ++v) out.vectors[v] = load(row + b * kBlock + v * kLanes);
    return out;
  }
};

struct BFloat16 : Real {
  static constexpr int kBits = 16;
  const uint16_t* row;
  BFloat16(const Matrix& w, int64_t o) : row(static_cast<const uint16_t*>(w.values) + o * w.n_in) {}
  Block block(int64_t b) const {
    Block out;
    for (int v = 0; v < kVectors; ++v) out.vectors[v] = (Floats)(widened(row + b * kBlock + v * kLanes) << 16);
    return out;
  }
};

struct Int8Blocks : Real {
  static constexpr int kBits = 8;
  const int8_t* row;
  const float* scales;
  Int8Blocks(const Matrix& w, int64_t o)
      : row(static_cast<const int8_t*>(w.values) + o * w.n_in), scales(w.scales + o * (w.n_in / kBlock)) {}
  Block block(int64_t b) const {
    Block out;
    for (int v = 0; v < kVectors; ++v) out.vectors[v] = real(widened(row + b * kBlock + v * kLanes)) * scales[b];
    return out;
  }
};

struct Int4Blocks : Real {  // byte j of a block holds its elements j and j + 16, each plus 8
  static constexpr int kBits = 4;
  const uint8_t* row;
  const float* scales;
  Int4Blocks(const Matrix& w, int64_t o)
      : row(static_cast<const uint8_t*>(w.values) + o * (w.n_in / 2)), scales(w.scales + o * (w.n_in / kBlock)) {}
  Block block(int64_t b) const {
    Block out;
    for (int v = 0; v < kVectors / 2; ++v) {
      const Integers pairs = widened(row + b * (kBlock / 2) + v * kLanes);
      out.vectors[v] = real((pairs & 15) - 8) * scales[b];
      out.vectors[v + kVectors / 2] = real((pairs >> 4) - 8) * scales[b];
    }
    return out;
  }
};

struct Int8 {  // rows x are int8 too; widened to int16 once, so that pairs of products are one instruction
  static constexpr int kBits = 8;
  using X = int8_t;
  using PackedX = int16_t;
  using Y = int32_t;
  using Sum = Integers;
  const int8_t* row;
  Int8(const Matrix& w, int64_t o) : row(static_cast<const int8_t*>(w.values) + o * w.n_in) {}
#if defined(__AVX512BW__)
  static constexpr int kParts = 1;
  using Block = __m512i;
  Block block(int64_t b) const {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(row + b * kBlock)));
  }
  static __m512i part(const int16_t* x, int) { return _mm512_loadu_si512(x); }
  static void add(Sum& sum, const Block& block, int, __m512i x) { sum += (Integers)_mm512_madd_epi16(block, x); }
#elif defined(__AVX2__)
  static constexpr int kParts = 2;
  struct Block {
    __m256i halves[2];
  };
  Block block(int64_t b) const {
    const __m128i* at = (const __m128i*)(row + b * kBlock);
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(at)), _mm256_cvtepi8_epi16(_mm_loadu_si128(at + 1))};
  }
  static __m256i part(const int16_t* x, int h) { return _mm256_loadu_si256((const __m256i*)x + h); }
  static void add(Sum& sum, const Block& block, int h, __m256i x) {
    sum += (Integers)_mm256_madd_epi16(block.halves[h], x);
  }
#else
  static constexpr int kParts = kVectors;
  using Block = const int8_t*;
  Block block(int64_t b) const { return row + b * kBlock; }
  static Integers part(const int16_t* x, int v) { return widened(x + v * kLanes); }
  static void add(Sum& sum, const Block& block, int v, Integers x) { sum += widened(block + v * kLanes) * x; }
#endif
};

// --------------------------------------------------------------------------------------------- products

// Blocks [b0, b1) of kRows packed rows x with kOuts rows of the weight: into the first n_rows rows of y [n_rows, out],
// or onto them where there were blocks before.
template <class Format, int kRows, int kOuts>
void tile(const Matrix& w, int64_t o, int64_t b0, int64_t b1, const typename Format::PackedX* x, int64_t n_rows,
          typename Format::Y* y) {
  constexpr int kSums = kRows * kOuts < 8 ? kVectors : 1;  // enough sums at once to hide the latency of adding
  typename Format::Sum sums[kOuts][kRows][kSums] = {};
  for (int64_t b = b0; b < b1; ++b) {
    typename Format::Block blocks[kOuts];
    for (int k = 0; k < kOuts; ++k) {
      const char* next = static_cast<const char*>(w.values) + ((o + kOuts + k) * w.n_in + b * kBlock) * Format::kBits / 8;
      for (int byte = 0; byte < kBlock * Format::kBits / 8; byte += 64) __builtin_prefetch(next + byte);
      blocks[k] = Format(w, o + k).block(b);
    }
#pragma GCC unroll 8
    for (int v = 0; v < Format::kParts; ++v)
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto part = Format::part(x + (b * kRows + r) * kBlock, v);
#pragma GCC unroll 8
        for (int k = 0; k < kOuts; ++k) Format::add(sums[k][r][v % kSums], blocks[k], v, part);
      }
  }
  for (int k = 0; k < kOuts; ++k)
    for (int r = 0; r < n_rows; ++r) {
      for (int s = 1; s < kSums; ++s) sums[k][r][0] += sums[k][r][s];
      auto& out = y[r * w.n_out + o + k];
      out = (b0 > 0 ? out : 0) + total(sums[k][r][0]);
    }
}

// Rows [begin, end) of the weight, by as many blocks as leave x in the nearest cache. Two rows at a time only where
// loading x would take longer than reading the weight: one at a time is read as it lies in memory, which is faster.
template <class Format, int kRows>
void span(const Matrix& w, int64_t begin, int64_t end, const typename Format::PackedX* x, int64_t n_rows,
          typename Format::Y* y) {
  constexpr int kOuts = kLanes == 16 && kRows > 4 ? 2 : 1;
  constexpr int64_t kNear = kNearBytes / (kRows * kBlock * sizeof(typename Format::PackedX));
  const int64_t n_blocks = w.n_in / kBlock;
  for (int64_t b = 0; b < n_blocks; b += kNear) {
    const int64_t stop = std::min(n_blocks, b + kNear);
    int64_t o = begin;
    for (; o + kOuts <= end; o += kOuts) tile<Format, kRows, kOuts>(w, o, b, stop, x, n_rows, y);
    for (; o < end; ++o) tile<Format, kRows, 1>(w, o, b, stop, x, n_rows, y);
  }
}

int64_t tiled(int64_t n_rows) { return n_rows <= 2 ? n_rows : n_rows <= 4 ? 4 : kMostRows; }

template <class T>
struct alignas(64) BlockOfX {  // a vector that crosses a line of the cache takes twice the time
  T values[kBlock];
};

// Groups of kMostRows rows, each block by block as `tile` reads them; the last one filled up with zeros.
template <class Format>
auto packed(const typename Format::X* x, int64_t n_rows, int64_t n_in) {
  std::vector<BlockOfX<typename Format::PackedX>> out;
  out.reserve((n_rows / kMostRows * kMostRows + tiled(n_rows % kMostRows)) * n_in / kBlock);
  for (int64_t first = 0; first < n_rows; first += kMostRows) {
    const int64_t n = std::min(kMostRows, n_rows - first);
    for (int64_t b = 0; b < n_in; b += kBlock) {
      for (int64_t r = first; r < first + n; ++r)
        std::copy_n(x + r * n_in + b, kBlock, out.emplace_back().values);
      out.resize(out.size() + tiled(n) - n);
    }
  }
  return out;
}

// Calls work(i) for each i below n, on the caller's thread and those of the pool that are free. The caller never waits
// for work that nobody has begun, so a pool that is busy (perhaps with such callers) costs time only.
template <class Work>
void share(ffi::ThreadPool& pool, int64_t n, const Work& work) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  const auto state = std::make_shared<State>();
  const auto run = [state, n, &work] {  // a thread that comes late finds nothing left and does not touch `work`
    for (int64_t i; (i = state->next.fetch_add(1, std::memory_order_relaxed)) < n;) {
      work(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t helper = 1; helper < std::min(pool.num_threads(), n); ++helper) {
    auto task = run;
    pool.Schedule(std::move(task));
  }
  run();
  while (state->done.load(std::memory_order_acquire) < n) std::this_thread::yield();
}

template <class Format>
void product(ffi::ThreadPool& pool, const Matrix& w, const void* from, int64_t n_rows, void* to) {
  const auto x = packed<Format>(static_cast<const typename Format::X*>(from), n_rows, w.n_in);
  const auto y = static_cast<typename Format::Y*>(to);
  const int64_t row_bytes = std::max<int64_t>(1, w.n_in * Format::kBits / 8);
  const int64_t size = std::max<int64_t>(2, kPieceBytes / row_bytes / 2 * 2);  // whole tiles
  share(pool, (w.n_out + size - 1) / size, [&](int64_t i) {
    const int64_t begin = i * size, end = std::min(w.n_out, begin + size);
    for (int64_t first = 0; first < n_rows; first += kMostRows) {
      const int64_t n = std::min(kMostRows, n_rows - first);
      const auto* group = x.data()->values + first * w.n_in;
      auto* out = y + first * w.n_out;
      switch (tiled(n)) {
        case 1: span<Format, 1>(w, begin, end, group, n, out); break;
        case 2: span<Format, 2>(w, begin, end, group, n, out); break;
        case 4: span<Format, 4>(w, begin, end, group, n, out); break;
        default: span<Format, kMostRows>(w, begin, end, group, n, out);
      }
    }
  });
}

// Where each pair of matrices lies in two arrays [..., m, n] whose leading axes are equal or 1.
std::vector<std::pair<int64_t, int64_t>> pairs_of(ffi::Span<const int64_t> a, ffi::Span<const int64_t> b) {
  std::vector<std::pair<int64_t, int64_t>> pairs{{0, 0}};
  for (size_t axis = 0; axis + 2 < a.size(); ++axis) {
    decltype(pairs) next;
    for (auto [i, j] : pairs)
      for (int64_t k = 0; k < std::max(a[axis], b[axis]); ++k)
        next.emplace_back(i * a[axis] + k % a[axis], j * b[axis] + k % b[axis]);
    pairs = std::move(next);
  }
  return pairs;
}

// x [..., rows, in] (float32, or int8 with int8 weights of one scale a channel, which the caller applies), w [..., out,
// in], for int4 [..., out, in / 2], and scales [..., out, in / kBlock] where the format has them: y [..., rows, out].
ffi::Error products(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::RemainingArgs scales,
                    ffi::Result<ffi::AnyBuffer> y) {
  const auto of_x = x.dimensions(), of_w = w.dimensions();
  const size_t n_axes = of_x.size();
  const auto wrong = [] { return ffi::Error::InvalidArgument("products of few rows: no such rows and weights"); };
  if (n_axes < 2 || of_w.size() != n_axes || of_x[n_axes - 1] % kBlock || y->element_count() == 0) return wrong();
  const bool has_scales = scales.size() == 1;
  void (*run)(ffi::ThreadPool&, const Matrix&, const void*, int64_t, void*) = nullptr;
  if (x.element_type() == ffi::S8 && w.element_type() == ffi::S8) run = product<Int8>;
  if (x.element_type() == ffi::F32) {
    if (w.element_type() == ffi::F32) run = product<Float32>;
    if (w.element_type() == ffi::BF16) run = product<BFloat16>;
    if (w.element_type() == ffi::S8 && has_scales) run = product<Int8Blocks>;
    if (w.element_type() == ffi::U8 && has_scales) run = product<Int4Blocks>;
  }
  if (run == nullptr) return wrong();

  const int64_t n_rows = of_x[n_axes - 2], n_in = of_x[n_axes - 1], n_out = of_w[n_axes - 2];
  const auto pairs = pairs_of(of_x, of_w);
  const int64_t n_weights = w.element_count() / (n_out * of_w[n_axes - 1]);
  const int64_t together = n_weights == 1 ? pairs.size() : 1;  // all rows that meet the same weight
  const auto* from = static_cast<const char*>(x.untyped_data());
  const auto* weights = static_cast<const char*>(w.untyped_data());
  const auto* scale = has_scales ? scales.get<ffi::AnyBuffer>(0)->typed_data<float>() : nullptr;
  auto* to = static_cast<char*>(y->untyped_data());
  const int64_t x_bytes = n_rows * n_in * (x.element_type() == ffi::S8 ? 1 : 4), y_bytes = n_rows * n_out * 4;
  const int64_t w_bytes = w.size_bytes() / n_weights;
  for (size_t i = 0; i < pairs.size(); i += together) {
    const auto [at_x, at_w] = pairs[i];
    const Matrix matrix{weights + at_w * w_bytes, scale + (has_scales ? at_w * n_out * (n_in / kBlock) : 0), n_out,
                        n_in};
    run(pool, matrix, from + at_x * x_bytes, n_rows * together, to + i * y_bytes);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ProductsOfFewRows, products,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>());
