// Products by bfloat16 weights that are read once, from end to end, at the speed of the memory. See linear.py.
//
// Weights are packed into blocks of 32 outputs; within a block the pairs of inputs follow each other, each with the
// 32 x 2 weights that vdpbf16ps wants, in two cache lines:
//
//     packed [ceil(N / 32), ceil(K / 2), 32, 2]     zeros where N and K end
//
// An output is one float32 sum to which the pairs are added from the first to the last, whatever is computed beside it:
// rows are taken together so that a weight is loaded once for them, and long sums are laid aside in float32 in between,
// which rounds nothing. So the bits of a row depend on nothing but the row.

#include <immintrin.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "../exponential.h"
#include "threads.h"

namespace {

constexpr int64_t kOutputs = 32;               // of a block: two vectors of sums
constexpr int64_t kPairValues = 2 * kOutputs;  // weights of a block for one pair of inputs
constexpr int64_t kRows = 14;                  // that are computed together at most: 14 x 2 sums, 2 vectors of weights
constexpr int64_t kPanelPairs = 512;           // of a long sum for many rows: 64 KiB of weights, which stay in the cache
constexpr int64_t kFewRows = 4 * kRows;        // of more than these a panel is kept too, for the blocks of a group
constexpr int64_t kBlocks = 4;                 // of a group
constexpr int64_t kAhead = 128;                // pairs, 16 KiB: the memory is asked this far ahead
constexpr int64_t kReading = 5;                // rows that never wait but for the memory: the processor fetches ahead best
constexpr int64_t kShared = 128 * 1024;        // weights and more: of these a product is worth the helpers
constexpr int64_t kPieces = 4;                 // of a product for each thread
constexpr int64_t kGated = 16 * 1024;          // values that are gated and more: these are worth the helpers
constexpr int64_t kAliasing = 512;             // values: rows a multiple of this apart compete for the same cache lines

struct Tile {
  const uint16_t* w;   // [pairs, 32, 2]
  const uint16_t* x;   // [rows, 2 * pairs]
  int64_t rows_apart;  // values from row to row of x
  int64_t pairs;
  bool first, last;   // of the sum
  const char* ahead;  // what is read next
  int64_t lines;      // of it that are fetched for each pair: 0, 1 or 2
  float* sums;        // [rows, 32] of the pairs before, if not the first; for the pairs after, if not the last
  uint16_t* y;        // of the first row and output
  int64_t n;          // outputs of a row
  int64_t outputs;    // that the block has
  const float* bias;  // of the first output; or null
};

inline __m512bh pair_of(const uint16_t* x) {
  int32_t bits;
  std::memcpy(&bits, x, 4);
  return (__m512bh)_mm512_set1_epi32(bits);
}

template <int R, int Lines>
inline void multiply(const Tile& it, __m512 (&sums)[R][2]) {
  for (int64_t k = 0; k < it.pairs; ++k) {
    // To the second-level cache: what waits for the memory there leaves the first one's few misses to what is needed now.
    for (int i = 0; i < Lines; ++i) _mm_prefetch(it.ahead + 64 * (Lines * k + i), _MM_HINT_T1);
    const __m512bh low = (__m512bh)_mm512_loadu_si512(it.w + k * kPairValues);
    const __m512bh high = (__m512bh)_mm512_loadu_si512(it.w + k * kPairValues + 32);
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
      const __m512bh x = pair_of(it.x + r * it.rows_apart + 2 * k);
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], low, x);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], high, x);
    }
  }
}

template <int R>
inline void narrow(const Tile& it, __m512 (&sums)[R][2]) {
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const int64_t left = it.outputs - 16 * v;
    if (left <= 0) return;
    const __mmask16 mask = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
      __m512 sum = sums[r][v];
      if (it.bias != nullptr) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, it.bias + 16 * v));
      _mm256_mask_storeu_epi16(it.y + r * it.n + 16 * v, mask, (__m256i)_mm512_cvtneps_pbh(sum));
    }
  }
}

template <int R>
void compute(const Tile& it) {
  __m512 sums[R][2];
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r) {
    sums[r][0] = it.first ? _mm512_setzero_ps() : _mm512_loadu_ps(it.sums + r * kOutputs);
    sums[r][1] = it.first ? _mm512_setzero_ps() : _mm512_loadu_ps(it.sums + r * kOutputs + 16);
  }
  if (it.lines == 0) multiply<R, 0>(it, sums);
  else if (it.lines == 1) multiply<R, 1>(it, sums);
  else multiply<R, 2>(it, sums);
  if (it.last) {
    narrow<R>(it, sums);
    return;
  }
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r) {
    _mm512_storeu_ps(it.sums + r * kOutputs, sums[r][0]);
    _mm512_storeu_ps(it.sums + r * kOutputs + 16, sums[r][1]);
  }
}

template <int... R>
void compute(int64_t rows, const Tile& it, std::integer_sequence<int, R...>) {
  using Compute = void (*)(const Tile&);
  constexpr Compute by_rows[] = {compute<R + 1>...};
  by_rows[rows - 1](it);
}

struct Product {
  const uint16_t* x;  // [m, 2 * pairs]
  int64_t rows_apart;
  const uint16_t* w;  // packed
  const float* bias;  // [n] or null
  uint16_t* y;        // [m, n]
  int64_t m, n, pairs;
};

// All rows by the blocks [first, stop). `sums` [m, stop - first, 32]
void multiply_blocks(const Product& it, int64_t first, int64_t stop, float* sums) {
  const int64_t passes = (it.m + kRows - 1) / kRows, blocks = stop - first;
  const int64_t panel = passes == 1 ? it.pairs : kPanelPairs;
  Tile tile{};
  tile.rows_apart = it.rows_apart, tile.n = it.n;
  for (int64_t k = 0; k < it.pairs; k += panel) {
    tile.pairs = std::min(panel, it.pairs - k);
    tile.first = k == 0, tile.last = k + panel >= it.pairs;
    for (int64_t pass = 0, row = 0; pass < passes; ++pass) {
      const int64_t rows = it.m / passes + (pass < it.m % passes);
      tile.x = it.x + row * it.rows_apart + 2 * k;
      for (int64_t block = first; block < stop; ++block) {
        const int64_t n = block * kOutputs;
        tile.w = it.w + (block * it.pairs + k) * kPairValues;
        // One pass of more than a few rows: the stream itself, some way ahead. Several: the first two fetch half each of the
        // panel that follows.
        const int64_t ahead = passes == 1 ? kAhead : (tile.last ? (blocks - 1) * it.pairs : 0) + tile.pairs;
        tile.lines = passes > 1 ? pass < 2 : it.m > kReading ? 2 : 0;
        tile.ahead = reinterpret_cast<const char*>(tile.w + ahead * kPairValues) + (pass == 1 ? 64 * tile.pairs : 0);
        tile.y = it.y + row * it.n + n;
        tile.outputs = std::min(kOutputs, it.n - n);
        tile.bias = it.bias == nullptr ? nullptr : it.bias + n;
        tile.sums = sums + (row * blocks + (block - first) * rows) * kOutputs;
        compute(rows, tile, std::make_integer_sequence<int, kRows>());
      }
      row += rows;
    }
  }
}

thread_local std::unique_ptr<paceline::Helpers> helpers;  // of the engine whose steps this thread takes

void multiply_all(const Product& it) {
  const int64_t blocks = (it.n + kOutputs - 1) / kOutputs, together = it.m > kFewRows ? kBlocks : 1;
  const int64_t groups = (blocks + together - 1) / together;
  const int64_t aside = it.m > kRows && it.pairs > kPanelPairs ? it.m * together * kOutputs : 0;
  const auto multiply_groups = [&](const Product& some, int64_t first, int64_t stop) {
    std::vector<float> sums(aside);
    for (int64_t group = first; group < stop; ++group) {
      multiply_blocks(some, group * together, std::min((group + 1) * together, blocks), sums.data());
    }
  };
  if (helpers == nullptr || 2 * it.pairs * it.n < kShared) {
    multiply_groups(it, 0, groups);
    return;
  }
  const int64_t threads = helpers->count() + 1, pieces = std::min(groups, kPieces * threads);
  // Few groups are not shared evenly: then the rows of each are, if they are many.
  const int64_t parts = together > 1 && pieces < kPieces * threads ? threads : 1;
  helpers->share(pieces * parts, [&](int64_t number) {
    const int64_t piece = number / parts, part = number % parts, row = part * it.m / parts;
    Product some = it;
    some.x += row * it.rows_apart, some.y += row * it.n, some.m = (part + 1) * it.m / parts - row;
    multiply_groups(some, piece * groups / pieces, (piece + 1) * groups / pieces);
  });
}

// Some number of rows of k values each, `apart` values from one to the next, as the product takes them: an even number
// of values, which do not compete for the cache.
struct Rows {
  const uint16_t* x;
  int64_t apart;
  std::vector<uint16_t> copy;

  Rows(const uint16_t* given, int64_t m, int64_t k, int64_t given_apart) : x(given), apart(given_apart) {
    const bool competes = m > 2 && apart % kAliasing == 0;
    if (k % 2 == 0 && !competes) return;
    apart = (k + 1) / 2 * 2 + (competes ? 32 : 0);
    copy.assign(m * apart, 0);
    for (int64_t row = 0; row < m; ++row) std::memcpy(&copy[row * apart], given + row * given_apart, 2 * k);
    x = copy.data();
  }
};

// silu(x[:n]) * x[n:] in float32, rounded once; value by value, whatever is computed beside it.
void gate(const uint16_t* x, int64_t n, uint16_t* y) {
  const auto widen = [](__mmask16 mask, const uint16_t* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
  };
  const __m512 one = _mm512_set1_ps(1.0f), minus_log2e = _mm512_set1_ps(-1.44269504f);
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = n - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (n - i)) - 1);
    const __m512 a = widen(mask, x + i), b = widen(mask, x + n + i);
    const __m512 silu = _mm512_div_ps(a, _mm512_add_ps(one, paceline::exp2(_mm512_mul_ps(a, minus_log2e))));
    _mm256_mask_storeu_epi16(y + i, mask, (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(silu, b)));
  }
}

}  // namespace

extern "C" {

// What this thread does is shared with `count` helpers from now on.
void paceline_helpers(int64_t count) {
  helpers.reset();
  if (count > 0) helpers = std::make_unique<paceline::Helpers>(static_cast<int>(count));
}

// work(it, i) for all i below `pieces`, each once, by this thread and its helpers: whatever else is worth them. False: it
// has none, and nothing was done.
bool paceline_share(int64_t pieces, void (*work)(const void* it, int64_t piece), const void* it) {
  if (helpers == nullptr) return false;
  helpers->share(pieces, work, it);
  return true;
}

// y [m, n] = x [m, k], rows `apart` values apart, by `packed`, + bias [n] float32 unless it is null
void paceline_linear(const uint16_t* x, int64_t apart, const uint16_t* packed, const float* bias, uint16_t* y, int64_t m,
                     int64_t n, int64_t k) {
  if (m <= 0 || n <= 0) return;
  const Rows rows(x, m, k, apart);
  multiply_all({rows.x, rows.apart, packed, bias, y, m, n, (k + 1) / 2});
}

// y [m, n] = silu(x[:, :n]) * x[:, n:] of x [m, 2 n]
void paceline_gated_silu(const uint16_t* x, uint16_t* y, int64_t m, int64_t n) {
  const auto gate_row = [&](int64_t row) { gate(x + row * 2 * n, n, y + row * n); };
  if (helpers != nullptr && m > 1 && m * n >= kGated) {
    helpers->share(m, gate_row);
    return;
  }
  for (int64_t row = 0; row < m; ++row) gate_row(row);
}

// What compiled models call, without the dispatcher and the interpreter.
AOTITorchError aoti_torch_cpu_gated_silu(AtenTensorHandle x, AtenTensorHandle* out) {
  int64_t dim = 0, count = 0, *sizes = nullptr;
  bool contiguous = false;
  void *from = nullptr, *to = nullptr;
  if (aoti_torch_get_dim(x, &dim) || dim < 1 || aoti_torch_get_sizes(x, &sizes) || aoti_torch_get_numel(x, &count) ||
      aoti_torch_is_contiguous(x, &contiguous) || !contiguous || sizes[dim - 1] % 2 || aoti_torch_get_data_ptr(x, &from)) {
    return AOTI_TORCH_FAILURE;
  }
  try {
    std::vector<int64_t> shape(sizes, sizes + dim), apart(dim, 1);
    const int64_t n = shape.back() /= 2;
    for (int64_t i = dim - 1; i > 0; --i) apart[i - 1] = apart[i] * shape[i];
    if (aoti_torch_empty_strided(dim, shape.data(), apart.data(), aoti_torch_dtype_bfloat16(),
                                 aoti_torch_device_type_cpu(), 0, out) ||
        aoti_torch_get_data_ptr(*out, &to)) {
      return AOTI_TORCH_FAILURE;
    }
    if (n > 0) paceline_gated_silu(static_cast<const uint16_t*>(from), static_cast<uint16_t*>(to), count / (2 * n), n);
  } catch (const std::bad_alloc&) {
    return AOTI_TORCH_FAILURE;
  }
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_cpu_packed_linear(AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle* bias,
                                            int64_t outputs, AtenTensorHandle* out) {
  int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
  void *from = nullptr, *weights = nullptr, *added = nullptr, *to = nullptr;
  if (aoti_torch_get_dim(x, &dim) || dim < 1 || aoti_torch_get_sizes(x, &sizes) || aoti_torch_get_strides(x, &strides) ||
      aoti_torch_get_data_ptr(x, &from) || aoti_torch_get_data_ptr(packed, &weights) ||
      (bias != nullptr && aoti_torch_get_data_ptr(*bias, &added))) {
    return AOTI_TORCH_FAILURE;
  }
  try {
    std::vector<int64_t> shape(sizes, sizes + dim), apart(dim, 1);
    const int64_t k = shape.back();
    shape.back() = outputs;
    int64_t rows = 1, expected = k;
    for (int64_t i = dim - 1; i > 0; --i) apart[i - 1] = apart[i] * shape[i];
    if (strides[dim - 1] != 1 && k > 1) return AOTI_TORCH_FAILURE;
    for (int64_t i = dim - 2; i >= 0; --i) {
      if (shape[i] != 1 && strides[i] != expected) return AOTI_TORCH_FAILURE;
      rows *= shape[i], expected *= shape[i];
    }
    if (aoti_torch_empty_strided(dim, shape.data(), apart.data(), aoti_torch_dtype_bfloat16(),
                                 aoti_torch_device_type_cpu(), 0, out) ||
        aoti_torch_get_data_ptr(*out, &to)) {
      return AOTI_TORCH_FAILURE;
    }
    paceline_linear(static_cast<const uint16_t*>(from), k, static_cast<const uint16_t*>(weights),
                    static_cast<const float*>(added), static_cast<uint16_t*>(to), rows, outputs, k);
  } catch (const std::bad_alloc&) {
    return AOTI_TORCH_FAILURE;
  }
  return AOTI_TORCH_SUCCESS;
}

}  // extern "C"
