// Weights in bfloat16, for processors with AVX512-BF16, with and without AMX.
//
// Weights are packed into blocks of 32 outputs; within a block the pairs of inputs follow each other, each with the
// 32 x 2 weights that vdpbf16ps wants, in two cache lines. Sixteen pairs are two tiles of AMX:
//
//     packed [ceil(N / 32), 16 * ceil(K / 32), 32, 2]     zeros where N and K end
//
// AMX adds the products of a tile in another order than vdpbf16ps. A processor uses one of them for all its products.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "product.h"

namespace paceline {

struct BFloat16 {
  static constexpr int64_t kOutputs = 32, kInputs = 2, kStepBytes = 128;
  static constexpr int kRows = 14;  // 14 x 2 sums, 2 vectors of weights
  static constexpr int64_t kReading = 5;
  static constexpr int64_t kWhole = 16;  // steps are a multiple of it

  struct Session {};

  struct Rows {
    const uint16_t* x;
    int64_t stride;  // values from row to row

    Rows at(int64_t row, int64_t step) const { return {x + row * stride + kInputs * step, stride}; }
  };

  template <int R>
  static void multiply(const Tile<BFloat16>& it, Floats (&sums)[R][2]) {
    if (it.halves == 0) multiply<R, 0>(it, sums);
    else if (it.halves == 1) multiply<R, 1>(it, sums);
    else multiply<R, 2>(it, sums);
  }

  static void store(char* y, int64_t, Floats sum, int64_t count) {
    const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
    _mm256_mask_storeu_epi16(y, mask, (__m256i)_mm512_cvtneps_pbh((__m512)sum));
  }

 private:
  static __m512bh pair_of(const uint16_t* x) {
    int32_t bits;
    std::memcpy(&bits, x, 4);
    return (__m512bh)_mm512_set1_epi32(bits);
  }

  template <int R, int Lines>
  static void multiply(const Tile<BFloat16>& it, Floats (&sums)[R][2]) {
    for (int64_t k = 0; k < it.steps; ++k) {
      // To the second-level cache: what waits for the memory there leaves the first one's few misses to what is needed now.
      for (int i = 0; i < Lines; ++i) _mm_prefetch(it.ahead + 64 * (Lines * k + i), _MM_HINT_T1);
      const __m512bh low = (__m512bh)_mm512_loadu_si512(it.w + k * kStepBytes);
      const __m512bh high = (__m512bh)_mm512_loadu_si512(it.w + k * kStepBytes + 64);
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r) {
        const __m512bh x = pair_of(it.x.x + r * it.x.stride + kInputs * k);
        sums[r][0] = (Floats)_mm512_dpbf16_ps((__m512)sums[r][0], low, x);
        sums[r][1] = (Floats)_mm512_dpbf16_ps((__m512)sums[r][1], high, x);
      }
    }
  }
};

#ifdef __AMX_BF16__
// The same by tiles of AMX: 16 rows by 32 inputs, 32 inputs by 16 outputs. A tile multiplies each of its rows alone.
struct Tiles : BFloat16 {
  static constexpr int kRows = 32;  // 2 x 2 tiles of sums, 2 of rows, 2 of weights

  // A thread's use of its tiles, for one product. Others may have set them up otherwise before.
  struct Session {
    Session() { configured = 0; }
    ~Session() { _tile_release(); }
  };

  // True if the system lets this process use tiles; it has to be asked before the first one.
  static bool usable() {
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
    return allowed;
  }

  template <int R>
  static void multiply(const Tile<Tiles>& it, Floats (&sums)[R][2]) {
    if (configured != R) configure(R);
    constexpr bool kTwo = R > 16;
    constexpr int64_t kRowBytes = sizeof sums[0], kSecond = kTwo ? 16 : 0;
    _tile_loadd(0, &sums[0][0], kRowBytes);
    _tile_loadd(1, &sums[0][1], kRowBytes);
    if (kTwo) _tile_loadd(2, &sums[kSecond][0], kRowBytes);
    if (kTwo) _tile_loadd(3, &sums[kSecond][1], kRowBytes);
    const int64_t stride = it.x.stride * sizeof(uint16_t);
    for (int64_t k = 0; k < it.steps; k += kWhole) {
      for (int64_t i = 0; i < it.halves * kWhole; ++i) _mm_prefetch(it.ahead + 64 * (it.halves * k + i), _MM_HINT_T1);
      const uint8_t* w = it.w + k * kStepBytes;
      const uint16_t* x = it.x.x + kInputs * k;
      _tile_loadd(6, w, kStepBytes);
      _tile_loadd(4, x, stride);
      _tile_loadd(7, w + 64, kStepBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (kTwo) {
        _tile_loadd(5, x + kSecond * it.x.stride, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, &sums[0][0], kRowBytes);
    _tile_stored(1, &sums[0][1], kRowBytes);
    if (kTwo) _tile_stored(2, &sums[kSecond][0], kRowBytes);
    if (kTwo) _tile_stored(3, &sums[kSecond][1], kRowBytes);
  }

 private:
  inline static thread_local int configured = 0;  // rows that the tiles are set up for

  static void configure(int rows) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } to;
    const uint8_t first = rows < 16 ? rows : 16, second = rows - first;
    const uint8_t of[] = {first, first, second, second, first, second, 16, 16};
    for (int tile = 0; tile < 8; ++tile) to.rows[tile] = of[tile], to.bytes[tile] = of[tile] ? 64 : 0;
    _tile_loadconfig(&to);
    configured = rows;
  }
};
#endif

// Some number of rows of k values each, `given_stride` values from one to the next, as the product takes them: whole
// tiles of values, which do not compete for the cache.
struct BFloat16Rows {
  BFloat16::Rows rows;
  std::vector<uint16_t> copy;

  BFloat16Rows(const uint16_t* given, int64_t m, int64_t k, int64_t given_stride) : rows{given, given_stride} {
    constexpr int64_t kValues = BFloat16::kInputs * BFloat16::kWhole;
    const bool competes = m > 2 && given_stride * 2 % kAliasing == 0;
    if (k % kValues == 0 && !competes) return;
    rows.stride = (k + kValues - 1) / kValues * kValues + (competes ? 32 : 0);
    copy.assign(m * rows.stride, 0);
    for (int64_t row = 0; row < m; ++row) std::memcpy(&copy[row * rows.stride], given + row * given_stride, 2 * k);
    rows.x = copy.data();
  }
};

}  // namespace paceline
