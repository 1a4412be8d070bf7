// The memory of a speculation tree and of its nodes; tree.py has the reference implementation, with the same names. Every
// extension that includes this has pointers of its own, which prepare_tree fills.

#pragma once

#include "objects.h"

#include <cmath>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

namespace paceline {
namespace {

constexpr int kProducerShift = 28;
constexpr double kLeastProb = 1e-9;
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
  int64_t vocab_size, max_nodes, first_id, best_limit;
  bool rejection;

  bool lost() const { return !nodes->suffix.empty(); }
};

// paceline_probability in rows.cpp, null if there is none, and its tolerance.
using Probability = double (*)(const void*, const void*, int64_t, int64_t, int64_t, double);
Probability probability;
double tolerance;

PyTypeObject *node_type, *tree_type;
PyObject *packed_ids, *packed_probs, *empty_tuple;

bool is_node(PyObject* object) { return Py_TYPE(object) == node_type; }
bool is_tree(PyObject* object) { return Py_TYPE(object) == tree_type; }

// Takes the types of nodes and trees, and the address of paceline_probability and its tolerance. False after an error.
bool prepare_tree(PyObject* nodes, PyObject* trees, PyObject* address, PyObject* most) {
  node_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(nodes));
  tree_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(trees));
  probability = reinterpret_cast<Probability>(PyLong_AsVoidPtr(address));
  tolerance = PyFloat_AsDouble(most);
  empty_tuple = PyTuple_New(0);
  return !PyErr_Occurred() && intern({{packed_ids, "packed_ids"}, {packed_probs, "packed_probs"}});
}

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

}  // namespace
}  // namespace paceline
