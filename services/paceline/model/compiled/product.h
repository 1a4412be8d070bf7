// The product of rows by packed weights, whatever the format of these. See linear.py.
//
// A format says how the weights of a block of outputs lie for one step of inputs, and multiplies rows by them:
//
//     kOutputs       outputs of a block, a multiple of the 16 lanes of a vector of sums
//     kInputs        inputs of a step
//     kStepBytes     bytes of the weights of a block for one step
//     kRows          rows that are computed together at most, so that their sums stay in registers
//     kReading       rows that never wait but for the memory: the processor fetches ahead best
//     Rows           the inputs of some rows; at(row, step) are those from there on
//     Session        what a thread holds during a product
//     multiply<R>    adds the products of a tile to the sums of R rows, step by step
//     store          writes up to 16 outputs
//
// An output is one float32 sum to which the steps are added from the first to the last, whatever else is computed:
// rows are taken together so that a weight is loaded once for them, and long sums are laid aside in float32 in between,
// which rounds nothing. So the bits of a row depend on nothing but the row.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "threads.h"

namespace paceline {

typedef float Floats __attribute__((vector_size(64)));  // 16 lanes, narrower where the processor's vectors are

constexpr int64_t kLanes = 16;
constexpr int64_t kPanelBytes = 64 * 1024;  // of a long sum for many rows: weights that stay in the cache
constexpr int64_t kBlocks = 4;              // of a group
constexpr int64_t kAheadBytes = 16 * 1024;  // the memory is asked this far ahead
constexpr int64_t kShared = 128 * 1024;     // weights and more: of these a product is worth the helpers
constexpr int64_t kPieces = 4;              // of a product for each thread
constexpr int64_t kAliasing = 1024;         // bytes: rows a multiple of this apart compete for the same cache lines

inline Floats load_floats(const float* from) {
  Floats loaded;
  std::memcpy(&loaded, from, sizeof loaded);
  return loaded;
}

inline Floats splat(float value) { return value - Floats{}; }

template <class Format>
struct Tile {
  const uint8_t* w;         // of the first step
  typename Format::Rows x;  // of the first row and step
  int64_t steps;
  bool first, last;   // of the sum
  const char* ahead;  // what is read next
  int64_t halves;     // of it that are fetched: 0, 1 or 2
  float* sums;        // [rows, kOutputs] of the steps before, if not the first; for the steps after, if not the last
  char* y;            // of the first row and output
  int64_t y_bytes;    // of an output: 2 or 4
  int64_t n;          // outputs of a row
  int64_t outputs;    // that the block has
  const float* bias;  // of the first output; or null
};

template <class Format, int R>
void compute(const Tile<Format>& it) {
  constexpr int kVectors = Format::kOutputs / kLanes;
  Floats sums[R][kVectors];
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = it.first ? Floats{} : load_floats(it.sums + r * Format::kOutputs + v * kLanes);
    }
  }
  Format::template multiply<R>(it, sums);
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    const int64_t left = std::min(it.outputs - v * kLanes, kLanes);
    if (it.last && left <= 0) return;
    Floats bias{};
    if (it.last && it.bias != nullptr) std::memcpy(&bias, it.bias + v * kLanes, left * sizeof(float));
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
      if (!it.last) {
        std::memcpy(it.sums + r * Format::kOutputs + v * kLanes, &sums[r][v], sizeof(Floats));
        continue;
      }
      const Floats sum = it.bias == nullptr ? sums[r][v] : sums[r][v] + bias;
      Format::store(it.y + (r * it.n + v * kLanes) * it.y_bytes, it.y_bytes, sum, left);
    }
  }
}

template <class Format, int... R>
void compute(int64_t rows, const Tile<Format>& it, std::integer_sequence<int, R...>) {
  using Compute = void (*)(const Tile<Format>&);
  constexpr Compute by_rows[] = {compute<Format, R + 1>...};
  by_rows[rows - 1](it);
}

template <class Format>
struct Product {
  typename Format::Rows x;  // [m, steps]
  const uint8_t* w;         // packed
  const float* bias;        // [n] or null
  char* y;                  // [m, n]
  int64_t y_bytes;
  int64_t m, n, steps;
};

// All rows by the blocks [first, stop). `sums` [m, stop - first, kOutputs]
template <class Format>
void multiply_blocks(const Product<Format>& it, int64_t first, int64_t stop, float* sums) {
  constexpr int64_t kOutputs = Format::kOutputs, kBytes = Format::kStepBytes;
  const int64_t passes = (it.m + Format::kRows - 1) / Format::kRows, blocks = stop - first;
  const int64_t panel = passes == 1 ? it.steps : kPanelBytes / kBytes;
  Tile<Format> tile{};
  tile.n = it.n, tile.y_bytes = it.y_bytes;
  for (int64_t k = 0; k < it.steps; k += panel) {
    tile.steps = std::min(panel, it.steps - k);
    tile.first = k == 0, tile.last = k + panel >= it.steps;
    for (int64_t pass = 0, row = 0; pass < passes; ++pass) {
      const int64_t rows = it.m / passes + (pass < it.m % passes);
      tile.x = it.x.at(row, k);
      for (int64_t block = first; block < stop; ++block) {
        const int64_t n = block * kOutputs;
        tile.w = it.w + (block * it.steps + k) * kBytes;
        // One pass of more than a few rows: the stream itself, some way ahead. Several: the first two fetch half each of the
        // panel that follows.
        const int64_t next = ((tile.last ? (blocks - 1) * it.steps : 0) + tile.steps) * kBytes;
        tile.halves = passes > 1 ? pass < 2 : it.m > Format::kReading ? 2 : 0;
        tile.ahead = reinterpret_cast<const char*>(tile.w) + (passes == 1 ? kAheadBytes : next);
        if (pass == 1) tile.ahead += tile.steps * kBytes / 2;
        tile.y = it.y + (row * it.n + n) * it.y_bytes;
        tile.outputs = std::min(kOutputs, it.n - n);
        tile.bias = it.bias == nullptr ? nullptr : it.bias + n;
        tile.sums = sums + (row * blocks + (block - first) * rows) * kOutputs;
        compute(rows, tile, std::make_integer_sequence<int, Format::kRows>());
      }
      row += rows;
    }
  }
}

inline thread_local std::unique_ptr<Helpers> helpers;  // of the engine whose steps this thread takes

// `alone`: by this thread only.
template <class Format>
void multiply_all(const Product<Format>& it, bool alone = false) {
  constexpr int64_t kOutputs = Format::kOutputs, kFewRows = 4 * Format::kRows;
  // Of more than a few rows a panel is kept too, for the blocks of a group.
  const int64_t blocks = (it.n + kOutputs - 1) / kOutputs, together = it.m > kFewRows ? kBlocks : 1;
  const int64_t groups = (blocks + together - 1) / together;
  const bool in_panels = it.m > Format::kRows && it.steps > kPanelBytes / Format::kStepBytes;
  const int64_t aside = in_panels ? it.m * together * kOutputs : 0;
  const auto multiply_groups = [&](const Product<Format>& some, int64_t first, int64_t stop) {
    const typename Format::Session session;
    std::vector<float> sums(aside);
    for (int64_t group = first; group < stop; ++group) {
      multiply_blocks(some, group * together, std::min((group + 1) * together, blocks), sums.data());
    }
  };
  if (alone || helpers == nullptr || Format::kInputs * it.steps * it.n < kShared) {
    multiply_groups(it, 0, groups);
    return;
  }
  const int64_t threads = helpers->count() + 1, pieces = std::min(groups, kPieces * threads);
  // Few groups are not shared evenly: then the rows of each are, if they are many.
  const int64_t parts = together > 1 && pieces < kPieces * threads ? threads : 1;
  helpers->share(pieces * parts, [&](int64_t number) {
    const int64_t piece = number / parts, part = number % parts, row = part * it.m / parts;
    Product<Format> some = it;
    some.x = it.x.at(row, 0), some.y += row * it.n * it.y_bytes, some.m = (part + 1) * it.m / parts - row;
    multiply_groups(some, piece * groups / pieces, (piece + 1) * groups / pieces);
  });
}

}  // namespace paceline
