// The buffer of a step and the masks that follow from it. See layout.py.
//
// A step is one buffer: the fields of StepArrays as int64, one behind the other, and of a step with trees the bytes of
// `visible` behind them.

#pragma once

#include <algorithm>
#include <cstdint>

namespace paceline {

constexpr int64_t kPage = 64;  // PAGE_SIZE

// As in StepShape, in its order.
struct Shape {
  int64_t tokens, writes, logit_rows, rows, row_len, pages, is_tree;

  explicit Shape(const int64_t* s)
      : tokens(s[0]), writes(s[1]), logit_rows(s[2]), rows(s[3]), row_len(s[4]), pages(s[5]), is_tree(s[6]) {}
  int64_t keys() const { return pages * kPage; }
  // Of the buffer; exact, as sizes are below 2^31 and products of three of them below 2^127.
  __int128 bytes() const {
    const __int128 places = __int128{rows} * row_len;
    const __int128 integers = 3 * __int128{tokens} + logit_rows + 2 * __int128{writes} + __int128{rows} * pages + 2 * places;
    return 8 * integers + (is_tree ? (8 * __int128{rows} + places) * keys() : 0);
  }
};

// As in StepArrays.
struct Fields {
  int64_t *tokens, *positions, *logits_index, *write_rows, *write_tokens, *page_table, *gather, *scatter, *query_rows;
  int64_t* key_positions = nullptr;
  uint8_t* visible = nullptr;

  Fields(int64_t* at, const Shape& s) {
    const auto next = [&at](int64_t size) {
      int64_t* field = at;
      at += size;
      return field;
    };
    tokens = next(s.tokens), positions = next(s.tokens), logits_index = next(s.logit_rows);
    write_rows = next(s.writes), write_tokens = next(s.writes), page_table = next(s.rows * s.pages);
    gather = next(s.rows * s.row_len), scatter = next(s.tokens), query_rows = next(s.rows * s.row_len);
    if (!s.is_tree) return;
    key_positions = next(s.rows * s.keys());
    visible = reinterpret_cast<uint8_t*>(at);
  }
};

// `window`: of the layers that slide; negative: the size of the chunks of layers that attend in chunks.
template <class T>
void fill_masks(const Shape& s, const Fields& f, int64_t window, T infinity, T* whole, T* near) {
  for (int64_t row = 0; row < s.rows; ++row) {
    const int64_t* keys = f.key_positions == nullptr ? nullptr : f.key_positions + row * s.keys();
    for (int64_t place = row * s.row_len; place < (row + 1) * s.row_len; ++place, whole += s.keys()) {
      if (f.visible == nullptr) {
        const int64_t seen = std::min(f.query_rows[place] + 1, s.keys());
        std::fill(whole, whole + seen, T{0});
        std::fill(whole + seen, whole + s.keys(), infinity);
      } else {
        const uint8_t* seen = f.visible + place * s.keys();
        for (int64_t key = 0; key < s.keys(); ++key) whole[key] = seen[key] ? T{0} : infinity;
      }
      if (near == nullptr) continue;
      const int64_t at = f.positions[f.gather[place]];
      const int64_t first = window > 0 ? at - window : at - at % -window - 1;  // positions beyond it are near
      for (int64_t key = 0; key < s.keys(); ++key) {
        near[key] = (keys == nullptr ? key : keys[key]) > first ? whole[key] : infinity;
      }
      near += s.keys();
    }
  }
}

// step_plan.attention_masks, of values of two or four bytes; `near` only with a window.
inline void make_masks(const Shape& s, const Fields& f, int64_t window, int64_t bytes, void* whole, void* near) {
  if (bytes == 2) {
    fill_masks<uint16_t>(s, f, window, 0xff80, static_cast<uint16_t*>(whole), static_cast<uint16_t*>(near));
  } else {
    fill_masks<uint32_t>(s, f, window, 0xff800000, static_cast<uint32_t*>(whole), static_cast<uint32_t*>(near));
  }
}

}  // namespace paceline
