// The sequences of a step as columns of integers, read from their Python objects in one pass. See columns.py.

#include "objects.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

using paceline::find, paceline::intern, paceline::method, paceline::Ref, paceline::slot;

using LayOut = void (*)(int64_t, const int64_t*, const int64_t*, const int64_t*, const int64_t*, const int64_t*, int64_t,
                        const int64_t*, const uint8_t* const*, const int64_t*, const int64_t* const*, int64_t,
                        const int64_t*, int64_t*);
using Column = std::vector<int64_t>;

// Where SequenceStep keeps its attributes.
struct StepLayout {
  PyTypeObject* type = nullptr;
  Py_ssize_t token_ids, positions, rows, pages, num_logits, visible, key_positions, own_rows, also, copies;
} layout;

// Begin a packed step: sequences, tokens, pages, further writes, 1 if positions differ from rows, and the numbers about
// rows of their own.
constexpr Py_ssize_t kHeader = 6, kCounts = 5;
constexpr int kSizes = 7;

// Finds the attributes of a class of sequences, once. False after an error.
bool known(PyTypeObject* type) {
  if (type == layout.type) return true;
  StepLayout found;
  if (!find({
        {type, "token_ids", found.token_ids},
        {type, "positions", found.positions},
        {type, "rows", found.rows},
        {type, "pages", found.pages},
        {type, "num_logits", found.num_logits},
        {type, "visible", found.visible},
        {type, "key_positions", found.key_positions},
        {type, "own_rows", found.own_rows},
        {type, "also", found.also},
        {type, "copies", found.copies},
      }))
    return false;
  layout = found;
  layout.type = reinterpret_cast<PyTypeObject*>(Py_NewRef(reinterpret_cast<PyObject*>(type)));
  return true;
}

// The readers below return false after an error, and where there is something else than they expect.

bool read_int(PyObject* object, int64_t& value) {
  if (object == nullptr) return false;
  value = PyLong_AsLongLong(object);
  return value != -1 || !PyErr_Occurred();
}

// Adds the numbers of a range that counts up by one.
bool add_range(PyObject* range, Column& column) {
  const Py_ssize_t size = PyObject_Size(range);
  if (size <= 0) return size == 0;
  Ref ends[] = {Ref(PySequence_GetItem(range, 0)), Ref(PySequence_GetItem(range, size - 1))};
  int64_t first = 0, last = 0;
  if (!read_int(ends[0].get(), first) || !read_int(ends[1].get(), last) || last - first != size - 1) return false;
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
  if (values == nullptr) return false;
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

// Adds the further writes of a sequence whose first token is `first` of the step.
bool add_also(PyObject* also, int64_t first, Column& column) {
  if (also == nullptr || (!PyList_CheckExact(also) && !PyTuple_CheckExact(also))) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(also); ++i) {
    PyObject* pair = PySequence_Fast_GET_ITEM(also, i);
    const size_t at = column.size();
    if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2 || !add(pair, column)) return false;
    column[at] += first;
  }
  return true;
}

struct Names {
  PyObject *data_ptr, *dim, *is_contiguous, *numel;
} names;

// A number that a method of a tensor gives; -1 after an error.
int64_t ask(PyObject* tensor, PyObject* name) {
  Ref value(PyObject_CallMethodNoArgs(tensor, name));
  return value ? PyLong_AsLongLong(value.get()) : -1;
}

// Adds the place of the values of a tensor [num_values]; of any length if that is -1 before.
bool add_values(PyObject* tensor, int64_t& num_values, Column& column) {
  if (tensor == nullptr || ask(tensor, names.dim) != 1 || ask(tensor, names.is_contiguous) != 1) return false;
  const int64_t size = ask(tensor, names.numel), at = ask(tensor, names.data_ptr);
  if (size < 0 || PyErr_Occurred() || (num_values >= 0 && size != num_values)) return false;
  num_values = size;
  column.push_back(at);
  return true;
}

// Adds the rows that tokens see beside the others: of each how many, and which.
bool add_own(PyObject* own_rows, int64_t num_tokens, Column& column) {
  if (own_rows == nullptr || !PyList_CheckExact(own_rows) || PyList_GET_SIZE(own_rows) != num_tokens) return false;
  for (Py_ssize_t i = 0; i < num_tokens; ++i) {
    const size_t at = column.size();
    column.push_back(0);
    if (!add(PyList_GET_ITEM(own_rows, i), column)) return false;
    column[at] = static_cast<int64_t>(column.size() - at - 1);
  }
  return true;
}

bool is_empty(PyObject* values) { return values != nullptr && PyObject_Size(values) == 0; }

// The columns of a step: of each sequence the counts that paceline_lay_out takes, and the numbers of all.
struct Columns {
  Column counts, ids, rows, positions, pages, also, own;
  Column visible, key_positions;  // addresses, 0 where there is none
  bool apart = false;  // positions differ from rows
  int64_t num_logits = 0, shortest = INT64_MAX, longest = 0, most_keys = 0;

  bool add_step(PyObject* step, PyObject* copies) {
    if (!known(Py_TYPE(step))) return false;
    const size_t first = ids.size(), first_page = pages.size();
    int64_t logits = 0;
    if (!add_also(slot(step, layout.also), static_cast<int64_t>(first), also) || !add(slot(step, layout.token_ids), ids) ||
        !add(slot(step, layout.rows), rows) || !add(slot(step, layout.pages), pages) ||
        !read_int(slot(step, layout.num_logits), logits) || rows.size() != ids.size() || ids.size() == first)
      return false;
    if (slot(step, layout.positions) != slot(step, layout.rows) && !apart) {
      apart = true;
      positions.assign(rows.begin(), rows.begin() + static_cast<int64_t>(first));
    }
    if (apart && (!add(slot(step, layout.positions), positions) || positions.size() != ids.size())) return false;
    const auto tokens = static_cast<int64_t>(ids.size() - first), tables = static_cast<int64_t>(pages.size() - first_page);
    int64_t keys = 0;
    if (!add_tree(step, tokens, keys)) return false;
    counts.insert(counts.end(), {tokens, tables, logits, keys, keys ? tokens : 0});
    num_logits += logits, shortest = std::min(shortest, tokens), longest = std::max(longest, tokens);
    PyObject* copied = slot(step, layout.copies);
    return is_empty(copied) || PyList_SetSlice(copies, PY_SSIZE_T_MAX, PY_SSIZE_T_MAX, copied) == 0;
  }

  // What the tokens of a sequence see, where that is not all rows up to their own: some rows, and each its own beside.
  bool add_tree(PyObject* step, int64_t num_tokens, int64_t& keys) {
    PyObject *seen = slot(step, layout.visible), *at = slot(step, layout.key_positions);
    if (seen == Py_None) {
      visible.push_back(0), key_positions.push_back(0);
      return is_empty(slot(step, layout.own_rows));
    }
    keys = -1;
    if (!add_values(seen, keys, visible) || keys == 0 || !add_own(slot(step, layout.own_rows), num_tokens, own))
      return false;
    if (at == Py_None) key_positions.push_back(0);
    else if (!add_values(at, keys, key_positions)) return false;
    most_keys = std::max(most_keys, keys);
    return true;
  }

  PyObject* packed() const {
    const int64_t header[kHeader] = {static_cast<int64_t>(counts.size()) / kCounts,
                                     static_cast<int64_t>(ids.size()),
                                     static_cast<int64_t>(pages.size()),
                                     static_cast<int64_t>(also.size()) / 2,
                                     apart,
                                     static_cast<int64_t>(own.size())};
    const Column* all[] = {&counts, &ids, &rows, &positions, &pages, &also, &own, &visible, &key_positions};
    size_t size = kHeader;
    for (const Column* column : all) size += column->size();
    PyObject* bytes = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(8 * size));
    if (bytes == nullptr) return nullptr;
    auto* at = std::copy(header, header + kHeader, reinterpret_cast<int64_t*>(PyBytes_AS_STRING(bytes)));
    for (const Column* column : all) at = std::copy(column->begin(), column->end(), at);
    return bytes;
  }
};

// gather(steps) -> tokens, writes, logits, tokens of the shortest and of the longest sequence, KV rows that the page
// tables must cover, if a step has a tree, the copies, and the columns as lay_out takes them, as long as the steps live;
// None if a tree says token by token what it sees, or this is no list of SequenceStep as the engines make them.
PyObject* gather(PyObject*, PyObject* steps) {
  if (!PyList_CheckExact(steps) || PyList_GET_SIZE(steps) == 0) Py_RETURN_NONE;
  Columns columns;
  Ref copied(PyList_New(0));
  for (Py_ssize_t i = 0; copied && i < PyList_GET_SIZE(steps); ++i) {
    if (columns.add_step(PyList_GET_ITEM(steps, i), copied.get())) continue;
    PyErr_Clear();  // Python finds it, too, and says what is wrong
    Py_RETURN_NONE;
  }
  Ref copies(copied ? PyList_AsTuple(copied.get()) : nullptr), packed(columns.packed());
  if (!copies || !packed) return nullptr;
  const auto num_tokens = static_cast<Py_ssize_t>(columns.ids.size());
  const auto num_writes = num_tokens + static_cast<Py_ssize_t>(columns.also.size()) / 2;
  const int64_t num_rows = std::max(*std::max_element(columns.rows.begin(), columns.rows.end()) + 1, columns.most_keys);
  return Py_BuildValue("nnLLLLOOO", num_tokens, num_writes, columns.num_logits, columns.shortest, columns.longest,
                       num_rows, columns.most_keys ? Py_True : Py_False, copies.get(), packed.get());
}

// lay_out(packed, sizes, scratch_row, buffer, function): fills the buffer of a step by columns of gather. `sizes`: a
// StepShape.numbers; the addresses of the buffer and of paceline_lay_out in layout.cpp.
PyObject* lay_out(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 5 || !PyBytes_CheckExact(arguments[0]) || !PyTuple_CheckExact(arguments[1]) ||
      PyTuple_GET_SIZE(arguments[1]) != kSizes)
    return PyErr_Format(PyExc_TypeError, "lay_out takes columns, 7 sizes, a row and two addresses");
  int64_t sizes[kSizes];
  for (int i = 0; i < kSizes; ++i) sizes[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(arguments[1], i));
  const int64_t scratch_row = PyLong_AsLongLong(arguments[2]);
  auto* to = static_cast<int64_t*>(PyLong_AsVoidPtr(arguments[3]));
  const auto fill = reinterpret_cast<LayOut>(PyLong_AsVoidPtr(arguments[4]));
  if (PyErr_Occurred()) return nullptr;
  const auto* header = reinterpret_cast<const int64_t*>(PyBytes_AS_STRING(arguments[0]));
  const int64_t *counts = header + kHeader, *ids = counts + kCounts * header[0], *rows = ids + header[1];
  const int64_t* positions = header[4] ? rows + header[1] : rows;
  const int64_t *pages = positions + header[1], *also = pages + header[2], *own = also + 2 * header[3];
  const auto *visible = own + header[5], *key_positions = visible + header[0];  // addresses
  fill(header[0], counts, ids, rows, positions, pages, header[3], also, reinterpret_cast<const uint8_t* const*>(visible),
       own, reinterpret_cast<const int64_t* const*>(key_positions), scratch_row, sizes, to);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"gather", gather, METH_O, nullptr},
    method("lay_out", lay_out),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "paceline_columns", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_paceline_columns() {
  if (!intern({{names.data_ptr, "data_ptr"},
               {names.dim, "dim"},
               {names.is_contiguous, "is_contiguous"},
               {names.numel, "numel"}}))
    return nullptr;
  return PyModule_Create(&module);
}
