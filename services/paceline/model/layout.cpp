// The integers of a step, laid out in one pass each. See layout.py.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "layout.h"

namespace {

using paceline::Fields, paceline::kPage, paceline::Shape;

void pad(int64_t* field, int64_t from, int64_t to) { std::fill(field + from, field + to, int64_t{0}); }

// Writes that pad go to the scratch page.
void scratch(const Fields& f, int64_t from, int64_t to, int64_t row) {
  for (int64_t i = from; i < to; ++i) f.write_rows[i] = row + (i - from) % kPage, f.write_tokens[i] = 0;
}

// `to` [n, width] = `from` [m, other], whose last column, and then first row, is repeated.
template <class T>
void widen(const T* from, int64_t m, int64_t other, T* to, int64_t n, int64_t width) {
  for (int64_t i = 0; i < n; ++i, to += width) {
    const T* row = from + (i < m ? i : 0) * other;
    std::memcpy(to, row, other * sizeof(T));
    std::fill(to + other, to + width, row[other - 1]);
  }
}

}  // namespace

extern "C" {

// step_plan._lay_out. `counts` [n, 5]: tokens, pages and logits of each sequence, keys that its tree sees, 0 if it is
// none, and tokens with rows of their own; `also` [num_also, 2]: the token and row of further writes; `visible`,
// `key_positions`: of each sequence, or null; `own`: of each token with rows of its own how many, and which.
void paceline_lay_out(int64_t n, const int64_t* counts, const int64_t* ids, const int64_t* rows, const int64_t* positions,
                      const int64_t* pages, int64_t num_also, const int64_t* also, const uint8_t* const* visible,
                      const int64_t* own, const int64_t* const* key_positions, int64_t scratch_row, const int64_t* sizes,
                      int64_t* to) {
  const Shape s(sizes);
  const Fields f(to, s);
  int64_t first = 0, logits = 0, row = 0;  // of the sequence, among all
  for (int64_t i = 0; i < n; ++i, counts += 5) {
    const int64_t tokens = counts[0], tables = counts[1], seen = counts[3], owners = counts[4];
    std::memcpy(f.tokens + first, ids + first, 8 * tokens);
    std::memcpy(f.positions + first, positions + first, 8 * tokens);
    for (int64_t j = tokens - counts[2]; j < tokens; ++j) f.logits_index[logits++] = first + j;
    for (int64_t j = 0; j < tokens; ++j) {
      f.write_rows[first + j] = pages[rows[first + j] / kPage] * kPage + rows[first + j] % kPage;
      f.write_tokens[first + j] = first + j;
      f.scatter[first + j] = row * s.row_len + j;  // the rows of a sequence lie next to each other
    }
    for (int64_t begin = 0; begin < tokens; begin += s.row_len, ++row) {
      // Masked keys weigh exactly zero, but 0 * NaN is NaN: what pads a table must be the session's own.
      for (int64_t p = 0; p < s.pages; ++p) f.page_table[row * s.pages + p] = pages[p < tables ? p : 0];
      for (int64_t p = 0; p < s.row_len; ++p) {
        const int64_t place = row * s.row_len + p, local = std::min(begin + p, tokens - 1);
        f.gather[place] = first + local;
        f.query_rows[place] = rows[first + local];
        if (!s.is_tree) continue;
        uint8_t* sees = f.visible + place * s.keys();
        const int64_t width = seen ? seen : f.query_rows[place] + 1;
        if (owners) std::memcpy(sees, visible[i], seen);
        else if (seen) std::memcpy(sees, visible[i] + local * seen, seen);
        else std::memset(sees, 1, width);
        std::memset(sees + width, 0, s.keys() - width);
        if (!owners) continue;
        for (int64_t j = 1; j <= *own; ++j) sees[own[j]] = 1;
        if (begin + p < tokens - 1) own += 1 + *own;  // the last token's rows are those of the padding, too
      }
      if (!s.is_tree) continue;
      int64_t* of_key = f.key_positions + row * s.keys();
      const int64_t given = key_positions[i] == nullptr ? 0 : seen;
      if (given) std::memcpy(of_key, key_positions[i], 8 * given);
      for (int64_t key = given; key < s.keys(); ++key) of_key[key] = key;
    }
    first += tokens, pages += tables;
    if (owners) own += 1 + *own;
  }
  pad(f.tokens, first, s.tokens), pad(f.positions, first, s.tokens), pad(f.scatter, first, s.tokens);
  pad(f.logits_index, logits, s.wanted);
  for (int64_t i = 0; i < num_also; ++i) f.write_tokens[first + i] = also[2 * i], f.write_rows[first + i] = also[2 * i + 1];
  scratch(f, first + num_also, s.writes, scratch_row);
}

// buckets.pack: from the buffer of one shape to that of one that covers it.
void paceline_pack(const int64_t* own_sizes, int64_t* from, const int64_t* sizes, int64_t* to, int64_t scratch_row) {
  const Shape own(own_sizes), s(sizes);
  const Fields x(from, own), f(to, s);
  const auto copy = [](const int64_t* values, int64_t count, int64_t* field, int64_t size) {
    std::memcpy(field, values, 8 * count);
    pad(field, count, size);
  };
  copy(x.tokens, own.tokens, f.tokens, s.tokens);
  copy(x.positions, own.tokens, f.positions, s.tokens);
  copy(x.logits_index, own.wanted, f.logits_index, s.wanted);
  copy(x.write_rows, own.writes, f.write_rows, s.writes);
  copy(x.write_tokens, own.writes, f.write_tokens, s.writes);
  scratch(f, own.writes, s.writes, scratch_row);
  for (int64_t i = 0; i < own.tokens; ++i) {
    f.scatter[i] = x.scatter[i] + x.scatter[i] / own.row_len * (s.row_len - own.row_len);
  }
  pad(f.scatter, own.tokens, s.tokens);
  for (int64_t row = 0; row < s.rows; ++row) {
    const int64_t* table = x.page_table + (row < own.rows ? row : 0) * own.pages;
    int64_t* into = f.page_table + row * s.pages;
    std::memcpy(into, table, 8 * own.pages);
    std::fill(into + own.pages, into + s.pages, table[0]);
  }
  widen(x.gather, own.rows, own.row_len, f.gather, s.rows, s.row_len);
  widen(x.query_rows, own.rows, own.row_len, f.query_rows, s.rows, s.row_len);
  if (!s.is_tree) return;
  for (int64_t row = 0; row < s.rows; ++row) {
    const int64_t given = row < own.rows ? row : 0;
    std::memcpy(f.key_positions + row * s.keys(), x.key_positions + given * own.keys(), 8 * own.keys());
    std::fill(f.key_positions + row * s.keys() + own.keys(), f.key_positions + (row + 1) * s.keys(), int64_t{0});
    for (int64_t place = 0; place < s.row_len; ++place) {
      const int64_t other = given * own.row_len + std::min(place, own.row_len - 1);
      uint8_t* into = f.visible + (row * s.row_len + place) * s.keys();
      std::memcpy(into, x.visible + other * own.keys(), own.keys());
      std::memset(into + own.keys(), 0, s.keys() - own.keys());
    }
  }
}

// step_plan.attention_masks, of values of two or four bytes; `near` only with a window.
void paceline_masks(const int64_t* sizes, int64_t* from, int64_t window, int64_t bytes, void* whole, void* near) {
  const Shape s(sizes);
  paceline::make_masks(s, Fields(from, s), window, bytes, whole, near);
}

// KVCache.copy and KVCache.clear. `pools` [n]: each a page of `bytes` behind the other; `pairs` [count, 2]: from, to.
void paceline_copy_pages(int64_t n, uint8_t* const* pools, const int64_t* bytes, int64_t count, const int64_t* pairs) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < count; ++j) {
      std::memcpy(pools[i] + pairs[2 * j + 1] * bytes[i], pools[i] + pairs[2 * j] * bytes[i], bytes[i]);
    }
  }
}

void paceline_clear_pages(int64_t n, uint8_t* const* pools, const int64_t* bytes, int64_t count, const int64_t* pages) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < count; ++j) std::memset(pools[i] + pages[j] * bytes[i], 0, bytes[i]);
  }
}

}  // extern "C"
