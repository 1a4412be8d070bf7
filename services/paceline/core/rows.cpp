// Passes over vocabulary rows that torch would make with dozens of operators. Plain C, no torch: see rows.py.
//
// Noise. The noise of a token is g = -log(-log u), u = (k + 0.5) / 2^32 with k its Philox word. Since -log u >= 1 - u,
//
//     g <= -log(1 - u) = 32 log 2 - log(c),    c = 2^32 - k - 0.5
//
// so a token with weight w can beat a score S only if log2(c) <= (w - S) / log 2 + 32. The words of all tokens cost
// some integer multiplications; the bits of a float are a lower bound of its log2; and of a normalised row about
// exp(-S) tokens pass, S being the best score so far. Only those get the exact logarithm, whose bits are noise.py's:
// additions, multiplications and divisions of doubles, each rounded on its own (-ffp-contract=off).

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __AVX512DQ__
#include <immintrin.h>
#endif

namespace {

constexpr int kBlock = 128;  // tokens that are looked at together, a multiple of 16
constexpr int kCounters = kBlock / 4;
constexpr int kLanes = 16;
constexpr float kLog2e = 1.44269504f;
constexpr double kMinGumbel = -3.13;  // no noise is below noise.MIN_GUMBEL, which is above this - 0.01
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Bf16 {
  uint16_t bits;
};

inline float value(float x) { return x; }
inline float value(double x) { return static_cast<float>(x); }
inline float value(Bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline double exact_value(double x) { return x; }
inline double exact_value(float x) { return x; }
inline double exact_value(Bf16 x) { return value(x); }

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

struct Key {
  int64_t seed, position, nonce;
  int stream;
};

// Philox4x32-10 of kCounters counters at once: x0 holds the counters, and word j of each comes into xj.
inline void philox_rounds(const Key& key, uint32_t* __restrict x0, uint32_t* __restrict x1, uint32_t* __restrict x2,
                          uint32_t* __restrict x3) {
  const uint32_t position = static_cast<uint32_t>(key.position);
  const uint32_t high = (static_cast<uint32_t>(key.position >> 32) & 0xFFFFFF) | static_cast<uint32_t>(key.stream) << 24;
  const uint32_t nonce = static_cast<uint32_t>(key.nonce);
  for (int i = 0; i < kCounters; ++i) {
    x1[i] = position, x2[i] = high, x3[i] = nonce;
  }
  uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kCounters; ++i) {
      const uint64_t p0 = static_cast<uint64_t>(x0[i]) * 0xD2511F53u, p1 = static_cast<uint64_t>(x2[i]) * 0xCD9E8D57u;
      x0[i] = static_cast<uint32_t>(p1 >> 32) ^ x1[i] ^ k0;
      x2[i] = static_cast<uint32_t>(p0 >> 32) ^ x3[i] ^ k1;
      x1[i] = static_cast<uint32_t>(p1), x3[i] = static_cast<uint32_t>(p0);
    }
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
}

// words[4 * i + j] is word j of counter first + i, of kCounters counters.
inline void philox(uint32_t first, const Key& key, uint32_t* __restrict words) {
  uint32_t x0[kCounters], x1[kCounters], x2[kCounters], x3[kCounters];
  for (int i = 0; i < kCounters; ++i) x0[i] = first + i;
  philox_rounds(key, x0, x1, x2, x3);
  for (int i = 0; i < kCounters; ++i) {
    words[4 * i] = x0[i], words[4 * i + 1] = x1[i], words[4 * i + 2] = x2[i], words[4 * i + 3] = x3[i];
  }
}

// The words of kCounters tokens, or of `count` of them.
inline void philox_of(const int64_t* tokens, int64_t count, const Key& key, uint32_t* __restrict words) {
  uint32_t x0[kCounters], x1[kCounters], x2[kCounters], x3[kCounters];
  for (int i = 0; i < kCounters; ++i) x0[i] = i < count ? static_cast<uint32_t>(tokens[i] >> 2) : 0;
  philox_rounds(key, x0, x1, x2, x3);
  for (int i = 0; i < kCounters && i < count; ++i) {
    const int64_t j = tokens[i] & 3;
    words[i] = j == 0 ? x0[i] : j == 1 ? x1[i] : j == 2 ? x2[i] : x3[i];
  }
}

uint32_t philox_word(int64_t token, const Key& key) {
  uint32_t x0 = static_cast<uint32_t>(token >> 2), x1 = static_cast<uint32_t>(key.position);
  uint32_t x2 = (static_cast<uint32_t>(key.position >> 32) & 0xFFFFFF) | static_cast<uint32_t>(key.stream) << 24;
  uint32_t x3 = static_cast<uint32_t>(key.nonce);
  uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(x0) * 0xD2511F53u, p1 = static_cast<uint64_t>(x2) * 0xCD9E8D57u;
    x0 = static_cast<uint32_t>(p1 >> 32) ^ x1 ^ k0;
    x2 = static_cast<uint32_t>(p0 >> 32) ^ x3 ^ k1;
    x1 = static_cast<uint32_t>(p1), x3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  const uint32_t words[4] = {x0, x1, x2, x3};
  return words[token & 3];
}

// noise.exact_log, operation by operation.
double exact_log(double x) {
  constexpr double kHigh = 0x1.62e42fee00000p-1, kLow = 0x1.a39ef35793c76p-33;
  int64_t bits;
  std::memcpy(&bits, &x, 8);
  const int64_t exponent = ((bits + 0x00095F619980C433) >> 52) - 1023;
  bits -= static_cast<int64_t>(static_cast<uint64_t>(exponent) << 52);
  double mantissa;
  std::memcpy(&mantissa, &bits, 8);
  const double e = static_cast<double>(exponent);
  double s = (mantissa - 1.0) / (mantissa + 1.0);
  const double square = s * s;
  double series = 1.0 / 23;
  for (int i = 10; i >= 1; --i) series = series * square + 1.0 / (2 * i + 1);
  s *= 2.0;
  series = series * square * s + e * kLow;
  return series + s + e * kHigh;
}

float gumbel(uint32_t word) {
  const double u = (static_cast<double>(word) + 0.5) * 0x1p-32;
  return static_cast<float>(-exact_log(-exact_log(u)));
}

// A lower bound of log2(2^32 - word - 0.5).
inline float log2_below(uint32_t word) {
  const float c = static_cast<float>(~word);
  return static_cast<float>(static_cast<int32_t>(bits_of(c))) * 0x1p-23f - 127.0f;
}

// What log2_below must not exceed for a token of weight w to reach a score: (w - score) * kLog2e + 32, and room for
// rounding. Written as w * kLog2e + offset(score).
inline float offset(double score) {
  return static_cast<float>(32.001 - score * 1.4426950408889634 + 1e-6 * std::fabs(score));
}

// exp of x <= 0, within 3e-7 relative; below -87 about 1e-38.
inline float exp_below(float x) {
  x = x > -87.0f ? x : -87.0f;
  const float n = std::nearbyint(x * kLog2e);
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t power = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &power, 4);
  return p * scale;
}

// The sum of exp_below of a few values.
inline float sum_of_exp(const float* x, int64_t count) {
  float sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int j = 0; j < kLanes; ++j) sums[j] += exp_below(x[i + j]);
  for (; i < count; ++i) sums[0] += exp_below(x[i]);
  for (int j = 1; j < kLanes; ++j) sums[0] += sums[j];
  return sums[0];
}

typedef float Lanes __attribute__((vector_size(4 * kLanes)));

inline Lanes load_lanes(const float* x) {
  Lanes lanes;
  std::memcpy(&lanes, x, sizeof lanes);
  return lanes;
}

typedef int32_t Flags __attribute__((vector_size(4 * kLanes)));  // -1 or 0

// Bit j: flag j is set.
inline uint32_t bits_of(Flags flags) {
#ifdef __AVX512DQ__
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(flags));
#else
  uint32_t bits = 0;
  for (int j = 0; j < kLanes; ++j) bits |= static_cast<uint32_t>(flags[j] & 1) << j;
  return bits;
#endif
}

inline float largest_lane(Lanes lanes) {
  float best = lanes[0];
  for (int j = 1; j < kLanes; ++j) best = lanes[j] > best ? lanes[j] : best;
  return best;
}

// The values of a row, -inf where its mask has no bit. No mask: all of them.
template <typename T>
struct Values {
  const T* x;
  const uint8_t* mask = nullptr;

  float operator[](int64_t i) const {
    return mask && !(mask[i >> 3] >> (i & 7) & 1) ? -kInfinity : value(x[i]);
  }

  // A block from `begin`: up to `count` values, the rest -inf. False: there are only -inf, and
  // `out` is as it was. With a mask `begin` is a multiple of 8.
  bool load(int64_t begin, int64_t count, float* __restrict out) const {
    const T* __restrict from = x + begin;
    if (!mask) {
      if (count >= kBlock) {
        for (int i = 0; i < kBlock; ++i) out[i] = value(from[i]);
      } else {
        for (int i = 0; i < kBlock; ++i) out[i] = i < count ? value(from[i]) : -kInfinity;
      }
      return true;
    }
    uint32_t words[kBlock / 32] = {};
    std::memcpy(words, mask + begin / 8, (std::min<int64_t>(count, kBlock) + 7) / 8);
    uint32_t any = 0;
    for (uint32_t word : words) any |= word;
    if (!any) return false;
    if (count >= kBlock) {
      for (int i = 0; i < kBlock; i += 32) {
        const uint32_t word = words[i / 32];
        for (int j = 0; j < 32; ++j) {
          const float v = value(from[i + j]);
          out[i + j] = word >> j & 1 ? v : -kInfinity;
        }
      }
    } else {
      for (int i = 0; i < kBlock; ++i) {
        out[i] = i < count && words[i / 32] >> (i % 32) & 1 ? value(from[i]) : -kInfinity;
      }
    }
    return true;
  }
};

template <typename T>
float largest_of(const Values<T>& x, int64_t n, bool* is_number) {
  alignas(64) float block[kBlock];
  Lanes best = Lanes{} - kInfinity, sum = {};  // of what is no number
  for (int64_t base = 0; base < n; base += kBlock) {
    if (!x.load(base, n - base, block)) continue;
    for (int i = 0; i < kBlock; i += kLanes) {
      const Lanes v = load_lanes(block + i);
      best = v > best ? v : best;
      sum += v == v ? Lanes{} : v;
    }
  }
  float total = 0;
  for (int j = 0; j < kLanes; ++j) total += sum[j];
  *is_number = total == total;
  return largest_lane(best);
}

struct Best {
  double score = -std::numeric_limits<double>::infinity();
  int64_t token = 0;
};

// The `num_best` largest of weight + noise over tokens [first, first + n) into `best`, largest first, of equal ones the
// lower token first; weight(i) of token first + i as what the score is the sum with. Where there are fewer, the rest has
// the score -inf. `floor`: a score that at least `num_best` tokens reach. Weights of a block go through `load(begin, count,
// out)`, which returns false where all are -inf.
template <typename Load, typename Weight>
void gumbel_best(int64_t n, int64_t first, const Key& key, double floor, int64_t num_best, Best* best, Load load,
                 Weight weight) {
  std::fill(best, best + num_best, Best{});
  best->token = first;
  float reached = offset(floor);
  double least = floor;
  alignas(64) float w[kBlock];
  alignas(64) uint32_t words[kBlock];
  for (int64_t base = first & ~int64_t{3}; base < first + n; base += kBlock) {
    const int64_t begin = std::max(base, first), end = std::min(base + kBlock, first + n);
    if (end - begin < kBlock) std::fill(w, w + kBlock, -kInfinity);
    if (!load(begin - first, static_cast<int>(end - begin), w + (begin - base))) continue;
    // With the largest noise possible (log2 c = -1), does the heaviest reach?
    Lanes heaviest = load_lanes(w);
    for (int i = kLanes; i < kBlock; i += kLanes) {
      const Lanes v = load_lanes(w + i);
      heaviest = v > heaviest ? v : heaviest;
    }
    if (!(largest_lane(heaviest) * kLog2e + reached >= -1.5f)) continue;
    philox(static_cast<uint32_t>(base >> 2), key, words);
    int32_t any = 0;
    for (int i = 0; i < kBlock; ++i) any |= log2_below(words[i]) <= w[i] * kLog2e + reached;
    if (!any) continue;
    for (int i = 0; i < kBlock; ++i) {
      if (!(log2_below(words[i]) <= w[i] * kLog2e + reached)) continue;
      const int64_t token = base + i;
      if (token < first || token >= first + n) continue;
      const double score = static_cast<double>(gumbel(words[i])) + weight(token - first);
      int64_t at = num_best;
      while (at > 0 && score > best[at - 1].score) --at;
      if (at == num_best) continue;
      std::copy_backward(best + at, best + num_best - 1, best + num_best);
      best[at].score = score, best[at].token = token;
      if (best[num_best - 1].score > least) least = best[num_best - 1].score, reached = offset(least);
    }
  }
}

template <typename T>
void raw_rows(const T* x, int64_t rows, int64_t n, int64_t stride, const int64_t* keys, int stream, int64_t first,
              int64_t* tokens, double* scores) {
  for (int64_t row = 0; row < rows; ++row, x += stride) {
    const Key key{keys[3 * row], keys[3 * row + 1], keys[3 * row + 2], stream};
    bool is_number;
    const float most = largest_of(Values<T>{x}, n, &is_number);
    const double floor = most * (most < 0 ? 1.000001 : 0.999999) + kMinGumbel - 0.01;
    const T* at = x;
    Best best;
    gumbel_best(
        n, first, key, most == -kInfinity ? -std::numeric_limits<double>::infinity() : floor, 1, &best,
        [at](int64_t begin, int count, float* out) {
          for (int i = 0; i < count; ++i) out[i] = value(at[begin + i]);
          return true;
        },
        [at](int64_t i) { return exact_value(at[i]); });
    tokens[row] = best.token, scores[row] = best.score;
  }
}

// Larger values are larger.
inline uint32_t ordered(float x) {
  x = x == x ? x + 0.0f : -kInfinity;  // + 0: the sign of zero does not order
  const uint32_t bits = bits_of(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Larger values are larger, and of equal ones lower ids.
inline uint64_t sortable(float x, int64_t id) {
  return static_cast<uint64_t>(ordered(x)) << 32 | static_cast<uint32_t>(~static_cast<uint32_t>(id));
}

inline float value_of(uint64_t key) {
  uint32_t bits = static_cast<uint32_t>(key >> 32);
  bits = bits & 0x80000000u ? bits & 0x7FFFFFFFu : ~bits;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// A value that m of n values reach, and few more: halfway between one that enough reach and one that too few do, and so
// on. -inf: there is none.
template <typename T>
float bisected(const Values<T>& x, int64_t n, int64_t m) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  std::vector<float> values(blocks * kBlock, -kInfinity);
  for (int64_t base = 0; base < n; base += kBlock) x.load(base, n - base, &values[base]);
  uint32_t low = ordered(-kInfinity), high = ordered(kInfinity) + 1;
  for (int64_t reaching = 0; high - low > 1 && (reaching < m || reaching > m + m / 8);) {
    const uint32_t middle = low + (high - low) / 2;
    const float least = value_of(static_cast<uint64_t>(middle) << 32);
    int32_t count = 0;
    for (const float v : values) count += v >= least;
    (count >= m ? low : high) = middle;
    if (count >= m) reaching = count;
  }
  return value_of(static_cast<uint64_t>(low) << 32);
}

// A value that m of n values reach for certain: of few values by bisection, of many the m-th largest of the maxima
// of some groups. -inf: not known.
template <typename T>
float reached_by(const Values<T>& x, int64_t n, int64_t m) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  if (blocks * kLanes < 4 * m) return bisected(x, n, m);
  const int64_t together = std::max<int64_t>(1, blocks * kLanes / (4 * m));  // about 4 m groups
  const int64_t rounds = (blocks + together - 1) / together;
  if (rounds * kLanes < m) return -kInfinity;
  std::vector<float> most(rounds * kLanes);
  alignas(64) float block[kBlock];
  for (int64_t round = 0; round < rounds; ++round) {
    Lanes best = Lanes{} - kInfinity;
    const int64_t end = std::min(n, (round + 1) * together * kBlock);
    for (int64_t base = round * together * kBlock; base < end; base += kBlock) {
      if (!x.load(base, n - base, block)) continue;
      for (int i = 0; i < kBlock; i += kLanes) {
        const Lanes v = load_lanes(block + i);
        best = v > best ? v : best;
      }
    }
    std::memcpy(&most[round * kLanes], &best, sizeof best);
  }
  std::nth_element(most.begin(), most.begin() + (m - 1), most.end(), std::greater<float>());
  return most[m - 1];
}

// Puts the m largest of n values into the first m places of `kept`, in any order but for the smallest, which is last.
template <typename T>
void gather_largest(const Values<T>& x, int64_t n, int64_t m, std::vector<uint64_t>& kept) {
  const int64_t room = std::min(n, std::max<int64_t>(4 * m, 512)) + kBlock;
  if (static_cast<int64_t>(kept.size()) < room) kept.resize(room);
  const auto descending = [](uint64_t a, uint64_t b) { return a > b; };
  alignas(64) float block[kBlock];
  int64_t size = 0;
  float least = reached_by(x, n, m);
  bool full = false;  // there are m: ties with the least come too late
  for (int64_t base = 0; base < n; base += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, n - base));
    const bool any = least > -kInfinity || full;  // not every value is wanted
    if (!x.load(base, count, block)) {
      if (any) continue;
      std::fill(block, block + kBlock, -kInfinity);
    }
    for (int i = 0; i < count; i += kLanes) {
      const Lanes v = load_lanes(block + i);
      uint32_t wanted = any ? bits_of(full ? v > least : v >= least) : ~uint32_t{0};
      wanted &= (uint32_t{1} << std::min(kLanes, count - i)) - 1;
      for (; wanted; wanted &= wanted - 1) {
        const int j = i + std::countr_zero(wanted);
        kept[size++] = sortable(block[j], base + j);
      }
    }
    if (size > room - kBlock && base + kBlock < n) {
      std::nth_element(kept.begin(), kept.begin() + (m - 1), kept.begin() + size, descending);
      size = m, full = true, least = value_of(kept[m - 1]);
    }
  }
  std::nth_element(kept.begin(), kept.begin() + (m - 1), kept.begin() + size, descending);
}

// Sorts the first m keys, the largest first; many of them byte by byte from the last that differs, which leaves no
// comparison to be predicted.
void sort_descending(std::vector<uint64_t>& keys, int64_t m, std::vector<uint64_t>& spare) {
  if (m < 128) return std::sort(keys.begin(), keys.begin() + m, std::greater<uint64_t>());
  if (static_cast<int64_t>(spare.size()) < m) spare.resize(m);
  uint64_t any = 0, all = ~uint64_t{0};
  for (int64_t i = 0; i < m; ++i) any |= keys[i], all &= keys[i];
  for (int shift = 0; shift < 64; shift += 8) {
    if (!((any ^ all) >> shift & 0xFF)) continue;
    int32_t ends[257] = {};  // of the keys by 255 less their byte
    for (int64_t i = 0; i < m; ++i) ++ends[256 - (keys[i] >> shift & 0xFF)];
    for (int byte = 0; byte < 256; ++byte) ends[byte + 1] += ends[byte];
    for (int64_t i = 0; i < m; ++i) spare[ends[255 - (keys[i] >> shift & 0xFF)]++] = keys[i];
    std::swap_ranges(keys.begin(), keys.begin() + m, spare.begin());
  }
}

template <typename T>
void largest_rows(const T* x, int64_t rows, int64_t n, int64_t stride, const uint8_t* masks, int64_t mask_stride,
                  int64_t m, float* values, int64_t* ids) {
  std::vector<uint64_t> kept, spare;
  for (int64_t row = 0; row < rows; ++row, x += stride) {
    gather_largest(Values<T>{x, masks ? masks + row * mask_stride : nullptr}, n, m, kept);
    sort_descending(kept, m, spare);
    for (int64_t i = 0; i < m; ++i) {
      values[row * m + i] = value_of(kept[i]);
      ids[row * m + i] = static_cast<uint32_t>(~static_cast<uint32_t>(kept[i]));
    }
  }
}

// What each row is cut to before a token of it is picked.
struct Cuts {
  const uint8_t* masks;  // a bit for every token, `mask_stride` bytes from row to row; nullptr: all are allowed
  int64_t mask_stride;
  const int64_t* top_k;  // the k largest stay, and what equals the k-th
  const float* floors;   // after the temperature, with the largest at 0: what is below goes
};

// The rows that follow a draft token, and the earlier row that the token follows; -1: the row follows a context.
struct Drafted {
  const int64_t* tokens;
  const int64_t* parents;  // nullptr: all follow contexts
};

constexpr int64_t kNone = -1, kSkipped = -2;

template <typename T>
void pick_rows(const T* x, int64_t rows, int64_t n, int64_t stride, const Cuts& cuts, const Drafted& drafted,
               const float* temperatures, const int64_t* keys, int stream, int64_t num_best, int64_t* tokens,
               float* logprobs) {
  std::vector<uint64_t> kept;
  std::vector<Best> best(num_best);
  const int64_t* const all = tokens;
  for (int64_t row = 0; row < rows; ++row, x += stride, tokens += num_best, logprobs += num_best) {
    std::fill(tokens, tokens + num_best, kNone);
    std::fill(logprobs, logprobs + num_best, -kInfinity);
    const int64_t parent = drafted.parents ? drafted.parents[row] : -1;
    if (parent >= 0 && all[parent * num_best] != drafted.tokens[row]) {
      tokens[0] = kSkipped;
      continue;
    }
    const Values<T> at{x, cuts.masks ? cuts.masks + row * cuts.mask_stride : nullptr};
    const float temperature = temperatures[row] == 0 ? 1.0f : temperatures[row];
    bool is_number;
    const float most = largest_of(at, n, &is_number);
    if (!is_number || !(std::fabs(most) < kInfinity)) continue;
    // The same two roundings as torch's: shift, then scale.
    const auto scaled = [at, most, temperature](int64_t i) { return (at[i] - most) / temperature; };
    float floor = cuts.floors[row];
    if (cuts.top_k[row] < n) {
      gather_largest(at, n, cuts.top_k[row], kept);
      floor = std::max(floor, (value_of(kept[cuts.top_k[row] - 1]) - most) / temperature);
    }
    double total = 0;
    const auto load = [&](int64_t begin, int count, float* out) {
      alignas(64) float block[kBlock];
      if (!at.load(begin, count, block)) return false;
      for (int i = 0; i < count; ++i) {
        const float v = (block[i] - most) / temperature;
        out[i] = v < floor ? -kInfinity : v;
      }
      total += sum_of_exp(out, count);
      return true;
    };
    if (temperatures[row] == 0) {
      float buffer[kBlock];
      for (int64_t i = 0; i < n; i += kBlock) load(i, static_cast<int>(std::min<int64_t>(kBlock, n - i)), buffer);
      std::fill(best.begin(), best.end(), Best{});
      while (at[best[0].token] != most) ++best[0].token;
      best[0].score = 0;
    } else {
      const Key key{keys[3 * row], keys[3 * row + 1], keys[3 * row + 2], stream};
      const double floor = num_best == 1 ? kMinGumbel - 0.01 : -std::numeric_limits<double>::infinity();
      gumbel_best(n, 0, key, floor, num_best, best.data(), load,
                  [&](int64_t i) { return static_cast<double>(scaled(i)); });
    }
    const float log_total = static_cast<float>(std::log(total));
    for (int64_t i = 0; i < num_best && best[i].score > -std::numeric_limits<double>::infinity(); ++i)
      tokens[i] = best[i].token, logprobs[i] = scaled(best[i].token) - log_total;
  }
}

template <typename T>
void unlisted_rows(const T* x, int64_t rows, int64_t n, int64_t stride, const Cuts& cuts, const float* temperatures,
                   const int64_t* keys, int stream, const int64_t* listed, int64_t m, int64_t num_best, int64_t* tokens,
                   float* weights) {
  const int64_t num_bytes = (n + 7) / 8;
  std::vector<uint8_t> mask(num_bytes);
  std::vector<Best> best(num_best);
  for (int64_t row = 0; row < rows; ++row, x += stride, listed += m, tokens += num_best, weights += num_best) {
    std::fill(tokens, tokens + num_best, 0);
    std::fill(weights, weights + num_best, -kInfinity);
    const float top = value(x[listed[0]]), temperature = temperatures[row], floor = cuts.floors[row];
    if (!(std::fabs(top) < kInfinity)) continue;
    if (cuts.masks) std::memcpy(mask.data(), cuts.masks + row * cuts.mask_stride, num_bytes);
    else std::fill(mask.begin(), mask.end(), 0xFF);
    for (int64_t i = 0; i < m; ++i) mask[listed[i] >> 3] &= ~(1 << (listed[i] & 7));
    const Values<T> at{x, mask.data()};
    const auto scaled = [at, top, temperature](int64_t i) { return (at[i] - top) / temperature; };
    const auto load = [&](int64_t begin, int count, float* out) {
      alignas(64) float block[kBlock];
      if (!at.load(begin, count, block)) return false;
      for (int i = 0; i < count; ++i) {
        const float v = (block[i] - top) / temperature;
        out[i] = v >= floor && v < kInfinity ? v : -kInfinity;
      }
      return true;
    };
    const Key key{keys[3 * row], keys[3 * row + 1], keys[3 * row + 2], stream};
    gumbel_best(n, 0, key, -std::numeric_limits<double>::infinity(), num_best, best.data(), load,
                [&](int64_t i) { return static_cast<double>(scaled(i)); });
    for (int64_t i = 0; i < num_best && best[i].score > -std::numeric_limits<double>::infinity(); ++i)
      tokens[i] = best[i].token, weights[i] = scaled(best[i].token);
  }
}

// noise.uniform of one key.
double uniform(const Key& key, int64_t lane) {
  const uint64_t high = philox_word(4 * lane, key), low = philox_word(4 * lane + 1, key);
  return static_cast<double>((high << 21) | (low >> 11)) * 0x1p-53;
}

// The log-probabilities of a row after its temperature and its cuts.
template <typename T>
struct Law {
  Values<T> at;
  float most, temperature, floor, log_total;

  // False: the row has NaN or +inf, or nothing but -inf.
  bool read(const T* x, int64_t n, int64_t top_k, float least, float row_temperature, std::vector<uint64_t>& kept) {
    bool is_number;
    at = Values<T>{x}, temperature = row_temperature, floor = least, log_total = 0;
    most = largest_of(at, n, &is_number);
    if (!is_number || !(std::fabs(most) < kInfinity)) return false;
    if (top_k < n) {
      gather_largest(at, n, top_k, kept);
      floor = std::max(floor, (value_of(kept[top_k - 1]) - most) / temperature);
    }
    double total = 0;
    alignas(64) float block[kBlock];
    for (int64_t base = 0; base < n; base += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, n - base));
      at.load(base, count, block);
      for (int i = 0; i < count; ++i) {
        const float v = (block[i] - most) / temperature;
        block[i] = v < floor ? -kInfinity : v;
      }
      total += sum_of_exp(block, count);
    }
    log_total = static_cast<float>(std::log(total));
    return true;
  }

  float operator[](int64_t i) const {
    const float v = (at[i] - most) / temperature;
    return v < floor ? -kInfinity : v - log_total;
  }
};

}  // namespace

extern "C" {

// kind: 0 float32, 1 float64, 2 bfloat16. stride: elements from one row to the next. keys: seed, position and nonce of
// each row.

// The token with the largest weight + noise of each row, and that score. Columns are tokens from `first`.
void paceline_gumbel_max(const void* x, int kind, int64_t rows, int64_t n, int64_t stride, const int64_t* keys,
                         int stream, int64_t first, int64_t* tokens, double* scores) {
  if (kind == 0) raw_rows(static_cast<const float*>(x), rows, n, stride, keys, stream, first, tokens, scores);
  if (kind == 1) raw_rows(static_cast<const double*>(x), rows, n, stride, keys, stream, first, tokens, scores);
  if (kind == 2) raw_rows(static_cast<const Bf16*>(x), rows, n, stride, keys, stream, first, tokens, scores);
}

// The `num_best` tokens with the largest (x - max) / temperature + noise of each row after its cuts (see Cuts), and their
// log-probabilities among the tokens that are left; temperature 0: the largest x alone. Where there are fewer, and in a row
// with NaN, +inf or nothing but -inf where its mask has bits, tokens are -1. Returns [rows, num_best].
void paceline_pick(const void* x, int kind, int64_t rows, int64_t n, int64_t stride, const uint8_t* masks,
                   int64_t mask_stride, const int64_t* top_k, const float* floors, const float* temperatures,
                   const int64_t* keys, int stream, int64_t num_best, int64_t* tokens, float* logprobs) {
  const Cuts cuts{masks, mask_stride, top_k, floors};
  const auto pick = [&](const auto* of) {
    pick_rows(of, rows, n, stride, cuts, Drafted{}, temperatures, keys, stream, num_best, tokens, logprobs);
  };
  if (kind == 0) pick(static_cast<const float*>(x));
  if (kind == 2) pick(static_cast<const Bf16*>(x));
}

// As paceline_pick of one token, for the rows that are reached: row r follows the draft token `drafted[r]`, which follows
// the earlier row `parents[r]`, and is reached if that row picks it; parent -1: it follows a context. Others have token
// -2.
void paceline_follow(const void* x, int kind, int64_t rows, int64_t n, int64_t stride, const uint8_t* masks,
                     int64_t mask_stride, const int64_t* top_k, const float* floors, const float* temperatures,
                     const int64_t* keys, int stream, const int64_t* drafted, const int64_t* parents, int64_t* tokens,
                     float* logprobs) {
  const Cuts cuts{masks, mask_stride, top_k, floors};
  const auto follow = [&](const auto* of) {
    pick_rows(of, rows, n, stride, cuts, Drafted{drafted, parents}, temperatures, keys, stream, 1, tokens, logprobs);
  };
  if (kind == 0) follow(static_cast<const float*>(x));
  if (kind == 2) follow(static_cast<const Bf16*>(x));
}

// The `num_best` tokens with the largest weight (x - x of the first listed token) / temperature + noise of each row after
// its cuts, but for the m tokens `listed`, and their weights, -inf where there are fewer. Returns [rows, num_best].
void paceline_unlisted(const void* x, int kind, int64_t rows, int64_t n, int64_t stride, const uint8_t* masks,
                       int64_t mask_stride, const float* floors, const float* temperatures, const int64_t* keys,
                       int stream, const int64_t* listed, int64_t m, int64_t num_best, int64_t* tokens, float* weights) {
  const Cuts cuts{masks, mask_stride, nullptr, floors};
  const auto find = [&](const auto* of) {
    unlisted_rows(of, rows, n, stride, cuts, temperatures, keys, stream, listed, m, num_best, tokens, weights);
  };
  if (kind == 0) find(static_cast<const float*>(x));
  if (kind == 2) find(static_cast<const Bf16*>(x));
}

// The m largest of each row, largest first, of equal ones the lower id first; NaN, and what its mask has no bit for,
// counts as -inf.
void paceline_largest(const void* x, int kind, int64_t rows, int64_t n, int64_t stride, const uint8_t* masks,
                      int64_t mask_stride, int64_t m, float* values, int64_t* ids) {
  if (kind == 0) largest_rows(static_cast<const float*>(x), rows, n, stride, masks, mask_stride, m, values, ids);
  if (kind == 2) largest_rows(static_cast<const Bf16*>(x), rows, n, stride, masks, mask_stride, m, values, ids);
}

// Ranks candidates: the `num_best` best of log_q + noise of each row (greedy: no noise), best first, equal ones by id.
// What is not finite counts as -inf. Returns ids and scores [rows, num_best].
void paceline_rank(const int64_t* ids, const float* log_q, int64_t rows, int64_t m, const int64_t* keys,
                   const uint8_t* greedy, int stream, int64_t num_best, int64_t* best_ids, double* best_scores) {
  for (int64_t row = 0; row < rows; ++row, ids += m, log_q += m) {
    const Key key{keys[3 * row], keys[3 * row + 1], keys[3 * row + 2], stream};
    int64_t* tokens = best_ids + row * num_best;
    double* scores = best_scores + row * num_best;
    int64_t size = 0;
    float reached = kInfinity;
    uint32_t words[kCounters];
    for (int64_t i = 0; i < m; ++i) {
      if (!greedy[row] && i % kCounters == 0) philox_of(ids + i, m - i, key, words);
      const float q = std::fabs(log_q[i]) < kInfinity ? log_q[i] : -kInfinity;
      double score = q;
      if (!greedy[row] && q > -kInfinity) {
        const uint32_t word = words[i % kCounters];
        if (size == num_best && !(log2_below(word) <= q * kLog2e + reached)) continue;
        score += static_cast<double>(gumbel(word));
      }
      int64_t at = size;
      while (at > 0 && (score > scores[at - 1] || (score == scores[at - 1] && ids[i] < tokens[at - 1]))) --at;
      if (at == num_best) continue;
      size = std::min(size + 1, num_best);
      for (int64_t j = size - 1; j > at; --j) tokens[j] = tokens[j - 1], scores[j] = scores[j - 1];
      tokens[at] = ids[i], scores[at] = score;
      if (size == num_best) reached = std::isfinite(scores[size - 1]) ? offset(scores[size - 1]) : kInfinity;
    }
  }
}

// paceline_rank of what paceline_pick picks, and in a row of temperature 0 of the largest x, whose scores are x. What
// there is no token for, and a row with NaN, +inf or nothing but -inf, has the score -inf. Returns [rows, num_best].
void paceline_best(const void* x, int kind, int64_t rows, int64_t n, int64_t stride, const uint8_t* masks,
                   int64_t mask_stride, const int64_t* top_k, const float* floors, const float* temperatures,
                   const int64_t* keys, int stream, int64_t num_best, int64_t* ids, double* scores) {
  std::vector<float> values(num_best);
  const auto best = [&](const auto* of) {
    for (int64_t row = 0; row < rows; ++row, of += stride, ids += num_best, scores += num_best) {
      const uint8_t* mask = masks ? masks + row * mask_stride : nullptr;
      if (temperatures[row] == 0) {
        largest_rows(of, 1, n, stride, mask, mask_stride, num_best, values.data(), ids);
        const bool is_number = std::fabs(values[0]) < kInfinity;
        for (int64_t i = 0; i < num_best; ++i) scores[i] = is_number ? values[i] : -kInfinity;
        continue;
      }
      const Cuts cuts{mask, mask_stride, top_k + row, floors + row};
      const int64_t* key = keys + 3 * row;
      pick_rows(of, 1, n, stride, cuts, Drafted{}, temperatures + row, key, stream, num_best, ids, values.data());
      std::vector<int64_t> picked(ids, ids + num_best);
      for (int64_t& token : picked) token = std::max<int64_t>(token, 0);
      const uint8_t greedy = 0;
      paceline_rank(picked.data(), values.data(), 1, num_best, key, &greedy, stream, num_best, ids, scores);
    }
  };
  if (kind == 0) best(static_cast<const float*>(x));
  if (kind == 2) best(static_cast<const Bf16*>(x));
}

// Draws from q of each row: exp(log_q), of the first `scaled` candidates times `scale`, normalized. The noise is that of
// the candidates' places, not of their ids. Returns the tokens [rows], and the ids and probabilities of the candidates
// that q can yield, `sizes` of each row, row after row with room for m.
void paceline_sample(const int64_t* ids, const float* log_q, int64_t rows, int64_t m, const int64_t* keys, int stream,
                     const double* scale, const int64_t* scaled, int64_t* tokens, int32_t* q_ids, double* q_probs,
                     int64_t* sizes) {
  for (int64_t row = 0; row < rows; ++row, ids += m, log_q += m, q_ids += m, q_probs += m) {
    const Key key{keys[3 * row], keys[3 * row + 1], keys[3 * row + 2], stream};
    const double shift = std::log(scale[row]);
    const auto weight = [&](int64_t i) { return static_cast<double>(log_q[i]) + (i < scaled[row] ? shift : 0.0); };
    Best best;
    gumbel_best(
        m, 0, key, -std::numeric_limits<double>::infinity(), 1, &best,
        [&](int64_t begin, int count, float* out) {
          for (int i = 0; i < count; ++i) out[i] = static_cast<float>(weight(begin + i));
          return true;
        },
        weight);
    tokens[row] = ids[best.token];
    double total = 0;
    int64_t size = 0;
    for (int64_t i = 0; i < m; ++i) {
      const double q = std::exp(weight(i));
      q_ids[size] = static_cast<int32_t>(ids[i]), q_probs[size] = q;
      total += q, size += q > 0;
    }
    for (int64_t i = 0; i < size; ++i) q_probs[i] /= total;
    sizes[row] = size;
  }
}

// What the target may draw itself where `drawn` is the draft's token (ranking.py): the first candidates by `bonus` =
// log_q + noise and by `recovered`, the same with the first `listed` log_q moved by `shift`, or with `likeliest` those
// log_q alone. Of each row's twice `fan_out` best by either, `fan_out` - 1 are taken in turn, without `drawn`, and are put
// in the order of `recovered`. Returns them [rows, width], how many there are, by how much they are behind the best as
// recovered tokens, and by how much `drawn` and they are as bonus tokens [rows, width + 1].
void paceline_guess(const int64_t* ids, const float* log_q, int64_t rows, int64_t m, int64_t listed, float shift,
                    const int64_t* keys, int stream, const int64_t* drawn, const int64_t* fan_out,
                    const uint8_t* likeliest, int64_t width, int64_t* found, int64_t* counts, double* behind,
                    double* behind_bonus) {
  struct Guess {
    double score;
    int64_t token;
  };
  std::vector<Guess> bonus, recovered;
  const auto insert = [](std::vector<Guess>& best, int64_t most, double score, int64_t token) {
    auto at = best.end();
    while (at != best.begin() && (score > at[-1].score || (score == at[-1].score && token < at[-1].token))) --at;
    if (at == best.end() && static_cast<int64_t>(best.size()) == most) return;
    if (static_cast<int64_t>(best.size()) == most) best.pop_back();
    best.insert(at, Guess{score, token});
  };
  const auto score_of = [](const std::vector<Guess>& best, int64_t token) {
    for (const Guess& guess : best)
      if (guess.token == token) return guess.score;
    return -std::numeric_limits<double>::infinity();
  };
  uint32_t words[kCounters];
  for (int64_t row = 0; row < rows; ++row, ids += m, log_q += m) {
    const Key key{keys[3 * row], keys[3 * row + 1], keys[3 * row + 2], stream};
    const int64_t most = 2 * fan_out[row];
    bonus.clear(), recovered.clear();
    bonus.reserve(most + 1), recovered.reserve(most + 1);
    for (int64_t i = 0; i < m; ++i) {
      if (i % kCounters == 0) philox_of(ids + i, m - i, key, words);
      const float q = log_q[i], moved = i < listed ? q + shift : q;
      if (!(std::fabs(q) < kInfinity)) continue;
      const auto reaches = [&](const std::vector<Guess>& best, float weight) {
        return static_cast<int64_t>(best.size()) < most ||
               log2_below(words[i % kCounters]) <= weight * kLog2e + offset(best.back().score);
      };
      const bool may_be = reaches(bonus, q), may_recover = !likeliest[row] && reaches(recovered, moved);
      if (may_be || may_recover) {
        const double noise = static_cast<double>(gumbel(words[i % kCounters]));
        if (may_be) insert(bonus, most, static_cast<double>(q) + noise, ids[i]);
        if (may_recover) insert(recovered, most, static_cast<double>(moved) + noise, ids[i]);
      }
      if (likeliest[row] && i < std::min(most, listed)) recovered.push_back({static_cast<double>(q), ids[i]});
    }
    int64_t count = 0;
    int64_t* siblings = found + row * width;
    const auto take = [&](const std::vector<Guess>& best, int64_t i) {
      if (i >= static_cast<int64_t>(best.size()) || count == fan_out[row] - 1 || best[i].token == drawn[row]) return;
      if (std::find(siblings, siblings + count, best[i].token) == siblings + count) siblings[count++] = best[i].token;
    };
    for (int64_t i = 0; i < most; ++i) take(recovered, i), take(bonus, i);
    std::stable_sort(siblings, siblings + count, [&](int64_t a, int64_t b) {
      return score_of(recovered, a) > score_of(recovered, b);
    });
    counts[row] = count;
    const auto behind_best = [&](const std::vector<Guess>& best, int64_t token) {
      return (best.empty() ? 0.0 : best[0].score) - score_of(best, token);
    };
    behind_bonus[row * (width + 1)] = behind_best(bonus, drawn[row]);
    for (int64_t i = 0; i < count; ++i) {
      behind[row * width + i] = behind_best(recovered, siblings[i]);
      behind_bonus[row * (width + 1) + 1 + i] = behind_best(bonus, siblings[i]);
    }
  }
}

// What a draft draws by the rejection rule and guesses, from its logits: paceline_largest of the m largest x; their log q,
// of (x - max) / temperature without what the row's cuts leave out of them; paceline_unlisted of the others, for rows
// with `unlisted`; and of these paceline_sample and paceline_guess. `drawing`, `guessing`: the keys of each row's noise for
// the one and for the other. `shift`: of listed tokens, relative to unlisted ones. Token -1: the row has +inf or
// nothing but -inf, and nothing is drawn. `gaps`: the distance of the two largest log q, inf where there are no two.
void paceline_draft(const void* x, int kind, int64_t rows, int64_t n, int64_t stride, const uint8_t* masks,
                    int64_t mask_stride, const int64_t* top_k, const float* floors, const float* temperatures,
                    const int64_t* drawing, int draft_stream, const int64_t* guessing, int guess_stream, int64_t m,
                    const uint8_t* unlisted, int64_t num_best, float shift, const double* scale,
                    const int64_t* fan_out, const uint8_t* likeliest, int64_t width, int64_t* tokens, int32_t* q_ids,
                    double* q_probs, int64_t* sizes, double* gaps, int64_t* found, int64_t* counts, double* behind,
                    double* behind_bonus) {
  std::vector<int64_t> ids(m + num_best);
  std::vector<float> log_q(m + num_best);
  for (int64_t row = 0; row < rows; ++row) {
    const auto* at = static_cast<const uint8_t*>(x) + row * stride * (kind == 0 ? 4 : 2);
    const uint8_t* mask = masks ? masks + row * mask_stride : nullptr;
    tokens[row] = kNone, sizes[row] = counts[row] = 0;
    paceline_largest(at, kind, 1, n, stride, mask, mask_stride, m, log_q.data(), ids.data());
    const float top = log_q[0];
    if (!(std::fabs(top) < kInfinity)) continue;
    const auto scaled = [&](float value) { return (value - top) / temperatures[row]; };
    const float floor = std::max(floors[row], scaled(log_q[std::min(top_k[row], m) - 1]));
    for (int64_t i = 0; i < m; ++i) {
      const float v = scaled(log_q[i]);
      log_q[i] = v < floor ? -kInfinity : v;
    }
    const float log_total = std::log(sum_of_exp(log_q.data(), m));
    for (int64_t i = 0; i < m; ++i) log_q[i] -= log_total;
    gaps[row] = m > 1 ? static_cast<double>(log_q[0]) - log_q[1] : kInfinity;
    int64_t num = m;
    if (unlisted[row]) {
      num += num_best;
      paceline_unlisted(at, kind, 1, n, stride, mask, mask_stride, floors + row, temperatures + row, guessing + 3 * row,
                        guess_stream, ids.data(), m, num_best, ids.data() + m, log_q.data() + m);
      for (int64_t i = m; i < num; ++i) log_q[i] += log_q[0];
    }
    paceline_sample(ids.data(), log_q.data(), 1, m, drawing + 3 * row, draft_stream, scale + row, fan_out + row,
                    tokens + row, q_ids + row * m, q_probs + row * m, sizes + row);
    if (width == 0) {  // no row wants siblings: nothing is guessed
      behind_bonus[row] = kInfinity;
      continue;
    }
    paceline_guess(ids.data(), log_q.data(), 1, num, m, shift, guessing + 3 * row, guess_stream, tokens + row,
                   fan_out + row, likeliest + row, width, found + row * width, counts + row, behind + row * width,
                   behind_bonus + row * (width + 1));
  }
}

// Keeps what is above the row's limit and, of what equals it, the `room` tokens with the lowest ids; sets the rest to
// -inf.
void paceline_keep_largest(float* x, int64_t rows, int64_t n, int64_t stride, const float* limits,
                           const int64_t* rooms) {
  for (int64_t row = 0; row < rows; ++row, x += stride) {
    const float limit = limits[row];
    int32_t equal = 0;
    for (int64_t i = 0; i < n; ++i) {
      equal += x[i] == limit;
      x[i] = x[i] < limit ? -kInfinity : x[i];
    }
    int64_t excess = equal - rooms[row];
    for (int64_t i = n - 1; excess > 0; --i) {
      if (x[i] == limit) x[i] = -kInfinity, --excess;
    }
  }
}

// Sets what is below the row's limit to -inf.
void paceline_cut_below(float* x, int64_t rows, int64_t n, int64_t stride, const float* limits) {
  for (int64_t row = 0; row < rows; ++row, x += stride) {
    const float limit = limits[row];
    for (int64_t i = 0; i < n; ++i) x[i] = x[i] < limit ? -kInfinity : x[i];
  }
}

// The probability of `token` by `probs` [n], normalized, a distribution over the distinct tokens `ids` [n], all below
// `vocab`; 0 if it is none or cannot yield the token. Its sum, taken from the first to the last, may differ from 1 by
// `tolerance`. Neither is taken to be aligned.
double paceline_probability(const char* ids, const char* probs, int64_t n, int64_t token, int64_t vocab, double tolerance) {
  std::vector<bool> seen(vocab);
  double found = 0, sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    int32_t id;
    double p;
    std::memcpy(&id, ids + 4 * i, 4);
    std::memcpy(&p, probs + 8 * i, 8);
    if (id < 0 || id >= vocab || seen[id] || !(p >= 0 && p <= 1)) return 0;  // NaN, too
    seen[id] = true;
    if (id == token) found = p;
    sum += p;
  }
  return std::abs(sum - 1) <= tolerance ? found / sum : 0;
}

// Decides chains of draft tokens by the rejection rule (verification.py). Session s owns the rows from starts[s] up to
// starts[s + 1]. Row r decides the draft token `drafted[r]`, drawn from the `sizes[r]` packed ids and probabilities of its
// q, 0: there is none; the last row of a session decides none. `keys` of a row: seed, position, and the digest of the text
// before it, which the noise of recovered and bonus tokens depends on. Returns of each session how many draft tokens are
// accepted, the next token, and whether the one behind the accepted ones was rejected; and of the rows the log-probability
// of the token that was decided there. False: a row that is reached has no distribution, and nothing is decided.
bool paceline_verify(const void* x, int kind, int64_t n, int64_t stride, const int64_t* top_k, const float* floors,
                     const float* temperatures, int64_t sessions, const int64_t* starts, const int64_t* drafted,
                     const char* const* q_ids, const char* const* q_probs, const int64_t* sizes, double tolerance,
                     const int64_t* keys, int accept_stream, int recover_stream, int64_t* accepted, int64_t* next,
                     uint8_t* rejected, float* logprobs) {
  std::vector<uint64_t> kept;
  std::vector<double> weights(n);
  const auto decide = [&](const auto* rows) {
    Law<std::remove_const_t<std::remove_pointer_t<decltype(rows)>>> p;
    for (int64_t s = 0; s < sessions; ++s) {
      int64_t row = starts[s];
      double sum = 0;
      rejected[s] = false;
      for (;; ++row) {
        if (!p.read(rows + row * stride, n, top_k[row], floors[row], temperatures[row], kept)) return false;
        if (row + 1 == starts[s + 1] || sizes[row] == 0) break;
        const double q = paceline_probability(q_ids[row], q_probs[row], sizes[row], drafted[row], n, tolerance);
        if (!(q > 0)) break;
        logprobs[row] = p[drafted[row]];
        const double ratio = std::min(1.0, std::exp(static_cast<double>(logprobs[row])) / q);
        rejected[s] = !(uniform(Key{keys[3 * row], keys[3 * row + 1], 0, accept_stream}, 0) < ratio);
        if (rejected[s]) break;
      }
      for (int64_t i = 0; i < n; ++i) weights[i] = p[i];
      bool any = !rejected[s];
      if (rejected[s]) {
        const auto column = [&](int64_t i) {
          std::pair<int32_t, double> entry;
          std::memcpy(&entry.first, q_ids[row] + 4 * i, 4);
          std::memcpy(&entry.second, q_probs[row] + 8 * i, 8);
          return entry;
        };
        for (int64_t i = 0; i < sizes[row]; ++i) sum += column(i).second;
        for (int64_t i = 0; i < sizes[row]; ++i) {
          const auto [id, probability] = column(i);
          const double left = std::exp(weights[id]) - probability / sum;
          weights[id] = left > 0 ? std::log(left) : -std::numeric_limits<double>::infinity();
        }
        for (int64_t i = 0; i < n && !any; ++i) any = weights[i] > -std::numeric_limits<double>::infinity();
      }
      // p and q equal up to rounding leave nothing: then the token comes from p.
      if (!any)
        for (int64_t i = 0; i < n; ++i) weights[i] = p[i];
      double score;
      raw_rows(weights.data(), 1, n, n, keys + 3 * row, recover_stream, 0, next + s, &score);
      logprobs[row] = p[next[s]];
      accepted[s] = row - starts[s];
    }
    return true;
  };
  return kind == 0 ? decide(static_cast<const float*>(x)) : decide(static_cast<const Bf16*>(x));
}
}
