// The native SpeculationTree and TreeNode, which replace those of tree.py, and the wire form of their nodes: see
// native_tree.py.

#include "tree.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace {

using namespace paceline;

// Where messages.py keeps the attributes of Nodes, and NodeColumns its columns.
struct MessageLayout {
  PyTypeObject* type = nullptr;
  Py_ssize_t session_id, epoch, context_len, nodes, idle, step_s;
  PyTypeObject* columns_type = nullptr;
  Py_ssize_t columns[6];  // node_ids, parent_ids, token_ids, probs, sampled, qs
} of_message;

// Where tree.py keeps those of Proposal.
struct {
  PyTypeObject* type;
  PyObject* none;  // NO_PROPOSAL
  Py_ssize_t token_ids, qs, probs, node_ids, parents, producer;
} proposals;

struct Names {
  PyObject *first, *node_id, *parent_id, *token_id, *prob, *sampled, *q;
} names;

// What prepare was told besides: the members of Refusal in their order, the causes of a walk, and Python's own types.
PyObject *refusals[3], *added_type, *walk_type, *distribution, *check;
struct {
  PyObject *hit, *late, *token, *k;
} causes;
double most_step_s;

// prepare(messages, proposals, refusals, causes, probability, limits, types, check): (Nodes, NodeColumns); NO_PROPOSAL;
// (Refusal.STALE, INVALID, DROPPED); (Cause.HIT, LATE, TOKEN, K); the address of paceline_probability in rows.cpp; its
// tolerance and the longest step that a message may report; (Added, Walk, SparseDistribution); and tree.check_integrity.
PyObject* prepare(PyObject*, PyObject* arguments) {
  PyObject *message, *columns, *address, *most;
  if (!PyArg_ParseTuple(arguments, "(OO)O(OOO)(OOOO)O(Od)(OOO)O", &message, &columns, &proposals.none, &refusals[0],
                        &refusals[1], &refusals[2], &causes.hit, &causes.late, &causes.token, &causes.k, &address, &most,
                        &most_step_s, &added_type, &walk_type, &distribution, &check))
    return nullptr;
  for (PyObject* each : {message, columns, proposals.none, refusals[0], refusals[1], refusals[2], causes.hit, causes.late,
                         causes.token, causes.k, added_type, walk_type, distribution, check})
    Py_INCREF(each);
  of_message.type = reinterpret_cast<PyTypeObject*>(message);
  of_message.columns_type = reinterpret_cast<PyTypeObject*>(columns);
  proposals.type = Py_TYPE(proposals.none);
  if (!prepare_tree(reinterpret_cast<PyObject*>(node_type), reinterpret_cast<PyObject*>(tree_type), address, most) || !find({
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
        {proposals.type, "token_ids", proposals.token_ids},
        {proposals.type, "qs", proposals.qs},
        {proposals.type, "probs", proposals.probs},
        {proposals.type, "node_ids", proposals.node_ids},
        {proposals.type, "parents", proposals.parents},
        {proposals.type, "producer", proposals.producer},
      }))
    return nullptr;
  Py_RETURN_NONE;
}

// A tuple of values by their indices. Null after an error, and where there is no value.
template <class Value>
PyObject* tuple_of(size_t size, Value value) {
  Ref tuple(PyTuple_New(static_cast<Py_ssize_t>(size)));
  for (size_t i = 0; tuple && i < size; ++i) {
    PyObject* item = value(i);
    if (item == nullptr) return nullptr;
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), item);
  }
  return tuple.release();
}

// Sets an attribute to a new value. False if there is none.
bool set(PyObject* self, Py_ssize_t offset, PyObject* value) {
  if (value != nullptr) put(self, offset, value);
  return value != nullptr;
}

// -- nodes --------------------------------------------------------------------------------------------------------------

Node* as_node(PyObject* self) { return reinterpret_cast<Node*>(self); }

PyObject* or_none(Node* node) { return Py_NewRef(node == nullptr ? Py_None : object(node)); }

PyObject* parent_of(PyObject* self, void*) { return or_none(as_node(self)->parent); }
PyObject* best_of(PyObject* self, void*) { return or_none(as_node(self)->best); }

PyObject* children_of(PyObject* self, void*) {
  Ref children(PyDict_New());
  for (Node* child = as_node(self)->first; children && child != nullptr; child = child->next) {
    Ref token_id(PyLong_FromLongLong(child->token_id));
    if (!token_id || PyDict_SetItem(children.get(), token_id.get(), object(child)) < 0) return nullptr;
  }
  return children.release();
}

PyObject* shift(PyObject* self, PyObject* by) {
  const double value = PyFloat_AsDouble(by);
  if (PyErr_Occurred()) return nullptr;
  as_node(self)->log_path += value;
  for (Node* node : below(as_node(self))) node->log_path += value;
  Py_RETURN_NONE;
}

void free_node(PyObject* self) {
  Node* node = as_node(self);
  Py_XDECREF(node->q), Py_XDECREF(node->gaps), Py_XDECREF(node->bonus);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef node_members[] = {
    {"node_id", T_LONGLONG, offsetof(Node, node_id), READONLY, nullptr},
    {"parent_id", T_LONGLONG, offsetof(Node, parent_id), READONLY, nullptr},
    {"token_id", T_LONGLONG, offsetof(Node, token_id), READONLY, nullptr},
    {"position", T_LONGLONG, offsetof(Node, position), READONLY, nullptr},
    {"rank", T_LONGLONG, offsetof(Node, rank), 0, nullptr},
    {"prob", T_DOUBLE, offsetof(Node, prob), READONLY, nullptr},
    {"log_path", T_DOUBLE, offsetof(Node, log_path), READONLY, nullptr},
    {"sampled", T_BOOL, offsetof(Node, sampled), READONLY, nullptr},
    {"alive", T_BOOL, offsetof(Node, alive), READONLY, nullptr},
    {"expanded", T_BOOL, offsetof(Node, expanded), 0, nullptr},
    {"q", T_OBJECT_EX, offsetof(Node, q), READONLY, nullptr},
    {"gaps", T_OBJECT_EX, offsetof(Node, gaps), 0, nullptr},
    {"bonus", T_OBJECT_EX, offsetof(Node, bonus), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef node_properties[] = {
    {"parent", parent_of, nullptr, nullptr, nullptr},
    {"best", best_of, nullptr, nullptr, nullptr},
    {"children", children_of, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef node_methods[] = {{"shift", shift, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};

PyType_Slot node_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(free_node)},
    {Py_tp_members, node_members},
    {Py_tp_getset, node_properties},
    {Py_tp_methods, node_methods},
    {0, nullptr},
};
PyType_Spec node_spec = {"paceline_tree.TreeNode", sizeof(Node), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, node_slots};

// -- what trees do ------------------------------------------------------------------------------------------------------

Tree* as_tree(PyObject* self) { return reinterpret_cast<Tree*>(self); }

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
  Py_ssize_t added = 0, refused[3] = {0, 0, 0};

  void count(Refusal refusal) { ++(refusal == Refusal::kNone ? added : refused[static_cast<int>(refusal) - 1]); }
  PyObject* object() const { return PyObject_CallFunction(added_type, "nnnn", added, refused[0], refused[1], refused[2]); }
};

// Attaches a node by its attributes; see attach. Null if it is refused, or after an error.
Node* attach_object(Tree* tree, PyObject* node, Refusal& refusal) {
  int64_t ids[3];
  PyObject* of[] = {names.node_id, names.parent_id, names.token_id};
  for (int i = 0; i < 3; ++i) {
    Ref value(PyObject_GetAttr(node, of[i]));
    if (!value || !read_int(value.get(), ids[i])) return nullptr;
  }
  Ref prob(PyObject_GetAttr(node, names.prob)), sampled(PyObject_GetAttr(node, names.sampled));
  Ref q(PyObject_GetAttr(node, names.q));
  if (!prob || !sampled || !q) return nullptr;
  const double p = PyFloat_AsDouble(prob.get());
  const int flag = PyObject_IsTrue(sampled.get());
  return PyErr_Occurred() ? nullptr : attach(tree, ids[0], ids[1], ids[2], p, flag != 0, q.get(), refusal);
}

bool is_columns(PyObject* nodes) { return Py_TYPE(nodes) == of_message.columns_type; }

// Attaches the nodes of NodeColumns and counts them. False after an error.
bool add_columns(Tree* tree, PyObject* columns, Counts& counts) {
  PyObject* ids = slot(columns, of_message.columns[0]);
  const Py_ssize_t size = PyObject_Size(ids == nullptr ? Py_None : ids);
  Column of[6];
  if (size < 0) return false;
  for (int i = 0; i < 6; ++i)
    if (!of[i].read(columns, i, size, i > 3)) return false;
  for (Py_ssize_t i = 0; i < size; ++i) {
    int64_t node_id = 0, parent_id = 0, token_id = 0;
    if (!read_int(of[0].items[i], node_id) || !read_int(of[1].items[i], parent_id) || !read_int(of[2].items[i], token_id))
      return false;
    const double prob = PyFloat_AsDouble(of[3].items[i]);
    const int sampled = of[4].items == nullptr ? 1 : PyObject_IsTrue(of[4].items[i]);
    if (PyErr_Occurred()) return false;
    Refusal refusal = Refusal::kNone;
    PyObject* q = of[5].items == nullptr ? Py_None : of[5].items[i];
    if (!attach(tree, node_id, parent_id, token_id, prob, sampled != 0, q, refusal) && refusal == Refusal::kNone) return false;
    counts.count(refusal);
  }
  return true;
}

// Attaches the nodes of a message and counts them. False after an error.
bool add_nodes(Tree* tree, PyObject* nodes, Counts& counts) {
  if (is_columns(nodes)) return add_columns(tree, nodes, counts);
  Ref all(PySequence_Fast(nodes, "nodes are no sequence"));
  for (Py_ssize_t i = 0; all && i < PySequence_Fast_GET_SIZE(all.get()); ++i) {
    Refusal refusal = Refusal::kNone;
    if (!attach_object(tree, PySequence_Fast_GET_ITEM(all.get(), i), refusal) && refusal == Refusal::kNone) return false;
    counts.count(refusal);
  }
  return static_cast<bool>(all);
}

PyObject* add(PyObject* self, PyObject* nodes) {
  Counts counts;
  return add_nodes(as_tree(self), nodes, counts) ? counts.object() : nullptr;
}

PyObject* attach_one(PyObject* self, PyObject* node) {
  Refusal refusal = Refusal::kNone;
  Node* placed = attach_object(as_tree(self), node, refusal);
  if (placed == nullptr && refusal == Refusal::kNone) return nullptr;
  return Py_NewRef(placed == nullptr ? refusals[static_cast<int>(refusal) - 1] : object(placed));
}

// As in tree.py.
constexpr char kGrew = 1, kOffers = 2, kFirst = 4, kLost = 8;

// add_each(trees, nodes) -> Added of all, and a byte for each. tree.add_each, by lists of equal length.
PyObject* add_each(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || !PyList_CheckExact(arguments[0]) || !PyList_CheckExact(arguments[1]) ||
      PyList_GET_SIZE(arguments[0]) != PyList_GET_SIZE(arguments[1]))
    return PyErr_Format(PyExc_TypeError, "add_each takes two lists of equal length");
  const Py_ssize_t size = PyList_GET_SIZE(arguments[0]);
  for (Py_ssize_t i = 0; i < size; ++i)
    if (!is_tree(PyList_GET_ITEM(arguments[0], i))) return PyErr_Format(PyExc_TypeError, "this is no native tree");
  Ref effects(PyBytes_FromStringAndSize(nullptr, size));
  if (!effects) return nullptr;
  Counts counts;
  for (Py_ssize_t i = 0; i < size; ++i) {
    Tree* tree = as_tree(PyList_GET_ITEM(arguments[0], i));
    const Py_ssize_t before = counts.added;
    const bool offered = tree->anchor->best != nullptr;
    if (!add_nodes(tree, PyList_GET_ITEM(arguments[1], i), counts)) return nullptr;
    const bool offers = tree->anchor->best != nullptr;
    PyBytes_AS_STRING(effects.get())[i] = static_cast<char>((counts.added > before ? kGrew : 0) | (offers ? kOffers : 0) |
                                                            (offers && !offered ? kFirst : 0) | (tree->lost() ? kLost : 0));
  }
  Ref added(counts.object());
  return added ? PyTuple_Pack(2, added.get(), effects.get()) : nullptr;
}

// Moves the anchor along tokens and forgets all that is not below it. Sets the nodes that it has passed and the cause; the
// other tokens are the suffix. False after an error.
bool walk_along(Tree* tree, PyObject* tokens, std::vector<int64_t>& passed, PyObject*& cause) {
  std::vector<int64_t> token_ids(static_cast<size_t>(PySequence_Fast_GET_SIZE(tokens)));
  for (size_t i = 0; i < token_ids.size(); ++i)
    if (!read_int(PySequence_Fast_GET_ITEM(tokens, static_cast<Py_ssize_t>(i)), token_ids[i])) return false;
  tree->best_limit = -1;
  cause = causes.late;  // of a lost tree, below whose anchor there is nothing
  if (!tree->lost()) {
    Node* child = nullptr;
    while (passed.size() < token_ids.size() && (child = tree->nodes->child(tree->anchor, token_ids[passed.size()]))) {
      passed.push_back(child->node_id);
      move(tree, child);
    }
    Node* anchor = tree->anchor;
    if (passed.size() == token_ids.size()) {
      cause = anchor->best ? causes.hit : causes.late;
    } else {
      cause = anchor->first ? causes.token : causes.k;
      drop_below(tree, anchor);
    }
  }
  for (size_t i = passed.size(); i < token_ids.size(); ++i) tree->nodes->suffix.push_back(token_ids[i]);
  return true;
}

PyObject* walk(PyObject* self, PyObject* token_ids) {
  Ref tokens(PySequence_Tuple(token_ids));
  std::vector<int64_t> passed;
  PyObject* cause = nullptr;
  if (!tokens || !walk_along(as_tree(self), tokens.get(), passed, cause)) return nullptr;
  Ref node_ids(tuple_of(passed.size(), [&](size_t i) { return PyLong_FromLongLong(passed[i]); }));
  Ref rest(PyTuple_GetSlice(tokens.get(), static_cast<Py_ssize_t>(passed.size()), PY_SSIZE_T_MAX));
  if (!node_ids || !rest) return nullptr;
  return PyObject_CallFunctionObjArgs(walk_type, node_ids.get(), rest.get(), cause, nullptr);
}

PyObject* follow(PyObject* self, PyObject* token_ids) {
  Ref tokens(PySequence_Fast(token_ids, "tokens are no sequence"));
  std::vector<int64_t> passed;
  PyObject* cause = nullptr;
  return tokens && walk_along(as_tree(self), tokens.get(), passed, cause) ? Py_NewRef(cause) : nullptr;
}

// SpeculationTree._proposal.
PyObject* best_path(const Tree* tree, Py_ssize_t most) {
  std::vector<Node*> path;
  for (Node* node = tree->anchor->best; node != nullptr && static_cast<Py_ssize_t>(path.size()) < most; node = node->best)
    path.push_back(node);
  if (path.empty()) return Py_NewRef(proposals.none);
  Ref made(PyType_GenericAlloc(proposals.type, 0));
  const auto fill = [&](Py_ssize_t column, auto value) {
    return set(made.get(), column, tuple_of(path.size(), [&](size_t i) { return value(*path[i]); }));
  };
  const bool done = made && set(made.get(), proposals.parents, Py_NewRef(empty_tuple)) &&
                    set(made.get(), proposals.producer, Py_NewRef(tree->producer)) &&
                    fill(proposals.token_ids, [](const Node& it) { return PyLong_FromLongLong(it.token_id); }) &&
                    fill(proposals.qs, [](const Node& it) { return Py_NewRef(it.q); }) &&
                    fill(proposals.probs, [](const Node& it) { return PyFloat_FromDouble(it.prob); }) &&
                    fill(proposals.node_ids, [](const Node& it) { return PyLong_FromLongLong(it.node_id); });
  return done ? made.release() : nullptr;
}

PyObject* proposal(PyObject* self, PyObject* k) {
  Tree* tree = as_tree(self);
  const Py_ssize_t most = PyLong_AsSsize_t(k);
  if (PyErr_Occurred()) return nullptr;
  if (most > tree->best_limit) {
    PyObject* found = best_path(tree, most);
    if (found == nullptr) return nullptr;
    Py_XSETREF(tree->best_path, found);
    tree->best_limit = most;
  }
  if (tree->best_path == nullptr) return Py_NewRef(proposals.none);
  if (PyTuple_GET_SIZE(slot(tree->best_path, proposals.token_ids)) <= std::max<Py_ssize_t>(most, 0))
    return Py_NewRef(tree->best_path);
  return PyObject_CallMethodOneArg(tree->best_path, names.first, k);
}

PyObject* get(PyObject* self, PyObject* node_id) {
  int64_t id = 0;
  return read_int(node_id, id) ? or_none(as_tree(self)->nodes->get(id)) : nullptr;
}

// nodes() -> an iterator over all nodes, parents before children.
PyObject* all_nodes(PyObject* self, PyObject*) {
  Ref all(PyList_New(0));
  for (Node* node = as_tree(self)->anchor; all && node != nullptr; node = node->newer)
    if (PyList_Append(all.get(), object(node)) < 0) return nullptr;
  return all ? PyObject_GetIter(all.get()) : nullptr;
}

PyObject* check_integrity(PyObject* self, PyObject*) { return PyObject_CallOneArg(check, self); }

PyObject* anchor_of(PyObject* self, void*) { return or_none(as_tree(self)->anchor); }
PyObject* is_lost(PyObject* self, void*) { return PyBool_FromLong(as_tree(self)->lost()); }
PyObject* suffix_of(PyObject* self, void*) {
  const auto& suffix = as_tree(self)->nodes->suffix;
  return tuple_of(suffix.size(), [&](size_t i) { return PyLong_FromLongLong(suffix[i]); });
}
PyObject* context_len_of(PyObject* self, void*) {
  const Tree* tree = as_tree(self);
  return PyLong_FromLongLong(tree->anchor->position + 1 + static_cast<int64_t>(tree->nodes->suffix.size()));
}
Py_ssize_t num_below(PyObject* self) { return static_cast<Py_ssize_t>(as_tree(self)->nodes->by_id.size()) - 1; }

// SpeculationTree(vocab_size, context_len, rejection, max_nodes, producer)
PyObject* new_tree(PyTypeObject* type, PyObject* arguments, PyObject*) {
  long long vocab_size = 0, context_len = 0, max_nodes = 0;
  int rejection = 0;
  PyObject* producer = nullptr;
  if (!PyArg_ParseTuple(arguments, "LLpLO", &vocab_size, &context_len, &rejection, &max_nodes, &producer)) return nullptr;
  int64_t maker = 0;
  if (!read_int(producer, maker)) return nullptr;
  Ref self(PyType_GenericAlloc(type, 0));
  Node* root = self ? make_node(0, -1, 0, context_len - 1, 1.0, false, Py_None) : nullptr;
  if (root == nullptr) return nullptr;
  Tree* tree = as_tree(self.get());
  tree->nodes = new Nodes;
  tree->producer = Py_NewRef(producer);
  tree->vocab_size = vocab_size, tree->max_nodes = max_nodes, tree->first_id = maker << kProducerShift;
  tree->rejection = rejection != 0, tree->best_limit = -1;
  tree->anchor = root;
  hold(tree, root);
  return self.release();
}

void free_tree(PyObject* self) {
  Tree* tree = as_tree(self);
  if (tree->nodes != nullptr) {
    drop_below(tree, tree->anchor);
    forget(tree, tree->anchor);
    delete tree->nodes;
  }
  Py_XDECREF(tree->producer), Py_XDECREF(tree->best_path);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef tree_methods[] = {
    {"add", add, METH_O, nullptr},
    {"attach", attach_one, METH_O, nullptr},
    {"walk", walk, METH_O, nullptr},
    {"follow", follow, METH_O, nullptr},
    {"proposal", proposal, METH_O, nullptr},
    {"get", get, METH_O, nullptr},
    {"nodes", all_nodes, METH_NOARGS, nullptr},
    {"check_integrity", check_integrity, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef tree_properties[] = {
    {"anchor", anchor_of, nullptr, nullptr, nullptr},
    {"context_len", context_len_of, nullptr, nullptr, nullptr},
    {"lost", is_lost, nullptr, nullptr, nullptr},
    {"suffix", suffix_of, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMemberDef tree_members[] = {
    {"max_nodes", T_LONGLONG, offsetof(Tree, max_nodes), READONLY, nullptr},
    {"rejection", T_BOOL, offsetof(Tree, rejection), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot tree_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(new_tree)},
    {Py_tp_dealloc, reinterpret_cast<void*>(free_tree)},
    {Py_tp_methods, tree_methods},
    {Py_tp_getset, tree_properties},
    {Py_tp_members, tree_members},
    {Py_sq_length, reinterpret_cast<void*>(num_below)},
    {0, nullptr},
};
PyType_Spec tree_spec = {"paceline_tree.SpeculationTree", sizeof(Tree), 0, Py_TPFLAGS_DEFAULT, tree_slots};

// -- rows of a step, and messages ---------------------------------------------------------------------------------------

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
  column.reset(tuple_of(static_cast<size_t>(size), [&](size_t) -> PyObject* {
    uint32_t value = 0;
    return inner.uint32(value) ? PyLong_FromUnsignedLong(value) : nullptr;
  }));
  return column && inner.at == inner.end;
}

bool read_probs(Wire& wire, Py_ssize_t size, Ref& column) {
  Wire inner{nullptr, nullptr};
  if ((wire.has(kProbs) && !wire.part(inner)) || inner.end - inner.at != 8 * size) return false;
  column.reset(tuple_of(static_cast<size_t>(size), [&](size_t) -> PyObject* {
    double value = 0;
    return inner.real(value) && std::isfinite(value) ? PyFloat_FromDouble(value) : nullptr;
  }));
  return static_cast<bool>(column);
}

bool read_sampled(Wire& wire, Py_ssize_t size, Ref& column) {
  Wire inner{nullptr, nullptr};
  if (wire.has(kSampled) && !wire.part(inner)) return false;
  const Py_ssize_t found = inner.end - inner.at;
  if (found != size && found != 0) return false;
  column.reset(tuple_of(static_cast<size_t>(found), [&](size_t i) -> PyObject* {
    return inner.at[i] > 1 ? nullptr : PyBool_FromLong(inner.at[i]);
  }));
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
  const bool any = wire.has(kQs);
  column.reset(tuple_of(any ? static_cast<size_t>(size) : 0, [&](size_t) -> PyObject* {
    Wire inner{nullptr, nullptr};
    return wire.has(kQs) && wire.part(inner) ? read_q(inner) : nullptr;
  }));
  return static_cast<bool>(column);
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
  const Py_ssize_t size = PyList_GET_SIZE(arguments[0]);
  const auto node = [&](Py_ssize_t i) { return reinterpret_cast<Node*>(PyList_GET_ITEM(arguments[0], i)); };
  bool all_sampled = true, any_q = false;
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!is_node(object(node(i)))) return PyErr_Format(PyExc_TypeError, "columns_of takes nodes of a tree");
    all_sampled = all_sampled && node(i)->sampled;
    any_q = any_q || node(i)->q != Py_None;
  }
  Ref columns(PyType_GenericAlloc(of_message.columns_type, 0));
  const auto fill = [&](int column, bool wanted, auto value) {
    const auto at = [&](size_t i) { return value(*node(static_cast<Py_ssize_t>(i))); };
    return set(columns.get(), of_message.columns[column], tuple_of(wanted ? static_cast<size_t>(size) : 0, at));
  };
  const bool done = columns && fill(0, true, [](const Node& it) { return PyLong_FromLongLong(it.node_id); }) &&
                    fill(1, true, [](const Node& it) { return PyLong_FromLongLong(it.parent_id); }) &&
                    fill(2, true, [](const Node& it) { return PyLong_FromLongLong(it.token_id); }) &&
                    fill(3, true, [](const Node& it) { return PyFloat_FromDouble(it.prob); }) &&
                    fill(4, !all_sampled, [](const Node& it) { return PyBool_FromLong(it.sampled); }) &&
                    fill(5, any_q, [](const Node& it) { return Py_NewRef(it.q); });
  return done ? columns.release() : nullptr;
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
      if (!PyLong_CheckExact(column.items[i]) || !read_int(column.items[i], value) || value < 0 || value > UINT32_MAX)
        return false;
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
    {"prepare", prepare, METH_VARARGS, nullptr},
    method("add_each", add_each),
    method("columns_of", columns_of),
    method("read_each", read_each),
    method("write_each", write_each),
    method("rows", rows),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "paceline_tree", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_paceline_tree() {
  if (!intern({{names.first, "first"},
               {names.node_id, "node_id"},
               {names.parent_id, "parent_id"},
               {names.token_id, "token_id"},
               {names.prob, "prob"},
               {names.sampled, "sampled"},
               {names.q, "q"}}))
    return nullptr;
  PyObject *nodes = PyType_FromSpec(&node_spec), *trees = PyType_FromSpec(&tree_spec), *made = PyModule_Create(&module);
  if (nodes == nullptr || trees == nullptr || made == nullptr) return nullptr;
  node_type = reinterpret_cast<PyTypeObject*>(nodes), tree_type = reinterpret_cast<PyTypeObject*>(trees);
  if (PyModule_AddObjectRef(made, "TreeNode", nodes) < 0 || PyModule_AddObjectRef(made, "SpeculationTree", trees) < 0)
    return nullptr;
  return made;
}
