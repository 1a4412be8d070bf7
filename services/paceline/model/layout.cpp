// The integers of a step: its sequences are read from their Python objects as columns, and laid out in the step's buffer,
// each in one pass. See layout.py.

#include "layout.h"

#include "objects.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using paceline::Fields, paceline::intern, paceline::kPage, paceline::method, paceline::Ref, paceline::Shape;

using Column = std::vector<int64_t>;

// Columns of a sequence, as layout.py hands them over.
enum { kTokenIds, kPositions, kRows, kPages, kNumLogits, kVisible, kKeyPositions, kOwnRows, kAlso, kCopies, kNumColumns };

// The readers below return false after an error, and where there is something else than they expect.

bool read_int(PyObject* object, int64_t& value) {
  value = PyLong_AsLongLong(object);
  return value != -1 || !PyErr_Occurred();
}

// Adds the numbers of a range that counts up by one.
bool add_range(PyObject* range, Column& column) {
  const Py_ssize_t size = PyObject_Size(range);
  if (size <= 0) return size == 0;
  Ref ends[] = {Ref(PySequence_GetItem(range, 0)), Ref(PySequence_GetItem(range, size - 1))};
  int64_t first = 0, last = 0;
  if (!ends[0] || !ends[1] || !read_int(ends[0].get(), first) || !read_int(ends[1].get(), last)) return false;
  if (last - first != size - 1) return false;
  for (int64_t value = first; value <= last; ++value) column.push_back(value);
  return true;
}

// Adds the numbers of an array("q").
bool add_array(PyObject* array, Column& column) {
  Py_buffer view;
  if (PyObject_GetBuffer(array, &view, PyBUF_ND | PyBUF_FORMAT) < 0) return false;
  const bool fits = view.ndim == 1 && view.format != nullptr && view.format[0] == 'q' && view.format[1] == 0;
  const auto* values = static_cast<const int64_t*>(view.buf);
  if (fits) column.insert(column.end(), values, values + view.len / 8);
  PyBuffer_Release(&view);
  return fits;
}

bool add(PyObject* values, Column& column) {
  if (PyRange_Check(values)) return add_range(values, column);
  if (PyObject_CheckBuffer(values)) return add_array(values, column);
  if (!PyList_CheckExact(values) && !PyTuple_CheckExact(values)) return false;
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(values);
  for (Py_ssize_t i = 0; i < size; ++i) {
    int64_t value = 0;
    if (!read_int(PySequence_Fast_GET_ITEM(values, i), value)) return false;
    column.push_back(value);
  }
  return true;
}

// True if all numbers are in [0, end).
bool all_below(const int64_t* values, int64_t count, int64_t end) {
  return std::all_of(values, values + count, [end](int64_t value) { return value >= 0 && value < end; });
}

// True if all numbers from `first` on are.
bool within(const Column& column, size_t first, int64_t end) {
  return all_below(column.data() + first, static_cast<int64_t>(column.size() - first), end);
}

// Adds the further writes of a sequence of `num_tokens`, whose first token is `first` of the step.
bool add_also(PyObject* also, int64_t first, int64_t num_tokens, Column& column) {
  if (!PyList_CheckExact(also) && !PyTuple_CheckExact(also)) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(also); ++i) {
    PyObject* pair = PySequence_Fast_GET_ITEM(also, i);
    const size_t at = column.size();
    if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2 || !add(pair, column)) return false;
    if (column[at] < 0 || column[at] >= num_tokens || column[at + 1] < 0) return false;
    column[at] += first;
  }
  return true;
}

struct Names {
  PyObject *data_ptr, *dim, *is_contiguous, *is_cpu, *nbytes;
} names;

// A number that a method of a tensor gives; -1 after an error.
int64_t ask(PyObject* tensor, PyObject* name) {
  Ref value(PyObject_CallMethodNoArgs(tensor, name));
  return value ? PyLong_AsLongLong(value.get()) : -1;
}

// Adds the place of the values of a tensor [num_values] in the host's memory, of `width` bytes each; of any num_values if
// that is -1 before.
bool add_values(PyObject* tensor, int64_t width, int64_t& num_values, Column& column) {
  Ref on_host(PyObject_GetAttr(tensor, names.is_cpu)), bytes(PyObject_GetAttr(tensor, names.nbytes));
  if (!on_host || !bytes || on_host.get() != Py_True) return false;
  if (ask(tensor, names.dim) != 1 || ask(tensor, names.is_contiguous) != 1) return false;
  const int64_t size = PyLong_AsLongLong(bytes.get()), at = ask(tensor, names.data_ptr);
  if (PyErr_Occurred() || size % width != 0 || (num_values >= 0 && size != num_values * width)) return false;
  num_values = size / width;
  column.push_back(at);
  return true;
}

// Adds the further rows that tokens see, below `num_keys`: the number of each token's rows, then the rows.
bool add_own(PyObject* own_rows, int64_t num_tokens, int64_t num_keys, Column& column) {
  if (!PyList_CheckExact(own_rows) || PyList_GET_SIZE(own_rows) != num_tokens) return false;
  for (Py_ssize_t i = 0; i < num_tokens; ++i) {
    const size_t at = column.size();
    column.push_back(0);
    if (!add(PyList_GET_ITEM(own_rows, i), column) || !within(column, at + 1, num_keys)) return false;
    column[at] = static_cast<int64_t>(column.size() - at - 1);
  }
  return true;
}

bool is_empty(PyObject* values) { return PyObject_Size(values) == 0; }

// The columns of a step.
struct Columns {
  // Of each sequence: tokens, pages and logits, and keys that its tree sees, 0 if it is none.
  Column counts;
  Column ids, rows, positions, pages, also, own;
  Column visible, key_positions;  // addresses, 0 where there is none
  bool apart = false;  // positions differ from rows
  int64_t num_logits = 0, shortest = INT64_MAX, longest = 0, most_keys = 0;
  int64_t num_rows = 0;  // KV rows that the page tables must cover

  // Adds a sequence by its columns, a tuple.
  bool add_step(PyObject* const* of, PyObject* copies) {
    const size_t first = ids.size(), first_page = pages.size();
    int64_t logits = 0;
    if (!add(of[kTokenIds], ids) || !add(of[kRows], rows) || !add(of[kPages], pages) || !read_int(of[kNumLogits], logits) ||
        rows.size() != ids.size() || ids.size() == first)
      return false;
    if (of[kPositions] != of[kRows] && !apart) {
      apart = true;
      positions.assign(rows.begin(), rows.begin() + static_cast<int64_t>(first));
    }
    if (apart && (!add(of[kPositions], positions) || positions.size() != ids.size())) return false;
    const auto tokens = static_cast<int64_t>(ids.size() - first), tables = static_cast<int64_t>(pages.size() - first_page);
    int64_t keys = 0;
    if (!within(rows, first, tables * kPage) || logits < 0 || logits > tokens) return false;
    if (!add_also(of[kAlso], static_cast<int64_t>(first), tokens, also)) return false;
    if (!add_tree(of, tokens, keys) || keys > tables * kPage) return false;
    counts.insert(counts.end(), {tokens, tables, logits, keys});
    num_logits += logits, shortest = std::min(shortest, tokens), longest = std::max(longest, tokens);
    return is_empty(of[kCopies]) || PyList_SetSlice(copies, PY_SSIZE_T_MAX, PY_SSIZE_T_MAX, of[kCopies]) == 0;
  }

  // What the tokens of a sequence see, where that is not all rows up to their own: all the same ones, and each its own.
  bool add_tree(PyObject* const* of, int64_t num_tokens, int64_t& keys) {
    if (of[kVisible] == Py_None) {
      visible.push_back(0), key_positions.push_back(0);
      return is_empty(of[kOwnRows]);
    }
    keys = -1;
    if (!add_values(of[kVisible], 1, keys, visible) || keys == 0) return false;
    if (!add_own(of[kOwnRows], num_tokens, keys, own)) return false;
    if (of[kKeyPositions] == Py_None) key_positions.push_back(0);
    else if (!add_values(of[kKeyPositions], 8, keys, key_positions)) return false;
    most_keys = std::max(most_keys, keys);
    return true;
  }
};

constexpr const char* kCapsule = "paceline_layout.columns";

// gather(steps) -> tokens, writes, logits, tokens of the shortest and of the longest sequence, KV rows that the page
// tables must cover, if a step has a tree, the copies, and the columns for lay_out, which are good as long as the steps live;
// None if these are no columns of SequenceStep as the engines make them. `steps`: a list of tuples, see layout.py.
PyObject* gather(PyObject*, PyObject* steps) {
  if (!PyList_CheckExact(steps) || PyList_GET_SIZE(steps) == 0) Py_RETURN_NONE;
  auto held = std::make_unique<Columns>();
  Columns& columns = *held;
  Ref copied(PyList_New(0));
  for (Py_ssize_t i = 0; copied && i < PyList_GET_SIZE(steps); ++i) {
    PyObject* step = PyList_GET_ITEM(steps, i);
    const bool whole = PyTuple_CheckExact(step) && PyTuple_GET_SIZE(step) == kNumColumns;
    if (whole && columns.add_step(PySequence_Fast_ITEMS(step), copied.get())) continue;
    PyErr_Clear();  // Python finds it, too, and says what is wrong
    Py_RETURN_NONE;
  }
  const auto num_tokens = static_cast<Py_ssize_t>(columns.ids.size());
  const auto num_writes = num_tokens + static_cast<Py_ssize_t>(columns.also.size()) / 2;
  columns.num_rows = std::max(*std::max_element(columns.rows.begin(), columns.rows.end()) + 1, columns.most_keys);
  Ref copies(copied ? PyList_AsTuple(copied.get()) : nullptr);
  Ref capsule(PyCapsule_New(held.get(), kCapsule, [](PyObject* of) {
    delete static_cast<Columns*>(PyCapsule_GetPointer(of, kCapsule));
  }));
  if (capsule) held.release();
  if (!copies || !capsule) return nullptr;
  return Py_BuildValue("nnLLLLOOO", num_tokens, num_writes, columns.num_logits, columns.shortest, columns.longest,
                       columns.num_rows, columns.most_keys ? Py_True : Py_False, copies.get(), capsule.get());
}

// -- buffers of steps. What does not fit is refused before anything is read or written ----------------------------------

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

std::string said(const std::string& name, int64_t value) { return name + " is " + std::to_string(value); }

// Refuses sizes that no step has, and memory that is smaller than they say.
void check(Shape s, int64_t bytes) {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  const std::pair<const char*, int64_t> sizes[] = {{"tokens", s.tokens}, {"writes", s.writes}, {"logit_rows", s.logit_rows},
                                                   {"rows", s.rows}, {"row_len", s.row_len}, {"pages", s.pages}};
  for (const auto& [name, size] : sizes) {
    if (size < 0 || size > kMost) refuse(said(name, size) + ": 0 to 2^31 - 1 is allowed");
  }
  if (s.rows == 0 || s.row_len == 0 || s.pages == 0) refuse("rows, row_len or pages is 0: more is allowed");
  if (s.bytes() > bytes) refuse("the buffer has " + std::to_string(bytes) + " bytes: its sizes need more");
}

// Refuses a shape that is smaller than a step in it.
void check_covers(const Shape& s, const Shape& own) {
  const std::tuple<const char*, int64_t, int64_t> sizes[] = {
      {"tokens", s.tokens, own.tokens}, {"writes", s.writes, own.writes}, {"logit_rows", s.logit_rows, own.logit_rows},
      {"rows", s.rows, own.rows}, {"row_len", s.row_len, own.row_len}, {"pages", s.pages, own.pages}};
  for (const auto& [name, size, least] : sizes)
    if (size < least) refuse(said(name, size) + ": the step has " + std::to_string(least));
  if (!s.is_tree != !own.is_tree) refuse(said("is_tree", s.is_tree) + ": the step has " + std::to_string(own.is_tree));
}

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

// The least shape of a step whose query rows are `row_len` long.
Shape shape_of(const Columns& columns, int64_t row_len) {
  const auto tokens = static_cast<int64_t>(columns.ids.size());
  int64_t rows = 0;
  for (size_t i = 0; i < columns.counts.size(); i += 4) rows += (columns.counts[i] + row_len - 1) / row_len;
  const int64_t writes = tokens + static_cast<int64_t>(columns.also.size()) / 2;
  const int64_t sizes[] = {tokens, writes, columns.num_logits, rows, row_len, (columns.num_rows + kPage - 1) / kPage,
                           columns.most_keys > 0};
  return Shape(sizes);
}

// step_plan._lay_out: fills the buffer `to` of a step.
void fill(const Columns& columns, int64_t scratch_row, const Shape& s, int64_t* to, int64_t bytes) {
  check(s, bytes);
  check_covers(s, shape_of(columns, s.row_len));
  const Fields f(to, s);
  const int64_t *counts = columns.counts.data(), *ids = columns.ids.data(), *rows = columns.rows.data();
  const int64_t *positions = columns.apart ? columns.positions.data() : rows, *pages = columns.pages.data();
  const int64_t *also = columns.also.data(), *own = columns.own.data();
  const auto* visible = reinterpret_cast<const uint8_t* const*>(columns.visible.data());
  const auto* key_positions = reinterpret_cast<const int64_t* const*>(columns.key_positions.data());
  const auto n = static_cast<int64_t>(columns.visible.size()), num_also = static_cast<int64_t>(columns.also.size()) / 2;
  int64_t first = 0, logits = 0, row = 0;  // of the sequence, among all
  for (int64_t i = 0; i < n; ++i, counts += 4) {
    const int64_t tokens = counts[0], tables = counts[1], seen = counts[3];
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
        if (seen) std::memcpy(sees, visible[i], seen);
        else std::memset(sees, 1, width);
        std::memset(sees + width, 0, s.keys() - width);
        if (!seen) continue;
        for (int64_t j = 1; j <= *own; ++j) sees[own[j]] = 1;
        if (begin + p < tokens - 1) own += 1 + *own;  // the padding has the last token's rows, too
      }
      if (!s.is_tree) continue;
      int64_t* of_key = f.key_positions + row * s.keys();
      const int64_t given = key_positions[i] == nullptr ? 0 : seen;
      if (given) std::memcpy(of_key, key_positions[i], 8 * given);
      for (int64_t key = given; key < s.keys(); ++key) of_key[key] = key;
    }
    first += tokens, pages += tables;
    if (seen) own += 1 + *own;
  }
  pad(f.tokens, first, s.tokens), pad(f.positions, first, s.tokens), pad(f.scatter, first, s.tokens);
  pad(f.logits_index, logits, s.logit_rows);
  for (int64_t i = 0; i < num_also; ++i) f.write_tokens[first + i] = also[2 * i], f.write_rows[first + i] = also[2 * i + 1];
  scratch(f, first + num_also, s.writes, scratch_row);
}

// buckets.pack: from the buffer of one shape to that of one that covers it.
void pack(Shape own, int64_t* from, int64_t own_bytes, Shape s, int64_t* to, int64_t bytes, int64_t scratch_row) {
  check(own, own_bytes), check(s, bytes), check_covers(s, own);
  const Fields x(from, own), f(to, s);
  const auto copy = [](const int64_t* values, int64_t count, int64_t* field, int64_t size) {
    std::memcpy(field, values, 8 * count);
    pad(field, count, size);
  };
  copy(x.tokens, own.tokens, f.tokens, s.tokens);
  copy(x.positions, own.tokens, f.positions, s.tokens);
  copy(x.logits_index, own.logit_rows, f.logits_index, s.logit_rows);
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

// step_plan.attention_masks, of values of two or four bytes; `near` only with a window. `check` comes first.
void masks(Shape s, int64_t* from, int64_t window, int64_t bytes, void* whole, void* near) {
  const Fields f(from, s);
  if (near != nullptr && window == 0) refuse("window is 0: another number is allowed");
  if (!all_below(f.gather, s.rows * s.row_len, s.tokens)) refuse("gather has an index that is no token's");
  if (!all_below(f.query_rows, s.rows * s.row_len, INT64_MAX)) refuse("query_rows has a negative row");
  paceline::make_masks(s, f, window, bytes, whole, near);
}

// Refuses a page that one of n pools does not have; `sizes` [n]: their pages.
void check_pages(int64_t n, const int64_t* sizes, int64_t count, const int64_t* pages) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < count; ++j)
      if (pages[j] < 0 || pages[j] >= sizes[i]) refuse(said("page", pages[j]) + ": 0 to " + std::to_string(sizes[i] - 1) + " is allowed");
  }
}

// KVCache.copy and KVCache.clear. `pools` [n]: each `sizes` pages of `bytes`, one behind the other; `pairs` [count, 2]:
// from, to.
void copy_pages(int64_t n, uint8_t* const* pools, const int64_t* bytes, const int64_t* sizes, int64_t count, const int64_t* pairs) {
  check_pages(n, sizes, 2 * count, pairs);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < count; ++j) {
      std::memmove(pools[i] + pairs[2 * j + 1] * bytes[i], pools[i] + pairs[2 * j] * bytes[i], bytes[i]);
    }
  }
}

void clear_pages(int64_t n, uint8_t* const* pools, const int64_t* bytes, const int64_t* sizes, int64_t count, const int64_t* pages) {
  check_pages(n, sizes, count, pages);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < count; ++j) std::memset(pools[i] + pages[j] * bytes[i], 0, bytes[i]);
  }
}

// Calls a function of integers, addresses, which Python gives as ints, and shapes, of which it gives tuples. What the
// function refuses is a ValueError.
template <class T>
T number_of(PyObject* object) {
  if constexpr (std::is_same_v<T, PyObject*>) {
    if (!PyCapsule_IsValid(object, kCapsule)) PyErr_SetString(PyExc_TypeError, "these are no columns of gather");
    return object;
  } else if constexpr (std::is_pointer_v<T>) {
    return static_cast<T>(PyLong_AsVoidPtr(object));
  } else if constexpr (std::is_same_v<T, Shape>) {
    int64_t sizes[7] = {};
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != 7) PyErr_SetString(PyExc_TypeError, "seven sizes are needed");
    for (int i = 0; i < 7 && !PyErr_Occurred(); ++i) sizes[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(object, i));
    return Shape(sizes);
  } else {
    return PyLong_AsLongLong(object);
  }
}

template <class... T, size_t... i>
PyObject* call(void (*function)(T...), PyObject* const* arguments, Py_ssize_t count, std::index_sequence<i...>) {
  if (count != sizeof...(T)) return PyErr_Format(PyExc_TypeError, "%zu numbers are needed", sizeof...(T));
  const std::tuple<T...> numbers{number_of<T>(arguments[i])...};
  if (PyErr_Occurred()) return nullptr;
  try {
    std::apply(function, numbers);
  } catch (const std::invalid_argument& refused) {
    PyErr_SetString(PyExc_ValueError, refused.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

template <class... T>
PyObject* call(void (*function)(T...), PyObject* const* arguments, Py_ssize_t count) {
  return call(function, arguments, count, std::index_sequence_for<T...>());
}

// Fills the buffer of a step by the capsule of gather.
void lay_out(PyObject* columns, int64_t scratch_row, Shape s, int64_t* to, int64_t bytes) {
  fill(*static_cast<const Columns*>(PyCapsule_GetPointer(columns, kCapsule)), scratch_row, s, to, bytes);
}

template <auto function>
PyMethodDef calls(const char* name) {
  return method(name, [](PyObject*, PyObject* const* arguments, Py_ssize_t count) { return call(function, arguments, count); });
}

PyMethodDef methods[] = {
    {"gather", gather, METH_O, nullptr},
    calls<lay_out>("lay_out"),
    calls<check>("check"),
    calls<pack>("pack"),
    calls<masks>("masks"),
    calls<copy_pages>("copy_pages"),
    calls<clear_pages>("clear_pages"),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "paceline_layout", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_paceline_layout() {
  if (!intern({{names.data_ptr, "data_ptr"},
               {names.dim, "dim"},
               {names.is_contiguous, "is_contiguous"},
               {names.is_cpu, "is_cpu"},
               {names.nbytes, "nbytes"}}))
    return nullptr;
  return PyModule_Create(&module);
}
