// Passes over the Python objects of a SpeculationTree (tree.py), whose methods are their twins: see native_tree.py.
//
// A node is a TreeNode as Python makes it, so whoever looks at a tree finds the same objects. What is done here is the
// common case of each pass; the rest, bad input included, is left to the twin, node by node.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int kProducerShift = 28;
constexpr double kLeastProb = 1e-9;

using Probability = double (*)(const void*, const void*, int64_t, int64_t, int64_t, double);

// An owned reference; null after an error.
class Ref {
 public:
  explicit Ref(PyObject* object = nullptr) : object_(object) {}
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  void reset(PyObject* object) {
    PyObject* old = object_;
    object_ = object;
    Py_XDECREF(old);
  }
  PyObject* release() {
    PyObject* object = object_;
    object_ = nullptr;
    return object;
  }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// Where TreeNode keeps its attributes, and a node whose attributes a new one begins with.
struct Layout {
  PyTypeObject* type = nullptr;
  PyObject* prototype = nullptr;
  std::vector<Py_ssize_t> slots;
  Py_ssize_t aliases, alive, best, children, claims, log_path, node_id, parent, position, prob, q, rank, sampled,
      token_id;
} layout;

struct Names {
  PyObject *aliases, *anchor, *best_limit, *max_nodes, *nodes, *producers, *rejection, *suffix, *vocab_size, *attach,
      *node_ids, *parent_ids, *token_ids, *probs, *sampled, *qs, *packed_ids, *packed_probs;
} names;

// What prepare was told besides.
PyObject *refused_stale, *refused_invalid, *refused_dropped;
Probability probability;
double tolerance;

PyObject *columns_type, *distribution, *added_type;
PyObject* all_added;  // of so many nodes that none was refused of, a tuple
Py_ssize_t column_slots[6];  // of NodeColumns

PyObject* empty_tuple;
PyObject* minus_one;

inline PyObject*& slot(PyObject* node, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(node) + offset);
}

// Steals a reference to the value.
inline void put(PyObject* node, Py_ssize_t offset, PyObject* value) {
  PyObject*& at = slot(node, offset);
  PyObject* old = at;
  at = value;
  Py_XDECREF(old);
}

inline bool is_node(PyObject* object) { return object != nullptr && Py_TYPE(object) == layout.type; }

// Offset of a slot of TreeNode; -1 after an error.
Py_ssize_t offset_of(PyObject* descriptor) {
  if (!Py_IS_TYPE(descriptor, &PyMemberDescr_Type)) {
    PyErr_SetString(PyExc_TypeError, "TreeNode has an attribute that is no slot");
    return -1;
  }
  const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member;
  if (member->type != T_OBJECT_EX) {
    PyErr_SetString(PyExc_TypeError, "TreeNode has a slot that holds no object");
    return -1;
  }
  return member->offset;
}

bool find(const char* name, Py_ssize_t& offset, PyObject* type = reinterpret_cast<PyObject*>(layout.type)) {
  Ref descriptor(PyObject_GetAttrString(type, name));
  return descriptor && (offset = offset_of(descriptor.get())) >= 0;
}

// True if nodes may share the value: nobody can change it.
bool is_constant(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
         PyTuple_CheckExact(value) || PyDict_CheckExact(value);  // the dict is that of children, which each node makes
}

// prepare(prototype, stale, invalid, dropped, probability, tolerance, columns_type, distribution, added_type,
// all_added): a TreeNode without parent and children, as its constructor makes it; the reasons why attach may refuse a
// node; the address of paceline_probability in rows.cpp, 0 if there is none, and its tolerance; NodeColumns,
// SparseDistribution and Added; and the Added of 0, 1, .. nodes of which none was refused.
PyObject* prepare(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 10 || !PyTuple_CheckExact(arguments[9]))
    return PyErr_Format(PyExc_TypeError, "prepare takes 10 arguments, the last a tuple");
  PyObject* prototype = arguments[0];
  refused_stale = Py_NewRef(arguments[1]);
  refused_invalid = Py_NewRef(arguments[2]);
  refused_dropped = Py_NewRef(arguments[3]);
  probability = reinterpret_cast<Probability>(PyLong_AsVoidPtr(arguments[4]));
  tolerance = PyFloat_AsDouble(arguments[5]);
  columns_type = Py_NewRef(arguments[6]);
  distribution = Py_NewRef(arguments[7]);
  added_type = Py_NewRef(arguments[8]);
  all_added = Py_NewRef(arguments[9]);
  if (PyErr_Occurred()) return nullptr;
  const char* columns[] = {"node_ids", "parent_ids", "token_ids", "probs", "sampled", "qs"};
  for (int column = 0; column < 6; ++column)
    if (!find(columns[column], column_slots[column], columns_type)) return nullptr;
  layout.type = Py_TYPE(prototype);
  layout.slots.clear();
  Ref slots(PyObject_GetAttrString(reinterpret_cast<PyObject*>(layout.type), "__slots__"));
  Ref all(slots ? PySequence_Fast(slots.get(), "TreeNode has no slots") : nullptr);
  if (!all) return nullptr;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(all.get()); ++i) {
    Ref descriptor(PyObject_GetAttr(reinterpret_cast<PyObject*>(layout.type), PySequence_Fast_GET_ITEM(all.get(), i)));
    if (!descriptor) return nullptr;
    const Py_ssize_t offset = offset_of(descriptor.get());
    if (offset < 0) return nullptr;
    if (slot(prototype, offset) == nullptr || !is_constant(slot(prototype, offset))) {
      PyErr_SetString(PyExc_TypeError, "a new TreeNode has an attribute that nodes cannot share");
      return nullptr;
    }
    layout.slots.push_back(offset);
  }
  if (!(find("aliases", layout.aliases) && find("alive", layout.alive) && find("best", layout.best) &&
        find("children", layout.children) && find("claims", layout.claims) && find("log_path", layout.log_path) &&
        find("node_id", layout.node_id) && find("parent", layout.parent) && find("position", layout.position) &&
        find("prob", layout.prob) && find("q", layout.q) && find("rank", layout.rank) &&
        find("sampled", layout.sampled) && find("token_id", layout.token_id)))
    return nullptr;
  layout.prototype = Py_NewRef(prototype);
  Py_RETURN_NONE;
}

// A column as the list or tuple that it is, with an item for each of the nodes, or with none.
struct Column {
  Ref held;
  PyObject** items = nullptr;

  bool read(PyObject* columns, PyObject* name, Py_ssize_t size, bool optional) {
    PyObject* column = PyObject_GetAttr(columns, name);
    if (column == nullptr) return false;
    held.reset(PySequence_Fast(column, "a column is no sequence"));
    Py_DECREF(column);
    if (!held) return false;
    const Py_ssize_t found = PySequence_Fast_GET_SIZE(held.get());
    if (found == 0 && optional) return true;
    if (found != size) {
      PyErr_SetString(PyExc_ValueError, "columns of unequal length");
      return false;
    }
    items = PySequence_Fast_ITEMS(held.get());
    return true;
  }
};

// False, without an error, if the object is no int of at most 63 bits.
inline bool read_int(PyObject* object, int64_t& value) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

// The attributes of a tree, for as long as one call lasts.
struct Tree {
  PyObject* self;
  Ref nodes, aliases, suffix;

  explicit Tree(PyObject* tree)
      : self(tree),
        nodes(PyObject_GetAttr(tree, names.nodes)),
        aliases(PyObject_GetAttr(tree, names.aliases)),
        suffix(PyObject_GetAttr(tree, names.suffix)) {}
  bool valid() const {
    if (!nodes || !aliases || !suffix) return false;
    if (PyDict_CheckExact(nodes.get()) && PyDict_CheckExact(aliases.get())) return true;
    PyErr_SetString(PyExc_TypeError, "the nodes of a tree are no dict");
    return false;
  }
  bool number(PyObject* name, int64_t& value) const {
    Ref found(PyObject_GetAttr(self, name));
    if (found) value = PyLong_AsLongLong(found.get());
    return found && !PyErr_Occurred();
  }
  // True if the plain cases below apply: it is not lost and no node has an alias.
  bool plain() const { return PyDict_GET_SIZE(aliases.get()) == 0 && PyObject_Size(suffix.get()) == 0; }
};

// Makes one node below its parent. False after an error.
bool grow(const Tree& tree, PyObject* parent, PyObject* claims, PyObject* node_id, PyObject* token_id, PyObject* prob,
          double p, PyObject* sampled, PyObject* q) {
  Ref child(PyType_GenericAlloc(layout.type, 0));
  Ref children(PyDict_New());
  if (!child || !children) return false;
  PyObject* node = child.get();
  PyObject* siblings = slot(parent, layout.children);
  for (const Py_ssize_t offset : layout.slots) put(node, offset, Py_NewRef(slot(layout.prototype, offset)));
  put(node, layout.node_id, Py_NewRef(node_id));
  put(node, layout.token_id, Py_NewRef(token_id));
  put(node, layout.prob, Py_NewRef(prob));
  put(node, layout.claims, Py_NewRef(claims));
  put(node, layout.sampled, Py_NewRef(sampled));
  put(node, layout.q, Py_NewRef(q));
  put(node, layout.parent, Py_NewRef(parent));
  put(node, layout.children, children.release());
  const double above = PyFloat_AsDouble(slot(parent, layout.log_path));
  const long position = PyLong_AsLong(slot(parent, layout.position));
  if (PyErr_Occurred()) return false;
  Ref log_path(PyFloat_FromDouble(above + std::log(p > kLeastProb ? p : kLeastProb)));
  Ref place(PyLong_FromLong(position + 1));
  Ref rank(PyLong_FromSsize_t(PyDict_GET_SIZE(siblings)));
  if (!log_path || !place || !rank) return false;
  put(node, layout.log_path, log_path.release());
  put(node, layout.position, place.release());
  put(node, layout.rank, rank.release());
  if (PyDict_SetItem(tree.nodes.get(), node_id, node) < 0 || PyDict_SetItem(siblings, token_id, node) < 0) return false;
  if (sampled == Py_True) {
    PyObject* best = slot(parent, layout.best);
    if (best == Py_None || p > PyFloat_AsDouble(slot(best, layout.prob))) put(parent, layout.best, child.release());
  }
  return !PyErr_Occurred();
}

// True if q is a distribution that can yield the token.
bool drawable(PyObject* q, int64_t token_id, int64_t vocab_size) {
  if (q == Py_None || probability == nullptr) return false;
  Ref ids(PyObject_GetAttr(q, names.packed_ids)), probs(PyObject_GetAttr(q, names.packed_probs));
  if (!ids || !probs || !PyBytes_CheckExact(ids.get()) || !PyBytes_CheckExact(probs.get())) {
    PyErr_Clear();
    return false;
  }
  const Py_ssize_t size = PyBytes_GET_SIZE(ids.get());
  if (size == 0 || size % 4 != 0 || PyBytes_GET_SIZE(probs.get()) != 2 * size) return false;
  return probability(PyBytes_AS_STRING(ids.get()), PyBytes_AS_STRING(probs.get()), size / 4, token_id, vocab_size,
                     tolerance) > 0.0;
}

// add(tree, columns, producer) -> Added. SpeculationTree.add.
PyObject* add(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3) return PyErr_Format(PyExc_TypeError, "add takes 3 arguments, not %zd", count);
  PyObject *self = arguments[0], *columns = arguments[1], *producer = arguments[2];
  const int64_t maker = PyLong_AsLongLong(producer);
  if (PyErr_Occurred()) return nullptr;
  const Tree tree(self);
  int64_t vocab_size = 0, max_nodes = 0, rejection = 0;
  if (!tree.valid() || !tree.number(names.vocab_size, vocab_size) || !tree.number(names.max_nodes, max_nodes) ||
      !tree.number(names.rejection, rejection))
    return nullptr;
  Ref ids(PyObject_GetAttr(columns, names.node_ids));
  const Py_ssize_t size = ids ? PyObject_Size(ids.get()) : -1;
  Column node_ids, parent_ids, token_ids, probs, sampled, qs;
  if (size < 0 || !node_ids.read(columns, names.node_ids, size, false) ||
      !parent_ids.read(columns, names.parent_ids, size, false) ||
      !token_ids.read(columns, names.token_ids, size, false) || !probs.read(columns, names.probs, size, false) ||
      !sampled.read(columns, names.sampled, size, true) || !qs.read(columns, names.qs, size, true))
    return nullptr;
  Ref known(PyObject_GetAttr(self, names.producers));
  if (!known) return nullptr;
  bool told = false;  // that nodes have changed, and who has made them
  Py_ssize_t num_added = 0, num_stale = 0, num_invalid = 0, num_dropped = 0;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* flag = sampled.items == nullptr ? Py_True : sampled.items[i];
    PyObject* q = qs.items == nullptr ? Py_None : qs.items[i];
    PyObject* prob = probs.items[i];
    int64_t node_id = 0, parent_id = 0, token_id = 0;
    if (tree.plain() && read_int(node_ids.items[i], node_id) && read_int(parent_ids.items[i], parent_id) &&
        read_int(token_ids.items[i], token_id) && PyFloat_CheckExact(prob) && PyBool_Check(flag) &&
        node_id >> kProducerShift == maker && parent_id < node_id && token_id >= 0 && token_id < vocab_size &&
        PyDict_GET_SIZE(tree.nodes.get()) <= max_nodes) {
      const double p = PyFloat_AS_DOUBLE(prob);
      PyObject* parent = PyDict_GetItemWithError(tree.nodes.get(), parent_ids.items[i]);
      if (is_node(parent) && p >= 0.0 && p <= 1.0 &&
          PyDict_Contains(slot(parent, layout.children), token_ids.items[i]) == 0 &&
          PyDict_Contains(tree.nodes.get(), node_ids.items[i]) == 0 &&
          (!rejection || flag == Py_False ||
           (slot(parent, layout.best) == Py_None && drawable(q, token_id, vocab_size)))) {
        if (!told) {
          if (PyObject_SetAttr(self, names.best_limit, minus_one) < 0 || PySet_Add(known.get(), producer) < 0)
            return nullptr;
          told = true;
        }
        Ref claim(PyTuple_Pack(2, producer, prob));
        Ref claims(claim ? PyTuple_Pack(1, claim.get()) : nullptr);
        if (!claims || !grow(tree, parent, claims.get(), node_ids.items[i], token_ids.items[i], prob, p, flag, q))
          return nullptr;
        ++num_added;
        continue;
      }
      if (PyErr_Occurred()) return nullptr;
    }
    Ref node(PySequence_GetItem(columns, i));
    Ref result(node ? PyObject_CallMethodObjArgs(self, names.attach, node.get(), producer, nullptr) : nullptr);
    if (!result) return nullptr;
    num_added += is_node(result.get());
    num_stale += result.get() == refused_stale;
    num_invalid += result.get() == refused_invalid;
    num_dropped += result.get() == refused_dropped;
  }
  if (num_added == size && size < PyTuple_GET_SIZE(all_added)) return Py_NewRef(PyTuple_GET_ITEM(all_added, size));
  return PyObject_CallFunction(added_type, "nnnn", num_added, num_stale, num_invalid, num_dropped);
}

// Takes a node that is no longer below the anchor out of the dict of nodes. False after an error.
bool forget(const Tree& tree, PyObject* node) {
  if (PyDict_DelItem(tree.nodes.get(), slot(node, layout.node_id)) < 0) return false;
  put(node, layout.alive, Py_NewRef(Py_False));
  return true;
}

// Forgets a node and all below it. False after an error.
bool drop(const Tree& tree, PyObject* root) {
  std::vector<PyObject*> stack{root};
  while (!stack.empty()) {
    PyObject *node = stack.back(), *token_id, *child;
    stack.pop_back();
    put(node, layout.parent, Py_NewRef(Py_None));
    if (!forget(tree, node)) return false;
    Py_ssize_t place = 0;
    while (PyDict_Next(slot(node, layout.children), &place, &token_id, &child)) stack.push_back(child);
  }
  return true;
}

// descend(tree, token_ids) -> ids of the nodes that the anchor has moved along, those of the first tokens; of none if
// there is more than the plain case. What SpeculationTree.walk does for tokens that have nodes.
PyObject* descend(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "descend takes 2 arguments, not %zd", count);
  const Tree tree(arguments[0]);
  Ref tokens(PySequence_Fast(arguments[1], "tokens are no sequence"));
  Ref anchor(PyObject_GetAttr(arguments[0], names.anchor));
  if (!tree.valid() || !tokens || !anchor) return nullptr;
  if (!tree.plain()) return Py_NewRef(empty_tuple);
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(tokens.get());
  std::vector<PyObject*> path;  // held by the tree
  PyObject* at = anchor.get();
  while (static_cast<Py_ssize_t>(path.size()) < size) {
    PyObject* token_id = PySequence_Fast_GET_ITEM(tokens.get(), static_cast<Py_ssize_t>(path.size()));
    PyObject* child = PyDict_GetItemWithError(slot(at, layout.children), token_id);
    if (child == nullptr) break;
    path.push_back(at = child);
  }
  if (PyErr_Occurred()) return nullptr;
  if (path.empty()) return Py_NewRef(empty_tuple);
  Ref node_ids(PyTuple_New(static_cast<Py_ssize_t>(path.size())));
  Ref last(Py_NewRef(at));
  if (!node_ids || PyObject_SetAttr(arguments[0], names.best_limit, minus_one) < 0) return nullptr;
  PyObject* old = anchor.get();
  for (size_t i = 0; i < path.size(); ++i) {
    PyObject* child = path[i];
    PyTuple_SET_ITEM(node_ids.get(), static_cast<Py_ssize_t>(i), Py_NewRef(slot(child, layout.node_id)));
    if (!forget(tree, old)) return nullptr;
    PyObject *token_id, *other;
    Py_ssize_t place = 0;
    while (PyDict_Next(slot(old, layout.children), &place, &token_id, &other))
      if (other != child && !drop(tree, other)) return nullptr;
    put(child, layout.parent, Py_NewRef(Py_None));
    old = child;
  }
  if (PyObject_SetAttr(arguments[0], names.anchor, last.get()) < 0) return nullptr;
  return node_ids.release();
}

// best_path(tree, k) -> token ids, qs, probs, node ids and claims of the best path below the anchor, a tuple of each, or
// None if there is none. SpeculationTree._proposal.
PyObject* best_path(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "best_path takes 2 arguments, not %zd", count);
  const Py_ssize_t most = PyLong_AsSsize_t(arguments[1]);
  Ref anchor(PyObject_GetAttr(arguments[0], names.anchor));
  if (!anchor || PyErr_Occurred()) return nullptr;
  std::vector<PyObject*> path;
  for (PyObject* node = slot(anchor.get(), layout.best); is_node(node) && static_cast<Py_ssize_t>(path.size()) < most;
       node = slot(node, layout.best))
    path.push_back(node);
  if (path.empty()) Py_RETURN_NONE;
  const Py_ssize_t size = static_cast<Py_ssize_t>(path.size());
  const Py_ssize_t offsets[] = {layout.token_id, layout.q, layout.prob, layout.node_id, layout.claims};
  Ref columns(PyTuple_New(5));
  if (!columns) return nullptr;
  for (Py_ssize_t column = 0; column < 5; ++column) {
    PyObject* values = PyTuple_New(size);
    if (values == nullptr) return nullptr;
    PyTuple_SET_ITEM(columns.get(), column, values);
    for (Py_ssize_t i = 0; i < size; ++i)
      PyTuple_SET_ITEM(values, i, Py_NewRef(slot(path[static_cast<size_t>(i)], offsets[column])));
  }
  return columns.release();
}

// The bytes of a protobuf message that have yet to be read. Every read returns false where there is something else.
struct Wire {
  const uint8_t *at, *end;

  bool has(uint8_t tag) const { return at < end && *at == tag; }
  bool byte(uint8_t& value) {
    if (at == end) return false;
    value = *at++;
    return true;
  }
  bool uint32(uint32_t& value) {
    uint64_t found = 0;
    uint8_t next = 0x80;
    for (int shift = 0; next & 0x80; shift += 7) {
      if (shift > 28 || !byte(next)) return false;
      found |= static_cast<uint64_t>(next & 0x7F) << shift;
    }
    value = static_cast<uint32_t>(found);
    return found <= UINT32_MAX;
  }
  bool real(double& value) {
    if (end - at < 8) return false;
    std::memcpy(&value, at, 8);
    at += 8;
    return true;
  }
  // What a tag that has been seen is followed by: a length and so many bytes.
  bool part(Wire& inner) {
    uint32_t size = 0;
    ++at;
    if (!uint32(size) || static_cast<uint32_t>(end - at) < size) return false;
    inner = {at, at + size};
    at += size;
    return true;
  }
};

bool append(PyObject* list, PyObject* value) {
  const bool done = value != nullptr && PyList_Append(list, value) == 0;
  Py_XDECREF(value);
  return done;
}

// Fields of types.proto: Nodes, and SparseDistribution in it.
constexpr uint8_t kNodeIds = 0x22, kParentIds = 0x2A, kTokenIds = 0x32, kProbs = 0x3A, kSampled = 0x42, kQs = 0x4A,
                  kIdle = 0x50, kStepS = 0x59, kQTokenIds = 0x1A, kQProbs = 0x22;

// Reads a distribution, None where it has no tokens. False if it is not plain, or after an error.
bool read_q(Wire wire, PyObject* qs) {
  Wire ids{nullptr, nullptr}, probs{nullptr, nullptr};
  if ((wire.has(kQTokenIds) && !wire.part(ids)) || (wire.has(kQProbs) && !wire.part(probs)) || wire.at != wire.end)
    return false;
  const Py_ssize_t size = ids.end - ids.at, num_probs = probs.end - probs.at;
  if (size % 4 != 0 || num_probs != 2 * size) return false;
  if (size == 0) return PyList_Append(qs, Py_None) == 0;
  return append(qs, PyObject_CallFunction(distribution, "y#y#", ids.at, size, probs.at, num_probs));
}

// The columns of a Nodes message in the plain form, every field at most once and in order. False if it is not plain, or
// after an error.
bool read_columns(Wire wire, PyObject* const* lists, bool& idle, double& step_s) {
  Wire inner;
  const uint8_t tags[] = {kNodeIds, kParentIds, kTokenIds};
  for (int column = 0; column < 3; ++column) {
    if (!wire.has(tags[column])) continue;
    if (!wire.part(inner)) return false;
    for (uint32_t value = 0; inner.at < inner.end;)
      if (!inner.uint32(value) || !append(lists[column], PyLong_FromUnsignedLong(value))) return false;
  }
  if (wire.has(kProbs)) {
    if (!wire.part(inner)) return false;
    for (double value = 0; inner.at < inner.end;)
      if (!inner.real(value) || !std::isfinite(value) || !append(lists[3], PyFloat_FromDouble(value))) return false;
  }
  if (wire.has(kSampled)) {
    if (!wire.part(inner)) return false;
    for (uint8_t value = 0; inner.byte(value);)
      if (value > 1 || PyList_Append(lists[4], value ? Py_True : Py_False) < 0) return false;
  }
  while (wire.has(kQs))
    if (!wire.part(inner) || !read_q(inner, lists[5])) return false;
  uint8_t flag = 0;
  if (wire.has(kIdle) && (++wire.at, !wire.byte(flag) || flag > 1)) return false;
  if (wire.has(kStepS) && (++wire.at, !wire.real(step_s))) return false;
  idle = flag == 1;
  return wire.at == wire.end;
}

// unpack(packed) -> NodeColumns, idle and step_s of a Nodes message in wire form, as protobuf reads them; None if it is
// not in the plain form, or its columns do not fit together.
PyObject* unpack(PyObject*, PyObject* packed) {
  if (!PyBytes_CheckExact(packed)) Py_RETURN_NONE;
  const auto* start = reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(packed));
  Ref columns(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(columns_type), 0));
  if (!columns) return nullptr;
  PyObject* lists[6];
  for (int column = 0; column < 6; ++column) {
    if ((lists[column] = PyList_New(0)) == nullptr) return nullptr;
    put(columns.get(), column_slots[column], lists[column]);
  }
  bool idle = false;
  double step_s = 0;
  const bool plain = read_columns({start, start + PyBytes_GET_SIZE(packed)}, lists, idle, step_s);
  if (PyErr_Occurred()) return nullptr;
  const Py_ssize_t size = PyList_GET_SIZE(lists[0]);
  for (int column = 1; plain && column < 6; ++column) {
    const Py_ssize_t found = PyList_GET_SIZE(lists[column]);
    if (found != size && (column < 4 || found != 0)) Py_RETURN_NONE;
  }
  if (!plain) Py_RETURN_NONE;
  return Py_BuildValue("NOd", columns.release(), idle ? Py_True : Py_False, step_s);
}

PyMethodDef methods[] = {
    {"unpack", unpack, METH_O, nullptr},
    {"prepare", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(prepare)), METH_FASTCALL, nullptr},
    {"add", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(add)), METH_FASTCALL, nullptr},
    {"descend", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(descend)), METH_FASTCALL, nullptr},
    {"best_path", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(best_path)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "paceline_tree", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_paceline_tree() {
  const struct {
    PyObject** name;
    const char* text;
  } all[] = {{&names.aliases, "_aliases"},       {&names.anchor, "_anchor"},         {&names.best_limit, "_best_limit"},
             {&names.max_nodes, "_max_nodes"},   {&names.nodes, "_nodes"},           {&names.producers, "_producers"},
             {&names.rejection, "_rejection"},   {&names.suffix, "_suffix"},         {&names.vocab_size, "_vocab_size"},
             {&names.attach, "attach"},          {&names.node_ids, "node_ids"},      {&names.parent_ids, "parent_ids"},
             {&names.token_ids, "token_ids"},    {&names.probs, "probs"},            {&names.sampled, "sampled"},
             {&names.qs, "qs"},                  {&names.packed_ids, "packed_ids"},  {&names.packed_probs, "packed_probs"}};
  for (const auto& each : all)
    if ((*each.name = PyUnicode_InternFromString(each.text)) == nullptr) return nullptr;
  if ((empty_tuple = PyTuple_New(0)) == nullptr || (minus_one = PyLong_FromLong(-1)) == nullptr) return nullptr;
  return PyModule_Create(&module);
}
