// Words of 32 bits in vectors of 16: two neighbours of bfloat16, multiplied and added at once, or one float32.
//
// What native.cpp does lane by lane, for either.

#pragma once

#include <immintrin.h>

#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>

#include "../exponential.h"

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__)
#error "the operator needs AVX-512 (F, BW, DQ, VL)"
#endif

namespace {

constexpr int kQueries = 6;  // queries, and
constexpr int kVectors = 4;  // vectors of 16 lanes of each, that a product keeps in registers
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504f;

// Bits of bfloat16 of the numbers of float8_e4m3fn that are not negative: four bits of exponent, three of mantissa.
constexpr std::array<uint16_t, 128> float8_table() {
  std::array<uint16_t, 128> bits{};
  for (int i = 1; i < 127; ++i) {
    int exponent = i >> 3, mantissa = (i & 7) << 4;
    if (exponent == 0) {  // mantissa * 2^-13, which bfloat16 has as a normal number
      for (exponent = 1; mantissa < 128; mantissa *= 2) --exponent;
      mantissa -= 128;
    }
    bits[i] = static_cast<uint16_t>((exponent + 120) << 7 | mantissa);
  }
  bits[127] = 0x7fc0;  // NaN
  return bits;
}

alignas(64) constexpr std::array<uint16_t, 128> kFloat8 = float8_table();

// 32 numbers of float8_e4m3fn in bfloat16.
inline __m512i bfloat16_of(__m256i x) {
  const __m512i wide = _mm512_cvtepu8_epi16(x);
  const auto part = [](int i) { return _mm512_load_si512(kFloat8.data() + 32 * i); };
  const __m512i small = _mm512_permutex2var_epi16(part(0), wide, part(1));
  const __m512i large = _mm512_permutex2var_epi16(part(2), wide, part(3));
  const __m512i size = _mm512_mask_mov_epi16(small, _mm512_test_epi16_mask(wide, _mm512_set1_epi16(0x40)), large);
  return _mm512_or_si512(size, _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x80)), 8));
}

// The byte of the number of float8_e4m3fn that is nearest; what is beyond 448 becomes that.
inline uint8_t float8_of(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), size = bits & 0x7fffffff;
  const uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
  const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(size) + 16384.0f);  // whose last bit is 2^-9
  const uint32_t rounded = size < 0x3c800000 ? small & 0xff : normal > 0x7e ? 0x7e : normal;
  return static_cast<uint8_t>(bits >> 24 & 0x80 | (size > 0x7f800000 ? 0x7f : rounded));
}

struct Bfloat16 {
  using Value = uint16_t;
  static constexpr int kPair = 2;

  // sum + a * b, of each lane's two products.
  static __m512 add(__m512 sum, __m512i a, __m512i b) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const auto first = [](__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); };
    const auto second = [&](__m512i x) { return _mm512_castsi512_ps(_mm512_and_si512(x, high)); };
    return _mm512_fmadd_ps(first(a), first(b), _mm512_fmadd_ps(second(a), second(b), sum));
#endif
  }

  static __m512i load(const Value* x, int length) {  // 32 values, zeros from `length`
    return _mm512_maskz_loadu_epi16(length >= 32 ? ~0u : (1u << length) - 1, x);
  }

  static __m512i load(const uint8_t* x, int length) {  // of float8
    return bfloat16_of(_mm256_maskz_loadu_epi8(length >= 32 ? ~0u : (1u << length) - 1, x));
  }

  static __m512i narrow(__m512 low, __m512 high) {
#ifdef __AVX512BF16__
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
#else
    const auto round = [](__m512 x) {
      const __m512i bits = _mm512_castps_si512(x);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
      const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
      const __m512i kept = _mm512_mask_mov_epi32(sum, nan, _mm512_set1_epi32(0x7fc00000));
      return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
    };
    return _mm512_inserti64x4(_mm512_castsi256_si512(round(low)), round(high), 1);
#endif
  }

  static void store_weights(uint32_t* to, const __m512* w) {
    _mm512_store_si512(to, narrow(w[0], w[1]));
    _mm512_store_si512(to + 16, narrow(w[2], w[3]));
  }

  // 32 columns of two rows, interleaved within each 128 bits; `store` undoes that.
  template <class Kept>
  static void interleave(uint32_t* to, const Kept* x, int64_t stride, int length, __m512i& largest) {
    const __m512i a = load(x, length), b = load(x + stride, length);
    const __m512i sign = _mm512_set1_epi16(0x7fff);
    largest = _mm512_max_epu16(largest, _mm512_max_epu16(_mm512_and_si512(a, sign), _mm512_and_si512(b, sign)));
    _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
    _mm512_store_si512(to + 16, _mm512_unpackhi_epi16(a, b));
  }

  static bool finite(__m512i largest) { return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7f80)) == 0; }

  static void store(Value* to, const float* sums, __m512 factor, int length) {  // 32 columns
    const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i later = _mm512_add_epi32(order, _mm512_set1_epi32(8));
    const __m512 zero = _mm512_setzero_ps();  // added: the sign of a zero is nobody's
    const __m512 a = _mm512_add_ps(_mm512_mul_ps(_mm512_load_ps(sums), factor), zero);
    const __m512 b = _mm512_add_ps(_mm512_mul_ps(_mm512_load_ps(sums + 16), factor), zero);
    const __m512i x = narrow(_mm512_permutex2var_ps(a, order, b), _mm512_permutex2var_ps(a, later, b));
    _mm512_mask_storeu_epi16(to, length >= 32 ? ~0u : (1u << length) - 1, x);
  }

  // Of 64 additive masks: which hide, and whether any does something else than hide or nothing.
  static uint64_t hidden(const Value* mask, bool& biased) {
    uint64_t bits = 0;
    for (int i = 0; i < 2; ++i) {
      const __m512i x = _mm512_loadu_si512(mask + 32 * i);
      const __mmask32 hides = _mm512_cmpeq_epi16_mask(x, _mm512_set1_epi16(static_cast<short>(0xff80)));
      biased |= (hides | _mm512_testn_epi16_mask(x, _mm512_set1_epi16(0x7fff))) != ~0u;
      bits |= static_cast<uint64_t>(hides) << (32 * i);
    }
    return bits;
  }

  static __m512 widen(const Value* x) {  // 16 values
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
  }
};

struct Float32 {
  using Value = float;
  static constexpr int kPair = 1;

  static __m512 add(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }

  static __m512i load(const Value* x, int length) {
    return _mm512_maskz_loadu_epi32(length >= 16 ? 0xffff : (1u << length) - 1, x);
  }

  static __m512i load(const uint8_t* x, int length) {  // of float8
    const __m128i bytes = _mm_maskz_loadu_epi8(length >= 16 ? 0xffff : (1u << length) - 1, x);
    const __m512i halves = bfloat16_of(_mm256_zextsi128_si256(bytes));
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(halves)), 16);
  }

  static void store_weights(uint32_t* to, const __m512* w) {
    for (int i = 0; i < 4; ++i) _mm512_store_ps(to + 16 * i, w[i]);
  }

  template <class Kept>
  static void interleave(uint32_t* to, const Kept* x, int64_t, int length, __m512i& largest) {
    const __m512i a = load(x, length);
    largest = _mm512_max_epu32(largest, _mm512_and_si512(a, _mm512_set1_epi32(0x7fffffff)));
    _mm512_store_si512(to, a);
  }

  static bool finite(__m512i largest) { return _mm512_cmpge_epu32_mask(largest, _mm512_set1_epi32(0x7f800000)) == 0; }

  static void store(Value* to, const float* sums, __m512 factor, int length) {
    const __m512 x = _mm512_add_ps(_mm512_mul_ps(_mm512_load_ps(sums), factor), _mm512_setzero_ps());
    _mm512_mask_storeu_ps(to, length >= 16 ? 0xffff : (1u << length) - 1, x);
  }

  static uint64_t hidden(const Value* mask, bool& biased) {
    uint64_t bits = 0;
    for (int i = 0; i < 4; ++i) {
      const __m512 x = _mm512_loadu_ps(mask + 16 * i);
      const __mmask16 hides = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-kInfinity), _CMP_EQ_OQ);
      const __mmask16 nothing = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_EQ_OQ);
      biased |= static_cast<__mmask16>(hides | nothing) != 0xffff;
      bits |= static_cast<uint64_t>(hides) << (16 * i);
    }
    return bits;
  }

  static __m512 widen(const Value* x) { return _mm512_loadu_ps(x); }
};

using paceline::exp2;

inline float exp2(float x) { return _mm512_cvtss_f32(exp2(_mm512_set1_ps(x))); }

// c[q] = c[q] * fade[q] + a[q] @ b for Q rows of `steps` words and 16 * N columns of b, whose rows are `width` words
// apart; without fade c[q] = a[q] @ b.
template <class T, int Q, int N>
void product(const uint32_t* const* a, const uint32_t* b, size_t width, int steps, float* const* c, const float* fade) {
  __m512 sum[Q][N];
  for (int q = 0; q < Q; ++q) {
    for (int n = 0; n < N; ++n) {
      sum[q][n] = fade ? _mm512_mul_ps(_mm512_load_ps(c[q] + 16 * n), _mm512_set1_ps(fade[q])) : _mm512_setzero_ps();
    }
  }
  for (int s = 0; s < steps; ++s, b += width) {
    __m512i row[N];
    for (int n = 0; n < N; ++n) row[n] = _mm512_load_si512(b + 16 * n);
    for (int q = 0; q < Q; ++q) {
      const __m512i x = _mm512_set1_epi32(static_cast<int>(a[q][s]));
      for (int n = 0; n < N; ++n) sum[q][n] = T::add(sum[q][n], x, row[n]);
    }
  }
  for (int q = 0; q < Q; ++q) {
    for (int n = 0; n < N; ++n) _mm512_store_ps(c[q] + 16 * n, sum[q][n]);
  }
}

using Product = void (*)(const uint32_t* const*, const uint32_t*, size_t, int, float* const*, const float*);

template <class T, int Q>
constexpr std::array<Product, kVectors> kRow = {product<T, Q, 1>, product<T, Q, 2>, product<T, Q, 3>, product<T, Q, 4>};

template <class T>
constexpr std::array<Product, kVectors> kProducts[kQueries] = {kRow<T, 1>, kRow<T, 2>, kRow<T, 3>,
                                                               kRow<T, 4>, kRow<T, 5>, kRow<T, 6>};

void transpose(__m512i* x) {  // 16 x 16 words
  __m512i y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
    y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
  }
}

// Grows and is kept: a step asks for the same sizes in every layer.
class Buffer {
 public:
  ~Buffer() { std::free(data_); }

  template <class T>
  T* of(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = std::aligned_alloc(64, bytes);
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace
