// Linear layers over chunks at absolute positions. See native.py, and operator.py for the same in torch.
//
// A key head, with the value heads that share its keys, is computed by itself, sequence after sequence; so are some
// channels of Mamba. Vectors hold 16 neighboring channels, each of which is summed in one fixed order:
//
//   products with a state   16 rows of the state at a time, then these sums in order
//   products of two rows    16 lanes, each in order, then halves of the lanes: 8 + 8, 4 + 4, 2 + 2, 1 + 1
//   rows of a chunk         in order
//
// Sums begin with 0 and no product is fused with a sum, so bits depend on nothing but the numbers. e^x and log(1 + x) in
// float64, of which float32 is kept, are fused: their results are within 2 units of the last place.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <iterator>
#include <vector>

#include "../exponential.h"

namespace {

constexpr int kChunk = 16;  // CHUNK: the rows of a chunk, which are the lanes of a vector
constexpr int kBlock = 16;  // rows of a state that are summed by themselves
constexpr int kVectors = 8;  // vectors of a state's row that a product keeps in registers
constexpr int kPiece = 128;  // channels of Mamba that one thread computes
constexpr float kLog2e = 1.44269504f;
constexpr int64_t kNone = -1;  // NONE of plan.py

// The tensors of a call without its output.
enum { kNumbers, kInputs, kA, kB, kWeight, kDecay, kBias, kShift, kSkip, kStates, kTails, kRows, kKeys, kUpdates, kDecays, kTensors };
constexpr int64_t kShared = 1 << 16;  // numbers of states and rows: of these a step is worth the helpers

// work(it, i) for all i below `pieces`, each once, by this thread and those that help it. False: nobody helps it, and
// nothing was done. See compiled/linear.cpp.
using Share = bool (*)(int64_t pieces, void (*work)(const void* it, int64_t piece), const void* it);
std::atomic<Share> share{nullptr};

enum Kind : int64_t { kGatedDelta, kKimiDelta, kLightning, kConvolution, kMamba, kMamba2 };  // in the order of Kind

// The arguments of a call, as in native.py; those of Gates are described there.
struct Call {
  const int64_t* numbers;  // LinearStep.encode
  int64_t num_numbers;
  const void *inputs, *a, *b;
  const float *weight, *decay, *bias, *shift, *skip;  // the last two null: there is none
  float* states;  // [state_slots, value_heads, key_dim, value_dim]
  void *tails, *rows;  // [state_slots, width - 1, conv_dim], [row_slots, kChunk, conv_dim]
  float *keys, *updates, *decays;  // [row_slots, kChunk, ..]
  void* out;  // [tokens, value_heads, value_dim]
  int64_t tokens, key_heads, value_heads, key_dim, value_dim, width, state_slots, row_slots;
  int64_t value_bytes;  // 2: bfloat16, 4: float32
  int64_t inputs_row, a_row, b_row;  // numbers from a token to the next one
  int64_t kind, rounds_rates, rounds_convolution, activates;
  int64_t counts[kTensors];  // of the numbers of each tensor, in this order; of inputs, a and b of a row
  double scale, lowest, shortest, longest;  // lowest 0: there is none
};

struct Float32 {
  using Value = float;
  static __m512 load(const Value* x, __mmask16 some) { return _mm512_maskz_loadu_ps(some, x); }
  static void store(Value* to, __mmask16 some, __m512 x) { _mm512_mask_storeu_ps(to, some, x); }
  static __m512 round(__m512 x) { return x; }
  static float widen(Value x) { return x; }
};

struct Bfloat16 {
  using Value = uint16_t;
  static __m512 load(const Value* x, __mmask16 some) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, x)), 16));
  }
  static void store(Value* to, __mmask16 some, __m512 x) {
    const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(round(x)), 16);
    _mm256_mask_storeu_epi16(to, some, _mm512_cvtepi32_epi16(high));
  }
  static __m512 round(__m512 x) {  // to the nearest bfloat16, of two the even one
    const __m512i bits = _mm512_castps_si512(x), high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(_mm512_and_si512(sum, high), nan, _mm512_set1_epi32(0x7fc00000)));
  }
  static float widen(Value x) { return _mm512_cvtss_f32(load(&x, 1)); }
};

__mmask16 first_of(int64_t count) { return count >= 16 ? 0xffff : static_cast<__mmask16>((1u << count) - 1); }

int64_t padded(int64_t size) { return (size + 15) / 16 * 16; }

// sum + a * b, rounded twice.
__m512 add_product(__m512 sum, __m512 a, __m512 b) { return _mm512_add_ps(sum, _mm512_mul_ps(a, b)); }

__m512 exponential(__m512 x) { return paceline::exp2(_mm512_mul_ps(x, _mm512_set1_ps(kLog2e))); }

float exponential(float x) { return _mm512_cvtss_f32(exponential(_mm512_set1_ps(x))); }

__m512 silu(__m512 x) {
  const __m512 e = paceline::exp2(_mm512_mul_ps(x, _mm512_set1_ps(-kLog2e)));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

// f of 16 numbers in float64.
template <class Function>
__m512 in_float64(__m512 x, const Function& f) {
  const __m256 low = _mm512_cvtpd_ps(f(_mm512_cvtps_pd(_mm512_castps512_ps256(x))));
  return _mm512_insertf32x8(_mm512_castps256_ps512(low), _mm512_cvtpd_ps(f(_mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)))), 1);
}

constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;

__m512d polynomial(__m512d x, const double* coefficients, int count) {
  __m512d sum = _mm512_set1_pd(coefficients[0]);
  for (int i = 1; i < count; ++i) sum = _mm512_fmadd_pd(sum, x, _mm512_set1_pd(coefficients[i]));
  return sum;
}

__m512d exponential(__m512d x) {
  constexpr double kInverse[] = {1 / 6227020800.0, 1 / 479001600.0, 1 / 39916800.0, 1 / 3628800.0, 1 / 362880.0,
                                 1 / 40320.0, 1 / 5040.0, 1 / 720.0, 1 / 120.0, 1 / 24.0, 1 / 6.0, 0.5, 1.0, 1.0};
  x = _mm512_max_pd(_mm512_set1_pd(-1000.0), _mm512_min_pd(_mm512_set1_pd(1000.0), x));
  const __m512d n = _mm512_roundscale_pd(_mm512_mul_pd(x, _mm512_set1_pd(1.44269504088896340736)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512d r = _mm512_fnmadd_pd(n, _mm512_set1_pd(kLn2Low), _mm512_fnmadd_pd(n, _mm512_set1_pd(kLn2High), x));
  return _mm512_scalef_pd(polynomial(r, kInverse, std::size(kInverse)), n);
}

// log(1 + x) of x >= 0: of 1 + x = m 2^n with m from 0.75 to 1.5, 2 atanh((m - 1) / (m + 1)); and what the sum has lost.
__m512d log1p(__m512d x) {
  constexpr double kOdd[] = {1 / 25.0, 1 / 23.0, 1 / 21.0, 1 / 19.0, 1 / 17.0, 1 / 15.0, 1 / 13.0,
                             1 / 11.0, 1 / 9.0, 1 / 7.0, 1 / 5.0, 1 / 3.0, 1.0};
  const __m512d one = _mm512_set1_pd(1.0), y = _mm512_add_pd(one, x), part = _mm512_sub_pd(y, one);
  const __m512d lost = _mm512_add_pd(_mm512_sub_pd(one, _mm512_sub_pd(y, part)), _mm512_sub_pd(x, part));
  const __m512i bits = _mm512_castpd_si512(y), least = _mm512_castpd_si512(_mm512_set1_pd(0.75));
  const __m512i power = _mm512_srai_epi64(_mm512_sub_epi64(bits, least), 52);
  const __m512d m = _mm512_castsi512_pd(_mm512_sub_epi64(bits, _mm512_slli_epi64(power, 52))), n = _mm512_cvtepi64_pd(power);
  const __m512d s = _mm512_div_pd(_mm512_sub_pd(m, one), _mm512_add_pd(m, one));
  const __m512d atanh = _mm512_mul_pd(s, polynomial(_mm512_mul_pd(s, s), kOdd, std::size(kOdd)));
  const __m512d low = _mm512_fmadd_pd(n, _mm512_set1_pd(kLn2Low), _mm512_mul_pd(lost, _mm512_rcp14_pd(y)));
  return _mm512_fmadd_pd(n, _mm512_set1_pd(kLn2High), _mm512_fmadd_pd(_mm512_set1_pd(2.0), atanh, low));
}

__m512 softplus(__m512 x) {
  const __m512 soft = in_float64(x, [](__m512d y) { return log1p(exponential(y)); });
  return _mm512_mask_mov_ps(soft, _mm512_cmp_ps_mask(x, _mm512_set1_ps(20.0f), _CMP_GT_OQ), x);
}

// factor / (1 + e^x)
__m512 falling_sigmoid(__m512 x, double factor) {
  return in_float64(x, [factor](__m512d y) {
    return _mm512_div_pd(_mm512_set1_pd(factor), _mm512_add_pd(_mm512_set1_pd(1.0), exponential(y)));
  });
}

float sum_of_lanes(__m512 x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// Sum of products of two rows of `size` numbers, a multiple of 16.
float dot(const float* a, const float* b, int64_t size) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += 16) sum = add_product(sum, _mm512_loadu_ps(a + i), _mm512_loadu_ps(b + i));
  return sum_of_lanes(sum);
}

// Adds to `by_q` the products of V vectors of a state's columns with a query; Both: and to `by_k` those with a key.
template <int V, bool Both>
void read_state(const float* state, int64_t rows, int64_t stride, __mmask16 last, const float* k, const float* q,
                float* by_k, float* by_q) {
  for (int64_t first = 0; first < rows; first += kBlock) {
    __m512 for_k[V], for_q[V];
    for (int v = 0; v < V; ++v) for_k[v] = for_q[v] = _mm512_setzero_ps();
    const int64_t stop = std::min(first + kBlock, rows);
    for (int64_t c = first; c < stop; ++c) {
      const __m512 of_k = _mm512_set1_ps(k[c]), of_q = _mm512_set1_ps(q[c]);
      for (int v = 0; v < V; ++v) {
        const __m512 s = _mm512_maskz_loadu_ps(v == V - 1 ? last : 0xffff, state + c * stride + 16 * v);
        if constexpr (Both) for_k[v] = add_product(for_k[v], s, of_k);
        for_q[v] = add_product(for_q[v], s, of_q);
      }
    }
    for (int v = 0; v < V; ++v) {
      if constexpr (Both) _mm512_storeu_ps(by_k + 16 * v, _mm512_add_ps(_mm512_loadu_ps(by_k + 16 * v), for_k[v]));
      _mm512_storeu_ps(by_q + 16 * v, _mm512_add_ps(_mm512_loadu_ps(by_q + 16 * v), for_q[v]));
    }
  }
}

// V vectors of the columns of to = state * fade of each row + the chunk's keys, each faded already, times its updates.
template <int V>
void fold_columns(const float* state, float* to, int64_t rows, int64_t stride, __mmask16 last, const float* fade,
                  const float* keys, int64_t key_stride, const float* updates, int64_t update_stride) {
  for (int64_t c = 0; c < rows; ++c) {
    __m512 sum[V];
    for (int v = 0; v < V; ++v) {
      const __mmask16 some = v == V - 1 ? last : 0xffff;
      const __m512 s = state == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(some, state + c * stride + 16 * v);
      sum[v] = _mm512_mul_ps(s, _mm512_set1_ps(fade[c]));
    }
    for (int j = 0; j < kChunk; ++j) {
      const __m512 k = _mm512_set1_ps(keys[j * key_stride + c]);
      for (int v = 0; v < V; ++v) {
        sum[v] = add_product(sum[v], k, _mm512_loadu_ps(updates + j * update_stride + 16 * v));
      }
    }
    for (int v = 0; v < V; ++v) {
      _mm512_mask_storeu_ps(to + c * stride + 16 * v, v == V - 1 ? last : 0xffff, sum[v]);
    }
  }
}

// function(columns, mask of the last vector), for groups of vectors that fit into registers.
template <class Function>
void over_columns(int64_t size, const Function& function) {
  int64_t at = 0;
  const auto take = [&]<int V>() {
    for (; at + 16 * V <= padded(size); at += 16 * V) function.template operator()<V>(at, first_of(size - at - 16 * (V - 1)));
  };
  take.template operator()<kVectors>(), take.template operator()<4>(), take.template operator()<1>();
}

// Channels that lie side by side: of a query, a key, or a value of a head.
struct Span {
  int64_t from, size, to;  // in the convolution's inputs, how many, in the tile
};

struct Chunk {
  int64_t rows, first, count, store;
  const int64_t* also;  // (offset, slot, offset there) each
  int64_t num_also;
};

// work.begin(slot of a state) and work.run(chunk, its first token, whether the state behind it is needed), for all
// sequences and their chunks.
template <class Work>
void walk(const Call& it, Work& work) {
  const int64_t* next = it.numbers + 1 + 3 * it.numbers[0];  // behind the groups, which one thread needs not know
  int64_t at = 0;
  for (int64_t left = *next++; left > 0; --left) {
    work.begin(*next++);
    for (int64_t chunks = *next++; chunks > 0; --chunks) {
      const Chunk chunk = {next[0], next[1], next[2], next[3], next + 5, next[4]};
      next += 5 + 3 * chunk.num_also;
      work.run(chunk, at, chunks > 1 || chunk.store != kNone);
      at += chunk.count;
    }
  }
}

// store(row of the chunk, row of the pools), for each row that a chunk computes or writes to a further place.
template <class Store>
void store_rows_of(const Chunk& chunk, const Store& store) {
  if (chunk.rows != kNone) {
    for (int64_t t = chunk.first; t < chunk.first + chunk.count; ++t) store(t, chunk.rows * kChunk + t);
  }
  for (int64_t i = 0; i < chunk.num_also; ++i) {
    const int64_t* also = chunk.also + 3 * i;
    store(also[0], also[1] * kChunk + also[2]);
  }
}

// A key head and the value heads that share its keys; of a convolution alone all channels, as one value without keys.
template <class T>
class Head {
  using Value = typename T::Value;

 public:
  explicit Head(const Call& call)
      : it_(call), groups_(call.value_heads / call.key_heads), convolves_(call.kind != kLightning),
        is_corrected_(call.kind == kGatedDelta || call.kind == kKimiDelta), by_channel_(call.kind == kKimiDelta),
        conv_dim_(2 * call.key_heads * call.key_dim + call.value_heads * call.value_dim), keys_(padded(call.key_dim)),
        values_(padded(call.value_dim)), wide_(2 * keys_ + groups_ * values_), history_(call.width - 1),
        decay_dim_(by_channel_ ? call.key_dim : 1), decay_row_(by_channel_ ? keys_ : 1) {
    x_.resize((history_ + kChunk) * wide_), mixed_.resize(kChunk * wide_);
    if (keys_ == 0) return;
    k_.resize(kChunk * keys_), q_.resize(kChunk * keys_), faded_.resize(kChunk * keys_), fades_.resize(keys_);
    if (by_channel_) faded_q_.resize(kChunk * keys_);
    u_.resize(groups_ * kChunk * values_), decays_.resize(groups_ * kChunk * decay_row_);
    by_k_.resize(kChunk * values_), by_q_.resize(kChunk * values_);
    states_.resize(groups_);
  }

  static int64_t pieces(const Call& it) { return it.key_heads; }

  void compute(int64_t number) {
    take(number);
    walk(it_, *this);
  }

  void begin(int64_t slot) {
    for (size_t g = 0; g < states_.size(); ++g) states_[g] = slot == kNone ? nullptr : state(slot, g);
    std::fill_n(x_.begin(), history_ * wide_, 0.0f);
    if (slot != kNone) load_rows(static_cast<const Value*>(it_.tails) + slot * history_ * conv_dim_, conv_dim_, history_, 0);
  }

  void run(const Chunk& chunk, int64_t at, bool goes_on) {
    load(chunk, at);
    compute(chunk, at);
    if (goes_on) fold(chunk);
  }

 private:
  void take(int64_t number) {
    head_ = number, first_value_ = number * groups_;
    const int64_t keys = it_.key_heads * it_.key_dim, all_values = it_.value_heads * it_.value_dim;
    const bool values_first = it_.kind == kMamba2;
    const int64_t key_at = values_first ? all_values : keys, query_at = values_first ? all_values + keys : 0;
    spans_.clear();
    if (keys > 0) {
      spans_.push_back({query_at + number * it_.key_dim, it_.key_dim, 0});
      spans_.push_back({key_at + number * it_.key_dim, it_.key_dim, keys_});
    }
    for (int64_t g = 0; g < groups_; ++g) {
      const int64_t from = (values_first ? 0 : 2 * keys) + (first_value_ + g) * it_.value_dim;
      spans_.push_back({from, it_.value_dim, 2 * keys_ + g * values_});
    }
  }

  float* state(int64_t slot, int64_t group) const {
    return it_.states + (slot * it_.value_heads + first_value_ + group) * it_.key_dim * it_.value_dim;
  }

  float* decays(int64_t group) { return &decays_[group * kChunk * decay_row_]; }

  // Inputs of the convolution, `count` rows of the head's channels, from row `to` of the tile on.
  void load_rows(const Value* from, int64_t stride, int64_t count, int64_t to) {
    for (int64_t row = 0; row < count; ++row) {
      for (const Span& span : spans_) {
        for (int64_t i = 0; i < span.size; i += 16) {
          const __mmask16 some = first_of(span.size - i);
          _mm512_storeu_ps(&x_[(to + row) * wide_ + span.to + i], T::load(from + row * stride + span.from + i, some));
        }
      }
    }
  }

  void store_rows(Value* to, int64_t count, int64_t from) const {
    for (int64_t row = 0; row < count; ++row) {
      for (const Span& span : spans_) {
        for (int64_t i = 0; i < span.size; i += 16) {
          const __m512 x = _mm512_loadu_ps(&x_[(from + row) * wide_ + span.to + i]);
          T::store(to + row * conv_dim_ + span.from + i, first_of(span.size - i), x);
        }
      }
    }
  }

  // The rows of a chunk before the first one that is computed, and the inputs of those that are.
  void load(const Chunk& chunk, int64_t at) {
    load_rows(static_cast<const Value*>(it_.inputs) + at * it_.inputs_row, it_.inputs_row, chunk.count, history_ + chunk.first);
    if (chunk.first == 0) return;
    const int64_t row = chunk.rows * kChunk, read = std::max<int64_t>(0, chunk.first - history_);  // by the convolution
    if (convolves_) {
      load_rows(static_cast<const Value*>(it_.rows) + (row + read) * conv_dim_, conv_dim_, chunk.first - read, history_ + read);
    }
    for (int64_t j = 0; keys_ > 0 && j < chunk.first; ++j) {
      std::copy_n(it_.keys + ((row + j) * it_.key_heads + head_) * it_.key_dim, it_.key_dim, &k_[j * keys_]);
      for (int64_t g = 0; g < groups_; ++g) {
        const int64_t place = (row + j) * it_.value_heads + first_value_ + g;
        std::copy_n(it_.updates + place * it_.value_dim, it_.value_dim, &u_[(g * kChunk + j) * values_]);
        std::copy_n(it_.decays + place * decay_dim_, decay_dim_, decays(g) + j * decay_row_);
      }
    }
  }

  // The rows that a chunk computes, and the outputs of their tokens, the first of which is `at`.
  void compute(const Chunk& chunk, int64_t at) {
    for (int64_t t = chunk.first; t < chunk.first + chunk.count; ++t) {
      convolve(t);
      if (keys_ > 0) take_keys(t);
      else store_output(at + t - chunk.first, 0, &mixed_[t * wide_]);
    }
    for (int64_t g = 0; keys_ > 0 && g < groups_; ++g) compute_head(chunk, at, g);
    store_rows_of(chunk, [this](int64_t t, int64_t row) { store_row(t, row); });
  }

  void convolve(int64_t t) {
    if (!convolves_) {
      std::copy_n(&x_[t * wide_], wide_, &mixed_[t * wide_]);
      return;
    }
    for (const Span& span : spans_) {
      for (int64_t i = 0; i < span.size; i += 16) {
        const float *x = &x_[t * wide_ + span.to + i], *weight = it_.weight + span.from + i;
        const __mmask16 some = first_of(span.size - i);
        __m512 sum = _mm512_setzero_ps();
        for (int64_t place = 0; place <= history_; ++place) {
          const __m512 w = _mm512_maskz_loadu_ps(some, weight + place * conv_dim_);
          sum = add_product(sum, _mm512_loadu_ps(x + place * wide_), w);
        }
        if (it_.shift != nullptr) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(some, it_.shift + span.from + i));
        if (it_.rounds_convolution) sum = T::round(sum);
        if (it_.activates) sum = T::round(silu(sum));
        _mm512_storeu_ps(&mixed_[t * wide_ + span.to + i], sum);
      }
    }
  }

  // The query and the key of row t, and the products of each with the keys up to t.
  void take_keys(int64_t t) {
    if (is_corrected_) {
      normalize(&mixed_[t * wide_], &q_[t * keys_], static_cast<float>(1.0 / std::sqrt(it_.key_dim)));
      normalize(&mixed_[t * wide_ + keys_], &k_[t * keys_], 1.0f);
    } else {
      std::copy_n(&mixed_[t * wide_], keys_, &q_[t * keys_]);
      std::copy_n(&mixed_[t * wide_ + keys_], keys_, &k_[t * keys_]);
    }
    for (int64_t j = 0; !by_channel_ && j <= t; ++j) {
      if (is_corrected_) of_k_[t][j] = dot(&k_[j * keys_], &k_[t * keys_], keys_);
      of_q_[t][j] = dot(&k_[j * keys_], &q_[t * keys_], keys_);
    }
  }

  void normalize(const float* x, float* to, float scale) const {
    const float factor = 1.0f / std::sqrt(dot(x, x, keys_) + 1e-6f);
    for (int64_t i = 0; i < keys_; i += 16) {
      const __m512 y = _mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(factor));
      _mm512_storeu_ps(to + i, _mm512_mul_ps(y, _mm512_set1_ps(scale)));
    }
  }

  void compute_head(const Chunk& chunk, int64_t at, int64_t g) {
    const int64_t stop = chunk.first + chunk.count;
    alignas(64) float strengths[kChunk];
    if (by_channel_) fade_channels(chunk, at, g);
    else fade_head(chunk, at, g, strengths);
    if (is_corrected_) {
      const __m512 open = T::round(falling_sigmoid(_mm512_sub_ps(_mm512_setzero_ps(), of_rows(it_.b, it_.b_row, chunk, at, g)), 1.0));
      _mm512_store_ps(strengths, _mm512_mul_ps(open, _mm512_set1_ps(static_cast<float>(it_.scale))));
    }
    for (auto* sums : {&by_k_, &by_q_}) std::fill_n(&(*sums)[chunk.first * values_], chunk.count * values_, 0.0f);
    if (states_[g] != nullptr) read(states_[g], chunk.first, stop, decays(g));
    for (int64_t t = chunk.first; t < stop; ++t) {
      const float* v = &mixed_[t * wide_ + 2 * keys_ + g * values_];
      correct(t, decays(g), &u_[g * kChunk * values_], strengths[t], v);
      if (it_.skip != nullptr) {
        const __m512 skip = _mm512_set1_ps(it_.skip[first_value_ + g]);
        for (float *out = &by_q_[t * values_], *end = out + values_; out < end; out += 16, v += 16) {
          _mm512_storeu_ps(out, add_product(_mm512_loadu_ps(out), _mm512_loadu_ps(v), skip));
        }
      }
      store_output(at + t - chunk.first, g, &by_q_[t * values_]);
    }
  }

  void store_output(int64_t token, int64_t g, const float* from) const {
    Value* out = static_cast<Value*>(it_.out) + (token * it_.value_heads + first_value_ + g) * it_.value_dim;
    for (int64_t i = 0; i < it_.value_dim; i += 16) T::store(out + i, first_of(it_.value_dim - i), _mm512_loadu_ps(from + i));
  }

  // The numbers of a value head in [tokens, value_heads], each in the lane of its row.
  __m512 of_rows(const void* of, int64_t stride, const Chunk& chunk, int64_t at, int64_t g) const {
    alignas(64) float lanes[kChunk] = {};
    const Value* from = static_cast<const Value*>(of) + at * stride + first_value_ + g;
    for (int64_t i = 0; i < chunk.count; ++i) lanes[chunk.first + i] = T::widen(from[i * stride]);
    return _mm512_load_ps(lanes);
  }

  __m512 rates(__m512 x, __m512 decay) const {
    const __m512 rate = it_.lowest != 0 ? falling_sigmoid(_mm512_mul_ps(decay, x), it_.lowest) : _mm512_mul_ps(decay, softplus(x));
    return it_.rounds_rates ? T::round(rate) : rate;
  }

  // Sums of the rates of a head's rows; of Mamba2 their strengths, too, of lightning attention 1.
  void fade_head(const Chunk& chunk, int64_t at, int64_t g, float* strengths) {
    const int64_t head = first_value_ + g;
    const __m512 decay = _mm512_set1_ps(it_.decay[head]);
    __m512 strength = _mm512_set1_ps(1.0f), rate = decay;
    if (it_.kind != kLightning) {
      const __m512 x = _mm512_add_ps(of_rows(it_.a, it_.a_row, chunk, at, g), _mm512_set1_ps(it_.bias[head]));
      if (it_.kind == kMamba2) {
        const __m512 least = _mm512_set1_ps(static_cast<float>(it_.shortest)), most = _mm512_set1_ps(static_cast<float>(it_.longest));
        strength = _mm512_min_ps(most, _mm512_max_ps(least, softplus(x)));
        rate = _mm512_mul_ps(decay, strength);
      } else {
        rate = rates(x, decay);
      }
    }
    alignas(64) float of_row[kChunk];
    _mm512_store_ps(of_row, rate), _mm512_store_ps(strengths, strength);
    float* sums = decays(g);
    for (int64_t t = chunk.first; t < chunk.first + chunk.count; ++t) sums[t] = (t ? sums[t - 1] : 0.0f) + of_row[t];
  }

  // The same for each channel of the keys.
  void fade_channels(const Chunk& chunk, int64_t at, int64_t g) {
    const int64_t head = first_value_ + g;
    const __m512 decay = _mm512_set1_ps(it_.decay[head]);
    for (int64_t t = chunk.first; t < chunk.first + chunk.count; ++t) {
      const Value* a = static_cast<const Value*>(it_.a) + (at + t - chunk.first) * it_.a_row + head * it_.key_dim;
      float* sums = decays(g) + t * keys_;
      for (int64_t i = 0; i < it_.key_dim; i += 16) {
        const __mmask16 some = first_of(it_.key_dim - i);
        const __m512 x = _mm512_add_ps(T::load(a + i, some), _mm512_maskz_loadu_ps(some, it_.bias + head * it_.key_dim + i));
        const __m512 before = t ? _mm512_loadu_ps(sums - keys_ + i) : _mm512_setzero_ps();
        _mm512_storeu_ps(sums + i, _mm512_maskz_add_ps(some, before, rates(x, decay)));
      }
    }
  }

  // Products of the state with the keys and queries of the rows [first, stop); by channel each faded by then.
  void read(const float* state, int64_t first, int64_t stop, const float* decays) {
    const float *k = k_.data(), *q = q_.data();
    if (by_channel_) {
      for (int64_t i = first * keys_; i < stop * keys_; i += 16) {
        const __m512 fade = exponential(_mm512_loadu_ps(decays + i));
        _mm512_storeu_ps(&faded_[i], _mm512_mul_ps(_mm512_loadu_ps(k + i), fade));
        _mm512_storeu_ps(&faded_q_[i], _mm512_mul_ps(_mm512_loadu_ps(q + i), fade));
      }
      k = faded_.data(), q = faded_q_.data();
    }
    over_columns(it_.value_dim, [&]<int V>(int64_t column, __mmask16 last) {
      const auto of_state = is_corrected_ ? read_state<V, true> : read_state<V, false>;
      for (int64_t t = first; t < stop; ++t) {
        of_state(state + column, it_.key_dim, it_.value_dim, last, k + t * keys_, q + t * keys_, &by_k_[t * values_ + column],
                 &by_q_[t * values_ + column]);
      }
    });
  }

  // What the rows up to t weigh in the update and in the output of t; returns the weight of the products with the state.
  float weigh(int64_t t, const float* decays, float* of_k, float* of_q) const {
    if (!by_channel_) {
      const __m512 fade = exponential(_mm512_sub_ps(_mm512_set1_ps(decays[t]), _mm512_loadu_ps(decays)));
      _mm512_store_ps(of_k, _mm512_mul_ps(_mm512_loadu_ps(of_k_[t]), fade));
      _mm512_store_ps(of_q, _mm512_mul_ps(_mm512_loadu_ps(of_q_[t]), fade));
      return exponential(decays[t]);
    }
    for (int64_t j = 0; j <= t; ++j) {
      __m512 for_k = _mm512_setzero_ps(), for_q = _mm512_setzero_ps();
      for (int64_t i = 0; i < keys_; i += 16) {
        const __m512 since = _mm512_sub_ps(_mm512_loadu_ps(decays + t * keys_ + i), _mm512_loadu_ps(decays + j * keys_ + i));
        const __m512 k = _mm512_mul_ps(_mm512_loadu_ps(&k_[j * keys_ + i]), exponential(since));
        for_k = add_product(for_k, k, _mm512_loadu_ps(&k_[t * keys_ + i]));
        for_q = add_product(for_q, k, _mm512_loadu_ps(&q_[t * keys_ + i]));
      }
      of_k[j] = sum_of_lanes(for_k), of_q[j] = sum_of_lanes(for_q);
    }
    return 1.0f;
  }

  // Adds the rows of the chunk before t to the products of t with the state, which makes its update and its output.
  void correct(int64_t t, const float* decays, float* u, float strength, const float* v) {
    alignas(64) float of_k[kChunk], of_q[kChunk];
    const __m512 total = _mm512_set1_ps(weigh(t, decays, of_k, of_q));
    for (int64_t i = 0; i < values_; i += 16) {
      __m512 for_k = _mm512_mul_ps(_mm512_loadu_ps(&by_k_[t * values_ + i]), total);
      __m512 for_q = _mm512_mul_ps(_mm512_loadu_ps(&by_q_[t * values_ + i]), total);
      for (int64_t j = 0; j < t; ++j) {
        const __m512 row = _mm512_loadu_ps(u + j * values_ + i);
        for_k = add_product(for_k, _mm512_set1_ps(of_k[j]), row), for_q = add_product(for_q, _mm512_set1_ps(of_q[j]), row);
      }
      const __m512 value = _mm512_loadu_ps(v + i);
      const __m512 own = _mm512_mul_ps(is_corrected_ ? _mm512_sub_ps(value, for_k) : value, _mm512_set1_ps(strength));
      _mm512_storeu_ps(u + t * values_ + i, own);
      _mm512_storeu_ps(&by_q_[t * values_ + i], add_product(for_q, _mm512_set1_ps(of_q[t]), own));
    }
  }

  // Writes row t of the chunk to a row of the pools.
  void store_row(int64_t t, int64_t row) {
    if (convolves_) store_rows(static_cast<Value*>(it_.rows) + row * conv_dim_, 1, history_ + t);
    if (keys_ == 0) return;
    std::copy_n(&k_[t * keys_], it_.key_dim, it_.keys + (row * it_.key_heads + head_) * it_.key_dim);
    for (int64_t g = 0; g < groups_; ++g) {
      const int64_t place = row * it_.value_heads + first_value_ + g;
      std::copy_n(&u_[(g * kChunk + t) * values_], it_.value_dim, it_.updates + place * it_.value_dim);
      std::copy_n(decays(g) + t * decay_row_, decay_dim_, it_.decays + place * decay_dim_);
    }
  }

  // The state behind a whole chunk, and the inputs that the convolution reads behind it.
  void fold(const Chunk& chunk) {
    const int64_t size = it_.key_dim * it_.value_dim;
    for (int64_t g = 0; g < static_cast<int64_t>(states_.size()); ++g) {
      fade_keys(decays(g));
      if (chunk.store == kNone) scratch_.resize(groups_ * size);
      float* to = chunk.store == kNone ? &scratch_[g * size] : state(chunk.store, g);
      over_columns(it_.value_dim, [&]<int V>(int64_t column, __mmask16 last) {
        fold_columns<V>(states_[g] == nullptr ? nullptr : states_[g] + column, to + column, it_.key_dim, it_.value_dim,
                        last, fades_.data(), faded_.data(), keys_, &u_[g * kChunk * values_ + column], values_);
      });
      states_[g] = to;
    }
    std::copy(x_.end() - history_ * wide_, x_.end(), x_.begin());
    if (chunk.store != kNone) {
      store_rows(static_cast<Value*>(it_.tails) + chunk.store * history_ * conv_dim_, history_, 0);
    }
  }

  // The decay of a state's rows over a chunk, and each key after the decay since its row.
  void fade_keys(const float* decays) {
    const float* end = decays + (kChunk - 1) * decay_row_;
    for (int64_t i = 0; i < keys_; i += 16) {
      const __m512 until = by_channel_ ? _mm512_loadu_ps(end + i) : _mm512_set1_ps(*end);
      _mm512_storeu_ps(&fades_[i], exponential(until));
      for (int64_t j = 0; j < kChunk; ++j) {
        const __m512 then = by_channel_ ? _mm512_loadu_ps(decays + j * keys_ + i) : _mm512_set1_ps(decays[j]);
        const __m512 k = _mm512_loadu_ps(&k_[j * keys_ + i]);
        _mm512_storeu_ps(&faded_[j * keys_ + i], _mm512_mul_ps(k, exponential(_mm512_sub_ps(until, then))));
      }
    }
  }

  const Call& it_;
  const int64_t groups_;
  const bool convolves_, is_corrected_, by_channel_;
  const int64_t conv_dim_, keys_, values_, wide_, history_;  // sizes in whole vectors, but of the inputs
  const int64_t decay_dim_, decay_row_;  // decays of a row in the pools and in the tile
  int64_t head_ = 0, first_value_ = 0;
  std::vector<Span> spans_;
  std::vector<const float*> states_;  // of each value head; null: zeros
  // Rows of the chunk, padded to whole vectors: x and mixed of the convolution, of all channels of the head.
  std::vector<float> x_, mixed_, k_, q_, faded_, faded_q_, fades_, u_, decays_, by_k_, by_q_, scratch_;
  float of_k_[kChunk][kChunk] = {}, of_q_[kChunk][kChunk] = {};  // products of a row's key and query with each key
};

// kPiece channels of Mamba, 16 at a time: their states, token by token from the chunk's beginning.
template <class T>
class Scan {
  using Value = typename T::Value;

 public:
  explicit Scan(const Call& call) : it_(call), size_(call.key_dim) {
    for (auto* rows : {&states_, &speeds_}) rows->resize(size_ * 16);
    for (auto* rows : {&keys_, &queries_}) rows->resize(size_ * kChunk);
  }

  static int64_t pieces(const Call& it) { return (it.value_heads + kPiece - 1) / kPiece; }

  void compute(int64_t number) {
    const int64_t stop = std::min((number + 1) * kPiece, it_.value_heads);
    for (channel_ = number * kPiece; channel_ < stop; channel_ += 16) {
      some_ = first_of(stop - channel_);
      bias_ = _mm512_maskz_loadu_ps(some_, it_.bias + channel_), skip_ = _mm512_maskz_loadu_ps(some_, it_.skip + channel_);
      load_rows(it_.decay + channel_ * size_, speeds_);
      walk(it_, *this);
    }
  }

  void begin(int64_t slot) {
    if (slot == kNone) std::fill(states_.begin(), states_.end(), 0.0f);
    else load_rows(state(slot), states_);
  }

  void run(const Chunk& chunk, int64_t at, bool) {
    for (int64_t t = 0; t < chunk.first + chunk.count; ++t) {
      const int64_t token = at + t - chunk.first;
      __m512 x = _mm512_setzero_ps();
      if (t < chunk.first) load_row(t, chunk.rows * kChunk + t);
      else x = make_row(t, token);
      const __m512 out = step(t);
      if (t < chunk.first) continue;
      Value* to = static_cast<Value*>(it_.out) + token * it_.value_heads + channel_;
      T::store(to, some_, add_product(out, x, skip_));
    }
    store_rows_of(chunk, [this](int64_t t, int64_t row) { store_row(t, row); });
    if (chunk.store == kNone) return;
    for (int64_t c = 0; c < size_; ++c) {
      _mm512_mask_i32scatter_ps(state(chunk.store) + c, some_, places(), _mm512_loadu_ps(&states_[16 * c]), 4);
    }
  }

 private:
  float* state(int64_t slot) const { return it_.states + (slot * it_.value_heads + channel_) * size_; }

  // The place of each channel's row among those of 16 channels.
  __m512i places() const {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(size_)));
  }

  // [16 channels, size] to [size, 16 channels].
  void load_rows(const float* from, std::vector<float>& to) const {
    for (int64_t c = 0; c < size_; ++c) {
      _mm512_storeu_ps(&to[16 * c], _mm512_mask_i32gather_ps(_mm512_setzero_ps(), some_, places(), from + c, 4));
    }
  }

  void load_row(int64_t t, int64_t row) {
    std::copy_n(it_.keys + row * size_, size_, &keys_[t * size_]);
    updates_[t] = _mm512_maskz_loadu_ps(some_, it_.updates + row * it_.value_heads + channel_);
    steps_[t] = _mm512_maskz_loadu_ps(some_, it_.decays + row * it_.value_heads + channel_);
  }

  void store_row(int64_t t, int64_t row) const {
    if (channel_ == 0) std::copy_n(&keys_[t * size_], size_, it_.keys + row * size_);  // all channels have the same
    _mm512_mask_storeu_ps(it_.updates + row * it_.value_heads + channel_, some_, updates_[t]);
    _mm512_mask_storeu_ps(it_.decays + row * it_.value_heads + channel_, some_, steps_[t]);
  }

  // Row t, of a token, whose values are returned.
  __m512 make_row(int64_t t, int64_t token) {
    const Value *b = static_cast<const Value*>(it_.b) + token * it_.b_row, *a = static_cast<const Value*>(it_.a) + token * it_.a_row;
    for (int64_t c = 0; c < size_; ++c) keys_[t * size_ + c] = T::widen(b[c]), queries_[t * size_ + c] = T::widen(b[size_ + c]);
    const __m512 x = T::load(static_cast<const Value*>(it_.inputs) + token * it_.inputs_row + channel_, some_);
    steps_[t] = softplus(_mm512_add_ps(T::load(a + channel_, some_), bias_));
    updates_[t] = _mm512_mul_ps(steps_[t], x);
    return x;
  }

  // Takes the states to after row t; returns their products with its query.
  __m512 step(int64_t t) {
    __m512 total = _mm512_setzero_ps();
    for (int64_t first = 0; first < size_; first += kBlock) {
      __m512 sum = _mm512_setzero_ps();
      for (int64_t c = first; c < std::min(first + kBlock, size_); ++c) {
        const __m512 fade = exponential(_mm512_mul_ps(_mm512_loadu_ps(&speeds_[16 * c]), steps_[t]));
        const __m512 faded = _mm512_mul_ps(_mm512_loadu_ps(&states_[16 * c]), fade);
        const __m512 s = add_product(faded, _mm512_set1_ps(keys_[t * size_ + c]), updates_[t]);
        _mm512_storeu_ps(&states_[16 * c], s);
        sum = add_product(sum, s, _mm512_set1_ps(queries_[t * size_ + c]));
      }
      total = _mm512_add_ps(total, sum);
    }
    return total;
  }

  const Call& it_;
  const int64_t size_;
  int64_t channel_ = 0;
  __mmask16 some_ = 0;
  __m512 bias_ = {}, skip_ = {}, updates_[kChunk] = {}, steps_[kChunk] = {};
  std::vector<float> states_, speeds_, keys_, queries_;
};

// -1: it is no number of int64.
int64_t product(std::initializer_list<int64_t> sizes) {
  int64_t total = 1;
  for (const int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(total, size, &total)) return -1;
  }
  return total;
}

// Whether all that is read and written is in the tensors.
bool fits(const Call& it) {
  const int64_t *counts = it.counts, heads = it.value_heads, history = it.width - 1;
  const bool scans = it.kind == kMamba, convolves = !scans && it.kind != kLightning, has_state = it.key_dim > 0;
  const bool corrects = it.kind == kGatedDelta || it.kind == kKimiDelta, has_rates = has_state && it.kind != kLightning;
  if (it.kind < kGatedDelta || it.kind > kMamba2 || (it.value_bytes != 2 && it.value_bytes != 4)) return false;
  if (it.key_heads < 1 || heads < 0 || heads % it.key_heads != 0 || history < 0) return false;
  if (scans && (it.key_heads != 1 || it.value_dim != 1 || it.skip == nullptr)) return false;
  const int64_t keys = product({it.key_heads, it.key_dim}), values = product({heads, it.value_dim});
  int64_t channels = 0;
  if (keys < 0 || values < 0 || __builtin_mul_overflow(scans ? 0 : keys, 2, &channels)) return false;
  if (__builtin_add_overflow(channels, values, &channels) || counts[kInputs] < channels) return false;
  const int64_t decays = product({heads, it.kind == kKimiDelta ? it.key_dim : 1});
  const int64_t chunks = product({it.row_slots, kChunk});
  const auto holds = [counts](bool is_read, int of, std::initializer_list<int64_t> sizes) {
    return !is_read || counts[of] == product(sizes);
  };
  return (!has_rates || (decays >= 0 && counts[kA] >= decays)) && (!corrects || !has_state || counts[kB] >= heads) &&
         (!scans || counts[kB] >= 2 * it.key_dim) && holds(convolves, kWeight, {it.width, channels}) &&
         holds(has_state, kDecay, {heads, scans ? it.key_dim : 1}) && holds(has_rates, kBias, {decays}) &&
         holds(convolves && it.shift != nullptr, kShift, {channels}) &&
         holds(has_state && it.skip != nullptr, kSkip, {heads}) &&
         holds(has_state, kStates, {it.state_slots, values, it.key_dim}) &&
         holds(!scans && history > 0, kTails, {it.state_slots, history, channels}) &&
         holds(convolves, kRows, {chunks, channels}) && holds(has_state, kKeys, {chunks, keys}) &&
         holds(has_state, kUpdates, {chunks, values}) && holds(has_state, kDecays, {chunks, decays});
}

// The tokens that are computed; -1: a number is not one of a slot or of a row.
int64_t num_tokens(const Call& it) {
  const int64_t *next = it.numbers, *end = next + it.num_numbers;
  const auto in = [](int64_t x, int64_t stop, bool or_none) { return x < stop && (x >= 0 || (or_none && x == kNone)); };
  int64_t tokens = 0;
  if (end - next < 2 || *next < 0 || *next > (end - next - 2) / 3) return -1;
  next += 1 + 3 * *next;
  for (int64_t left = *next++; left > 0; --left) {
    if (end - next < 2 || !in(*next++, it.state_slots, true)) return -1;
    for (int64_t chunks = *next++; chunks > 0; --chunks) {
      if (end - next < 5) return -1;
      const int64_t first = next[1], count = next[2], num_also = next[4];
      if (!in(next[0], it.row_slots, first == 0) || !in(next[3], it.state_slots, true)) return -1;
      if (first < 0 || first > kChunk || count < 0 || count > kChunk - first || num_also < 0 || (end - next - 5) / 3 < num_also) return -1;
      next += 5, tokens += count;
      for (int64_t i = 0; i < num_also; ++i, next += 3) {
        if (!in(next[0], kChunk, false) || !in(next[1], it.row_slots, false) || !in(next[2], kChunk, false)) return -1;
      }
    }
  }
  return tokens <= it.tokens ? tokens : -1;
}

template <class Work>
void run_pieces(const Call& it) {
  const auto one = [&it](int64_t number) { Work(it).compute(number); };
  const auto call = [](const void* work, int64_t number) { (*static_cast<decltype(&one)>(work))(number); };
  const Share by = share.load(std::memory_order_acquire);
  const int64_t pieces = Work::pieces(it);
  if (by != nullptr && it.value_heads * it.key_dim * it.value_dim >= kShared && by(pieces, call, &one)) return;
  Work work(it);
  for (int64_t number = 0; number < pieces; ++number) work.compute(number);
}

template <class T>
void run(const Call& it, int64_t tokens) {
  const int64_t row = it.value_heads * it.value_dim * static_cast<int64_t>(sizeof(typename T::Value));
  std::memset(static_cast<char*>(it.out) + tokens * row, 0, (it.tokens - tokens) * row);  // of padding
  if (it.kind == kMamba) run_pieces<Scan<T>>(it);
  else run_pieces<Head<T>>(it);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Runs a step of one layer. Returns 0; 1: its numbers do not fit the pools; 2: there is no memory; 3: its tensors do not
// fit each other.
int paceline_linear_attention(const Call* given) {
  Call it = *given;
  if (it.kind == kConvolution) {
    if (it.value_dim != 1) return 3;
    it.value_dim = it.value_heads, it.key_heads = it.value_heads = 1, it.key_dim = 0;
  }
  if (!fits(it)) return 3;
  const int64_t tokens = num_tokens(it);
  if (tokens < 0) return 1;
  try {
    if (it.value_bytes == 2) run<Bfloat16>(it, tokens);
    else run<Float32>(it, tokens);
  } catch (const std::exception&) {  // of vectors
    return 2;
  }
  return 0;
}

// Steps are shared by `by` from now on, which knows for each thread who helps it.
void paceline_linear_attention_share(Share by) { share.store(by, std::memory_order_release); }

// What compiled models call, without the dispatcher and the interpreter. Tensors are contiguous; inputs, a and b may be
// columns of wider ones.
AOTITorchError aoti_torch_cpu_linear_attention(
    AtenTensorHandle numbers, AtenTensorHandle inputs, AtenTensorHandle a, AtenTensorHandle b, AtenTensorHandle weight,
    AtenTensorHandle decay, AtenTensorHandle bias, AtenTensorHandle* shift, AtenTensorHandle* skip,
    AtenTensorHandle states, AtenTensorHandle tails, AtenTensorHandle rows, AtenTensorHandle keys,
    AtenTensorHandle updates, AtenTensorHandle decays, int64_t kind, int64_t key_heads, int64_t value_heads,
    int64_t rounds_rates, int64_t rounds_convolution, int64_t activates, double scale, double lowest, double shortest,
    double longest, AtenTensorHandle* out) {
  const AtenTensorHandle given[] = {numbers, inputs, a, b, weight, decay, bias, shift ? *shift : nullptr,
                                    skip ? *skip : nullptr, states, tails, rows, keys, updates, decays};
  static_assert(std::size(given) == kTensors);
  void* at[kTensors] = {};
  int64_t *sizes[kTensors] = {}, *strides[kTensors] = {}, dims[kTensors] = {}, counts[kTensors] = {};
  int32_t dtypes[kTensors] = {};
  for (int i = 0; i < kTensors; ++i) {
    if (given[i] == nullptr) continue;
    bool contiguous = false;
    if (aoti_torch_is_contiguous(given[i], &contiguous) || aoti_torch_get_strides(given[i], &strides[i]) ||
        aoti_torch_get_sizes(given[i], &sizes[i]) || aoti_torch_get_data_ptr(given[i], &at[i]) ||
        aoti_torch_get_dim(given[i], &dims[i]) || aoti_torch_get_numel(given[i], &counts[i]) ||
        aoti_torch_get_dtype(given[i], &dtypes[i])) {
      return AOTI_TORCH_FAILURE;
    }
    const bool columns = i >= kInputs && i <= kB;
    if (columns ? dims[i] != 2 || sizes[i][0] != sizes[kInputs][0] || (strides[i][1] != 1 && sizes[i][1] > 1) : !contiguous) {
      return AOTI_TORCH_FAILURE;
    }
    if (columns) counts[i] = sizes[i][1];
  }
  const int32_t dtype = dtypes[kInputs];
  if (dims[kStates] != 4 || dims[kTails] != 3 || dims[kRows] != 3 || dtypes[kNumbers] != aoti_torch_dtype_int64() ||
      (dtype != aoti_torch_dtype_bfloat16() && dtype != aoti_torch_dtype_float32())) {
    return AOTI_TORCH_FAILURE;
  }
  for (const int i : {kA, kB, kTails, kRows}) {
    if (counts[i] > 0 && dtypes[i] != dtype) return AOTI_TORCH_FAILURE;
  }
  for (const int i : {kWeight, kDecay, kBias, kShift, kSkip, kStates, kKeys, kUpdates, kDecays}) {
    if (counts[i] > 0 && dtypes[i] != aoti_torch_dtype_float32()) return AOTI_TORCH_FAILURE;
  }
  const int64_t tokens = sizes[kInputs][0], value_dim = sizes[kStates][3];
  const int64_t shape[] = {tokens, value_heads, value_dim}, apart[] = {value_heads * value_dim, value_dim, 1};
  void* to = nullptr;
  if (aoti_torch_empty_strided(3, shape, apart, dtype, aoti_torch_device_type_cpu(), 0, out) ||
      aoti_torch_get_data_ptr(*out, &to)) {
    return AOTI_TORCH_FAILURE;
  }
  const auto floats = [&at](int i) { return static_cast<float*>(at[i]); };
  Call call = {static_cast<int64_t*>(at[kNumbers]), counts[kNumbers], at[1], at[2], at[3], floats(4), floats(5), floats(6), floats(7),
               floats(8), floats(9), at[10], at[11], floats(12), floats(13), floats(14), to, tokens, key_heads,
               value_heads, sizes[kStates][2], value_dim, sizes[kTails][1] + 1, sizes[kStates][0], sizes[kRows][0],
               dtype == aoti_torch_dtype_bfloat16() ? 2 : 4, strides[kInputs][0], strides[kA][0], strides[kB][0], kind,
               rounds_rates, rounds_convolution, activates, {}, scale, lowest, shortest, longest};
  std::copy_n(counts, kTensors, call.counts);
  return paceline_linear_attention(&call) == 0 ? AOTI_TORCH_SUCCESS : AOTI_TORCH_FAILURE;
}

}  // extern "C"
#pragma GCC visibility pop
