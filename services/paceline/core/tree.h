// A SpeculationTree and its nodes (tree.py) for native passes: where they keep their attributes, and how a node is made.
// Every extension that includes this has a copy of its own, which prepare_tree fills.

#pragma once

#include "objects.h"

#include <cmath>
#include <cstdint>
#include <vector>

namespace paceline {
namespace {

constexpr int kProducerShift = 28;
constexpr double kLeastProb = 1e-9;

// Where TreeNode keeps its attributes, and a node whose attributes a new one begins with.
struct Layout {
  PyTypeObject* type = nullptr;
  PyObject* prototype = nullptr;
  std::vector<Py_ssize_t> slots;
  Py_ssize_t alive, best, bonus, children, expanded, gaps, log_path, node_id, parent, parent_id, position, prob, q,
      rank, sampled, token_id;
} layout;

// Where a tree keeps its attributes.
struct TreeLayout {
  PyTypeObject* type = nullptr;
  Py_ssize_t anchor, best_limit, max_nodes, nodes, producer, rejection, suffix, vocab_size;
} of_tree;

PyObject *minus_one, *packed_ids, *packed_probs;

// paceline_probability in rows.cpp, null if there is none, and its tolerance.
using Probability = double (*)(const void*, const void*, int64_t, int64_t, int64_t, double);
Probability probability;
double tolerance;

inline bool is_node(PyObject* object) { return object != nullptr && Py_TYPE(object) == layout.type; }

// True if nodes may share the value: nobody can change it.
bool is_constant(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
         PyTuple_CheckExact(value) || PyDict_CheckExact(value);  // the dict is that of children, which each node makes
}

// Finds the attributes of TreeNode, by a node without parent and children as its constructor makes it, and of NativeTree;
// takes the address of paceline_probability and its tolerance. False after an error.
bool prepare_tree(PyObject* prototype, PyObject* tree_type, PyObject* address, PyObject* most) {
  probability = reinterpret_cast<Probability>(PyLong_AsVoidPtr(address));
  tolerance = PyFloat_AsDouble(most);
  if (PyErr_Occurred() || !intern({{packed_ids, "packed_ids"}, {packed_probs, "packed_probs"}})) return false;
  of_tree.type = reinterpret_cast<PyTypeObject*>(Py_NewRef(tree_type));
  layout.type = Py_TYPE(prototype);
  layout.slots.clear();
  Ref slots(PyObject_GetAttrString(reinterpret_cast<PyObject*>(layout.type), "__slots__"));
  Ref all(slots ? PySequence_Fast(slots.get(), "TreeNode has no slots") : nullptr);
  if (!all) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(all.get()); ++i) {
    Ref descriptor(PyObject_GetAttr(reinterpret_cast<PyObject*>(layout.type), PySequence_Fast_GET_ITEM(all.get(), i)));
    if (!descriptor) return false;
    const Py_ssize_t offset = offset_of(descriptor.get());
    if (offset < 0) return false;
    if (slot(prototype, offset) == nullptr || !is_constant(slot(prototype, offset))) {
      PyErr_SetString(PyExc_TypeError, "a new TreeNode has an attribute that nodes cannot share");
      return false;
    }
    layout.slots.push_back(offset);
  }
  if (!find({
        {layout.type, "alive", layout.alive},
        {layout.type, "best", layout.best},
        {layout.type, "bonus", layout.bonus},
        {layout.type, "children", layout.children},
        {layout.type, "expanded", layout.expanded},
        {layout.type, "gaps", layout.gaps},
        {layout.type, "log_path", layout.log_path},
        {layout.type, "node_id", layout.node_id},
        {layout.type, "parent", layout.parent},
        {layout.type, "parent_id", layout.parent_id},
        {layout.type, "position", layout.position},
        {layout.type, "prob", layout.prob},
        {layout.type, "q", layout.q},
        {layout.type, "rank", layout.rank},
        {layout.type, "sampled", layout.sampled},
        {layout.type, "token_id", layout.token_id},
        {of_tree.type, "_anchor", of_tree.anchor},
        {of_tree.type, "_best_limit", of_tree.best_limit},
        {of_tree.type, "_max_nodes", of_tree.max_nodes},
        {of_tree.type, "_nodes", of_tree.nodes},
        {of_tree.type, "_producer", of_tree.producer},
        {of_tree.type, "_rejection", of_tree.rejection},
        {of_tree.type, "_suffix", of_tree.suffix},
        {of_tree.type, "_vocab_size", of_tree.vocab_size},
      }))
    return false;
  layout.prototype = Py_NewRef(prototype);
  return (minus_one = PyLong_FromLong(-1)) != nullptr;
}

// True if q is a distribution that can yield the token.
bool drawable(PyObject* q, int64_t token_id, int64_t vocab_size) {
  if (q == Py_None || probability == nullptr) return false;
  Ref ids(PyObject_GetAttr(q, packed_ids)), probs(PyObject_GetAttr(q, packed_probs));
  if (!ids || !probs || !PyBytes_CheckExact(ids.get()) || !PyBytes_CheckExact(probs.get())) {
    PyErr_Clear();
    return false;
  }
  const Py_ssize_t size = PyBytes_GET_SIZE(ids.get());
  if (size == 0 || size % 4 != 0 || PyBytes_GET_SIZE(probs.get()) != 2 * size) return false;
  return probability(PyBytes_AS_STRING(ids.get()), PyBytes_AS_STRING(probs.get()), size / 4, token_id, vocab_size,
                     tolerance) > 0.0;
}

// False, without an error, if the object is no int of at most 63 bits.
inline bool read_int(PyObject* object, int64_t& value) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

// A NativeTree, whose dicts and whose suffix stay the same objects as long as it lives.
struct Tree {
  PyObject* self;
  PyObject *nodes = nullptr, *suffix = nullptr;

  explicit Tree(PyObject* tree) : self(tree) {
    if (!PyObject_TypeCheck(tree, of_tree.type)) return;
    nodes = slot(tree, of_tree.nodes), suffix = slot(tree, of_tree.suffix);
  }
  // False, with an error, if it is none.
  bool valid() const {
    if (nodes != nullptr && suffix != nullptr && anchor() != nullptr && PyDict_CheckExact(nodes)) return true;
    PyErr_SetString(PyExc_TypeError, "this is no tree of native passes");
    return false;
  }
  bool number(Py_ssize_t offset, int64_t& value) const {
    PyObject* found = slot(self, offset);
    value = PyLong_AsLongLong(found == nullptr ? Py_None : found);
    return !PyErr_Occurred();
  }
  PyObject* anchor() const {
    PyObject* node = slot(self, of_tree.anchor);
    return is_node(node) ? node : nullptr;
  }
  bool lost() const { return PyObject_Size(suffix) != 0; }
  bool offers() const { return slot(anchor(), layout.best) != Py_None; }
  // Forgets the best path, which was that of other nodes.
  void changed() const { put(self, of_tree.best_limit, Py_NewRef(minus_one)); }
};

// Makes one node below its parent; the tree holds it. Null after an error.
PyObject* grow(const Tree& tree, PyObject* parent, PyObject* node_id, PyObject* token_id, PyObject* prob,
               PyObject* sampled, PyObject* q) {
  Ref child(PyType_GenericAlloc(layout.type, 0));
  Ref children(PyDict_New());
  if (!child || !children) return nullptr;
  const double p = PyFloat_AS_DOUBLE(prob);
  PyObject* node = child.get();
  PyObject* siblings = slot(parent, layout.children);
  for (const Py_ssize_t offset : layout.slots) put(node, offset, Py_NewRef(slot(layout.prototype, offset)));
  put(node, layout.node_id, Py_NewRef(node_id));
  put(node, layout.token_id, Py_NewRef(token_id));
  put(node, layout.prob, Py_NewRef(prob));
  put(node, layout.sampled, Py_NewRef(sampled));
  put(node, layout.q, Py_NewRef(q));
  put(node, layout.parent, Py_NewRef(parent));
  put(node, layout.parent_id, Py_NewRef(slot(parent, layout.node_id)));
  put(node, layout.children, children.release());
  const double above = PyFloat_AsDouble(slot(parent, layout.log_path));
  const long position = PyLong_AsLong(slot(parent, layout.position));
  if (PyErr_Occurred()) return nullptr;
  Ref log_path(PyFloat_FromDouble(above + std::log(p > kLeastProb ? p : kLeastProb)));
  Ref place(PyLong_FromLong(position + 1));
  Ref rank(PyLong_FromSsize_t(PyDict_GET_SIZE(siblings)));
  if (!log_path || !place || !rank) return nullptr;
  put(node, layout.log_path, log_path.release());
  put(node, layout.position, place.release());
  put(node, layout.rank, rank.release());
  if (PyDict_SetItem(tree.nodes, node_id, node) < 0 || PyDict_SetItem(siblings, token_id, node) < 0)
    return nullptr;
  if (sampled == Py_True) {
    PyObject* best = slot(parent, layout.best);
    if (best == Py_None || p > PyFloat_AsDouble(slot(best, layout.prob))) put(parent, layout.best, Py_NewRef(node));
  }
  return PyErr_Occurred() ? nullptr : node;
}

}  // namespace
}  // namespace paceline
