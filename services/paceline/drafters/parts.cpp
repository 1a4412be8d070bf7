// The parts of all sessions in a forward of a draft model, from the leaves of a step in one pass: see parts.py.

#include "objects.h"

#include <cstdint>
#include <vector>

namespace {

using paceline::intern, paceline::method, paceline::Ref;

// Columns of a leaf, which is a tuple. The columns of a session are in parts.py.
enum { kSessionId, kNodeId, kPathIds, kPath, kNumOfLeaf };
enum { kTokens, kSampler, kNumCached, kNodeRows, kNumOfSession };

PyObject *part_type, *tree_step, *columns_of, *take_rows, *free_rows, *positions_name, *extend;
PyTypeObject* row_type;

// prepare(part_type, row_type, tree_step, columns_of): Part and Row, a tuple of two; rows.tree_step; and what makes the
// columns of a session.
PyObject* prepare(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 4 || !PyType_Check(arguments[1]) ||
      !PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(arguments[1]), &PyTuple_Type))
    return PyErr_Format(PyExc_TypeError, "prepare takes a type, one of tuples, and two functions");
  part_type = Py_NewRef(arguments[0]);
  row_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(arguments[1]));
  tree_step = Py_NewRef(arguments[2]), columns_of = Py_NewRef(arguments[3]);
  Py_RETURN_NONE;
}

// The leaves of one session, which stand next to each other.
struct Group {
  PyObject *session, *columns;
  Py_ssize_t first, stop;
  Py_ssize_t num_pending;

  PyObject* operator[](int column) const { return PyTuple_GET_ITEM(columns, column); }
};

PyObject* of_leaf(PyObject* leaves, Py_ssize_t i, int column) { return PyTuple_GET_ITEM(PyList_GET_ITEM(leaves, i), column); }

// True if a group is one that this pass lays out: an anchor with pending tokens, or leaves whose ancestors all have rows.
bool plain(PyObject* leaves, Group& group) {
  const Py_ssize_t num_cached = PyLong_AsSsize_t(group[kNumCached]);
  if (PyErr_Occurred() || !PyList_CheckExact(group[kTokens]) || !PyDict_CheckExact(group[kNodeRows])) return false;
  group.num_pending = PyList_GET_SIZE(group[kTokens]) - num_cached;
  if (num_cached < 0) return false;
  if (group.num_pending > 0) return group.stop - group.first == 1 && PyTuple_GET_SIZE(of_leaf(leaves, group.first, kPath)) == 0;
  for (Py_ssize_t i = group.first; i < group.stop; ++i) {
    PyObject* path_ids = of_leaf(leaves, i, kPathIds);
    const Py_ssize_t depth = PyTuple_GET_SIZE(path_ids);
    if (depth == 0 || PyTuple_GET_SIZE(of_leaf(leaves, i, kPath)) != depth) return false;
    for (Py_ssize_t at = 0; at < depth - 1; ++at)
      if (PyDict_Contains(group[kNodeRows], PyTuple_GET_ITEM(path_ids, at)) != 1) return false;
  }
  return true;
}

// True for a tuple of `size` columns, with names or without.
bool is_row(PyObject* columns, Py_ssize_t size) { return PyTuple_Check(columns) && PyTuple_GET_SIZE(columns) == size; }

// Finds the groups of leaves, whose columns are appended to `held`. False if there is more than the plain case, or after an
// error.
bool find_groups(PyObject* leaves, PyObject* sessions, std::vector<Group>& groups, PyObject* held) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leaves); ++i) {
    if (!is_row(PyList_GET_ITEM(leaves, i), kNumOfLeaf) || !PyTuple_CheckExact(of_leaf(leaves, i, kPath)) ||
        !PyTuple_CheckExact(of_leaf(leaves, i, kPathIds)))
      return false;
    PyObject* session = PyDict_GetItemWithError(sessions, of_leaf(leaves, i, kSessionId));
    if (session == nullptr) return false;
    if (groups.empty() || groups.back().session != session) {
      Ref columns(PyObject_CallOneArg(columns_of, session));
      if (!columns || !is_row(columns.get(), kNumOfSession) || PyList_Append(held, columns.get()) < 0) return false;
      groups.push_back({session, columns.get(), i, i, 0});
    }
    ++groups.back().stop;
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    for (size_t j = 0; j < i; ++j)
      if (groups[j].session == groups[i].session) return false;
    if (!plain(leaves, groups[i])) return false;
  }
  return true;
}

// The positions of a session's rows, an array of int64, to be written.
struct Positions {
  Py_buffer view{};

  ~Positions() { PyBuffer_Release(&view); }
  // After rows are taken, which may make another array.
  bool open(PyObject* session) {
    Ref array(PyObject_GetAttr(session, positions_name));
    return array && PyObject_GetBuffer(array.get(), &view, PyBUF_WRITABLE | PyBUF_ND) == 0;
  }
  // False after an error.
  bool set(PyObject* row, int64_t position) const {
    const Py_ssize_t at = PyLong_AsSsize_t(row);
    if (PyErr_Occurred()) return false;
    if (view.itemsize != 8 || at < 0 || at >= view.len / 8) {
      PyErr_SetString(PyExc_IndexError, "a row has no position");
      return false;
    }
    static_cast<int64_t*>(view.buf)[at] = position;
    return true;
  }
};

// ModelDrafter.part_of a group whose `rows` were taken: an anchor, or leaves whose ancestors have rows. Null after an error.
PyObject* part_of(PyObject* leaves, const Group& group, PyObject* rows) {
  PyObject *context = group[kTokens], *node_rows = group[kNodeRows];
  const Py_ssize_t num_tokens = PyList_GET_SIZE(context), size = PyList_GET_SIZE(rows);
  const bool anchor = group.num_pending > 0;
  Ref tokens(PyList_New(size)), depths(PyList_New(size)), seen(PyList_New(size)), kept(PyDict_New());
  Positions positions;
  if (!tokens || !depths || !seen || !kept || !positions.open(group.session)) return nullptr;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject *row = PyList_GET_ITEM(rows, i), *path_ids = anchor ? nullptr : of_leaf(leaves, group.first + i, kPathIds);
    const Py_ssize_t depth = anchor ? i : PyTuple_GET_SIZE(path_ids) - 1;  // own rows before this one
    const Py_ssize_t position = anchor ? num_tokens - size + i : num_tokens + depth;
    PyObject* token = anchor ? PyList_GET_ITEM(context, position) : PyTuple_GET_ITEM(of_leaf(leaves, group.first + i, kPath), depth);
    Ref own(PyList_New(depth + 1)), place(PyLong_FromSsize_t(position));
    if (!own || !place || !positions.set(row, position)) return nullptr;
    for (Py_ssize_t at = 0; at < depth; ++at) {
      PyObject* above = anchor ? PyList_GET_ITEM(rows, at) : PyDict_GetItemWithError(node_rows, PyTuple_GET_ITEM(path_ids, at));
      if (above == nullptr) return nullptr;
      PyList_SET_ITEM(own.get(), at, Py_NewRef(above));
    }
    PyList_SET_ITEM(own.get(), depth, Py_NewRef(row));
    PyList_SET_ITEM(tokens.get(), i, Py_NewRef(token));
    PyList_SET_ITEM(depths.get(), i, place.release());
    PyList_SET_ITEM(seen.get(), i, own.release());
    if (!anchor && PyDict_SetItem(kept.get(), of_leaf(leaves, group.first + i, kNodeId), row) < 0) return nullptr;
  }
  Ref num_logits(PyLong_FromSsize_t(anchor ? 1 : size)), num_pending(PyLong_FromSsize_t(group.num_pending));
  if (!num_logits || !num_pending) return nullptr;
  Ref step(PyObject_CallFunctionObjArgs(tree_step, group.session, tokens.get(), depths.get(), rows, seen.get(),
                                        num_logits.get(), nullptr));
  if (!step) return nullptr;
  return PyObject_CallFunctionObjArgs(part_type, group.session, step.get(), num_pending.get(), kept.get(), nullptr);
}

// Appends Row(sampler, path) of each leaf of a group. False after an error.
bool add_rows(PyObject* leaves, const Group& group, PyObject* all) {
  for (Py_ssize_t i = group.first; i < group.stop; ++i) {
    Ref row(PyType_GenericAlloc(row_type, 2));
    if (!row) return false;
    PyTuple_SET_ITEM(row.get(), 0, Py_NewRef(group[kSampler]));
    PyTuple_SET_ITEM(row.get(), 1, Py_NewRef(of_leaf(leaves, i, kPath)));
    if (PyList_Append(all, row.get()) < 0) return false;
  }
  return true;
}

// True if take_rows has made a list of `size` rows; else there is an error.
bool is_rows(PyObject* rows, PyObject* size) {
  if (PyList_CheckExact(rows) && PyList_GET_SIZE(rows) == PyLong_AsSsize_t(size)) return true;
  PyErr_SetString(PyExc_TypeError, "take_rows has made no list of the rows");
  return false;
}

// Gives rows back that were taken of a session, and keeps the error that there is.
void give_back(const Group& group, PyObject* rows) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  Ref free(PyObject_GetAttr(group.session, free_rows));
  Ref done(free ? PyObject_CallMethodObjArgs(free.get(), extend, rows, nullptr) : nullptr);
  PyErr_Restore(type, value, traceback);
}

// parts_of(leaves, sessions, cache) -> (parts, rows): the Part of each session, and the Row of each leaf, in order; None,
// and nothing is done, if there is more than the plain case. Raises what RowSession.take_rows raises; nothing is done then.
// `leaves`: a list of Leaf; `sessions`: RowSessions by their ids.
PyObject* parts_of(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3 || !PyList_CheckExact(arguments[0]) || !PyDict_CheckExact(arguments[1]))
    return PyErr_Format(PyExc_TypeError, "parts_of takes a list of leaves, a dict of sessions and a cache");
  PyObject* leaves = arguments[0];
  std::vector<Group> groups;
  Ref parts(PyList_New(0)), all(PyList_New(0)), taken(PyList_New(0)), held(PyList_New(0));
  if (!parts || !all || !taken || !held) return nullptr;
  if (!find_groups(leaves, arguments[1], groups, held.get())) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
  for (const Group& group : groups) {
    const Py_ssize_t num_leaves = group.stop - group.first;
    Ref size(PyLong_FromSsize_t(group.num_pending > 0 ? group.num_pending : num_leaves));
    Ref rows(size ? PyObject_CallMethodObjArgs(group.session, take_rows, arguments[2], size.get(), nullptr) : nullptr);
    const bool fit = rows && is_rows(rows.get(), size.get()) && PyList_Append(taken.get(), rows.get()) == 0;
    Ref part(fit ? part_of(leaves, group, rows.get()) : nullptr);
    if (part && PyList_Append(parts.get(), part.get()) == 0 && add_rows(leaves, group, all.get())) continue;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(taken.get()); ++i)
      give_back(groups[static_cast<size_t>(i)], PyList_GET_ITEM(taken.get(), i));
    return nullptr;
  }
  return PyTuple_Pack(2, parts.get(), all.get());
}

PyMethodDef methods[] = {
    method("prepare", prepare),
    method("parts_of", parts_of),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "paceline_parts", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_paceline_parts() {
  if (!intern({{take_rows, "take_rows"}, {free_rows, "free_rows"}, {positions_name, "positions"}, {extend, "extend"}})) return nullptr;
  return PyModule_Create(&module);
}
