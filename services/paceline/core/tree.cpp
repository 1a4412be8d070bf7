// The native SpeculationTree and TreeNode, which replace the classes of tree.py of the same names; the Frontier that replaces
// the one of draft/growth.py; what grows them; the choice of what a step verifies of them; and the wire form of nodes: see native_tree.py.

#include "objects.h"

#include <structmember.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace {

using paceline::intern, paceline::method, paceline::Ref;

constexpr int kProducerShift = 28;
constexpr double kLeastProb = 1e-9;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kNoInteger = INT64_MIN;  // an int of more than 63 bits, which is no id of anything

// A TreeNode. Its tree holds it; who else holds it finds neighbors as long as it is alive. None of them is owned.
struct Node {
  PyObject_HEAD
  int64_t node_id, parent_id, token_id, position, rank, num_children;
  double prob, log_path;
  char sampled, alive, expanded;
  Node *parent, *best;
  Node *first, *last, *next;       // its first and last child, its next sibling
  Node *older, *newer;             // all nodes of the tree, in the order in which they came
  PyObject *q, *gaps, *bonus;
};

PyObject* object(Node* node) { return reinterpret_cast<PyObject*>(node); }

// The containers of a tree.
struct Nodes {
  std::unordered_map<int64_t, Node*> by_id;
  std::unordered_map<uint64_t, Node*> children;  // by the parent's id and the token, of 32 bits each
  std::deque<int64_t> suffix;

  Node* get(int64_t node_id) const {
    const auto found = by_id.find(node_id);
    return found == by_id.end() ? nullptr : found->second;
  }
  static uint64_t key(const Node* parent, int64_t token_id) {
    return static_cast<uint64_t>(parent->node_id) << 32 | static_cast<uint64_t>(token_id);
  }
  Node* child(const Node* parent, int64_t token_id) const {
    if (parent->first == nullptr || token_id >> 32 != 0) return nullptr;
    const auto found = children.find(key(parent, token_id));
    return found == children.end() ? nullptr : found->second;
  }
};

// A SpeculationTree.
struct Tree {
  PyObject_HEAD
  Nodes* nodes;
  Node *anchor, *newest;
  PyObject *producer, *best_path;
  int64_t vocab_size, max_nodes, first_id, best_limit, best_len;
  int64_t next_id;  // of the next node that it grows
  bool rejection;

  bool lost() const { return !nodes->suffix.empty(); }
};

// paceline_probability in rows.cpp, null if there is none, and its tolerance.
using Probability = double (*)(const void*, const void*, int64_t, int64_t, int64_t, double);
Probability probability;
double tolerance;

PyTypeObject *node_type, *tree_type, *frontier_type, *ranking_type;
PyObject *empty_tuple;

struct Names {
  PyObject *first, *node_id, *parent_id, *token_id, *prob, *sampled, *q, *packed_ids, *packed_probs, *tokens;
} names;

bool is_node(PyObject* object) { return Py_TYPE(object) == node_type; }
bool is_tree(PyObject* object) { return Py_TYPE(object) == tree_type; }

// False, with an error, if the object is no int; kNoInteger for one of more than 63 bits.
bool read_int(PyObject* object, int64_t& value) {
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(object, &overflow);
  if (overflow) value = kNoInteger;
  return value != -1 || !PyErr_Occurred();
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

// A new node without neighbors. Null after an error.
Node* make_node(int64_t node_id, int64_t parent_id, int64_t token_id, int64_t position, double prob, bool sampled,
                PyObject* q) {
  auto* node = reinterpret_cast<Node*>(PyType_GenericAlloc(node_type, 0));
  if (node == nullptr) return nullptr;
  node->node_id = node_id, node->parent_id = parent_id, node->token_id = token_id, node->position = position;
  node->prob = prob, node->log_path = std::log(prob > kLeastProb ? prob : kLeastProb);
  node->sampled = sampled, node->alive = true;
  node->q = Py_NewRef(q), node->gaps = Py_NewRef(empty_tuple), node->bonus = Py_NewRef(empty_tuple);
  return node;
}

// Lets a tree hold a new node.
void hold(Tree* tree, Node* node) {
  tree->nodes->by_id[node->node_id] = node;
  node->older = tree->newest;
  if (tree->newest != nullptr) tree->newest->newer = node;
  tree->newest = node;
}

// Lets a tree hold a node no longer, which loses its neighbors.
void forget(Tree* tree, Node* node) {
  tree->nodes->by_id.erase(node->node_id);
  if (node->parent != nullptr) tree->nodes->children.erase(Nodes::key(node->parent, node->token_id));
  if (node->older != nullptr) node->older->newer = node->newer;
  (node->newer == nullptr ? tree->newest : node->newer->older) = node->older;
  node->alive = false;
  node->parent = node->best = node->first = node->last = node->next = node->older = node->newer = nullptr;
  Py_DECREF(object(node));
}

// All nodes below one, parents before children, but `without` and what is below it.
std::vector<Node*> below(const Node* top, const Node* without = nullptr) {
  std::vector<Node*> found;
  const auto add_children = [&](const Node* parent) {
    for (Node* child = parent->first; child != nullptr; child = child->next)
      if (child != without) found.push_back(child);
  };
  add_children(top);
  for (size_t i = 0; i < found.size(); ++i) add_children(found[i]);
  return found;
}

// Forgets all nodes below one, but `kept` and what is below it.
void drop_below(Tree* tree, Node* parent, const Node* kept = nullptr) {
  for (std::vector<Node*> nodes = below(parent, kept); !nodes.empty(); nodes.pop_back()) forget(tree, nodes.back());
  parent->first = parent->last = parent->best = nullptr, parent->num_children = 0;
}

// SpeculationTree._move.
void move(Tree* tree, Node* child) {
  Node* old = tree->anchor;
  drop_below(tree, old, child);
  tree->nodes->children.erase(Nodes::key(old, child->token_id));
  child->parent = child->next = nullptr;
  forget(tree, old);
  tree->anchor = child;
}

enum class Refusal { kNone, kStale, kInvalid, kDropped };

// SpeculationTree.attach. Null if the tree refuses the node, or after an error.
Node* attach(Tree* tree, int64_t node_id, int64_t parent_id, int64_t token_id, double prob, bool sampled, PyObject* q,
             Refusal& refusal) {
  Nodes& nodes = *tree->nodes;
  Node* parent = nodes.get(parent_id);
  const auto refuse = [&refusal](Refusal why) {
    refusal = why;
    return nullptr;
  };
  if (parent == nullptr || (tree->lost() && token_id != nodes.suffix.front())) return refuse(Refusal::kStale);
  if (node_id >> kProducerShift != tree->first_id >> kProducerShift || parent_id >= node_id || nodes.get(node_id) ||
      token_id < 0 || token_id >= tree->vocab_size || !(prob >= 0.0 && prob <= 1.0) || nodes.child(parent, token_id) ||
      (tree->rejection && sampled && (parent->best || !drawable(q, token_id, tree->vocab_size))))
    return refuse(Refusal::kInvalid);
  if (static_cast<int64_t>(nodes.by_id.size()) > tree->max_nodes) return refuse(Refusal::kDropped);
  refusal = Refusal::kNone;
  Node* child = make_node(node_id, parent_id, token_id, parent->position + 1, prob, sampled, q);
  if (child == nullptr) return nullptr;
  tree->best_limit = -1;
  child->log_path += parent->log_path;
  child->parent = parent;
  child->rank = parent->num_children++;
  (parent->last == nullptr ? parent->first : parent->last->next) = child;
  parent->last = child;
  nodes.children[Nodes::key(parent, token_id)] = child;
  hold(tree, child);
  if (sampled && (parent->best == nullptr || prob > parent->best->prob)) parent->best = child;
  if (!nodes.suffix.empty()) {
    nodes.suffix.pop_front();
    move(tree, child);
  }
  return child;
}


// What prepare was told besides: the members of Refusal in their order, the causes of a walk, and Python's own types.
PyObject *refusals[3], *added_type, *walk_type, *proposal_type, *no_proposal, *distribution, *check;
struct {
  PyObject *hit, *late, *token, *k;
} causes;
double most_step_s;

// prepare(refusals, causes, types, no_proposal, check, probability, tolerance, most_step_s): (Refusal.STALE, INVALID,
// DROPPED); (Cause.HIT, LATE, TOKEN, K); (Added, Walk, Proposal, SparseDistribution); NO_PROPOSAL; tree.check_integrity;
// the address of paceline_probability in rows.cpp and its tolerance; and the longest step that a message may report.
PyObject* prepare(PyObject*, PyObject* arguments) {
  PyObject* address;
  if (!PyArg_ParseTuple(arguments, "(OOO)(OOOO)(OOOO)OOOdd", &refusals[0], &refusals[1], &refusals[2], &causes.hit,
                        &causes.late, &causes.token, &causes.k, &added_type, &walk_type, &proposal_type, &distribution,
                        &no_proposal, &check, &address, &tolerance, &most_step_s))
    return nullptr;
  for (PyObject* each : {refusals[0], refusals[1], refusals[2], causes.hit, causes.late, causes.token, causes.k, added_type,
                         walk_type, proposal_type, distribution, no_proposal, check})
    Py_INCREF(each);
  probability = reinterpret_cast<Probability>(PyLong_AsVoidPtr(address));
  if (PyErr_Occurred()) return nullptr;
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

// -- subtrees -----------------------------------------------------------------------------------------------------------

// A child that may be proposed, by its calibrated probability.
struct Likely {
  double prob;
  Node* node;
};

// A node that may be ranked next: number `at` of the children of one node.
struct Candidate {
  double worth, own;                 // its own worth and path probability
  double parent_path, parent_worth;
  int64_t serial;
  size_t family, at;
  bool begins;

  bool operator<(const Candidate& other) const {
    return worth != other.worth ? worth < other.worth : serial > other.serial;
  }
};

struct Ranks {
  std::vector<std::vector<Likely>> families;
  std::vector<Candidate> heap;
  std::vector<Node*> order;
};

// A Ranking (ranking.py). It holds the nodes in its families, and its anchor.
struct Ranking {
  PyObject_HEAD
  Ranks* ranks;
  Node* anchor;
  int64_t depth, most, serial;
  double factor, branch_tokens;

  void push(size_t family, size_t at, double path, double worth, bool begins) {
    const double own = path * ranks->families[family][at].prob;
    const double value = std::min(worth, begins ? own - branch_tokens : own);
    if (!(value > 0)) return;
    ranks->heap.push_back({value, own, path, worth, ++serial, family, at, begins});
    std::push_heap(ranks->heap.begin(), ranks->heap.end());
  }

  void push_below(const Node* node, double path, double worth) {
    std::vector<Likely> found;
    for (Node* child = node->first; child != nullptr; child = child->next)
      if (child->sampled) found.push_back({std::min(1.0, factor * child->prob), as_node(Py_NewRef(object(child)))});
    if (found.empty()) return;
    std::stable_sort(found.begin(), found.end(), [](const Likely& a, const Likely& b) { return a.prob > b.prob; });
    ranks->families.push_back(std::move(found));
    push(ranks->families.size() - 1, 0, path, worth, false);
  }
};

Ranking* as_ranking(PyObject* self) { return reinterpret_cast<Ranking*>(self); }

// TreeNode.ranking(depth, factor, branch_tokens, most)
PyObject* ranking(PyObject* anchor, PyObject* arguments) {
  long long depth = 0, most = 0;
  double factor = 0, branch_tokens = 0;
  if (!PyArg_ParseTuple(arguments, "LddL", &depth, &factor, &branch_tokens, &most)) return nullptr;
  PyObject* self = PyType_GenericAlloc(ranking_type, 0);
  if (self == nullptr) return nullptr;
  Ranking* made = as_ranking(self);
  made->ranks = new Ranks, made->anchor = as_node(Py_NewRef(anchor));
  made->depth = depth, made->most = most, made->factor = factor, made->branch_tokens = branch_tokens;
  made->push_below(made->anchor, 1.0, kInfinity);
  return self;
}

void free_ranking(PyObject* self) {
  Ranking* ranking = as_ranking(self);
  if (ranking->ranks != nullptr) {
    for (const auto& family : ranking->ranks->families)
      for (const Likely& each : family) Py_DECREF(object(each.node));
    delete ranking->ranks;
  }
  Py_XDECREF(reinterpret_cast<PyObject*>(ranking->anchor));
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// The next node by worth; false if there is none.
bool advance(Ranking* ranking, Candidate& next) {
  Ranks& ranks = *ranking->ranks;
  if (ranks.heap.empty() || static_cast<int64_t>(ranks.order.size()) >= ranking->most) return false;
  std::pop_heap(ranks.heap.begin(), ranks.heap.end());
  next = ranks.heap.back();
  ranks.heap.pop_back();
  Node* node = ranks.families[next.family][next.at].node;
  ranks.order.push_back(node);
  if (next.at + 1 < ranks.families[next.family].size())
    ranking->push(next.family, next.at + 1, next.parent_path, next.parent_worth, true);
  if (node->position - ranking->anchor->position < ranking->depth) ranking->push_below(node, next.own, next.worth);
  return true;
}

PyObject* next_ranked(PyObject* self) {
  Candidate next;
  if (!advance(as_ranking(self), next)) return nullptr;
  return Py_BuildValue("(ddO)", next.worth, next.own, next.begins ? Py_True : Py_False);
}

// columns(num) -> token_ids, probs, node_ids, parents of the first nodes that were ranked, branch by branch
PyObject* ranked_columns(PyObject* self, PyObject* num) {
  const Ranks& ranks = *as_ranking(self)->ranks;
  const size_t size = std::min(static_cast<size_t>(std::max<Py_ssize_t>(PyLong_AsSsize_t(num), 0)), ranks.order.size());
  if (PyErr_Occurred()) return nullptr;
  std::unordered_map<const Node*, size_t> place;  // 1 more than its index; 0: the anchor
  std::vector<std::vector<size_t>> children(size + 1);
  for (size_t i = 0; i < size; ++i) {
    place[ranks.order[i]] = i + 1;
    const auto parent = place.find(ranks.order[i]->parent);
    children[parent == place.end() ? 0 : parent->second].push_back(i + 1);
  }
  std::vector<size_t> order, above(size + 1), at(size + 1), stack(children[0].rbegin(), children[0].rend());
  for (size_t i = 0; i <= size; ++i)
    for (const size_t child : children[i]) above[child] = i;
  while (!stack.empty()) {
    const size_t i = stack.back();
    stack.pop_back();
    order.push_back(i);
    at[i] = order.size();
    stack.insert(stack.end(), children[i].rbegin(), children[i].rend());
  }
  const auto column = [&](auto value) { return tuple_of(order.size(), [&](size_t i) { return value(order[i]); }); };
  const auto node = [&](size_t i) { return ranks.order[i - 1]; };
  Ref token_ids(column([&](size_t i) { return PyLong_FromLongLong(node(i)->token_id); }));
  Ref probs(column([&](size_t i) { return PyFloat_FromDouble(node(i)->prob); }));
  Ref node_ids(column([&](size_t i) { return PyLong_FromLongLong(node(i)->node_id); }));
  Ref parents(column([&](size_t i) { return PyLong_FromLongLong(static_cast<int64_t>(at[above[i]]) - 1); }));
  if (!token_ids || !probs || !node_ids || !parents) return nullptr;
  return PyTuple_Pack(4, token_ids.get(), probs.get(), node_ids.get(), parents.get());
}

Py_ssize_t num_ranked(PyObject* self) { return static_cast<Py_ssize_t>(as_ranking(self)->ranks->order.size()); }

PyMethodDef ranking_methods[] = {
    {"columns", ranked_columns, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot ranking_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(free_ranking)},
    {Py_tp_methods, ranking_methods},
    {Py_tp_iter, reinterpret_cast<void*>(PyObject_SelfIter)},
    {Py_tp_iternext, reinterpret_cast<void*>(next_ranked)},
    {Py_sq_length, reinterpret_cast<void*>(num_ranked)},
    {0, nullptr},
};
PyType_Spec ranking_spec = {"paceline_tree.Ranking", sizeof(Ranking), 0, Py_TPFLAGS_DEFAULT, ranking_slots};

PyMethodDef node_methods[] = {
    {"shift", shift, METH_O, nullptr},
    {"ranking", ranking, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot node_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(free_node)},
    {Py_tp_members, node_members},
    {Py_tp_getset, node_properties},
    {Py_tp_methods, node_methods},
    {0, nullptr},
};
PyType_Spec node_spec = {"paceline_tree.TreeNode", sizeof(Node), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, node_slots};

// -- the choice of draft tokens ---------------------------------------------------------------------------------------------

// Seconds of a step by its tokens (step_cost.py): a level and lists of at least two numbers.
struct StepSeconds {
  double level;
  PyObject *table, *convex, *lower;

  static double at(PyObject* list, Py_ssize_t index) {
    const auto value = [&](Py_ssize_t i) { return PyFloat_AsDouble(PyList_GET_ITEM(list, i)); };
    const Py_ssize_t size = PyList_GET_SIZE(list);
    if (index < size) return value(index);
    return value(size - 1) + (value(size - 1) - value(size - 2)) * static_cast<double>(index - size + 1);
  }
  double seconds(Py_ssize_t num_tokens) const { return level * at(table, num_tokens); }
  double floor(Py_ssize_t num_tokens) const {
    if (num_tokens < PyList_GET_SIZE(lower)) return level * at(lower, num_tokens);
    return level * std::min(at(convex, num_tokens), at(table, num_tokens));
  }
};

// A session's next draft token.
struct Choice {
  double worth, path;
  size_t session;
  bool begins;

  bool operator<(const Choice& other) const {
    return worth != other.worth ? worth < other.worth : session > other.session;
  }
};

// Draft tokens of a session: a native Ranking, or the probabilities of a chain.
struct Offered {
  PyObject* offer;
  Py_ssize_t at = 0;
  double chain = 1.0;

  bool next(Choice& choice) {
    if (Py_TYPE(offer) == ranking_type) {
      Candidate found;
      if (!advance(as_ranking(offer), found)) return false;
      choice.worth = found.worth, choice.path = found.own, choice.begins = found.begins;
      return true;
    }
    if (at >= PySequence_Fast_GET_SIZE(offer)) return false;
    chain *= PyFloat_AsDouble(PySequence_Fast_GET_ITEM(offer, at++));
    choice.worth = choice.path = chain, choice.begins = false;
    return true;
  }
};

// choose(offers, (level, table, floor, lower), num_context, limit, tokens, base_s, branch_s, branch_tokens, plain, least_gain)
// -> draft tokens of each session, as allocation.choose has them; None if an offer is neither a native Ranking nor a chain
PyObject* choose(PyObject*, PyObject* arguments) {
  PyObject* all;
  StepSeconds cost;
  Py_ssize_t at, limit;
  double tokens, base_s, branch_s, branch_tokens, plain, least_gain;
  if (!PyArg_ParseTuple(arguments, "O!(dO!O!O!)nndddddd", &PyList_Type, &all, &cost.level, &PyList_Type, &cost.table, &PyList_Type,
                        &cost.convex, &PyList_Type, &cost.lower, &at, &limit, &tokens, &base_s, &branch_s, &branch_tokens,
                        &plain, &least_gain))
    return nullptr;
  if (std::min(PyList_GET_SIZE(cost.table), PyList_GET_SIZE(cost.convex)) < 2 || at < 0)
    return PyErr_SetString(PyExc_ValueError, "times of a step are two or more, and its tokens no fewer than 0"), nullptr;
  std::vector<Offered> offers;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(all); ++i) {
    PyObject* offer = PyList_GET_ITEM(all, i);
    if (Py_TYPE(offer) != ranking_type && !PyList_CheckExact(offer) && !PyTuple_CheckExact(offer)) Py_RETURN_NONE;
    offers.push_back({offer});
  }
  std::vector<int64_t> counts(offers.size());
  std::vector<Choice> heap;
  std::vector<size_t> order;
  const auto push = [&](size_t session) {
    Choice next{};
    next.session = session;
    if (!offers[session].next(next)) return;
    heap.push_back(next);
    std::push_heap(heap.begin(), heap.end());
  };
  for (size_t i = 0; i < offers.size(); ++i) push(i);
  double best = plain, next_floor_s = cost.floor(at);
  size_t num_best = 0;
  while (!heap.empty() && static_cast<Py_ssize_t>(order.size()) < limit) {
    const Choice next = heap.front();
    const double floor_s = next_floor_s, most = branch_tokens + next.worth;
    next_floor_s = cost.floor(at + 1);
    if (most <= best * (next_floor_s - floor_s) && tokens <= best * (base_s + floor_s)) break;
    tokens += next.path;
    base_s += next.begins ? branch_s : 0.0;
    order.push_back(next.session);
    ++counts[next.session];
    std::pop_heap(heap.begin(), heap.end());
    heap.pop_back();
    push(next.session);
    const double value = tokens / (base_s + cost.seconds(++at));
    if (value > best) best = value, num_best = order.size();
  }
  if (PyErr_Occurred()) return nullptr;
  for (size_t i = best >= least_gain * plain ? num_best : 0; i < order.size(); ++i) --counts[order[i]];
  Ref made(PyList_New(static_cast<Py_ssize_t>(counts.size())));
  for (size_t i = 0; made && i < counts.size(); ++i) {
    PyObject* count = PyLong_FromLongLong(counts[i]);
    if (count == nullptr) return nullptr;
    PyList_SET_ITEM(made.get(), static_cast<Py_ssize_t>(i), count);
  }
  return made.release();
}

// -- what trees do ------------------------------------------------------------------------------------------------------

Tree* as_tree(PyObject* self) { return reinterpret_cast<Tree*>(self); }

// A column as the list or tuple that it is, with an item for each of the nodes, or with none.
struct Column {
  Ref held;
  PyObject** items = nullptr;

  bool read(PyObject* column, Py_ssize_t size, bool optional) {
    held.reset(PySequence_Fast(column, "a column is no sequence"));
    if (!held) return false;
    const Py_ssize_t found = PySequence_Fast_GET_SIZE(held.get());
    if (found == 0 && optional) return true;
    if (found != size) {
      PyErr_Format(PyExc_ValueError, "a column has %zd entries: %zd nodes need one each", found, size);
      return false;
    }
    items = PySequence_Fast_ITEMS(held.get());
    return true;
  }
};

// The columns of nodes, see NodeColumns: ids, ids of parents, tokens, probabilities, and two that may be empty: which are
// sampled, and distributions.
struct Columns {
  Py_ssize_t size = 0;
  Column of[6];

  bool read(PyObject* columns) {
    if (!PyTuple_CheckExact(columns) || PyTuple_GET_SIZE(columns) != 6) {
      PyErr_SetString(PyExc_TypeError, "nodes come in a tuple of six columns");
      return false;
    }
    size = PyObject_Size(PyTuple_GET_ITEM(columns, 0));
    for (int i = 0; size >= 0 && i < 6; ++i)
      if (!of[i].read(PyTuple_GET_ITEM(columns, i), size, i > 3)) return false;
    return size >= 0;
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

// Attaches the nodes of a message, by their columns, and counts them. False after an error.
bool add_columns(Tree* tree, PyObject* nodes, Counts& counts) {
  Columns columns;
  if (!columns.read(nodes)) return false;
  const Column* of = columns.of;
  for (Py_ssize_t i = 0; i < columns.size; ++i) {
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

PyObject* add(PyObject* self, PyObject* nodes) {
  Ref all(PySequence_Fast(nodes, "nodes are no sequence"));
  Counts counts;
  for (Py_ssize_t i = 0; all && i < PySequence_Fast_GET_SIZE(all.get()); ++i) {
    Refusal refusal = Refusal::kNone;
    if (!attach_object(as_tree(self), PySequence_Fast_GET_ITEM(all.get(), i), refusal) && refusal == Refusal::kNone)
      return nullptr;
    counts.count(refusal);
  }
  return all ? counts.object() : nullptr;
}

PyObject* attach_one(PyObject* self, PyObject* node) {
  Refusal refusal = Refusal::kNone;
  Node* placed = attach_object(as_tree(self), node, refusal);
  if (placed == nullptr && refusal == Refusal::kNone) return nullptr;
  return Py_NewRef(placed == nullptr ? refusals[static_cast<int>(refusal) - 1] : object(placed));
}

// Attaches new nodes below a parent, with the tree's next ids: of the first one its q, of the others None; the others
// are drawn where there is no q. Returns a list of the nodes that the tree has taken; null after an error.
PyObject* grow_below(Tree* tree, int64_t parent_id, const int64_t* token_ids, const double* probs, size_t size, bool sampled,
                     PyObject* q) {
  Ref made(PyList_New(0));
  const int64_t first = tree->next_id;
  tree->next_id += static_cast<int64_t>(size);
  for (size_t i = 0; made && i < size; ++i) {
    Refusal refusal = Refusal::kNone;
    Node* node = attach(tree, first + static_cast<int64_t>(i), parent_id, token_ids[i], probs[i],
                        sampled && (i == 0 || q == Py_None), i == 0 ? q : Py_None, refusal);
    if (node == nullptr && refusal == Refusal::kNone) return nullptr;
    if (node != nullptr && PyList_Append(made.get(), object(node)) < 0) return nullptr;
  }
  return made.release();
}

// grow(parent, token_ids, probs, sampled, q). SpeculationTree.grow.
PyObject* grow(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 5 || !is_node(arguments[0])) return PyErr_Format(PyExc_TypeError, "grow takes a node, columns, a flag and a q");
  Column ids, weights;
  const Py_ssize_t size = PyObject_Size(arguments[1]);
  if (size < 0 || !ids.read(arguments[1], size, false) || !weights.read(arguments[2], size, false)) return nullptr;
  std::vector<int64_t> token_ids(static_cast<size_t>(size));
  std::vector<double> probs(static_cast<size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    const auto at = static_cast<size_t>(i);
    if (!read_int(ids.items[i], token_ids[at])) return nullptr;
    probs[at] = PyFloat_AsDouble(weights.items[i]);
  }
  const int sampled = PyObject_IsTrue(arguments[3]);
  if (PyErr_Occurred()) return nullptr;
  const Node* parent = as_node(arguments[0]);
  return grow_below(as_tree(self), parent->node_id, token_ids.data(), probs.data(), probs.size(), sampled != 0, arguments[4]);
}

// As in tree.py.
constexpr char kGrew = 1, kOffers = 2, kFirst = 4, kLost = 8;

// add_each(trees, nodes) -> Added of all, and a byte for each. tree.add_each, by lists of equal length; the nodes of each
// tree are a tuple of columns.
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
    if (!add_columns(tree, PyList_GET_ITEM(arguments[1], i), counts)) return nullptr;
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

// SpeculationTree._proposal of a path.
PyObject* proposal_of(const Tree* tree, const std::vector<Node*>& path) {
  if (path.empty()) return Py_NewRef(no_proposal);
  const auto column = [&path](auto value) { return tuple_of(path.size(), [&](size_t i) { return value(*path[i]); }); };
  Ref token_ids(column([](const Node& it) { return PyLong_FromLongLong(it.token_id); }));
  Ref qs(column([](const Node& it) { return Py_NewRef(it.q); }));
  Ref probs(column([](const Node& it) { return PyFloat_FromDouble(it.prob); }));
  Ref node_ids(column([](const Node& it) { return PyLong_FromLongLong(it.node_id); }));
  if (!token_ids || !qs || !probs || !node_ids) return nullptr;
  return PyObject_CallFunctionObjArgs(proposal_type, token_ids.get(), qs.get(), probs.get(), node_ids.get(), empty_tuple,
                                      tree->producer, nullptr);
}

PyObject* proposal(PyObject* self, PyObject* k) {
  Tree* tree = as_tree(self);
  const Py_ssize_t most = PyLong_AsSsize_t(k);
  if (PyErr_Occurred()) return nullptr;
  if (most > tree->best_limit) {
    std::vector<Node*> path;
    for (Node* node = tree->anchor->best; node != nullptr && static_cast<Py_ssize_t>(path.size()) < most; node = node->best)
      path.push_back(node);
    PyObject* found = proposal_of(tree, path);
    if (found == nullptr) return nullptr;
    Py_XSETREF(tree->best_path, found);
    tree->best_limit = most, tree->best_len = static_cast<int64_t>(path.size());
  }
  if (tree->best_path == nullptr) return Py_NewRef(no_proposal);
  if (tree->best_len <= std::max<Py_ssize_t>(most, 0)) return Py_NewRef(tree->best_path);
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
  if (vocab_size < 0 || vocab_size >> 32 != 0)
    return PyErr_Format(PyExc_ValueError, "vocab_size is %lld: 0 to 2^32 - 1 is allowed", vocab_size);
  if (maker < 0 || maker > 15) return PyErr_Format(PyExc_ValueError, "producer is %lld: 0 to 15 is allowed", maker);
  Ref self(PyType_GenericAlloc(type, 0));
  Node* root = self ? make_node(0, -1, 0, context_len - 1, 1.0, false, Py_None) : nullptr;
  if (root == nullptr) return nullptr;
  Tree* tree = as_tree(self.get());
  tree->nodes = new Nodes;
  tree->producer = Py_NewRef(producer);
  tree->vocab_size = vocab_size, tree->max_nodes = max_nodes, tree->first_id = maker << kProducerShift, tree->next_id = tree->first_id + 1;
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
    method("grow", grow),
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
    {"next_id", T_LONGLONG, offsetof(Tree, next_id), READONLY, nullptr},
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

// -- frontiers ----------------------------------------------------------------------------------------------------------

// A node by its key, Growth.key.
struct Entry {
  double first, second;
  Node* node;

  bool operator>(const Entry& other) const {
    return std::tie(first, second, node->node_id) > std::tie(other.first, other.second, other.node->node_id);
  }
};

// The containers of a frontier, whose nodes it holds.
struct Unexpanded {
  std::vector<Entry> heap;  // the least entry first
  std::vector<Node*> unwanted;
  std::vector<int64_t> in_flight;  // nodes of the latest commit; once it is sorted in, only nodes that the tree has
};

// A Frontier of draft/growth.py. The order is Growth.key's with the same `k`, `min_log`, `in_turn` and `chain`.
struct Frontier {
  PyObject_HEAD
  Tree* tree;
  Unexpanded* nodes;
  PyObject* reach;
  int64_t k, num_in_flight;
  double min_log, most_ahead;
  char in_turn, chain, sorted;

  int64_t ahead_of(const Node* node) const {
    const auto &found = nodes->in_flight;
    int64_t ahead = 0;
    for (; node != nullptr; node = node->parent, ++ahead)
      if (node == tree->anchor || std::find(found.begin(), found.end(), node->node_id) != found.end()) return ahead;
    return INT64_MAX;  // the node is of no tree
  }
  // Growth.key. False: the node may not be expanded.
  bool key(Node* node, int64_t ahead, Entry& entry) const {
    if (static_cast<double>(ahead) > most_ahead || (in_turn && num_in_flight > 0)) return false;
    if (chain) {
      entry = {static_cast<double>(ahead), 0.0, node};
      return ahead < k && (ahead == 0 || node->rank == 0);
    }
    entry = {0.0, -node->log_path, node};
    return ahead <= k && !(node->log_path - tree->anchor->log_path < min_log);
  }
  // Takes a node that it holds.
  void push(Node* node, int64_t ahead) {
    Entry entry;
    if (!key(node, ahead, entry)) return nodes->unwanted.push_back(node);
    nodes->heap.push_back(entry);
    std::push_heap(nodes->heap.begin(), nodes->heap.end(), std::greater<>{});
  }
  // Frontier._sort. False after an error.
  bool sort() {
    if (sorted) return true;
    double most = kInfinity;
    if (reach != Py_None) {
      Ref tokens(PyObject_GetAttr(reach, names.tokens));
      if (!tokens || ((most = PyFloat_AsDouble(tokens.get())) == -1.0 && PyErr_Occurred())) return false;
    }
    sorted = true, most_ahead = most, num_in_flight = 0;
    std::erase_if(nodes->in_flight, [this](int64_t node_id) {
      const Node* found = tree->nodes->get(node_id);
      if (found != nullptr) num_in_flight = std::max(num_in_flight, found->position - tree->anchor->position);
      return found == nullptr;
    });
    std::vector<Node*> all = std::move(nodes->unwanted);
    for (const Entry& entry : nodes->heap) all.push_back(entry.node);
    nodes->heap.clear(), nodes->unwanted.clear();
    for (Node* node : all) {
      if (node->alive) push(node, ahead_of(node));
      else Py_DECREF(object(node));
    }
    return true;
  }
  // False after an error.
  bool push_below(const Node* parent, PyObject* const* children, Py_ssize_t size) {
    if (size == 0) return true;
    if (!sort()) return false;
    const int64_t above = ahead_of(parent), ahead = above == INT64_MAX ? above : above + 1;
    for (Py_ssize_t i = 0; i < size; ++i) push(as_node(Py_NewRef(children[i])), ahead);
    return true;
  }
};

Frontier* as_frontier(PyObject* self) { return reinterpret_cast<Frontier*>(self); }

// Frontier(tree, k, min_log, in_turn, chain, reach)
PyObject* new_frontier(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *tree, *reach;
  long long k = 0;
  double min_log = 0;
  int in_turn = 0, chain = 0;
  if (!PyArg_ParseTuple(arguments, "O!LdppO", tree_type, &tree, &k, &min_log, &in_turn, &chain, &reach)) return nullptr;
  PyObject* self = PyType_GenericAlloc(type, 0);
  if (self == nullptr) return nullptr;
  Frontier* made = as_frontier(self);
  made->tree = as_tree(Py_NewRef(tree)), made->reach = Py_NewRef(reach), made->nodes = new Unexpanded;
  made->k = k, made->min_log = min_log, made->in_turn = in_turn != 0, made->chain = chain != 0;
  made->nodes->unwanted.push_back(as_node(Py_NewRef(object(made->tree->anchor))));
  return self;
}

void free_frontier(PyObject* self) {
  Frontier* frontier = as_frontier(self);
  if (frontier->nodes != nullptr) {
    for (const Entry& entry : frontier->nodes->heap) Py_DECREF(object(entry.node));
    for (Node* node : frontier->nodes->unwanted) Py_DECREF(object(node));
    delete frontier->nodes;
  }
  Py_XDECREF(frontier->tree), Py_XDECREF(frontier->reach);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* push_anchor(PyObject* self, PyObject*) {
  Frontier* frontier = as_frontier(self);
  if (frontier->sorted) return PyErr_Format(PyExc_ValueError, "nodes are sorted by an anchor");
  frontier->nodes->unwanted.push_back(as_node(Py_NewRef(object(frontier->tree->anchor))));
  Py_RETURN_NONE;
}

PyObject* push_below(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2 || !is_node(arguments[0])) return PyErr_Format(PyExc_TypeError, "push_below takes a node and its children");
  Ref nodes(PySequence_Fast(arguments[1], "nodes are no sequence"));
  if (!nodes) return nullptr;
  PyObject** items = PySequence_Fast_ITEMS(nodes.get());
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(nodes.get());
  if (!std::all_of(items, items + size, is_node)) return PyErr_Format(PyExc_TypeError, "push_below takes nodes of a tree");
  return as_frontier(self)->push_below(as_node(arguments[0]), items, size) ? Py_NewRef(Py_None) : nullptr;
}

PyObject* wants(PyObject* self, PyObject* node) {
  if (!is_node(node)) return PyErr_Format(PyExc_TypeError, "wants takes a node of a tree");
  Frontier* frontier = as_frontier(self);
  Entry entry;
  return frontier->sort() ? PyBool_FromLong(frontier->key(as_node(node), frontier->ahead_of(as_node(node)), entry)) : nullptr;
}

PyObject* peek(PyObject* self, PyObject*) {
  if (!as_frontier(self)->sort()) return nullptr;
  const auto& heap = as_frontier(self)->nodes->heap;
  return or_none(heap.empty() ? nullptr : heap.front().node);
}

PyObject* pop(PyObject* self, PyObject*) {
  if (!as_frontier(self)->sort()) return nullptr;
  auto& heap = as_frontier(self)->nodes->heap;
  if (heap.empty()) return PyErr_Format(PyExc_IndexError, "no node may be expanded");
  std::pop_heap(heap.begin(), heap.end(), std::greater<>{});
  PyObject* node = object(heap.back().node);
  heap.pop_back();
  return node;
}

PyObject* commit(PyObject* self, PyObject* in_flight) {
  Ref ids(PySequence_Tuple(in_flight));
  if (!ids) return nullptr;
  std::vector<int64_t> found(static_cast<size_t>(PyTuple_GET_SIZE(ids.get())));
  for (size_t i = 0; i < found.size(); ++i)
    if (!read_int(PyTuple_GET_ITEM(ids.get(), static_cast<Py_ssize_t>(i)), found[i])) return nullptr;
  as_frontier(self)->nodes->in_flight = std::move(found);
  as_frontier(self)->sorted = false;
  Py_RETURN_NONE;
}

PyObject* split(PyObject* self, PyObject*) {
  if (!as_frontier(self)->sort()) return nullptr;
  std::vector<Entry> wanted = as_frontier(self)->nodes->heap;
  const auto& others = as_frontier(self)->nodes->unwanted;
  std::sort(wanted.begin(), wanted.end(), [](const Entry& a, const Entry& b) { return b > a; });
  Ref first(tuple_of(wanted.size(), [&](size_t i) { return Py_NewRef(object(wanted[i].node)); }));
  Ref second(tuple_of(others.size(), [&](size_t i) { return Py_NewRef(object(others[i])); }));
  return first && second ? PyTuple_Pack(2, first.get(), second.get()) : nullptr;
}

PyMethodDef frontier_methods[] = {
    {"push_anchor", push_anchor, METH_NOARGS, nullptr},
    method("push_below", push_below),
    {"wants", wants, METH_O, nullptr},
    {"peek", peek, METH_NOARGS, nullptr},
    {"pop", pop, METH_NOARGS, nullptr},
    {"commit", commit, METH_O, nullptr},
    {"split", split, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef frontier_members[] = {
    {"reach", T_OBJECT_EX, offsetof(Frontier, reach), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot frontier_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(new_frontier)},
    {Py_tp_dealloc, reinterpret_cast<void*>(free_frontier)},
    {Py_tp_methods, frontier_methods},
    {Py_tp_members, frontier_members},
    {0, nullptr},
};
PyType_Spec frontier_spec = {"paceline_tree.Frontier", sizeof(Frontier), 0, Py_TPFLAGS_DEFAULT, frontier_slots};

// -- growing ------------------------------------------------------------------------------------------------------------

// paceline_expect in calibration.cpp.
using Expect = void (*)(int64_t, double, const int64_t*, const void* const*, const double*, double*, int64_t*,
                        const void* const*, const double*, const double*);

// The candidates of several nodes, one behind the other, as paceline_expect takes them. What adds some returns false after
// an error.
struct Candidates {
  std::vector<int64_t> sizes, kept, token_ids;
  std::vector<const void*> tables, of_bonus;
  std::vector<double> gaps, probs, shares, bonus;
  std::vector<PyObject*> qs;  // that the first one was drawn from; Py_None: all are drawn alike

  // Makes room for `size` nodes, with 8 candidates each.
  void reserve(size_t size) {
    sizes.reserve(size), tables.reserve(size), of_bonus.reserve(size), shares.reserve(size), qs.reserve(size);
    token_ids.reserve(8 * size), gaps.reserve(8 * size), bonus.reserve(8 * size);
  }

  bool add_ids(PyObject* ids, size_t size) {
    for (size_t i = 0; i < size; ++i) {
      token_ids.push_back(0);
      if (!read_int(PySequence_Fast_GET_ITEM(ids, static_cast<Py_ssize_t>(i)), token_ids.back())) return false;
    }
    sizes.push_back(static_cast<int64_t>(size));
    return true;
  }

  // By their ids and scores, best first: the first `most`, as ranking.ranking_of takes them.
  bool add_scored(PyObject* ids, PyObject* scores, Py_ssize_t most) {
    if (!PyList_CheckExact(ids) || !PyList_CheckExact(scores))
      return PyErr_SetString(PyExc_TypeError, "ids and scores are no lists"), false;
    const size_t first = gaps.size();
    most = std::min({most, PyList_GET_SIZE(ids), PyList_GET_SIZE(scores)});
    for (Py_ssize_t i = 0; i < most; ++i) gaps.push_back(PyFloat_AsDouble(PyList_GET_ITEM(scores, i)));
    while (gaps.size() > first && gaps.back() == -kInfinity) gaps.pop_back();
    const size_t size = gaps.size() - first;
    const double best = size > 0 ? gaps[first] : 0.0;
    for (size_t i = 0; i < size; ++i) gaps[first + i] = best - gaps[first + i];
    if (size > 0) gaps[first] = size > 1 ? gaps[first + 1] : kInfinity;
    bonus.resize(gaps.size());
    of_bonus.push_back(nullptr), qs.push_back(Py_None);
    return !PyErr_Occurred() && add_ids(ids, size);
  }

  // By the columns of a Ranking.
  bool add_ranked(PyObject* const* columns, const void* of_guesses) {
    for (int i = 0; i < 3; ++i)
      if (!PyTuple_CheckExact(columns[i])) return PyErr_SetString(PyExc_TypeError, "a ranking has tuples"), false;
    const Py_ssize_t size = PyTuple_GET_SIZE(columns[1]), guesses = PyTuple_GET_SIZE(columns[2]);
    if (PyTuple_GET_SIZE(columns[0]) != size || (guesses != size && guesses != 0))
      return PyErr_Format(PyExc_ValueError, "a ranking has %zd ids, %zd gaps and %zd of a bonus: equal numbers are allowed",
                          PyTuple_GET_SIZE(columns[0]), size, guesses), false;
    for (Py_ssize_t i = 0; i < size; ++i) {
      gaps.push_back(PyFloat_AsDouble(PyTuple_GET_ITEM(columns[1], i)));
      bonus.push_back(guesses == 0 ? 0.0 : PyFloat_AsDouble(PyTuple_GET_ITEM(columns[2], i)));
    }
    of_bonus.push_back(guesses == 0 ? nullptr : of_guesses), qs.push_back(columns[3]);
    return !PyErr_Occurred() && add_ids(columns[0], static_cast<size_t>(size));
  }

  void weigh(Expect expect, double least) {
    const bool guesses = std::any_of(of_bonus.begin(), of_bonus.end(), [](const void* table) { return table != nullptr; });
    probs.resize(gaps.size()), kept.resize(sizes.size());
    expect(static_cast<int64_t>(sizes.size()), least, sizes.data(), tables.data(), gaps.data(), probs.data(), kept.data(),
           guesses ? of_bonus.data() : nullptr, guesses ? shares.data() : nullptr, guesses ? bonus.data() : nullptr);
  }
};

PyObject* tuple_of_numbers(const double* values, size_t size) {
  return tuple_of(size, [values](size_t i) { return PyFloat_FromDouble(values[i]); });
}

// grow_each(places, candidates, least, expect) -> a list of the new children of each node, which its frontier has, too.
// `places`: a list of (frontier, node, most children, address of its calibration, that of bonus tokens, share of these);
// `candidates`: of each node (ids, scores) or the columns of a Ranking; `least`: probability of a child behind the first;
// `expect`: address of paceline_expect.
PyObject* grow_each(PyObject*, PyObject* arguments) {
  PyObject *places, *all, *address;
  double least = 0;
  if (!PyArg_ParseTuple(arguments, "O!O!dO", &PyList_Type, &places, &PyList_Type, &all, &least, &address)) return nullptr;
  const Py_ssize_t size = PyList_GET_SIZE(places);
  if (PyList_GET_SIZE(all) != size)
    return PyErr_Format(PyExc_ValueError, "%zd nodes have %zd rows of candidates", size, PyList_GET_SIZE(all));
  const auto expect = reinterpret_cast<Expect>(PyLong_AsVoidPtr(address));
  if (PyErr_Occurred()) return nullptr;
  std::vector<std::pair<Frontier*, Node*>> nodes;
  Candidates candidates;
  nodes.reserve(static_cast<size_t>(size)), candidates.reserve(static_cast<size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject *place = PyList_GET_ITEM(places, i), *of = PyList_GET_ITEM(all, i);
    if (!PyTuple_CheckExact(place) || PyTuple_GET_SIZE(place) != 6 || !PyTuple_CheckExact(of))
      return PyErr_Format(PyExc_TypeError, "a place is no tuple of six, or its candidates are no tuple");
    PyObject** held = PySequence_Fast_ITEMS(place);
    if (Py_TYPE(held[0]) != frontier_type || !is_node(held[1]))
      return PyErr_Format(PyExc_TypeError, "a place is no frontier of a native tree, or no node");
    const Py_ssize_t most = PyLong_AsSsize_t(held[2]), columns = PyTuple_GET_SIZE(of);
    const void *table = PyLong_AsVoidPtr(held[3]), *guesses = PyLong_AsVoidPtr(held[4]);
    nodes.push_back({as_frontier(held[0]), as_node(held[1])});
    candidates.tables.push_back(table), candidates.shares.push_back(PyFloat_AsDouble(held[5]));
    if (PyErr_Occurred()) return nullptr;
    if (columns != 2 && columns != 4) return PyErr_Format(PyExc_TypeError, "candidates have %zd columns", columns);
    if (columns == 2 ? !candidates.add_scored(PyTuple_GET_ITEM(of, 0), PyTuple_GET_ITEM(of, 1), most)
                     : !candidates.add_ranked(PySequence_Fast_ITEMS(of), guesses))
      return nullptr;
  }
  candidates.weigh(expect, least);
  Ref grown(PyList_New(size));
  const int64_t* ids = candidates.token_ids.data();
  const double *gaps = candidates.gaps.data(), *probs = candidates.probs.data(), *bonus = candidates.bonus.data();
  for (size_t i = 0; grown && i < nodes.size(); ++i) {
    const auto [frontier, node] = nodes[i];
    const auto num = static_cast<size_t>(candidates.sizes[i]), kept = static_cast<size_t>(candidates.kept[i]);
    PyObject* of_node = tuple_of_numbers(gaps, num);
    PyObject* of_guesses = tuple_of_numbers(bonus, candidates.of_bonus[i] == nullptr ? 0 : num);
    if (of_node != nullptr) Py_XSETREF(node->gaps, of_node);
    if (of_guesses != nullptr) Py_XSETREF(node->bonus, of_guesses);
    if (of_node == nullptr || of_guesses == nullptr) return nullptr;
    node->expanded = true;
    PyObject* made = grow_below(frontier->tree, node->node_id, ids, probs, kept, true, candidates.qs[i]);
    if (made == nullptr) return nullptr;
    PyList_SET_ITEM(grown.get(), static_cast<Py_ssize_t>(i), made);
    if (!frontier->push_below(node, PySequence_Fast_ITEMS(made), PyList_GET_SIZE(made))) return nullptr;
    ids += num, gaps += num, probs += num, bonus += num;
  }
  return grown.release();
}

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
  // Reads what follows a tag: a length, then that number of bytes.
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

// A field of integers. `size`: nodes; -1: sets it to the number of integers.
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

// (columns, idle, step_s) of a message, as protobuf reads it; None if it is not plain or malformed. Null after an error.
PyObject* read_message(PyObject* packed) {
  if (!PyBytes_CheckExact(packed)) return Py_NewRef(Py_None);
  const auto* start = reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(packed));
  Ref columns[6];
  bool idle = false;
  double step_s = 0;
  const bool plain = read_nodes({start, start + PyBytes_GET_SIZE(packed)}, columns, idle, step_s);
  if (PyErr_Occurred()) return nullptr;
  if (!plain) return Py_NewRef(Py_None);
  Ref all(tuple_of(6, [&columns](size_t i) { return columns[i].release(); })), seconds(PyFloat_FromDouble(step_s));
  return all && seconds ? PyTuple_Pack(3, all.get(), idle ? Py_True : Py_False, seconds.get()) : nullptr;
}

// The results of a function for each item of a list; null after an error.
template <auto function>
PyObject* each_of(PyObject*, PyObject* items) {
  if (!PyList_CheckExact(items)) return PyErr_Format(PyExc_TypeError, "a list is needed");
  Ref results(PyList_New(PyList_GET_SIZE(items)));
  for (Py_ssize_t i = 0; results && i < PyList_GET_SIZE(items); ++i) {
    PyObject* result = function(PyList_GET_ITEM(items, i));
    if (result == nullptr) return nullptr;
    PyList_SET_ITEM(results.get(), i, result);
  }
  return results.release();
}

// columns_of(nodes) -> the columns of a list of TreeNodes. NodeColumns.of.
PyObject* columns_of(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 1 || !PyList_CheckExact(arguments[0])) return PyErr_Format(PyExc_TypeError, "columns_of takes a list");
  const Py_ssize_t size = PyList_GET_SIZE(arguments[0]);
  const auto node = [&](size_t i) { return as_node(PyList_GET_ITEM(arguments[0], static_cast<Py_ssize_t>(i))); };
  bool all_sampled = true, any_q = false;
  for (size_t i = 0; i < static_cast<size_t>(size); ++i) {
    if (!is_node(object(node(i)))) return PyErr_Format(PyExc_TypeError, "columns_of takes nodes of a tree");
    all_sampled = all_sampled && node(i)->sampled;
    any_q = any_q || node(i)->q != Py_None;
  }
  const auto column = [&](bool wanted, auto value) {
    return tuple_of(wanted ? static_cast<size_t>(size) : 0, [&](size_t i) { return value(*node(i)); });
  };
  PyObject* columns[] = {
      column(true, [](const Node& it) { return PyLong_FromLongLong(it.node_id); }),
      column(true, [](const Node& it) { return PyLong_FromLongLong(it.parent_id); }),
      column(true, [](const Node& it) { return PyLong_FromLongLong(it.token_id); }),
      column(true, [](const Node& it) { return PyFloat_FromDouble(it.prob); }),
      column(!all_sampled, [](const Node& it) { return PyBool_FromLong(it.sampled); }),
      column(any_q, [](const Node& it) { return Py_NewRef(it.q); }),
  };
  return tuple_of(6, [&columns](size_t i) { return columns[i]; });
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
      if (column.items[i] != Py_None && (!q.of(column.items[i], names.packed_ids, kQTokenIds) ||
                                         !q.of(column.items[i], names.packed_probs, kQProbs)))
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

// The wire form of (columns, idle, step_s), as protobuf writes it; None if they are not plain. Null after an error.
PyObject* write_message(PyObject* message) {
  if (!PyTuple_CheckExact(message) || PyTuple_GET_SIZE(message) != 3) return Py_NewRef(Py_None);
  PyObject* step_s = PyTuple_GET_ITEM(message, 2);
  if (!PyFloat_CheckExact(step_s)) return Py_NewRef(Py_None);
  Columns columns;
  if (!columns.read(PyTuple_GET_ITEM(message, 0))) return nullptr;
  const Py_ssize_t size = columns.size;
  const Column* of = columns.of;
  Written written;
  const bool plain =
      size == 0 || (written.ids(kNodeIds, of[0], size) && written.ids(kParentIds, of[1], size) &&
                    written.ids(kTokenIds, of[2], size) && written.probs(of[3], size) &&
                    (of[4].items == nullptr || written.sampled(of[4], size)) &&
                    (of[5].items == nullptr || written.qs(of[5], size)));
  if (PyErr_Occurred()) return nullptr;
  if (!plain) return Py_NewRef(Py_None);
  const int idle = PyObject_IsTrue(PyTuple_GET_ITEM(message, 1));
  if (idle < 0) return nullptr;
  if (idle) written.bytes += {static_cast<char>(kIdle), 1};
  if (PyFloat_AS_DOUBLE(step_s) != 0.0 || std::signbit(PyFloat_AS_DOUBLE(step_s))) {
    written.bytes.push_back(static_cast<char>(kStepS));
    written.real(PyFloat_AS_DOUBLE(step_s));
  }
  return PyBytes_FromStringAndSize(written.bytes.data(), static_cast<Py_ssize_t>(written.bytes.size()));
}

PyMethodDef methods[] = {
    {"prepare", prepare, METH_VARARGS, nullptr},
    method("add_each", add_each),
    method("columns_of", columns_of),
    {"choose", choose, METH_VARARGS, nullptr},
    {"grow_each", grow_each, METH_VARARGS, nullptr},
    {"read_each", each_of<read_message>, METH_O, nullptr},  // messages in wire form
    {"write_each", each_of<write_message>, METH_O, nullptr},
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
               {names.q, "q"},
               {names.packed_ids, "packed_ids"},
               {names.packed_probs, "packed_probs"},
               {names.tokens, "tokens"}}))
    return nullptr;
  empty_tuple = PyTuple_New(0);
  PyObject *nodes = PyType_FromSpec(&node_spec), *trees = PyType_FromSpec(&tree_spec);
  PyObject *frontiers = PyType_FromSpec(&frontier_spec), *rankings = PyType_FromSpec(&ranking_spec);
  PyObject* made = PyModule_Create(&module);
  if (nodes == nullptr || trees == nullptr || frontiers == nullptr || rankings == nullptr || made == nullptr) return nullptr;
  node_type = reinterpret_cast<PyTypeObject*>(nodes), tree_type = reinterpret_cast<PyTypeObject*>(trees);
  frontier_type = reinterpret_cast<PyTypeObject*>(frontiers), ranking_type = reinterpret_cast<PyTypeObject*>(rankings);
  if (PyModule_AddObjectRef(made, "TreeNode", nodes) < 0 || PyModule_AddObjectRef(made, "SpeculationTree", trees) < 0 ||
      PyModule_AddObjectRef(made, "Frontier", frontiers) < 0)
    return nullptr;
  return made;
}
