// Passes over the Python objects of a SpeculationTree (tree.py), whose methods are their twins: see native_tree.py.
//
// A node is a TreeNode as Python makes it, so whoever looks at a tree finds the same objects. What is done here is the
// common case of each pass; the rest, bad input included, is left to the twin, node by node.

#include "tree.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace {

using namespace paceline;

// Where messages.py keeps those of Node.
struct NodeLayout {
  PyTypeObject* type = nullptr;
  Py_ssize_t node_id, token_id, prob, sampled, q;
} of_node;

// Where messages.py keeps those of Nodes, and NodeColumns its columns.
struct MessageLayout {
  PyTypeObject* type = nullptr;
  Py_ssize_t session_id, epoch, context_len, nodes, idle, step_s;
  PyTypeObject* columns_type = nullptr;
  Py_ssize_t columns[6];  // node_ids, parent_ids, token_ids, probs, sampled, qs
} of_message;

struct Names {
  PyObject *add, *added, *append, *attach, *dropped, *invalid, *stale;
} names;

// What prepare was told besides.
PyObject *refused_stale, *refused_invalid, *refused_dropped;
double most_step_s;

PyObject *distribution, *added_type;
PyObject* all_added;  // of so many nodes that none was refused of, a tuple

// What prepare_walks was told: the causes of a walk, and where Proposal keeps its attributes.
struct {
  PyObject *hit, *late, *token, *k;
} causes;

struct {
  PyTypeObject* type;
  PyObject* none;  // NO_PROPOSAL
  Py_ssize_t token_ids, qs, probs, node_ids, parents, producer;
} proposals;

PyObject* empty_tuple;

// prepare(prototype, tree_type, message_type, columns_type, stale, invalid, dropped, probability, tolerance,
// most_step_s, distribution, added_type, all_added, node_type): a TreeNode without parent and children, as its
// constructor makes it; NativeTree, Nodes and NodeColumns; the reasons why attach may refuse a node; the address of
// paceline_probability in rows.cpp, 0 if there is none, and its tolerance; the longest step that a message may report;
// SparseDistribution and Added; the Added of 0, 1, .. nodes of which none was refused; and Node.
PyObject* prepare(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 14 || !PyType_Check(arguments[1]) || !PyType_Check(arguments[2]) || !PyType_Check(arguments[3]) ||
      !PyTuple_CheckExact(arguments[12]) || !PyType_Check(arguments[13]))
    return PyErr_Format(PyExc_TypeError, "prepare takes 14 arguments, four of them types and one a tuple");
  of_message.type = reinterpret_cast<PyTypeObject*>(Py_NewRef(arguments[2]));
  of_message.columns_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(arguments[3]));
  refused_stale = Py_NewRef(arguments[4]);
  refused_invalid = Py_NewRef(arguments[5]);
  refused_dropped = Py_NewRef(arguments[6]);
  most_step_s = PyFloat_AsDouble(arguments[9]);
  distribution = Py_NewRef(arguments[10]);
  added_type = Py_NewRef(arguments[11]);
  all_added = Py_NewRef(arguments[12]);
  of_node.type = reinterpret_cast<PyTypeObject*>(Py_NewRef(arguments[13]));
  if (PyErr_Occurred() || !prepare_tree(arguments[0], arguments[1], arguments[7], arguments[8])) return nullptr;
  if (!find({
        {of_node.type, "node_id", of_node.node_id},
        {of_node.type, "token_id", of_node.token_id},
        {of_node.type, "prob", of_node.prob},
        {of_node.type, "sampled", of_node.sampled},
        {of_node.type, "q", of_node.q},
        {of_message.type, "session_id", of_message.session_id},
        {of_message.type, "epoch", of_message.epoch},
        {of_message.type, "context_len", of_message.context_len},
        {of_message.type, "nodes", of_message.nodes},
        {of_message.type, "idle", of_message.idle},
        {of_message.type, "step_s", of_message.step_s},
        {of_message.columns_type, "node_ids", of_message.columns[0]},
        {of_message.columns_type, "parent_ids", of_message.columns[1]},
        {of_message.columns_type, "token_ids", of_message.columns[2]},
        {of_message.columns_type, "probs", of_message.columns[3]},
        {of_message.columns_type, "sampled", of_message.columns[4]},
        {of_message.columns_type, "qs", of_message.columns[5]},
      }))
    return nullptr;
  Py_RETURN_NONE;
}

// prepare_walks(none, hit, late, token, k): NO_PROPOSAL, and the causes of a walk.
PyObject* prepare_walks(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 5) return PyErr_Format(PyExc_TypeError, "prepare_walks takes 5 arguments, not %zd", count);
  proposals.type = Py_TYPE(proposals.none = Py_NewRef(arguments[0]));
  if (!find({
        {proposals.type, "token_ids", proposals.token_ids},
        {proposals.type, "qs", proposals.qs},
        {proposals.type, "probs", proposals.probs},
        {proposals.type, "node_ids", proposals.node_ids},
        {proposals.type, "parents", proposals.parents},
        {proposals.type, "producer", proposals.producer},
      }))
    return nullptr;
  causes = {Py_NewRef(arguments[1]), Py_NewRef(arguments[2]), Py_NewRef(arguments[3]), Py_NewRef(arguments[4])};
  Py_RETURN_NONE;
}

// A column as the list or tuple that it is, with an item for each of the nodes, or with none.
struct Column {
  Ref held;
  PyObject** items = nullptr;

  bool read(PyObject* columns, int index, Py_ssize_t size, bool optional) {
    PyObject* column = slot(columns, of_message.columns[index]);
    held.reset(PySequence_Fast(column == nullptr ? Py_None : column, "a column is no sequence"));
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

// Nodes by what became of them: see Added.
struct Counts {
  Py_ssize_t added = 0, stale = 0, invalid = 0, dropped = 0;

  // The Added of them; `size`: how many they are.
  PyObject* object(Py_ssize_t size) const {
    if (added == size && size < PyTuple_GET_SIZE(all_added)) return Py_NewRef(PyTuple_GET_ITEM(all_added, size));
    return PyObject_CallFunction(added_type, "nnnn", added, stale, invalid, dropped);
  }
};

// Attaches the nodes of NodeColumns and counts them. False after an error.
bool add_columns(const Tree& tree, PyObject* columns, Counts& counts) {
  int64_t vocab_size = 0, max_nodes = 0, rejection = 0, maker = 0;
  if (!tree.valid() || !tree.number(of_tree.vocab_size, vocab_size) || !tree.number(of_tree.max_nodes, max_nodes) ||
      !tree.number(of_tree.rejection, rejection) || !tree.number(of_tree.producer, maker))
    return false;
  PyObject* ids = slot(columns, of_message.columns[0]);
  const Py_ssize_t size = PyObject_Size(ids == nullptr ? Py_None : ids);
  Column node_ids, parent_ids, token_ids, probs, sampled, qs;
  if (size < 0 || !node_ids.read(columns, 0, size, false) || !parent_ids.read(columns, 1, size, false) ||
      !token_ids.read(columns, 2, size, false) || !probs.read(columns, 3, size, false) ||
      !sampled.read(columns, 4, size, true) || !qs.read(columns, 5, size, true))
    return false;
  bool told = false;  // that nodes have changed
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* flag = sampled.items == nullptr ? Py_True : sampled.items[i];
    PyObject* q = qs.items == nullptr ? Py_None : qs.items[i];
    PyObject* prob = probs.items[i];
    int64_t node_id = 0, parent_id = 0, token_id = 0;
    if (!tree.lost() && read_int(node_ids.items[i], node_id) && read_int(parent_ids.items[i], parent_id) &&
        read_int(token_ids.items[i], token_id) && PyFloat_CheckExact(prob) && PyBool_Check(flag) &&
        node_id >> kProducerShift == maker && parent_id < node_id && token_id >= 0 && token_id < vocab_size &&
        PyDict_GET_SIZE(tree.nodes) <= max_nodes) {
      const double p = PyFloat_AS_DOUBLE(prob);
      PyObject* parent = PyDict_GetItemWithError(tree.nodes, parent_ids.items[i]);
      if (is_node(parent) && p >= 0.0 && p <= 1.0 &&
          PyDict_Contains(slot(parent, layout.children), token_ids.items[i]) == 0 &&
          PyDict_Contains(tree.nodes, node_ids.items[i]) == 0 &&
          (!rejection || flag == Py_False ||
           (slot(parent, layout.best) == Py_None && drawable(q, token_id, vocab_size)))) {
        if (!told) {
          tree.changed();
          told = true;
        }
        if (!grow(tree, parent, node_ids.items[i], token_ids.items[i], prob, flag, q)) return false;
        ++counts.added;
        continue;
      }
      if (PyErr_Occurred()) return false;
    }
    Ref node(PySequence_GetItem(columns, i));
    Ref result(node ? PyObject_CallMethodOneArg(tree.self, names.attach, node.get()) : nullptr);
    if (!result) return false;
    counts.added += is_node(result.get());
    counts.stale += result.get() == refused_stale;
    counts.invalid += result.get() == refused_invalid;
    counts.dropped += result.get() == refused_dropped;
  }
  return true;
}

bool is_columns(PyObject* nodes) { return PyObject_TypeCheck(nodes, of_message.columns_type); }

// add(tree, columns) -> Added. SpeculationTree.add.
PyObject* add(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || !is_columns(arguments[1]))
    return PyErr_Format(PyExc_TypeError, "add takes a tree and columns of nodes");
  Counts counts;
  if (!add_columns(Tree(arguments[0]), arguments[1], counts)) return nullptr;
  return counts.object(counts.added + counts.stale + counts.invalid + counts.dropped);
}

// Attaches nodes that are no columns, by Python, and counts them. False after an error.
bool add_others(const Tree& tree, PyObject* nodes, Counts& counts) {
  Ref added(PyObject_CallMethodObjArgs(tree.self, names.add, nodes, nullptr));
  if (!added) return false;
  const struct {
    PyObject* name;
    Py_ssize_t* count;
  } all[] = {{names.added, &counts.added},
             {names.stale, &counts.stale},
             {names.invalid, &counts.invalid},
             {names.dropped, &counts.dropped}};
  for (const auto& each : all) {
    Ref value(PyObject_GetAttr(added.get(), each.name));
    if (!value) return false;
    *each.count += PyLong_AsSsize_t(value.get());
  }
  return !PyErr_Occurred();
}

// As in tree.py.
constexpr char kGrew = 1, kOffers = 2, kFirst = 4, kLost = 8;

// add_each(trees, nodes) -> Added of all, and a byte for each. tree.add_each, by lists of equal length.
PyObject* add_each(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || !PyList_CheckExact(arguments[0]) || !PyList_CheckExact(arguments[1]) ||
      PyList_GET_SIZE(arguments[0]) != PyList_GET_SIZE(arguments[1]))
    return PyErr_Format(PyExc_TypeError, "add_each takes two lists of equal length");
  const Py_ssize_t size = PyList_GET_SIZE(arguments[0]);
  Ref effects(PyBytes_FromStringAndSize(nullptr, size));
  if (!effects) return nullptr;
  Counts counts;
  for (Py_ssize_t i = 0; i < size; ++i) {
    const Tree tree(PyList_GET_ITEM(arguments[0], i));
    PyObject* nodes = PyList_GET_ITEM(arguments[1], i);
    if (!tree.valid()) return nullptr;
    const Py_ssize_t before = counts.added;
    const bool offered = tree.offers();
    if (!(is_columns(nodes) ? add_columns(tree, nodes, counts) : add_others(tree, nodes, counts)))
      return nullptr;
    const bool offers = tree.offers();
    PyBytes_AS_STRING(effects.get())[i] = static_cast<char>((counts.added > before ? kGrew : 0) | (offers ? kOffers : 0) |
                                                            (offers && !offered ? kFirst : 0) | (tree.lost() ? kLost : 0));
  }
  Ref added(counts.object(counts.added + counts.stale + counts.invalid + counts.dropped));
  return added ? PyTuple_Pack(2, added.get(), effects.get()) : nullptr;
}

// True if Nodes can be attached below a node of the tree, in order, and nothing has to be asked about any.
bool attachable(const Tree& tree, PyObject* parent, PyObject* nodes) {
  int64_t vocab_size = 0, max_nodes = 0, rejection = 0, maker = 0, parent_id = 0;
  if (!tree.number(of_tree.vocab_size, vocab_size) || !tree.number(of_tree.max_nodes, max_nodes) ||
      !tree.number(of_tree.rejection, rejection) || !tree.number(of_tree.producer, maker) || !is_node(parent) ||
      tree.lost() || !read_int(slot(parent, layout.node_id), parent_id))
    return false;
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(nodes);
  if (PyDict_GET_SIZE(tree.nodes) + size > max_nodes) return false;
  bool proposed = slot(parent, layout.best) != Py_None;
  std::vector<int64_t> ids, tokens;
  const auto fresh = [](std::vector<int64_t>& known, int64_t value) {
    if (std::find(known.begin(), known.end(), value) != known.end()) return false;
    known.push_back(value);
    return true;
  };
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* node = PySequence_Fast_GET_ITEM(nodes, i);
    if (Py_TYPE(node) != of_node.type) return false;
    PyObject *prob = slot(node, of_node.prob), *flag = slot(node, of_node.sampled);
    int64_t node_id = 0, token_id = 0;
    if (!read_int(slot(node, of_node.node_id), node_id) || !read_int(slot(node, of_node.token_id), token_id) ||
        !PyFloat_CheckExact(prob) || !PyBool_Check(flag) || node_id <= parent_id || node_id >> kProducerShift != maker ||
        token_id < 0 || token_id >= vocab_size || !fresh(ids, node_id) || !fresh(tokens, token_id) ||
        PyDict_Contains(tree.nodes, slot(node, of_node.node_id)) != 0 ||
        PyDict_Contains(slot(parent, layout.children), slot(node, of_node.token_id)) != 0)
      return false;
    const double p = PyFloat_AS_DOUBLE(prob);
    if (!(p >= 0.0 && p <= 1.0)) return false;
    if (rejection && flag == Py_True && (proposed || !drawable(slot(node, of_node.q), token_id, vocab_size))) return false;
    proposed = proposed || flag == Py_True;
  }
  return true;
}

// attach_below(tree, parent, nodes) -> the nodes that Nodes become below one of the tree, in order;
// None, and nothing is done, if there is more than the plain case. SpeculationTree.attach_below.
PyObject* attach_below(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3) return PyErr_Format(PyExc_TypeError, "attach_below takes 3 arguments, not %zd", count);
  const Tree tree(arguments[0]);
  PyObject* parent = arguments[1];
  Ref nodes(PySequence_Fast(arguments[2], "nodes are no sequence"));
  if (!nodes || !tree.valid()) return nullptr;
  if (!attachable(tree, parent, nodes.get())) return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(nodes.get());
  Ref placed(PyList_New(size));
  if (!placed) return nullptr;
  if (size > 0) tree.changed();
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* node = PySequence_Fast_GET_ITEM(nodes.get(), i);
    PyObject* child = grow(tree, parent, slot(node, of_node.node_id), slot(node, of_node.token_id),
                           slot(node, of_node.prob), slot(node, of_node.sampled), slot(node, of_node.q));
    if (child == nullptr) return nullptr;
    PyList_SET_ITEM(placed.get(), i, Py_NewRef(child));
  }
  return placed.release();
}

// Takes a node that is no longer below the anchor out of the dict of nodes. False after an error.
bool forget(const Tree& tree, PyObject* node) {
  if (PyDict_DelItem(tree.nodes, slot(node, layout.node_id)) < 0) return false;
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

// The nodes that tokens lead to from an anchor, held by their tree, as far as there are any. False after an error.
bool find_path(PyObject* anchor, PyObject* tokens, std::vector<PyObject*>& path) {
  PyObject* at = anchor;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(tokens); ++i) {
    at = PyDict_GetItemWithError(slot(at, layout.children), PySequence_Fast_GET_ITEM(tokens, i));
    if (at == nullptr) return !PyErr_Occurred();
    path.push_back(at);
  }
  return true;
}

// Moves the anchor along a path of at least one node, and forgets all that is beside it. False after an error.
bool move(const Tree& tree, PyObject* anchor, const std::vector<PyObject*>& path) {
  Ref last(Py_NewRef(path.back()));
  PyObject* old = anchor;
  for (PyObject* child : path) {
    if (!forget(tree, old)) return false;
    PyObject *token_id, *other;
    Py_ssize_t place = 0;
    while (PyDict_Next(slot(old, layout.children), &place, &token_id, &other))
      if (other != child && !drop(tree, other)) return false;
    put(child, layout.parent, Py_NewRef(Py_None));
    old = child;
  }
  put(tree.self, of_tree.anchor, last.release());
  return true;
}

// descend(tree, token_ids) -> ids of the nodes that the anchor has moved along, those of the first tokens; of none if
// there is more than the plain case. What SpeculationTree.walk does for tokens that have nodes.
PyObject* descend(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "descend takes 2 arguments, not %zd", count);
  const Tree tree(arguments[0]);
  Ref tokens(PySequence_Fast(arguments[1], "tokens are no sequence"));
  if (!tokens || !tree.valid()) return nullptr;
  Ref anchor(Py_NewRef(tree.anchor()));
  if (tree.lost()) return Py_NewRef(empty_tuple);
  std::vector<PyObject*> path;
  if (!find_path(anchor.get(), tokens.get(), path)) return nullptr;
  if (path.empty()) return Py_NewRef(empty_tuple);
  Ref node_ids(PyTuple_New(static_cast<Py_ssize_t>(path.size())));
  if (!node_ids) return nullptr;
  tree.changed();
  for (size_t i = 0; i < path.size(); ++i)
    PyTuple_SET_ITEM(node_ids.get(), static_cast<Py_ssize_t>(i), Py_NewRef(slot(path[i], layout.node_id)));
  if (!move(tree, anchor.get(), path)) return nullptr;
  return node_ids.release();
}

// follow(tree, token_ids) -> the cause of SpeculationTree.walk, which is what it does; None, and nothing is done, if
// there is more than the plain case.
PyObject* follow(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "follow takes 2 arguments, not %zd", count);
  const Tree tree(arguments[0]);
  Ref tokens(PySequence_Fast(arguments[1], "tokens are no sequence"));
  if (!tokens || !tree.valid()) return nullptr;
  Ref anchor(Py_NewRef(tree.anchor()));
  if (tree.lost()) Py_RETURN_NONE;
  std::vector<PyObject*> path;
  if (!find_path(anchor.get(), tokens.get(), path)) return nullptr;
  tree.changed();
  if (!path.empty() && !move(tree, anchor.get(), path)) return nullptr;
  PyObject* last = path.empty() ? anchor.get() : path.back();
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(tokens.get()), num_found = static_cast<Py_ssize_t>(path.size());
  if (num_found == size) return Py_NewRef(slot(last, layout.best) == Py_None ? causes.late : causes.hit);
  PyObject *token_id, *child;
  Py_ssize_t place = 0;
  const bool ends = PyDict_GET_SIZE(slot(last, layout.children)) == 0;
  while (PyDict_Next(slot(last, layout.children), &place, &token_id, &child))
    if (!drop(tree, child)) return nullptr;
  Ref children(PyDict_New());
  if (!children) return nullptr;
  put(last, layout.children, children.release());
  put(last, layout.best, Py_NewRef(Py_None));
  for (Py_ssize_t i = num_found; i < size; ++i) {
    Ref done(PyObject_CallMethodOneArg(tree.suffix, names.append, PySequence_Fast_GET_ITEM(tokens.get(), i)));
    if (!done) return nullptr;
  }
  return Py_NewRef(ends ? causes.k : causes.token);
}

// best_path(tree, k) -> the best path below the anchor. SpeculationTree._proposal.
PyObject* best_path(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "best_path takes 2 arguments, not %zd", count);
  const Py_ssize_t most = PyLong_AsSsize_t(arguments[1]);
  const Tree tree(arguments[0]);
  if (PyErr_Occurred() || !tree.valid()) return nullptr;
  std::vector<PyObject*> path;
  for (PyObject* node = slot(tree.anchor(), layout.best); is_node(node) && static_cast<Py_ssize_t>(path.size()) < most;
       node = slot(node, layout.best))
    path.push_back(node);
  if (path.empty()) return Py_NewRef(proposals.none);
  Ref proposal(PyType_GenericAlloc(proposals.type, 0));
  if (!proposal) return nullptr;
  put(proposal.get(), proposals.parents, Py_NewRef(empty_tuple));
  put(proposal.get(), proposals.producer, Py_NewRef(slot(tree.self, of_tree.producer)));
  const Py_ssize_t columns[][2] = {{proposals.token_ids, layout.token_id},
                                   {proposals.qs, layout.q},
                                   {proposals.probs, layout.prob},
                                   {proposals.node_ids, layout.node_id}};
  const Py_ssize_t size = static_cast<Py_ssize_t>(path.size());
  for (const auto& column : columns) {
    PyObject* values = PyTuple_New(size);
    if (values == nullptr) return nullptr;
    put(proposal.get(), column[0], values);
    for (Py_ssize_t i = 0; i < size; ++i)
      PyTuple_SET_ITEM(values, i, Py_NewRef(slot(path[static_cast<size_t>(i)], column[1])));
  }
  return proposal.release();
}

// rows(row_type, state, token_ids) -> [row_type(state, token_ids[:i]) for i in 0 .. len(token_ids)]; the type is a tuple of
// two.
PyObject* rows(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3 || !PyType_Check(arguments[0]) || !PyTuple_CheckExact(arguments[2]))
    return PyErr_Format(PyExc_TypeError, "rows takes a type, a state and a tuple");
  auto* type = reinterpret_cast<PyTypeObject*>(arguments[0]);
  if (!PyType_IsSubtype(type, &PyTuple_Type)) return PyErr_Format(PyExc_TypeError, "a row is a tuple");
  PyObject* token_ids = arguments[2];
  const Py_ssize_t size = PyTuple_GET_SIZE(token_ids);
  Ref all(PyList_New(size + 1));
  if (!all) return nullptr;
  for (Py_ssize_t i = 0; i <= size; ++i) {
    PyObject* suffix = PyTuple_GetSlice(token_ids, 0, i);
    PyObject* row = suffix == nullptr ? nullptr : PyType_GenericAlloc(type, 2);
    if (row == nullptr) {
      Py_XDECREF(suffix);
      return nullptr;
    }
    PyTuple_SET_ITEM(row, 0, Py_NewRef(arguments[1]));
    PyTuple_SET_ITEM(row, 1, suffix);
    PyList_SET_ITEM(all.get(), i, row);
  }
  return all.release();
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

// Fields of types.proto: Nodes, and SparseDistribution in it.
constexpr uint8_t kNodeIds = 0x22, kParentIds = 0x2A, kTokenIds = 0x32, kProbs = 0x3A, kSampled = 0x42, kQs = 0x4A,
                  kIdle = 0x50, kStepS = 0x59, kQTokenIds = 0x1A, kQProbs = 0x22;

// The readers below take one field each into a column, a tuple, which is empty without the field. They return false if
// the field is not plain or has no value for each of the nodes, or after an error.

// A field of integers. `size`: nodes; -1: as many as there are here.
bool read_ids(Wire& wire, uint8_t tag, Py_ssize_t& size, Ref& column) {
  Wire inner{nullptr, nullptr};
  if (wire.has(tag) && !wire.part(inner)) return false;
  const Py_ssize_t found = std::count_if(inner.at, inner.end, [](uint8_t byte) { return byte < 0x80; });
  if (size < 0) size = found;
  if (found != size) return false;
  column.reset(PyTuple_New(size));
  if (!column) return false;
  for (Py_ssize_t i = 0; i < size; ++i) {
    uint32_t value = 0;
    PyObject* item = inner.uint32(value) ? PyLong_FromUnsignedLong(value) : nullptr;
    if (item == nullptr) return false;
    PyTuple_SET_ITEM(column.get(), i, item);
  }
  return inner.at == inner.end;
}

bool read_probs(Wire& wire, Py_ssize_t size, Ref& column) {
  Wire inner{nullptr, nullptr};
  if ((wire.has(kProbs) && !wire.part(inner)) || inner.end - inner.at != 8 * size) return false;
  column.reset(PyTuple_New(size));
  if (!column) return false;
  for (Py_ssize_t i = 0; i < size; ++i) {
    double value = 0;
    PyObject* item = inner.real(value) && std::isfinite(value) ? PyFloat_FromDouble(value) : nullptr;
    if (item == nullptr) return false;
    PyTuple_SET_ITEM(column.get(), i, item);
  }
  return true;
}

bool read_sampled(Wire& wire, Py_ssize_t size, Ref& column) {
  Wire inner{nullptr, nullptr};
  if (wire.has(kSampled) && !wire.part(inner)) return false;
  const Py_ssize_t found = inner.end - inner.at;
  if (found != size && found != 0) return false;
  column.reset(PyTuple_New(found));
  for (Py_ssize_t i = 0; column && i < found; ++i) {
    if (inner.at[i] > 1) return false;
    PyTuple_SET_ITEM(column.get(), i, Py_NewRef(inner.at[i] ? Py_True : Py_False));
  }
  return static_cast<bool>(column);
}

// A distribution; None where it has no tokens. Null if it is not plain, or after an error.
PyObject* read_q(Wire wire) {
  Wire ids{nullptr, nullptr}, probs{nullptr, nullptr};
  if ((wire.has(kQTokenIds) && !wire.part(ids)) || (wire.has(kQProbs) && !wire.part(probs)) || wire.at != wire.end)
    return nullptr;
  const Py_ssize_t size = ids.end - ids.at, num_probs = probs.end - probs.at;
  if (size % 4 != 0 || num_probs != 2 * size) return nullptr;
  if (size == 0) return Py_NewRef(Py_None);
  return PyObject_CallFunction(distribution, "y#y#", ids.at, size, probs.at, num_probs);
}

bool read_qs(Wire& wire, Py_ssize_t size, Ref& column) {
  column.reset(wire.has(kQs) ? PyTuple_New(size) : Py_NewRef(empty_tuple));
  if (!column || !wire.has(kQs)) return static_cast<bool>(column);
  for (Py_ssize_t i = 0; i < size; ++i) {
    Wire inner{nullptr, nullptr};
    PyObject* q = wire.has(kQs) && wire.part(inner) ? read_q(inner) : nullptr;
    if (q == nullptr) return false;
    PyTuple_SET_ITEM(column.get(), i, q);
  }
  return true;
}

// The nodes of a message in wire form, of every field at most one and in order, with `idle` and `step_s`. False if it is
// not plain, or after an error.
bool read_nodes(Wire wire, Ref* columns, bool& idle, double& step_s) {
  Py_ssize_t size = -1;
  if (!read_ids(wire, kNodeIds, size, columns[0]) || !read_ids(wire, kParentIds, size, columns[1]) ||
      !read_ids(wire, kTokenIds, size, columns[2]) || !read_probs(wire, size, columns[3]) ||
      !read_sampled(wire, size, columns[4]) || !read_qs(wire, size, columns[5]))
    return false;
  uint8_t flag = 0;
  if (wire.has(kIdle) && (++wire.at, !wire.byte(flag) || flag > 1)) return false;
  if (wire.has(kStepS) && (++wire.at, !wire.real(step_s))) return false;
  idle = flag == 1;
  return wire.at == wire.end && step_s >= 0 && step_s <= most_step_s;
}

// The Nodes of one row, as protobuf reads it; None if it is not plain or malformed. Null after an error.
PyObject* read_message(PyObject* session_id, PyObject* epoch, PyObject* context_len, PyObject* packed) {
  if (!PyBytes_CheckExact(packed) || PyObject_Size(session_id) <= 0) {
    PyErr_Clear();
    return Py_NewRef(Py_None);
  }
  const auto* start = reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(packed));
  Ref columns[6];
  bool idle = false;
  double step_s = 0;
  const bool plain = read_nodes({start, start + PyBytes_GET_SIZE(packed)}, columns, idle, step_s);
  if (PyErr_Occurred()) return nullptr;
  if (!plain) return Py_NewRef(Py_None);
  Ref nodes(PyType_GenericAlloc(of_message.columns_type, 0));
  Ref seconds(PyFloat_FromDouble(step_s));
  Ref message(PyType_GenericAlloc(of_message.type, 0));
  if (!nodes || !seconds || !message) return nullptr;
  for (int column = 0; column < 6; ++column) put(nodes.get(), of_message.columns[column], columns[column].release());
  put(message.get(), of_message.session_id, Py_NewRef(session_id));
  put(message.get(), of_message.epoch, Py_NewRef(epoch));
  put(message.get(), of_message.context_len, Py_NewRef(context_len));
  put(message.get(), of_message.nodes, nodes.release());
  put(message.get(), of_message.idle, Py_NewRef(idle ? Py_True : Py_False));
  put(message.get(), of_message.step_s, seconds.release());
  return message.release();
}

// read_each(session_ids, epochs, context_lens, packed) -> a list of Nodes, None where a row is not plain or malformed.
// Lists of equal length: a row is that of types.proto: TreeUpdates.
PyObject* read_each(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  const auto fits = [&](int i) {
    return PyList_CheckExact(arguments[i]) && PyList_GET_SIZE(arguments[i]) == PyList_GET_SIZE(arguments[0]);
  };
  if (count != 4 || !fits(0) || !fits(1) || !fits(2) || !fits(3))
    return PyErr_Format(PyExc_TypeError, "read_each takes four lists of equal length");
  const Py_ssize_t size = PyList_GET_SIZE(arguments[0]);
  Ref messages(PyList_New(size));
  for (Py_ssize_t i = 0; messages && i < size; ++i) {
    PyObject* message = read_message(PyList_GET_ITEM(arguments[0], i), PyList_GET_ITEM(arguments[1], i),
                                     PyList_GET_ITEM(arguments[2], i), PyList_GET_ITEM(arguments[3], i));
    if (message == nullptr) return nullptr;
    PyList_SET_ITEM(messages.get(), i, message);
  }
  return messages.release();
}

// columns_of(nodes) -> NodeColumns of a list of TreeNodes, as messages take them. NodeColumns.of.
PyObject* columns_of(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 1 || !PyList_CheckExact(arguments[0])) return PyErr_Format(PyExc_TypeError, "columns_of takes a list");
  PyObject* nodes = arguments[0];
  const Py_ssize_t size = PyList_GET_SIZE(nodes);
  bool all_sampled = true, any_q = false;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* node = PyList_GET_ITEM(nodes, i);
    if (!is_node(node)) return PyErr_Format(PyExc_TypeError, "columns_of takes nodes of a tree");
    all_sampled = all_sampled && slot(node, layout.sampled) == Py_True;
    any_q = any_q || slot(node, layout.q) != Py_None;
  }
  const Py_ssize_t attributes[] = {layout.node_id, layout.parent_id, layout.token_id,
                                   layout.prob,    layout.sampled,   layout.q};
  const bool wanted[] = {true, true, true, true, !all_sampled, any_q};
  Ref columns(PyType_GenericAlloc(of_message.columns_type, 0));
  for (int column = 0; columns && column < 6; ++column) {
    PyObject* values = wanted[column] ? PyTuple_New(size) : Py_NewRef(empty_tuple);
    if (values == nullptr) return nullptr;
    put(columns.get(), of_message.columns[column], values);
    for (Py_ssize_t i = 0; wanted[column] && i < size; ++i)
      PyTuple_SET_ITEM(values, i, Py_NewRef(slot(PyList_GET_ITEM(nodes, i), attributes[column])));
  }
  return columns.release();
}

// Bytes of a protobuf message. Writers return false where protobuf would not take the value, or after an error.
struct Written {
  std::string bytes;

  void varint(uint64_t value) {
    for (; value > 0x7F; value >>= 7) bytes.push_back(static_cast<char>(value | 0x80));
    bytes.push_back(static_cast<char>(value));
  }
  void part(uint8_t tag, const std::string& inner) {
    bytes.push_back(static_cast<char>(tag));
    varint(inner.size());
    bytes += inner;
  }
  void real(double value) { bytes.append(reinterpret_cast<const char*>(&value), sizeof value); }

  bool ids(uint8_t tag, const Column& column, Py_ssize_t size) {
    Written inner;
    for (Py_ssize_t i = 0; i < size; ++i) {
      int64_t value = 0;
      if (!read_int(column.items[i], value) || value < 0 || value > UINT32_MAX) return false;
      inner.varint(static_cast<uint64_t>(value));
    }
    part(tag, inner.bytes);
    return true;
  }
  bool probs(const Column& column, Py_ssize_t size) {
    Written inner;
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!PyFloat_CheckExact(column.items[i])) return false;
      inner.real(PyFloat_AS_DOUBLE(column.items[i]));
    }
    part(kProbs, inner.bytes);
    return true;
  }
  bool sampled(const Column& column, Py_ssize_t size) {
    std::string flags;
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!PyBool_Check(column.items[i])) return false;
      flags.push_back(column.items[i] == Py_True);
    }
    if (flags.find('\0') != std::string::npos) part(kSampled, flags);
    return true;
  }
  bool qs(const Column& column, Py_ssize_t size) {
    if (std::all_of(column.items, column.items + size, [](PyObject* q) { return q == Py_None; })) return true;
    for (Py_ssize_t i = 0; i < size; ++i) {
      Written q;
      if (column.items[i] != Py_None && (!q.of(column.items[i], packed_ids, kQTokenIds) ||
                                         !q.of(column.items[i], packed_probs, kQProbs)))
        return false;
      part(kQs, q.bytes);
    }
    return true;
  }
  // One packed column of a distribution.
  bool of(PyObject* q, PyObject* name, uint8_t tag) {
    Ref packed(PyObject_GetAttr(q, name));
    if (!packed || !PyBytes_CheckExact(packed.get())) return false;
    const std::string inner(PyBytes_AS_STRING(packed.get()), static_cast<size_t>(PyBytes_GET_SIZE(packed.get())));
    if (!inner.empty()) part(tag, inner);
    return true;
  }
};

// The nodes of Nodes in wire form, as protobuf writes them; None if they are no columns or not plain. Null after an error.
PyObject* write_message(PyObject* message) {
  if (Py_TYPE(message) != of_message.type) return Py_NewRef(Py_None);
  PyObject *nodes = slot(message, of_message.nodes), *step_s = slot(message, of_message.step_s);
  if (nodes == nullptr || !is_columns(nodes) || step_s == nullptr || !PyFloat_CheckExact(step_s))
    return Py_NewRef(Py_None);
  PyObject* node_ids = slot(nodes, of_message.columns[0]);
  const Py_ssize_t size = PyObject_Size(node_ids == nullptr ? Py_None : node_ids);
  if (size < 0) return nullptr;
  Written written;
  Column columns[6];
  for (int i = 0; size > 0 && i < 6; ++i)
    if (!columns[i].read(nodes, i, size, i > 3)) return nullptr;
  const bool plain =
      size == 0 || (written.ids(kNodeIds, columns[0], size) && written.ids(kParentIds, columns[1], size) &&
                    written.ids(kTokenIds, columns[2], size) && written.probs(columns[3], size) &&
                    (columns[4].items == nullptr || written.sampled(columns[4], size)) &&
                    (columns[5].items == nullptr || written.qs(columns[5], size)));
  if (PyErr_Occurred()) return nullptr;
  if (!plain) return Py_NewRef(Py_None);
  const int idle = PyObject_IsTrue(slot(message, of_message.idle));
  if (idle < 0) return nullptr;
  if (idle) written.bytes += {static_cast<char>(kIdle), 1};
  if (PyFloat_AS_DOUBLE(step_s) != 0.0 || std::signbit(PyFloat_AS_DOUBLE(step_s))) {
    written.bytes.push_back(static_cast<char>(kStepS));
    written.real(PyFloat_AS_DOUBLE(step_s));
  }
  return PyBytes_FromStringAndSize(written.bytes.data(), static_cast<Py_ssize_t>(written.bytes.size()));
}

// write_each(messages) -> of each Nodes its nodes, idle and step_s in wire form; None: protobuf has to write them.
PyObject* write_each(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  Ref messages(count == 1 ? PySequence_Fast(arguments[0], "messages are no sequence") : nullptr);
  if (!messages) return count == 1 ? nullptr : PyErr_Format(PyExc_TypeError, "write_each takes messages");
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(messages.get());
  Ref all(PyList_New(size));
  for (Py_ssize_t i = 0; all && i < size; ++i) {
    PyObject* packed = write_message(PySequence_Fast_GET_ITEM(messages.get(), i));
    if (packed == nullptr) return nullptr;
    PyList_SET_ITEM(all.get(), i, packed);
  }
  return all.release();
}

PyMethodDef methods[] = {
    method("columns_of", columns_of),
    method("write_each", write_each),
    method("read_each", read_each),
    method("prepare", prepare),
    method("add", add),
    method("add_each", add_each),
    method("attach_below", attach_below),
    method("prepare_walks", prepare_walks),
    method("rows", rows),
    method("follow", follow),
    method("descend", descend),
    method("best_path", best_path),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "paceline_tree", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_paceline_tree() {
  if (!intern({{names.add, "add"},
               {names.added, "added"},
               {names.append, "append"},
               {names.attach, "attach"},
               {names.dropped, "dropped"},
               {names.invalid, "invalid"},
               {names.stale, "stale"}}))
    return nullptr;
  if ((empty_tuple = PyTuple_New(0)) == nullptr) return nullptr;
  return PyModule_Create(&module);
}
