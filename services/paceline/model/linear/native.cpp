// The gated delta rule over chunks at absolute positions. See native.py, and operator.py for the same in torch.
//
// A key head, with the value heads that share its keys, is computed by itself, sequence after sequence. Vectors hold 16
// neighboring channels, each of which is summed in one fixed order:
//
//   products with a state   16 rows of the state at a time, then these sums in order
//   products of two rows    16 lanes, each in order, then halves of the lanes: 8 + 8, 4 + 4, 2 + 2, 1 + 1
//   rows of a chunk         in order
//
// Sums begin with 0 and no product is fused with a sum, so bits depend on nothing but the numbers.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <new>
#include <vector>

#include "../exponential.h"

namespace {

constexpr int kChunk = 16;  // CHUNK: the rows of a chunk, which are the lanes of a vector
constexpr int kBlock = 16;  // rows of a state that are summed by themselves
constexpr int kVectors = 8;  // vectors of a state's row that a product keeps in registers
constexpr float kLog2e = 1.44269504f;
constexpr int64_t kNone = -1;  // NONE of plan.py
constexpr int64_t kShared = 1 << 16;  // numbers of states and rows: of these a step is worth the helpers

// work(it, i) for all i below `pieces`, each once, by this thread and those that help it. False: nobody helps it, and
// nothing was done. See compiled/linear.cpp.
using Share = bool (*)(int64_t pieces, void (*work)(const void* it, int64_t piece), const void* it);
std::atomic<Share> share{nullptr};

// The arguments of a call, as in native.py.
struct Call {
  const int64_t* numbers;  // LinearStep.encode
  int64_t num_numbers;
  const void *inputs, *a, *b;  // [tokens, conv_dim], [tokens, value_heads] twice
  const float *weight, *decay, *bias;  // [width, conv_dim], [value_heads] twice
  float* states;  // [state_slots, value_heads, key_dim, value_dim]
  void *tails, *rows;  // [state_slots, width - 1, conv_dim], [row_slots, kChunk, conv_dim]
  float *keys, *updates, *decays;  // [row_slots, kChunk, ..]
  void* out;  // [tokens, value_heads, value_dim]
  int64_t tokens, key_heads, value_heads, key_dim, value_dim, width, state_slots, row_slots;
  int64_t scale;  // of the strength of updates: 1 or 2
  int64_t value_bytes;  // 2: bfloat16, 4: float32
  int64_t inputs_row, a_row, b_row;  // numbers from a token to the next one
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

float softplus(float x) { return x > 20.0f ? x : static_cast<float>(std::log1p(std::exp(static_cast<double>(x)))); }

float sigmoid(float x) { return static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(x)))); }

// Sum of products of two rows of `size` numbers, a multiple of 16.
float dot(const float* a, const float* b, int64_t size) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += 16) sum = add_product(sum, _mm512_loadu_ps(a + i), _mm512_loadu_ps(b + i));
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps(sum, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// Adds to `by_k` and `by_q` the products of V vectors of a state's columns with a key and a query.
template <int V>
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
        for_k[v] = add_product(for_k[v], s, of_k), for_q[v] = add_product(for_q[v], s, of_q);
      }
    }
    for (int v = 0; v < V; ++v) {
      _mm512_storeu_ps(by_k + 16 * v, _mm512_add_ps(_mm512_loadu_ps(by_k + 16 * v), for_k[v]));
      _mm512_storeu_ps(by_q + 16 * v, _mm512_add_ps(_mm512_loadu_ps(by_q + 16 * v), for_q[v]));
    }
  }
}

// V vectors of the columns of to = state * fade + the chunk's keys, each faded already, times its updates.
template <int V>
void fold_columns(const float* state, float* to, int64_t rows, int64_t stride, __mmask16 last, float fade,
                  const float* keys, int64_t key_stride, const float* updates, int64_t update_stride) {
  for (int64_t c = 0; c < rows; ++c) {
    __m512 sum[V];
    for (int v = 0; v < V; ++v) {
      const __mmask16 some = v == V - 1 ? last : 0xffff;
      const __m512 s = state == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(some, state + c * stride + 16 * v);
      sum[v] = _mm512_mul_ps(s, _mm512_set1_ps(fade));
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

template <class T>
class Head {
  using Value = typename T::Value;

 public:
  explicit Head(const Call& call)
      : it_(call), groups_(call.value_heads / call.key_heads),
        conv_dim_(2 * call.key_heads * call.key_dim + call.value_heads * call.value_dim), keys_(padded(call.key_dim)),
        values_(padded(call.value_dim)), wide_(2 * keys_ + groups_ * values_), history_(call.width - 1) {
    x_.resize((history_ + kChunk) * wide_), mixed_.resize(kChunk * wide_);
    k_.resize(kChunk * keys_), q_.resize(kChunk * keys_), faded_.resize(kChunk * keys_);
    u_.resize(groups_ * kChunk * values_), decays_.resize(groups_ * kChunk);
    by_k_.resize(kChunk * values_), by_q_.resize(kChunk * values_);
    states_.resize(groups_);
  }

  void run(int64_t number) {
    take(number);
    const int64_t* next = it_.numbers + 1 + 3 * it_.numbers[0];  // behind the groups, which one thread needs not know
    int64_t at = 0;
    for (int64_t left = *next++; left > 0; --left) {
      const int64_t slot = *next++;
      for (int64_t g = 0; g < groups_; ++g) states_[g] = slot == kNone ? nullptr : state(slot, g);
      std::fill_n(x_.begin(), history_ * wide_, 0.0f);
      if (slot != kNone) load_rows(static_cast<const Value*>(it_.tails) + slot * history_ * conv_dim_, conv_dim_, history_, 0);
      for (int64_t chunks = *next++; chunks > 0; --chunks) {
        const Chunk chunk = {next[0], next[1], next[2], next[3], next + 5, next[4]};
        next += 5 + 3 * chunk.num_also;
        load(chunk, at);
        compute(chunk, at);
        if (chunks > 1 || chunk.store != kNone) fold(chunk);
        at += chunk.count;
      }
    }
  }

 private:
  void take(int64_t number) {
    head_ = number, first_value_ = number * groups_;
    spans_.clear();
    spans_.push_back({number * it_.key_dim, it_.key_dim, 0});
    spans_.push_back({(it_.key_heads + number) * it_.key_dim, it_.key_dim, keys_});
    for (int64_t g = 0; g < groups_; ++g) {
      const int64_t from = 2 * it_.key_heads * it_.key_dim + (first_value_ + g) * it_.value_dim;
      spans_.push_back({from, it_.value_dim, 2 * keys_ + g * values_});
    }
  }

  float* state(int64_t slot, int64_t group) const {
    return it_.states + (slot * it_.value_heads + first_value_ + group) * it_.key_dim * it_.value_dim;
  }

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
    load_rows(static_cast<const Value*>(it_.rows) + (row + read) * conv_dim_, conv_dim_, chunk.first - read, history_ + read);
    for (int64_t j = 0; j < chunk.first; ++j) {
      const float* key = it_.keys + ((row + j) * it_.key_heads + head_) * it_.key_dim;
      std::copy(key, key + it_.key_dim, &k_[j * keys_]);
      for (int64_t g = 0; g < groups_; ++g) {
        const int64_t place = (row + j) * it_.value_heads + first_value_ + g;
        const float* update = it_.updates + place * it_.value_dim;
        std::copy(update, update + it_.value_dim, &u_[(g * kChunk + j) * values_]);
        decays_[g * kChunk + j] = it_.decays[place];
      }
    }
  }

  // The rows that a chunk computes, and the outputs of their tokens, the first of which is `at`.
  void compute(const Chunk& chunk, int64_t at) {
    for (int64_t t = chunk.first; t < chunk.first + chunk.count; ++t) {
      convolve(t);
      normalize(&mixed_[t * wide_], &q_[t * keys_], static_cast<float>(1.0 / std::sqrt(it_.key_dim)));
      normalize(&mixed_[t * wide_ + keys_], &k_[t * keys_], 1.0f);
      for (int64_t j = 0; j <= t; ++j) {
        of_k_[t][j] = dot(&k_[j * keys_], &k_[t * keys_], keys_), of_q_[t][j] = dot(&k_[j * keys_], &q_[t * keys_], keys_);
      }
    }
    for (int64_t g = 0; g < groups_; ++g) compute_head(chunk, at, g);
    if (chunk.rows != kNone) {
      for (int64_t t = chunk.first; t < chunk.first + chunk.count; ++t) store_row(t, chunk.rows * kChunk + t);
    }
    for (int64_t i = 0; i < chunk.num_also; ++i) {
      const int64_t* also = chunk.also + 3 * i;
      store_row(also[0], also[1] * kChunk + also[2]);
    }
  }

  void convolve(int64_t t) {
    for (const Span& span : spans_) {
      for (int64_t i = 0; i < span.size; i += 16) {
        const float *x = &x_[t * wide_ + span.to + i], *weight = it_.weight + span.from + i;
        const __mmask16 some = first_of(span.size - i);
        __m512 sum = _mm512_setzero_ps();
        for (int64_t place = 0; place <= history_; ++place) {
          const __m512 w = _mm512_maskz_loadu_ps(some, weight + place * conv_dim_);
          sum = add_product(sum, _mm512_loadu_ps(x + place * wide_), w);
        }
        _mm512_storeu_ps(&mixed_[t * wide_ + span.to + i], T::round(silu(T::round(sum))));
      }
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
    const int64_t head = first_value_ + g, stop = chunk.first + chunk.count;
    float *decays = &decays_[g * kChunk], *u = &u_[g * kChunk * values_];
    for (auto* sums : {&by_k_, &by_q_}) std::fill_n(&(*sums)[chunk.first * values_], chunk.count * values_, 0.0f);
    if (states_[g] != nullptr) read(states_[g], chunk.first, stop);
    for (int64_t t = chunk.first; t < stop; ++t) {
      const int64_t token = at + t - chunk.first;
      const float a = T::widen(static_cast<const Value*>(it_.a)[token * it_.a_row + head]);
      const float b = T::widen(static_cast<const Value*>(it_.b)[token * it_.b_row + head]);
      const __m512 rounded = T::round(_mm512_set1_ps(sigmoid(b)));
      const float beta = _mm512_cvtss_f32(rounded) * static_cast<float>(it_.scale);
      decays[t] = (t ? decays[t - 1] : 0.0f) + it_.decay[head] * softplus(a + it_.bias[head]);
      correct(t, decays, u, beta, &mixed_[t * wide_ + 2 * keys_ + g * values_]);
      Value* out = static_cast<Value*>(it_.out) + (token * it_.value_heads + head) * it_.value_dim;
      for (int64_t i = 0; i < it_.value_dim; i += 16) {
        T::store(out + i, first_of(it_.value_dim - i), _mm512_loadu_ps(&by_q_[t * values_ + i]));
      }
    }
  }

  // Products of the state with the keys and queries of the rows [first, stop).
  void read(const float* state, int64_t first, int64_t stop) {
    over_columns(it_.value_dim, [&]<int V>(int64_t column, __mmask16 last) {
      for (int64_t t = first; t < stop; ++t) {
        read_state<V>(state + column, it_.key_dim, it_.value_dim, last, &k_[t * keys_], &q_[t * keys_],
                      &by_k_[t * values_ + column], &by_q_[t * values_ + column]);
      }
    });
  }

  // Adds the rows of the chunk before t to the products of t with the state, which makes its update and its output.
  void correct(int64_t t, const float* decays, float* u, float beta, const float* v) {
    alignas(64) float of_k[kChunk], of_q[kChunk];
    const float total = exponential(decays[t]);
    const __m512 fade = exponential(_mm512_sub_ps(_mm512_set1_ps(decays[t]), _mm512_loadu_ps(decays)));
    _mm512_store_ps(of_k, _mm512_mul_ps(_mm512_loadu_ps(of_k_[t]), fade));
    _mm512_store_ps(of_q, _mm512_mul_ps(_mm512_loadu_ps(of_q_[t]), fade));
    for (int64_t i = 0; i < values_; i += 16) {
      __m512 for_k = _mm512_mul_ps(_mm512_loadu_ps(&by_k_[t * values_ + i]), _mm512_set1_ps(total));
      __m512 for_q = _mm512_mul_ps(_mm512_loadu_ps(&by_q_[t * values_ + i]), _mm512_set1_ps(total));
      for (int64_t j = 0; j < t; ++j) {
        const __m512 row = _mm512_loadu_ps(u + j * values_ + i);
        for_k = add_product(for_k, _mm512_set1_ps(of_k[j]), row), for_q = add_product(for_q, _mm512_set1_ps(of_q[j]), row);
      }
      const __m512 own = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(v + i), for_k), _mm512_set1_ps(beta));
      _mm512_storeu_ps(u + t * values_ + i, own);
      _mm512_storeu_ps(&by_q_[t * values_ + i], add_product(for_q, _mm512_set1_ps(of_q_[t][t]), own));
    }
  }

  // Writes row t of the chunk to a row of the pools.
  void store_row(int64_t t, int64_t row) const {
    store_rows(static_cast<Value*>(it_.rows) + row * conv_dim_, 1, history_ + t);
    std::copy_n(&k_[t * keys_], it_.key_dim, it_.keys + (row * it_.key_heads + head_) * it_.key_dim);
    for (int64_t g = 0; g < groups_; ++g) {
      const int64_t place = row * it_.value_heads + first_value_ + g;
      std::copy_n(&u_[(g * kChunk + t) * values_], it_.value_dim, it_.updates + place * it_.value_dim);
      it_.decays[place] = decays_[g * kChunk + t];
    }
  }

  // The state behind a whole chunk, and the inputs that the convolution reads behind it.
  void fold(const Chunk& chunk) {
    const int64_t size = it_.key_dim * it_.value_dim;
    for (int64_t g = 0; g < groups_; ++g) {
      const float* decays = &decays_[g * kChunk];
      const float end = decays[kChunk - 1], fade = exponential(end);
      alignas(64) float factors[kChunk];
      _mm512_store_ps(factors, exponential(_mm512_sub_ps(_mm512_set1_ps(end), _mm512_loadu_ps(decays))));
      for (int64_t j = 0; j < kChunk; ++j) {
        for (int64_t c = 0; c < keys_; ++c) faded_[j * keys_ + c] = k_[j * keys_ + c] * factors[j];
      }
      if (chunk.store == kNone) scratch_.resize(groups_ * size);
      float* to = chunk.store == kNone ? &scratch_[g * size] : state(chunk.store, g);
      over_columns(it_.value_dim, [&]<int V>(int64_t column, __mmask16 last) {
        fold_columns<V>(states_[g] == nullptr ? nullptr : states_[g] + column, to + column, it_.key_dim, it_.value_dim,
                        last, fade, faded_.data(), keys_, &u_[g * kChunk * values_ + column], values_);
      });
      states_[g] = to;
    }
    std::copy(x_.end() - history_ * wide_, x_.end(), x_.begin());
    if (chunk.store != kNone) {
      store_rows(static_cast<Value*>(it_.tails) + chunk.store * history_ * conv_dim_, history_, 0);
    }
  }

  const Call& it_;
  const int64_t groups_, conv_dim_, keys_, values_, wide_, history_;  // sizes in whole vectors, but of the inputs
  int64_t head_ = 0, first_value_ = 0;
  std::vector<Span> spans_;
  std::vector<const float*> states_;  // of each value head; null: zeros
  // Rows of the chunk, padded to whole vectors: x and mixed of the convolution, of all channels of the head.
  std::vector<float> x_, mixed_, k_, q_, faded_, u_, decays_, by_k_, by_q_, scratch_;
  float of_k_[kChunk][kChunk] = {}, of_q_[kChunk][kChunk] = {};  // products of a row's key and query with each key
};

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
      if (first < 0 || count < 0 || first + count > kChunk || num_also < 0 || (end - next - 5) / 3 < num_also) return -1;
      next += 5, tokens += count;
      for (int64_t i = 0; i < num_also; ++i, next += 3) {
        if (!in(next[0], kChunk, false) || !in(next[1], it.row_slots, false) || !in(next[2], kChunk, false)) return -1;
      }
    }
  }
  return tokens <= it.tokens ? tokens : -1;
}

template <class T>
void run(const Call& it, int64_t tokens) {
  const int64_t row = it.value_heads * it.value_dim * static_cast<int64_t>(sizeof(typename T::Value));
  std::memset(static_cast<char*>(it.out) + tokens * row, 0, (it.tokens - tokens) * row);  // of padding
  const auto by_head = [&it](int64_t number) { Head<T>(it).run(number); };
  const auto call = [](const void* work, int64_t number) { (*static_cast<decltype(&by_head)>(work))(number); };
  const Share by = share.load(std::memory_order_acquire);
  if (by != nullptr && it.value_heads * it.key_dim * it.value_dim >= kShared && by(it.key_heads, call, &by_head)) return;
  Head<T> head(it);
  for (int64_t number = 0; number < it.key_heads; ++number) head.run(number);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Runs a step of one layer. Returns 0; 1: its numbers do not fit the pools; 2: there is no memory.
int paceline_gated_delta(const Call* it) {
  const int64_t tokens = num_tokens(*it);
  if (tokens < 0) return 1;
  try {
    if (it->value_bytes == 2) run<Bfloat16>(*it, tokens);
    else run<Float32>(*it, tokens);
  } catch (const std::bad_alloc&) {
    return 2;
  }
  return 0;
}

// Steps are shared by `by` from now on, which knows for each thread who helps it.
void paceline_gated_delta_share(Share by) { share.store(by, std::memory_order_release); }

// What compiled models call, without the dispatcher and the interpreter. Tensors are contiguous; inputs, a and b may be
// columns of wider ones.
AOTITorchError aoti_torch_cpu_gated_delta(AtenTensorHandle numbers, AtenTensorHandle inputs, AtenTensorHandle a,
                                          AtenTensorHandle b, AtenTensorHandle weight, AtenTensorHandle decay,
                                          AtenTensorHandle bias, AtenTensorHandle states, AtenTensorHandle tails,
                                          AtenTensorHandle rows, AtenTensorHandle keys, AtenTensorHandle updates,
                                          AtenTensorHandle decays, int64_t key_heads, int64_t scale,
                                          AtenTensorHandle* out) {
  const AtenTensorHandle given[] = {numbers, inputs, a, b, weight, decay, bias, states, tails, rows, keys, updates, decays};
  void* at[std::size(given)];
  int64_t row[std::size(given)] = {};  // strides of inputs, a and b
  for (size_t i = 0; i < std::size(given); ++i) {
    bool contiguous = false;
    int64_t *strides = nullptr, *sizes = nullptr;
    if (aoti_torch_is_contiguous(given[i], &contiguous) || aoti_torch_get_strides(given[i], &strides) ||
        aoti_torch_get_sizes(given[i], &sizes) || aoti_torch_get_data_ptr(given[i], &at[i])) {
      return AOTI_TORCH_FAILURE;
    }
    if (const bool columns = i >= 1 && i <= 3; columns ? strides[1] != 1 && sizes[1] > 1 : !contiguous) {
      return AOTI_TORCH_FAILURE;
    }
    row[i] = strides[0];
  }
  int64_t num_numbers = 0, *of_inputs = nullptr, *of_states = nullptr, *of_tails = nullptr, *of_rows = nullptr;
  int32_t dtype = 0;
  if (aoti_torch_get_numel(numbers, &num_numbers) || aoti_torch_get_sizes(inputs, &of_inputs) ||
      aoti_torch_get_sizes(states, &of_states) || aoti_torch_get_sizes(tails, &of_tails) ||
      aoti_torch_get_sizes(rows, &of_rows) || aoti_torch_get_dtype(inputs, &dtype)) {
    return AOTI_TORCH_FAILURE;
  }
  const int64_t tokens = of_inputs[0], value_heads = of_states[1], value_dim = of_states[3];
  const int64_t shape[] = {tokens, value_heads, value_dim}, apart[] = {value_heads * value_dim, value_dim, 1};
  void* to = nullptr;
  if (aoti_torch_empty_strided(3, shape, apart, dtype, aoti_torch_device_type_cpu(), 0, out) ||
      aoti_torch_get_data_ptr(*out, &to)) {
    return AOTI_TORCH_FAILURE;
  }
  const auto floats = [&at](int i) { return static_cast<float*>(at[i]); };
  const Call call = {static_cast<int64_t*>(at[0]), num_numbers, at[1], at[2], at[3], floats(4), floats(5), floats(6),
                     floats(7), at[8], at[9], floats(10), floats(11), floats(12), to, tokens, key_heads, value_heads,
                     of_states[2], value_dim, of_tails[1] + 1, of_states[0], of_rows[0], scale,
                     dtype == aoti_torch_dtype_bfloat16() ? 2 : 4, row[1], row[2], row[3]};
  return paceline_gated_delta(&call) == 0 ? AOTI_TORCH_SUCCESS : AOTI_TORCH_FAILURE;
}

}  // extern "C"
#pragma GCC visibility pop
