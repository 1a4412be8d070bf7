// Weights in bfloat16, for processors with AVX512-BF16.
//
// Weights are packed into blocks of 32 outputs; within a block the pairs of inputs follow each other, each with the
// 32 x 2 weights that vdpbf16ps wants, in two cache lines:
//
//     packed [ceil(N / 32), ceil(K / 2), 32, 2]     zeros where N and K end

#pragma once

#include <immintrin.h>

#include "product.h"

namespace paceline {

struct BFloat16 {
  static constexpr int64_t kOutputs = 32, kInputs = 2, kStepBytes = 128;
  static constexpr int kRows = 14;  // 14 x 2 sums, 2 vectors of weights
  static constexpr int64_t kReading = 5;

  struct Rows {
    const uint16_t* x;
    int64_t apart;  // values from row to row

    Rows at(int64_t row, int64_t step) const { return {x + row * apart + kInputs * step, apart}; }
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
        const __m512bh x = pair_of(it.x.x + r * it.x.apart + kInputs * k);
        sums[r][0] = (Floats)_mm512_dpbf16_ps((__m512)sums[r][0], low, x);
        sums[r][1] = (Floats)_mm512_dpbf16_ps((__m512)sums[r][1], high, x);
      }
    }
  }
};

// Some number of rows of k values each, `given_apart` values from one to the next, as the product takes them: an even
// number of values, which do not compete for the cache.
struct BFloat16Rows {
  BFloat16::Rows rows;
  std::vector<uint16_t> copy;

  BFloat16Rows(const uint16_t* given, int64_t m, int64_t k, int64_t given_apart) : rows{given, given_apart} {
    const bool competes = m > 2 && given_apart * 2 % kAliasing == 0;
    if (k % 2 == 0 && !competes) return;
    rows.apart = (k + 1) / 2 * 2 + (competes ? 32 : 0);
    copy.assign(m * rows.apart, 0);
    for (int64_t row = 0; row < m; ++row) std::memcpy(&copy[row * rows.apart], given + row * given_apart, 2 * k);
    rows.x = copy.data();
  }
};

}  // namespace paceline
