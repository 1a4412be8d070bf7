// Attention that reads the pages of the KV cache in place. See native.py.
//
// Keys are taken in blocks of one page. A block's keys of one head are transposed, its values interleaved, both once
// for all queries that see them; then every query adds its weighted values to its own sum and rescales that when the
// block has a larger score (online softmax, Milakov and Gimelshein 2018). Products go lane by lane, so that what a
// query computes is the same sequence of operations whatever queries share the block: bits depend on nothing else.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "lanes.h"

namespace {

constexpr int kPage = 64;  // keys of a block: the bits of one word of visibility
// Places of a query row that share a packed block, at most, and bytes of their sums, which stay in the second-level cache.
constexpr int kTokens = 32;
constexpr int64_t kSums = 1 << 20;
constexpr int64_t kPacking = 4;       // queries that a block takes as long as to be packed
constexpr int64_t kUnits = 16;        // pieces of work that are enough for the helpers
constexpr int64_t kShared = 1 << 18;  // multiplications, about 3 us: of these an attention is worth the helpers

// work(it, i) for all i below `pieces`, each once, by this thread and its helpers. False: nobody helps it, and
// nothing was done. See linear.cpp.
using Share = bool (*)(int64_t pieces, void (*work)(const void* it, int64_t piece), const void* it);
std::atomic<Share> share{nullptr};

template <class Work>
bool shared(int64_t pieces, const Work& work) {
  const Share by = share.load(std::memory_order_acquire);
  const auto call = [](const void* it, int64_t piece) { (*static_cast<const Work*>(it))(piece); };
  return by != nullptr && by(pieces, call, &work);
}

// Keys that some query of a row sees.
struct Block {
  int64_t number, page;
  int64_t next;  // page that is read afterwards
  uint64_t any, all;  // bits of its keys that some query sees, and that all see
};

struct Sizes {
  int64_t num_rows, row_len, num_blocks, num_heads, num_kv_heads, key_dim, value_dim;
  int64_t key_words = 0, columns = 0;  // of a key and of a value, up to whole vectors
};

// One query: the sum of its weighted values is kept in columns, of the weights in lanes.
struct State {
  alignas(64) float total[16];
  float level;  // the largest score so far, in units of log 2
};

// Kept: of keys and values on the pages, the values of T or bytes of float8.
template <class T, class Kept = typename T::Value>
class Attention {
  using Value = typename T::Value;

 public:
  Attention(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values, const at::Tensor& table,
            const at::Tensor& gather, const at::Tensor& scatter, const at::Tensor& mask, const float* sinks,
            double scale, double softcap, at::Tensor& out)
      : query_(query), keys_(keys), values_(values), mask_(mask), table_(table.const_data_ptr<int64_t>()),
        gather_(gather.const_data_ptr<int64_t>()), scatter_(scatter.const_data_ptr<int64_t>()), sinks_(sinks),
        scale_(static_cast<float>(scale)), softcap_(static_cast<float>(softcap)),
        to_(static_cast<Value*>(out.data_ptr())) {
    constexpr int step = 16 * T::kPair;
    s_ = {gather.size(0), gather.size(1), table.size(1), query.size(1), keys.size(2), keys.size(3), values.size(3)};
    s_.key_words = (s_.key_dim + step - 1) / step * 16;
    s_.columns = (s_.value_dim + step - 1) / step * step;
    groups_ = s_.num_heads / s_.num_kv_heads;
  }

  void run(int64_t num_tokens) {
    // Each place once, whatever the number of tokens that take its result.
    std::vector<int64_t> taker(s_.num_rows * s_.row_len, -1);
    for (int64_t t = 0; t < num_tokens; ++t) {
      if (taker[scatter_[t]] < 0) taker[scatter_[t]] = t;
    }
    std::vector<Piece> pieces;
    int64_t queries = 0;
    const int64_t row_bytes = groups_ * s_.columns * sizeof(float);
    const size_t most = std::clamp<int64_t>(kSums / std::max<int64_t>(1, row_bytes), 1, kTokens);
    for (int64_t row = 0; row < s_.num_rows; ++row) {
      const int64_t* takers = taker.data() + row * s_.row_len;
      for (int64_t j = 0; j < s_.row_len; ++j) {
        if (takers[j] < 0) continue;
        if (pieces.empty() || pieces.back().row != row || pieces.back().places.size() == most) {
          pieces.push_back({row, takers, {}});
        }
        pieces.back().places.push_back(j), queries += groups_;
      }
    }
    const int64_t heads = s_.num_kv_heads, num = pieces.size(), packed = num * kPacking;
    // The query heads of a KV head are split among few pieces, if each part then packs its blocks for enough queries.
    const int64_t units = std::max<int64_t>(1, num * heads), each = queries / std::max<int64_t>(1, num);
    const int64_t parts = std::clamp<int64_t>(std::min(kUnits / units, each / (2 * kPacking)), 1, groups_);
    const auto by_head = [&](int64_t number) {
      Attention own = *this;  // the last one first: of a prompt it is the longest
      const int64_t unit = number % (heads * parts), head = unit / parts, part = unit % parts;
      own.attend(pieces[num - 1 - number / (heads * parts)], head * groups_ + part * groups_ / parts,
                 head * groups_ + (part + 1) * groups_ / parts);
    };
    const int64_t products = (queries + packed) * heads * s_.num_blocks * kPage * (s_.key_dim + s_.value_dim);
    if (products < kShared || !shared(num * heads * parts, by_head)) {
      for (const Piece& piece : pieces) attend(piece, 0, s_.num_heads);
    }
    const size_t length = s_.num_heads * s_.value_dim;
    for (int64_t t = 0; t < num_tokens; ++t) {
      const int64_t first = taker[scatter_[t]];
      if (first != t) std::memcpy(to_ + t * length, to_ + first * length, length * sizeof(Value));
    }
  }

 private:
  // Places of one query row, which share packed blocks.
  struct Piece {
    int64_t row;
    const int64_t* takers;  // of all places of the row
    std::vector<int64_t> places;
  };

  // The queries of `piece` that the query heads [first, stop) have.
  void attend(const Piece& piece, int64_t first, int64_t stop) {
    first_ = first, num_heads_ = stop - first, places_ = piece.places.data();
    const int64_t row = piece.row, heads = num_heads_, num_places = piece.places.size(), num = num_places * heads;
    auto* q = queries_.of<uint32_t>(num * s_.key_words);
    auto* sums = sums_.of<float>(num * s_.columns);
    auto* states = states_.of<State>(num);
    auto* seen = seen_.of<uint64_t>(num_places * s_.num_blocks);
    std::memset(sums, 0, num * s_.columns * sizeof(float));
    const auto* from = static_cast<const Value*>(query_.const_data_ptr());
    for (int64_t i = 0; i < num_places; ++i) {
      const int64_t token = gather_[row * s_.row_len + places_[i]];
      for (int64_t h = 0; h < heads; ++h) {
        const Value* x = from + (first + h) * query_.stride(1) + token * query_.stride(2);
        uint32_t* word = q + (i * heads + h) * s_.key_words;
        for (int64_t w = 0; w < s_.key_words; w += 16) {
          const int64_t at = w * T::kPair;
          _mm512_store_si512(word + w, T::load(x + at, static_cast<int>(s_.key_dim - at)));
        }
        State& state = states[i * heads + h];
        std::memset(state.total, 0, sizeof state.total);
        state.level = -kInfinity;
      }
      const Value* mask = mask_of(row, places_[i]);
      biased_[i] = false;
      for (int64_t b = 0; b < s_.num_blocks; ++b) {
        seen[i * s_.num_blocks + b] = ~T::hidden(mask + b * kPage, biased_[i]);
      }
    }
    blocks_.clear();
    for (int64_t b = 0; b < s_.num_blocks; ++b) {
      Block block = {b, table_[row * s_.num_blocks + b], 0, 0, ~0ull};
      for (int64_t i = 0; i < num_places; ++i) {
        block.any |= seen[i * s_.num_blocks + b];
        block.all &= seen[i * s_.num_blocks + b];
      }
      if (block.any == 0) continue;
      if (!blocks_.empty()) blocks_.back().next = block.page;
      block.next = row + 1 < s_.num_rows ? table_[(row + 1) * s_.num_blocks] : block.page;
      blocks_.push_back(block);
    }
    for (const Block& block : blocks_) {
      num_active_ = 0;
      for (int64_t i = 0; i < num_places; ++i) {
        if (seen[i * s_.num_blocks + block.number] != 0) active_[num_active_++] = static_cast<int>(i);
      }
      for (int64_t h = first / groups_; h * groups_ < stop; ++h) add_block(row, block, h, q, sums, states, seen);
    }
    for (int64_t i = 0; i < num_places; ++i) {
      for (int64_t h = 0; h < heads; ++h) {
        finish(states[i * heads + h], sums + (i * heads + h) * s_.columns, piece.takers[places_[i]], first + h);
      }
    }
  }

  // A block's keys of KV head h, for the queries of the active places.
  void add_block(int64_t row, const Block& block, int64_t h, const uint32_t* q, float* sums, State* states,
                 const uint64_t* seen) {
    const int64_t b = block.number;
    const int num_keys = (64 - std::countl_zero(block.any) + 15) / 16 * 16;
    uint32_t* k = packed_keys_.of<uint32_t>(s_.key_words * kPage);
    uint32_t* v = packed_values_.of<uint32_t>(s_.columns * kPage / T::kPair);
    pack_keys(block, h, num_keys, k);
    const bool finite = pack_values(block, h, num_keys, v);
    const int64_t begin = std::max(first_, h * groups_);
    const int64_t own = std::min(first_ + num_heads_, (h + 1) * groups_) - begin, num = num_active_ * own;
    const bool apart = block.all != ~0ull && !finite;  // 0 * NaN is NaN: a query must not meet what it does not see
    for (int64_t at = 0; at < num;) {
      const int tile = apart ? 1 : static_cast<int>(std::min<int64_t>(kQueries, num - at));
      alignas(64) float scores[kQueries][kPage];
      alignas(64) uint32_t weights[kQueries][kPage];
      const uint32_t* rows[kQueries];
      float *to[kQueries], fade[kQueries];
      int64_t index[kQueries], place[kQueries];
      for (int i = 0; i < tile; ++i) {
        place[i] = active_[(at + i) / own];
        index[i] = place[i] * num_heads_ + begin - first_ + (at + i) % own;
        rows[i] = q + index[i] * s_.key_words;
        to[i] = scores[i];
      }
      kProducts<T>[tile - 1][num_keys / 16 - 1](rows, k, kPage, static_cast<int>(s_.key_words), to, nullptr);
      for (int i = 0; i < tile; ++i) {
        const Value* bias = biased_[place[i]] ? mask_of(row, places_[place[i]]) + b * kPage : nullptr;
        fade[i] = weigh(scores[i], num_keys, seen[place[i] * s_.num_blocks + b], bias, states[index[i]], weights[i]);
        rows[i] = weights[i];
      }
      const uint32_t* visible = apart ? without_hidden(v, seen[place[0] * s_.num_blocks + b]) : v;
      for (int64_t column = 0; column < s_.columns; column += 16 * kVectors) {
        for (int i = 0; i < tile; ++i) to[i] = sums + index[i] * s_.columns + column;
        const int vectors = static_cast<int>(std::min<int64_t>(kVectors, (s_.columns - column) / 16));
        kProducts<T>[tile - 1][vectors - 1](rows, visible + column, s_.columns, kPage / T::kPair, to, fade);
      }
      at += tile;
    }
  }

  // Turns the scores of a block into weights and takes them into `state`. Returns what the sums so far are to be
  // multiplied by.
  float weigh(const float* scores, int num_keys, uint64_t seen, const Value* bias, State& state,
              uint32_t* weights) const {
    const __m512 lowest = _mm512_set1_ps(-kInfinity);
    __m512 x[4];
    for (int i = 0; i < 4; ++i) {
      const auto visible = static_cast<__mmask16>(seen >> (16 * i));
      x[i] = lowest;
      if (16 * i >= num_keys) continue;
      __m512 s = _mm512_load_ps(scores + 16 * i);
      if (softcap_ > 0) {
        const __m512 e = exp2(_mm512_mul_ps(s, _mm512_set1_ps(2 * kLog2e * scale_ / softcap_)));
        const __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
        s = _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(e, one)));
        s = _mm512_mul_ps(s, _mm512_set1_ps(softcap_ * kLog2e));
      } else {
        s = _mm512_mul_ps(s, _mm512_set1_ps(scale_ * kLog2e));
      }
      if (bias != nullptr) s = _mm512_fmadd_ps(T::widen(bias + 16 * i), _mm512_set1_ps(kLog2e), s);
      x[i] = _mm512_mask_mov_ps(lowest, visible, s);
    }
    const __m512 top = _mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3]));
    const float level = std::max(state.level, _mm512_reduce_max_ps(top));
    const float base = level == -kInfinity ? 0.0f : level;
    const float fade = exp2(state.level - base);
    for (int i = 0; i < 4; ++i) x[i] = exp2(_mm512_sub_ps(x[i], _mm512_set1_ps(base)));
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(x[0], x[1]), _mm512_add_ps(x[2], x[3]));
    _mm512_store_ps(state.total, _mm512_fmadd_ps(_mm512_load_ps(state.total), _mm512_set1_ps(fade), sum));
    state.level = level;
    T::store_weights(weights, x);
    return fade;
  }

  void finish(const State& state, const float* sums, int64_t token, int64_t head) {
    float total = _mm512_reduce_add_ps(_mm512_load_ps(state.total)), factor = 1.0f;
    if (sinks_ != nullptr) {
      const float sink = sinks_[head] * kLog2e, level = std::max(state.level, sink);
      factor = exp2(state.level - level);
      total = total * factor + exp2(sink - level);
    }
    const __m512 scaled = _mm512_set1_ps(total == 0.0f ? 0.0f : factor / total);
    Value* to = to_ + (token * s_.num_heads + head) * s_.value_dim;
    constexpr int step = 16 * T::kPair;
    for (int64_t at = 0; at < s_.value_dim; at += step) {
      T::store(to + at, sums + at, scaled, static_cast<int>(s_.value_dim - at));
    }
  }

  void pack_keys(const Block& block, int64_t h, int num_keys, uint32_t* to) const {
    const int64_t stride = keys_.stride(1), ahead = (block.next - block.page) * keys_.stride(0);
    const Kept* from = rows_of(keys_, block.page, h);
    for (int64_t word = 0; word < s_.key_words; word += 16) {
      const int64_t at = word * T::kPair;
      for (int first = 0; first < num_keys; first += 16) {
        __m512i x[16];
        for (int i = 0; i < 16; ++i) {
          const Kept* key = from + (first + i) * stride + at;
          x[i] = T::load(key, static_cast<int>(s_.key_dim - at));
          prefetch(key + ahead);
        }
        transpose(x);
        for (int i = 0; i < 16; ++i) _mm512_store_si512(to + (word + i) * kPage + first, x[i]);
      }
    }
  }

  // Whether they are all finite. What is beyond num_keys becomes zero.
  bool pack_values(const Block& block, int64_t h, int num_keys, uint32_t* to) const {
    const int64_t stride = values_.stride(1), ahead = (block.next - block.page) * values_.stride(0);
    const Kept* from = rows_of(values_, block.page, h);
    constexpr int step = 16 * T::kPair;
    __m512i largest = _mm512_setzero_si512();
    for (int key = 0; key < num_keys; key += T::kPair, to += s_.columns) {
      for (int64_t at = 0; at < s_.columns; at += step) {
        const Kept* first = from + key * stride + at;
        T::interleave(to + at, first, stride, static_cast<int>(s_.value_dim - at), largest);
        for (int i = 0; i < T::kPair; ++i) prefetch(first + i * stride + ahead);
      }
    }
    std::memset(to, 0, (kPage - num_keys) / T::kPair * s_.columns * sizeof(uint32_t));
    return T::finite(largest);
  }

  // The next block comes from memory while this one is computed: its rows are too far apart for the processor to guess.
  static void prefetch(const Kept* x) { _mm_prefetch(reinterpret_cast<const char*>(x), _MM_HINT_T1); }

  const uint32_t* without_hidden(const uint32_t* values, uint64_t seen) {
    const size_t words = s_.columns, num = kPage / T::kPair;
    uint32_t* to = visible_values_.of<uint32_t>(words * num);
    for (size_t i = 0; i < num; ++i) {
      const uint64_t bits = seen >> (i * T::kPair);
      const uint32_t both = (bits & 1 ? 0xffffu : 0u) | (bits & 2 ? 0xffff0000u : 0u);
      const uint32_t keep = T::kPair == 2 ? both : bits & 1 ? ~0u : 0u;
      for (size_t j = 0; j < words; ++j) to[i * words + j] = values[i * words + j] & keep;
    }
    return to;
  }

  static const Kept* rows_of(const at::Tensor& pages, int64_t page, int64_t head) {
    return static_cast<const Kept*>(pages.const_data_ptr()) + page * pages.stride(0) + head * pages.stride(2);
  }

  const Value* mask_of(int64_t row, int64_t place) const {
    return static_cast<const Value*>(mask_.const_data_ptr()) + row * mask_.stride(0) + place * mask_.stride(2);
  }

  const at::Tensor &query_, &keys_, &values_, &mask_;
  const int64_t *table_, *gather_, *scatter_;
  const float* sinks_;
  float scale_, softcap_;
  Value* to_;
  Sizes s_;
  int64_t groups_;
  const int64_t* places_ = nullptr;
  int64_t first_ = 0, num_heads_ = 0;  // query heads that are attended for
  std::vector<Block> blocks_;
  bool biased_[kTokens];
  int active_[kTokens], num_active_ = 0;
  static thread_local Buffer queries_, sums_, states_, seen_, packed_keys_, packed_values_, visible_values_;
};

template <class T, class Kept> thread_local Buffer Attention<T, Kept>::queries_;
template <class T, class Kept> thread_local Buffer Attention<T, Kept>::sums_;
template <class T, class Kept> thread_local Buffer Attention<T, Kept>::states_;
template <class T, class Kept> thread_local Buffer Attention<T, Kept>::seen_;
template <class T, class Kept> thread_local Buffer Attention<T, Kept>::packed_keys_;
template <class T, class Kept> thread_local Buffer Attention<T, Kept>::packed_values_;
template <class T, class Kept> thread_local Buffer Attention<T, Kept>::visible_values_;

at::Tensor flat(const at::Tensor& x) { return x.stride(-1) == 1 || x.size(-1) == 1 ? x : x.contiguous(); }

at::Tensor integers(const at::Tensor& x, int64_t end, const char* name) {
  const at::Tensor y = x.to(at::kLong).contiguous();
  const auto* values = y.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < y.numel(); ++i) {
    TORCH_CHECK(values[i] >= 0 && values[i] < end, name, " has ", values[i], ", which is not in [0, ", end, ")");
  }
  return y;
}

at::Tensor attend_pages(const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
                        const at::Tensor& table, const at::Tensor& gather, const at::Tensor& scatter,
                        const at::Tensor& mask, const std::optional<at::Tensor>& sinks, double scale, double softcap) {
  const auto type = query.scalar_type();
  TORCH_CHECK(type == at::kBFloat16 || type == at::kFloat, "attend_pages of ", type);
  const auto kept = keys.scalar_type();
  TORCH_CHECK((kept == type || kept == at::kByte) && values.scalar_type() == kept && mask.scalar_type() == type,
              "attend_pages takes query, keys, values and mask of one dtype, or keys and values of float8 in bytes");
  TORCH_CHECK(keys.dim() == 4 && values.dim() == 4 && query.dim() == 4 && mask.dim() == 4 && query.size(0) == 1,
              "attend_pages takes query [1, heads, tokens, dim], pages of 4 dimensions, and a mask of 4");
  TORCH_CHECK(keys.size(1) == kPage && values.size(1) == kPage, "attend_pages takes pages of ", kPage, " rows");
  TORCH_CHECK(values.size(0) == keys.size(0) && values.size(2) == keys.size(2), "attend_pages: other pages of values");
  TORCH_CHECK(keys.size(2) > 0 && query.size(1) > 0 && query.size(1) % keys.size(2) == 0 &&
                  query.size(3) == keys.size(3),
              "attend_pages: ", query.sizes(), " queries do not fit ", keys.sizes(), " keys");
  TORCH_CHECK(table.dim() == 2 && gather.dim() == 2 && table.size(0) == gather.size(0) &&
                  mask.size(0) == gather.size(0) && mask.size(1) == 1 && mask.size(2) == gather.size(1) &&
                  mask.size(3) == kPage * table.size(1) && scatter.dim() == 1 && scatter.size(0) == query.size(2),
              "attend_pages: mask ", mask.sizes(), " for ", gather.sizes(), " places and ", table.sizes(), " pages");
  const at::Tensor q = flat(query), k = flat(keys), v = flat(values), m = flat(mask);
  const at::Tensor pages = integers(table, keys.size(0), "page_table");
  const at::Tensor tokens = integers(gather, query.size(2), "gather_index");
  const at::Tensor places = integers(scatter, gather.numel(), "scatter_index");
  at::Tensor given;
  if (sinks.has_value()) {
    TORCH_CHECK(sinks->numel() == query.size(1), "attend_pages: ", sinks->numel(), " sinks for ", query.size(1),
                " heads");
    given = sinks->to(at::kFloat).contiguous();
  }
  const float* sink = given.defined() ? given.const_data_ptr<float>() : nullptr;
  at::Tensor out = at::empty({1, query.size(2), query.size(1), values.size(3)}, query.options());
  const auto run = [&](auto attention) { attention.run(query.size(2)); };
  const auto of = [&]<class T>(T) {
    if (kept == type) run(Attention<T>(q, k, v, pages, tokens, places, m, sink, scale, softcap, out));
    else run(Attention<T, uint8_t>(q, k, v, pages, tokens, places, m, sink, scale, softcap, out));
  };
  if (type == at::kBFloat16) of(Bfloat16{});
  else of(Float32{});
  return out;
}

at::Tensor attend_pages_meta(const at::Tensor& query, const at::Tensor&, const at::Tensor& values, const at::Tensor&,
                             const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                             double, double) {
  return at::empty_symint({1, query.sym_size(2), query.sym_size(1), values.sym_size(3)}, query.options());
}

// Numbers as bytes of float8, as `attend_pages` reads them.
at::Tensor round_to_fp8(const at::Tensor& x) {
  const auto type = x.scalar_type();
  TORCH_CHECK(type == at::kBFloat16 || type == at::kFloat, "round_to_fp8 of ", type);
  const at::Tensor from = x.contiguous();
  at::Tensor out = at::empty(x.sizes(), x.options().dtype(at::kByte));
  auto* to = out.data_ptr<uint8_t>();
  const int64_t count = x.numel();
  if (type == at::kFloat) {
    std::transform(from.const_data_ptr<float>(), from.const_data_ptr<float>() + count, to, float8_of);
  } else {
    const auto* bits = static_cast<const uint16_t*>(from.const_data_ptr());
    std::transform(bits, bits + count, to, [](uint32_t half) { return float8_of(std::bit_cast<float>(half << 16)); });
  }
  return out;
}

at::Tensor round_to_fp8_meta(const at::Tensor& x) {
  return at::empty_symint(x.sym_sizes(), x.options().dtype(at::kByte));
}

// Scores of a page's keys for one query: the heads in order, and in each the dimensions in order. Products are rounded
// before they are added, as in the reference implementation. `keys`: [dim][kPage].
void score_page(const float* query, const float* keys, const float* weights, int64_t heads, int64_t dim, float* to) {
  const __m512 zero = _mm512_setzero_ps();
  __m512 total[4] = {zero, zero, zero, zero};
  for (int64_t h = 0; h < heads; ++h, query += dim) {
    __m512 sum[4] = {zero, zero, zero, zero};
    for (int64_t d = 0; d < dim; ++d) {
      const __m512 q = _mm512_set1_ps(query[d]);
      for (int i = 0; i < 4; ++i) {
        sum[i] = _mm512_add_ps(sum[i], _mm512_mul_ps(q, _mm512_loadu_ps(keys + d * kPage + 16 * i)));
      }
    }
    const __m512 weight = _mm512_set1_ps(weights[h]);
    for (int i = 0; i < 4; ++i) {
      total[i] = _mm512_add_ps(total[i], _mm512_mul_ps(_mm512_max_ps(sum[i], zero), weight));
    }
  }
  for (int i = 0; i < 4; ++i) _mm512_storeu_ps(to + 16 * i, total[i]);
}

// What `score_index` of native.py returns.
at::Tensor score_pages(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& weights,
                       const at::Tensor& table, const at::Tensor& gather, const at::Tensor& seen) {
  TORCH_CHECK(queries.dim() == 3 && weights.dim() == 2 && weights.size(0) == queries.size(0) &&
                  weights.size(1) == queries.size(1),
              "score_pages takes queries [tokens, heads, dim] and weights [tokens, heads]");
  TORCH_CHECK(keys.dim() == 3 && keys.size(1) == kPage && keys.size(2) == queries.size(2), "score_pages: ",
              keys.sizes(), " keys do not fit ", queries.sizes(), " queries");
  TORCH_CHECK(seen.scalar_type() == at::kBool && seen.dim() == 3 && table.dim() == 2 && gather.dim() == 2 &&
                  seen.size(0) == gather.size(0) && seen.size(1) == gather.size(1) &&
                  table.size(0) == gather.size(0) && seen.size(2) == kPage * table.size(1),
              "score_pages: ", seen.sizes(), " seen of ", gather.sizes(), " places and ", table.sizes(), " pages");
  const at::Tensor pages = integers(table, keys.size(0), "page_table");
  const at::Tensor tokens = integers(gather, queries.size(0), "gather_index");
  const at::Tensor q = queries.to(at::kFloat).contiguous(), w = weights.to(at::kFloat).contiguous();
  const at::Tensor visible = seen.contiguous();
  at::Tensor out = at::full(seen.sizes(), -kInfinity, q.options());
  const int64_t row_len = gather.size(1), num_pages = table.size(1), heads = queries.size(1), dim = queries.size(2);
  const auto* sees = visible.const_data_ptr<bool>();
  for (int64_t place = 0; place < gather.size(0) * num_pages; ++place) {
    const int64_t row = place / num_pages, page = place % num_pages;
    at::Tensor packed;  // the keys of the page, made when the first query sees one
    for (int64_t j = 0; j < row_len; ++j) {
      const int64_t first = ((row * row_len + j) * num_pages + page) * kPage;
      if (std::none_of(sees + first, sees + first + kPage, [](bool x) { return x; })) continue;
      if (!packed.defined()) {
        packed = keys.select(0, pages.const_data_ptr<int64_t>()[place]).to(at::kFloat).t().contiguous();
      }
      const int64_t token = tokens.const_data_ptr<int64_t>()[row * row_len + j];
      float* to = out.data_ptr<float>() + first;
      score_page(q.const_data_ptr<float>() + token * heads * dim, packed.const_data_ptr<float>(),
                 w.const_data_ptr<float>() + token * heads, heads, dim, to);
      for (int i = 0; i < kPage; ++i) {
        if (!sees[first + i]) to[i] = -kInfinity;
      }
    }
  }
  return out;
}

at::Tensor score_pages_meta(const at::Tensor& queries, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, const at::Tensor& seen) {
  return at::empty_symint(seen.sym_sizes(), queries.options().dtype(at::kFloat));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(paceline, library) {
  library.def(
      "score_pages(Tensor queries, Tensor keys, Tensor weights, Tensor page_table, Tensor gather_index, Tensor seen) "
      "-> Tensor");
  library.def(
      "attend_pages(Tensor query, Tensor keys, Tensor values, Tensor page_table, Tensor gather_index, "
      "Tensor scatter_index, Tensor mask, Tensor? sinks, float scale, float softcap) -> Tensor");
  library.def("round_to_fp8(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(paceline, CPU, library) {
  library.impl("attend_pages", attend_pages);
  library.impl("round_to_fp8", round_to_fp8);
  library.impl("score_pages", score_pages);
}

TORCH_LIBRARY_IMPL(paceline, Meta, library) {
  library.impl("attend_pages", attend_pages_meta);
  library.impl("round_to_fp8", round_to_fp8_meta);
  library.impl("score_pages", score_pages_meta);
}

// Attention is shared by `by` from now on, which knows for each thread who helps it.
extern "C" void paceline_attention_share(Share by) { share.store(by, std::memory_order_release); }

// What compiled models call, without the dispatcher and the interpreter.
extern "C" AOTITorchError aoti_torch_cpu_round_to_fp8(AtenTensorHandle x, AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *out = torch::aot_inductor::new_tensor_handle(
        round_to_fp8(*torch::aot_inductor::tensor_handle_to_tensor_pointer(x)));
  });
}

extern "C" AOTITorchError aoti_torch_cpu_attend_pages(
    AtenTensorHandle query, AtenTensorHandle keys, AtenTensorHandle values, AtenTensorHandle table,
    AtenTensorHandle gather, AtenTensorHandle scatter, AtenTensorHandle mask, AtenTensorHandle* sinks, double scale,
    double softcap, AtenTensorHandle* out) {
  const auto tensor = [](AtenTensorHandle x) -> const at::Tensor& {
    return *torch::aot_inductor::tensor_handle_to_tensor_pointer(x);
  };
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *out = torch::aot_inductor::new_tensor_handle(
        attend_pages(tensor(query), tensor(keys), tensor(values), tensor(table), tensor(gather), tensor(scatter),
                     tensor(mask), sinks == nullptr ? std::nullopt : std::optional<at::Tensor>(tensor(*sinks)), scale,
                     softcap));
  });
}

extern "C" AOTITorchError aoti_torch_cpu_score_pages(AtenTensorHandle queries, AtenTensorHandle keys,
                                                     AtenTensorHandle weights, AtenTensorHandle table,
                                                     AtenTensorHandle gather, AtenTensorHandle seen,
                                                     AtenTensorHandle* out) {
  const auto tensor = [](AtenTensorHandle x) -> const at::Tensor& {
    return *torch::aot_inductor::tensor_handle_to_tensor_pointer(x);
  };
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *out = torch::aot_inductor::new_tensor_handle(score_pages(tensor(queries), tensor(keys), tensor(weights),
                                                              tensor(table), tensor(gather), tensor(seen)));
  });
}
