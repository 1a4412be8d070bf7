// Weights of 4 or 8 bits in blocks of 32 inputs, each with a scale and perhaps a minimum. See blocks.py.
//
// Weights are packed into tiles of 16 outputs x 32 inputs; those of the same outputs follow each other:
//
//     weights   8 bits: [8, 16, 4], groups of 4 inputs; 4 bits: [4, 16, 4], low halves inputs 0 to 15, high ones 16 to 31
//     scales    [16] float16
//     minima    [16] float16, if the format has them
//
// A number u of a tile, without a sign, stands for scale * u + minimum, or without minima for scale * (u - zero) with
// zero 8 or 128. The inputs of a row are rounded to 8 bits for each block of 32. A tile's sums of products are whole
// numbers, which any instruction gets alike; to the sum of an output are added, block by block in float32,
//
//     float(dot) * (scale * x_scale), then minimum * (x_scale * float(sum of x))
//
// each operation rounded by itself (-ffp-contract=off), so that every processor gives the same bits.

#pragma once

#include <bit>
#include <limits>

#include "product.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define PACELINE_VNNI 1
#include <immintrin.h>
#endif

namespace paceline {

constexpr int64_t kBlockInputs = 32;

struct BlockScale {
  float scale;
  int32_t sum;   // of the rounded inputs
  float scaled;  // scale * sum
};

inline float half_to_float(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  if (exponent == 0) {
    const float tiny = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -tiny : tiny;
  }
  const uint32_t wide = exponent == 31 ? 0x7f800000u : (exponent + 112) << 23;
  return std::bit_cast<float>(sign | wide | fraction << 13);
}

inline Floats load_halves(const uint8_t* from) {
#ifdef PACELINE_VNNI
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
  Floats loaded;
  for (int64_t i = 0; i < kLanes; ++i) {
    uint16_t bits;
    std::memcpy(&bits, from + 2 * i, 2);
    loaded[i] = half_to_float(bits);
  }
  return loaded;
#endif
}

template <int Bits, bool Minima>
struct Blocks {
  static constexpr int64_t kOutputs = kLanes, kInputs = kBlockInputs;
  static constexpr int64_t kWeightBytes = kOutputs * kInputs * Bits / 8, kScaleBytes = 2 * kOutputs;
  static constexpr int64_t kStepBytes = kWeightBytes + (Minima ? 2 : 1) * kScaleBytes;
  static constexpr int kRows = 8;  // with 12 a row is 4 % cheaper, and compiling takes twice as long
  static constexpr int64_t kReading = 3;
  static constexpr int32_t kZero = Minima ? 0 : 1 << (Bits - 1);

  struct Session {};

  struct Rows {
    const int8_t* x;
    int64_t stride;  // values from row to row
    const BlockScale* scales;
    int64_t steps;  // scales from row to row

    Rows at(int64_t row, int64_t step) const {
      return {x + row * stride + kInputs * step, stride, scales + row * steps + step, steps};
    }
  };

  template <int R>
  static void multiply(const Tile<Blocks>& it, Floats (&sums)[R][1]) {
    for (int64_t k = 0; k < it.steps; ++k) {
      const uint8_t* w = it.w + k * kStepBytes;
      const int64_t fetched = kStepBytes / 2 * it.halves;
      for (int64_t line = 0; line < fetched; line += 64) __builtin_prefetch(it.ahead + fetched * k + line, 0, 2);
      Floats dots[R];
      multiply_tile<R>(w, it.x.x + kInputs * k, it.x.stride, it.x.scales + k, it.x.steps, dots);
      const Floats scales = load_halves(w + kWeightBytes);
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r) {
        sums[r][0] = sums[r][0] + dots[r] * (scales * splat(it.x.scales[r * it.x.steps + k].scale));
      }
      if constexpr (Minima) {
        const Floats minima = load_halves(w + kWeightBytes + kScaleBytes);
#pragma GCC unroll 14
        for (int r = 0; r < R; ++r) {
          sums[r][0] = sums[r][0] + minima * splat(it.x.scales[r * it.x.steps + k].scaled);
        }
      }
    }
  }

  static void store(char* y, int64_t y_bytes, Floats sum, int64_t count) {
    if (y_bytes == 4) {
      std::memcpy(y, &sum, count * 4);
      return;
    }
#ifdef PACELINE_VNNI
    const __m512i bits = (__m512i)sum, one = _mm512_set1_epi32(1);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd));
    const __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)sum, (__m512)sum, _CMP_UNORD_Q);
    const __m512i high = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), is_nan, _mm512_set1_epi32(0x7fc0));
    const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
    _mm512_mask_cvtepi32_storeu_epi16(y, mask, high);
#else
    uint16_t narrow[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {  // to the nearest bfloat16, ties to even
      const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(sum[i]));
      const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
      narrow[i] = is_nan ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
    }
    std::memcpy(y, narrow, count * 2);
#endif
  }

 private:
  // Whole sums of products of a tile for R rows.
  template <int R>
  static void multiply_tile(const uint8_t* w, const int8_t* x, int64_t stride, const BlockScale* scales, int64_t steps,
                            Floats (&dots)[R]) {
#ifdef PACELINE_VNNI
    __m512i sums[R];
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) sums[r] = _mm512_set1_epi32(-kZero * scales[r * steps].sum);
    const auto add = [&](__m512i weights, int group) __attribute__((always_inline)) {
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r) {
        int32_t four;
        std::memcpy(&four, x + r * stride + 4 * group, 4);
        sums[r] = _mm512_dpbusd_epi32(sums[r], weights, _mm512_set1_epi32(four));
      }
    };
#pragma GCC unroll 8
    for (int v = 0; v < kWeightBytes / 64; ++v) {
      const __m512i packed = _mm512_loadu_si512(w + 64 * v);
      if constexpr (Bits == 8) {
        add(packed, v);
      } else {
        const __m512i half = _mm512_set1_epi8(15);
        add(_mm512_and_si512(packed, half), v);
        add(_mm512_and_si512(_mm512_srli_epi16(packed, 4), half), v + 4);
      }
    }
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) dots[r] = (Floats)_mm512_cvtepi32_ps(sums[r]);
#else
    uint8_t wide[kInputs * kOutputs];
    for (int64_t i = 0; i < kWeightBytes; ++i) {
      wide[i] = Bits == 8 ? w[i] : w[i] & 15;
      if (Bits == 4) wide[i + kWeightBytes] = w[i] >> 4;
    }
    for (int r = 0; r < R; ++r) {
      int32_t sums[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) sums[i] = -kZero * scales[r * steps].sum;
      for (int64_t group = 0; group < kInputs / 4; ++group) {
        for (int64_t i = 0; i < kLanes; ++i) {
          for (int64_t j = 0; j < 4; ++j) {
            sums[i] += wide[(group * kLanes + i) * 4 + j] * x[r * stride + 4 * group + j];
          }
        }
      }
      for (int64_t i = 0; i < kLanes; ++i) dots[r][i] = static_cast<float>(sums[i]);
    }
#endif
  }
};

// Rows of k values, rounded to 8 bits for each block of 32: x = scale * q, q from -127 to 127. A block with a value
// that is not finite has the scale NaN, one of nothing but tiny values 0.
struct BlockRows {
  std::vector<int8_t> values;
  std::vector<BlockScale> scales;
  int64_t stride, steps;

  template <class Value>
  BlockRows(const Value* given, int64_t m, int64_t k, int64_t given_stride)
      : stride((k + kBlockInputs - 1) / kBlockInputs * kBlockInputs), steps(stride / kBlockInputs) {
    if (m > 2 && stride % kAliasing == 0) stride += 64;
    values.resize(m * stride), scales.resize(m * steps);
    for (int64_t row = 0; row < m; ++row) {
      for (int64_t step = 0; step < steps; ++step) {
        const int64_t count = std::min(kBlockInputs, k - step * kBlockInputs);
        round(given + row * given_stride + step * kBlockInputs, count, &values[row * stride + step * kBlockInputs],
              scales[row * steps + step]);
      }
    }
  }

  template <class Format>
  typename Format::Rows rows() const {
    return {values.data(), stride, scales.data(), steps};
  }

 private:
  static uint32_t widen(uint16_t bfloat16) { return static_cast<uint32_t>(bfloat16) << 16; }
  static uint32_t widen(float value) { return std::bit_cast<uint32_t>(value); }

  template <class Value>
  static void round(const Value* given, int64_t count, int8_t* q, BlockScale& scale) {
    uint32_t bits[kBlockInputs] = {}, largest = 0;
    for (int64_t i = 0; i < count; ++i) bits[i] = widen(given[i]);
    for (int64_t i = 0; i < kBlockInputs; ++i) largest = std::max(largest, bits[i] & 0x7fffffffu);
    const float most = std::bit_cast<float>(largest);
    if (largest >= 0x7f800000u || most < 0x1p-100f) {
      const float all = largest >= 0x7f800000u ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
      std::memset(q, 0, kBlockInputs);
      scale = {all, 0, all};
      return;
    }
    constexpr float kWhole = 0x1.8p23f;  // what is added to it is rounded to a whole number, ties to even
    const float factor = 127.0f / most;
    int32_t sum = 0;
    for (int64_t i = 0; i < kBlockInputs; ++i) {
      const float whole = std::bit_cast<float>(bits[i]) * factor + kWhole;
      const int32_t rounded = static_cast<int32_t>(std::bit_cast<uint32_t>(whole) - std::bit_cast<uint32_t>(kWhole));
      q[i] = static_cast<int8_t>(rounded), sum += rounded;
    }
    scale = {most / 127.0f, sum, most / 127.0f * static_cast<float>(sum)};
  }
};

}  // namespace paceline
