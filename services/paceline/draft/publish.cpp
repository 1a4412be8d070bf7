// The children of the leaves of a step, from ranked candidates to the frontier: see publish.py. A session with a hint is
// left to Python before anything of its leaf is done, and with it all behind it, so that nodes get their ids in one order.

#include "tree.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace {

using namespace paceline;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// paceline_expect in calibration.cpp.
using Expect = void (*)(int64_t, double, const int64_t*, const void* const*, const double*, double*, int64_t*,
                        const void* const*, const double*, const double*);

// Where a DraftSession keeps its attributes.
struct {
  Py_ssize_t bonus, calibration, changed, end, frontier, growth, hinted, next_node_id, outbox, tree;
} of_session;

// And a Ranking.
struct {
  PyTypeObject* type;
  Py_ssize_t bonus, gaps, q, token_ids;
} of_ranking;

// Where a Frontier keeps them.
struct {
  Py_ssize_t ahead, committed, heap, most_ahead, unwanted;
} of_frontier;

// And BestFirst.
struct {
  PyTypeObject* type;
  Py_ssize_t min_log;
} of_growth;

struct {
  PyTypeObject* session;
  PyTypeObject* frontier;
} types;

struct Names {
  PyObject *address, *fan_out, *place, *push_below;
} names;

PyObject *push, *zero;
Expect expect;
double end_share;  // END_SHARE of session.py

// prepare(node_type, tree_type, session_type, frontier_type, growth_type, ranking_type, expect, probability, tolerance,
// end_share, heappush): the native TreeNode and SpeculationTree, DraftSession, Frontier, BestFirst and Ranking; the
// addresses of paceline_expect and paceline_probability, and the tolerance of the latter; session.END_SHARE; and
// heapq.heappush.
PyObject* prepare(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  bool types_come = count == 11;
  for (int i = 0; types_come && i <= 5; ++i) types_come = PyType_Check(arguments[i]);
  if (!types_come) return PyErr_Format(PyExc_TypeError, "prepare takes 11 arguments, the first six of them types");
  types.session = reinterpret_cast<PyTypeObject*>(Py_NewRef(arguments[2]));
  types.frontier = reinterpret_cast<PyTypeObject*>(Py_NewRef(arguments[3]));
  of_growth.type = reinterpret_cast<PyTypeObject*>(Py_NewRef(arguments[4]));
  of_ranking.type = reinterpret_cast<PyTypeObject*>(Py_NewRef(arguments[5]));
  expect = reinterpret_cast<Expect>(PyLong_AsVoidPtr(arguments[6]));
  end_share = PyFloat_AsDouble(arguments[9]);
  push = Py_NewRef(arguments[10]);
  if (PyErr_Occurred() || !prepare_tree(arguments[0], arguments[1], arguments[7], arguments[8])) return nullptr;
  if (!find({
        {of_ranking.type, "bonus", of_ranking.bonus},
        {of_ranking.type, "gaps", of_ranking.gaps},
        {of_ranking.type, "q", of_ranking.q},
        {of_ranking.type, "token_ids", of_ranking.token_ids},
        {types.session, "bonus", of_session.bonus},
        {types.session, "calibration", of_session.calibration},
        {types.session, "changed", of_session.changed},
        {types.session, "end", of_session.end},
        {types.session, "frontier", of_session.frontier},
        {types.session, "growth", of_session.growth},
        {types.session, "hinted", of_session.hinted},
        {types.session, "next_node_id", of_session.next_node_id},
        {types.session, "outbox", of_session.outbox},
        {types.session, "tree", of_session.tree},
        {types.frontier, "_ahead", of_frontier.ahead},
        {types.frontier, "_committed", of_frontier.committed},
        {types.frontier, "_heap", of_frontier.heap},
        {types.frontier, "_most_ahead", of_frontier.most_ahead},
        {types.frontier, "_unwanted", of_frontier.unwanted},
        {of_growth.type, "_min_log", of_growth.min_log},
      }))
    return nullptr;
  Py_RETURN_NONE;
}

// A child to be made.
struct Child {
  PyObject* token_id;
  double prob;
};

// What one leaf is given: the gaps of its candidates, and the children that are worth a node.
struct Row {
  std::vector<double> gaps, bonus, probs;
  std::vector<Child> children;
  PyObject* q;  // that the first child was drawn from; Py_None: all are drawn alike

  // ranking_of the first `fan_out` of ranked candidates. False after an error.
  bool read(PyObject* ids, PyObject* scores, Py_ssize_t fan_out) {
    gaps.clear(), bonus.clear(), children.clear(), q = Py_None;
    const Py_ssize_t size = std::min({fan_out, PyList_GET_SIZE(ids), PyList_GET_SIZE(scores)});
    for (Py_ssize_t i = 0; i < size; ++i) gaps.push_back(PyFloat_AsDouble(PyList_GET_ITEM(scores, i)));
    while (!gaps.empty() && gaps.back() == -kInfinity) gaps.pop_back();
    if (PyErr_Occurred() || gaps.empty()) return !PyErr_Occurred();
    const double best = gaps[0];
    for (double& gap : gaps) gap = best - gap;
    gaps[0] = gaps.size() > 1 ? gaps[1] : kInfinity;
    for (size_t i = 0; i < gaps.size(); ++i) children.push_back({PyList_GET_ITEM(ids, static_cast<Py_ssize_t>(i)), 0.0});
    return true;
  }

  // A Ranking. False, without an error, if it is not as rank makes it.
  bool read(PyObject* ranking) {
    gaps.clear(), bonus.clear(), children.clear(), q = slot(ranking, of_ranking.q);
    PyObject* ids = slot(ranking, of_ranking.token_ids);
    if (!PyTuple_CheckExact(ids) || !numbers(slot(ranking, of_ranking.gaps), gaps) ||
        !numbers(slot(ranking, of_ranking.bonus), bonus) || static_cast<size_t>(PyTuple_GET_SIZE(ids)) != gaps.size() ||
        (!bonus.empty() && bonus.size() != gaps.size()))
      return false;
    for (size_t i = 0; i < gaps.size(); ++i) children.push_back({PyTuple_GET_ITEM(ids, static_cast<Py_ssize_t>(i)), 0.0});
    return true;
  }

  static bool numbers(PyObject* tuple, std::vector<double>& values) {
    if (!PyTuple_CheckExact(tuple)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
      PyObject* value = PyTuple_GET_ITEM(tuple, i);
      if (!PyFloat_CheckExact(value)) return false;
      values.push_back(PyFloat_AS_DOUBLE(value));
    }
    return true;
  }

  // expect of DraftSession.expansion. False after an error.
  bool weigh(PyObject* session, PyObject* parent, double least) {
    if (gaps.empty()) return true;
    const void* table = address_of(slot(session, of_session.calibration));
    const void* of_bonus = table && !bonus.empty() ? address_of(slot(session, of_session.bonus)) : nullptr;
    if (PyErr_Occurred()) return false;
    const double share = slot(session, of_session.end) == parent ? 1.0 : end_share;
    const int64_t num = static_cast<int64_t>(gaps.size());
    int64_t kept = 0;
    probs.resize(gaps.size());
    if (bonus.empty()) expect(1, least, &num, &table, gaps.data(), probs.data(), &kept, nullptr, nullptr, nullptr);
    else expect(1, least, &num, &table, gaps.data(), probs.data(), &kept, &of_bonus, &share, bonus.data());
    children.resize(static_cast<size_t>(kept));
    for (size_t i = 0; i < children.size(); ++i) children[i].prob = probs[i];
    return true;
  }

  // Null after an error.
  static const void* address_of(PyObject* calibration) {
    Ref address(PyObject_GetAttr(calibration, names.address));
    return address ? PyLong_AsVoidPtr(address.get()) : nullptr;
  }
};

// Frontier._ahead_of(node). -1 after an error.
long ahead_of(PyObject* known, const Node* node) {
  Ref node_id(PyLong_FromLongLong(node->node_id));
  PyObject* found = node_id ? PyDict_GetItemWithError(known, node_id.get()) : nullptr;
  if (found != nullptr) return PyLong_AsLong(found);
  if (PyErr_Occurred()) return -1;
  if (node->parent == nullptr) return PyErr_SetString(PyExc_TypeError, "the anchor is not known"), -1;
  const long ahead = ahead_of(known, node->parent) + 1;
  Ref value(ahead > 0 ? PyLong_FromLong(ahead) : nullptr);
  return value && PyDict_SetItem(known, node_id.get(), value.get()) == 0 ? ahead : -1;
}

// Frontier.push_below, by BestFirst.key where that is the policy: nothing is further ahead than its K. False after an
// error.
bool push_below(PyObject* frontier, PyObject* growth, const Tree* tree, const Node* parent, PyObject* made) {
  if (Py_TYPE(growth) != of_growth.type || slot(frontier, of_frontier.committed) != Py_None) {
    PyObject* of = reinterpret_cast<PyObject*>(const_cast<Node*>(parent));
    Ref done(PyObject_CallMethodObjArgs(frontier, names.push_below, of, made, nullptr));
    return static_cast<bool>(done);
  }
  const long ahead = ahead_of(slot(frontier, of_frontier.ahead), parent) + 1;
  if (ahead == 0) return false;
  const double most_ahead = PyFloat_AsDouble(slot(frontier, of_frontier.most_ahead));
  const double min_log = PyFloat_AsDouble(slot(growth, of_growth.min_log));
  if (PyErr_Occurred()) return false;
  PyObject *heap = slot(frontier, of_frontier.heap), *unwanted = slot(frontier, of_frontier.unwanted);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(made); ++i) {
    PyObject* item = PyList_GET_ITEM(made, i);
    const auto* node = reinterpret_cast<const Node*>(item);
    if (static_cast<double>(ahead) > most_ahead || node->log_path - tree->anchor->log_path < min_log) {
      if (PyList_Append(unwanted, item) < 0) return false;
      continue;
    }
    Ref unlikely(PyFloat_FromDouble(-node->log_path)), node_id(PyLong_FromLongLong(node->node_id));
    Ref key(unlikely ? PyTuple_Pack(2, zero, unlikely.get()) : nullptr);
    Ref entry(key && node_id ? PyTuple_Pack(3, key.get(), node_id.get(), item) : nullptr);
    Ref done(entry ? PyObject_CallFunctionObjArgs(push, heap, entry.get(), nullptr) : nullptr);
    if (!done) return false;
  }
  return true;
}

PyObject* tuple_of(const std::vector<double>& values) {
  Ref tuple(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
  for (size_t i = 0; tuple && i < values.size(); ++i) {
    PyObject* value = PyFloat_FromDouble(values[i]);
    if (value == nullptr) return nullptr;
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), value);
  }
  return tuple.release();
}

enum class Done { kPublished, kLeft, kFailed };

// DraftGrower.publish of one leaf and its candidates, ranked or a Ranking. kLeft: nothing is done, there is more than the
// plain case.
Done publish_leaf(PyObject* session, PyObject* leaf, PyObject* ranked, double least, Row& row, int64_t& published) {
  const Done left = Done::kLeft, failed = Done::kFailed;
  PyObject *hinted = slot(session, of_session.hinted), *frontier = slot(session, of_session.frontier);
  PyObject* held = slot(session, of_session.tree);
  int64_t next_id = 0;
  if (!is_node(leaf) || !is_tree(held) || !PyDict_CheckExact(hinted) || PyDict_GET_SIZE(hinted) > 0 ||
      Py_TYPE(frontier) != types.frontier)
    return left;
  auto* tree = reinterpret_cast<Tree*>(held);
  auto* parent = reinterpret_cast<Node*>(leaf);
  if (!read_int(slot(session, of_session.next_node_id), next_id)) return failed;
  PyObject* growth = slot(session, of_session.growth);
  if (Py_TYPE(ranked) == of_ranking.type) {
    if (!row.read(ranked)) return left;
  } else {
    if (!PyTuple_CheckExact(ranked) || PyTuple_GET_SIZE(ranked) != 2 ||
        !PyList_CheckExact(PyTuple_GET_ITEM(ranked, 0)) || !PyList_CheckExact(PyTuple_GET_ITEM(ranked, 1)))
      return left;
    Ref fan_out(PyObject_GetAttr(growth, names.fan_out));
    const Py_ssize_t most = fan_out ? PyLong_AsSsize_t(fan_out.get()) : -1;
    if (PyErr_Occurred() || !row.read(PyTuple_GET_ITEM(ranked, 0), PyTuple_GET_ITEM(ranked, 1), most)) return failed;
  }
  if (!row.weigh(session, leaf, least)) return failed;

  const auto size = static_cast<int64_t>(row.children.size());
  Ref made(PyList_New(0)), following(PyLong_FromLongLong(next_id + size));
  PyObject *gaps = tuple_of(row.gaps), *bonus = tuple_of(row.bonus), *outbox = slot(session, of_session.outbox);
  if (gaps == nullptr || bonus == nullptr || !made || !following) return failed;
  parent->expanded = true;
  Py_XSETREF(parent->gaps, gaps);
  Py_XSETREF(parent->bonus, bonus);
  put(session, of_session.changed, Py_NewRef(Py_True));
  put(session, of_session.next_node_id, following.release());
  for (int64_t i = 0; i < size; ++i) {
    const Child& child = row.children[static_cast<size_t>(i)];
    const bool drawn = i == 0 || row.q == Py_None;
    int64_t token_id = 0;
    if (!read_int(child.token_id, token_id)) return failed;
    Refusal refusal = Refusal::kNone;
    Node* node = attach(tree, next_id + i, parent->node_id, token_id, child.prob, drawn, drawn ? row.q : Py_None, refusal);
    if (node == nullptr && refusal == Refusal::kNone) return failed;
    if (node == nullptr) continue;
    if (PyList_Append(outbox, object(node)) < 0 || PyList_Append(made.get(), object(node)) < 0) return failed;
  }
  published += PyList_GET_SIZE(made.get());
  if (slot(session, of_session.end) == leaf) {
    Ref placed(PyObject_CallMethodObjArgs(session, names.place, leaf, nullptr));
    if (!placed) return failed;
  }
  const bool none = PyList_GET_SIZE(made.get()) == 0;
  return none || push_below(frontier, growth, tree, parent, made.get()) ? Done::kPublished : failed;
}

// publish(leaves, ranked, least) -> number of nodes, and of the first leaves that were published: the next one is left.
// `leaves`: a list of (session, node); `ranked`: of each the ids and scores of its candidates, or its Ranking.
PyObject* publish(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3 || !PyList_CheckExact(arguments[0]) || !PyList_CheckExact(arguments[1]) ||
      PyList_GET_SIZE(arguments[0]) != PyList_GET_SIZE(arguments[1]))
    return PyErr_Format(PyExc_TypeError, "publish takes two lists of equal length and the least probability");
  const double least = PyFloat_AsDouble(arguments[2]);
  if (PyErr_Occurred()) return nullptr;
  int64_t published = 0;
  Py_ssize_t done = 0;
  Row row;
  for (; done < PyList_GET_SIZE(arguments[0]); ++done) {
    PyObject* leaf = PyList_GET_ITEM(arguments[0], done);
    if (!PyTuple_CheckExact(leaf) || PyTuple_GET_SIZE(leaf) != 2 || Py_TYPE(PyTuple_GET_ITEM(leaf, 0)) != types.session)
      return PyErr_Format(PyExc_TypeError, "publish takes pairs of a session and a node");
    const Done result = publish_leaf(PyTuple_GET_ITEM(leaf, 0), PyTuple_GET_ITEM(leaf, 1),
                                     PyList_GET_ITEM(arguments[1], done), least, row, published);
    if (result == Done::kFailed) return nullptr;
    if (result == Done::kLeft) break;
  }
  return Py_BuildValue("Ln", static_cast<long long>(published), done);
}

PyMethodDef methods[] = {
    method("prepare", prepare),
    method("publish", publish),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "paceline_publish", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_paceline_publish() {
  if (!intern({{names.address, "address"}, {names.fan_out, "fan_out"}, {names.place, "place"}, {names.push_below, "push_below"}}))
    return nullptr;
  if ((zero = PyFloat_FromDouble(0.0)) == nullptr) return nullptr;
  return PyModule_Create(&module);
}
