// Steps of a compiled model in one call: a plan's fields as tensors, its masks, the cache, and the run; or several, each
// of the token that the one before it ranks first. See package.py.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <utility>
#include <vector>

#include "layout.h"

namespace {

// AOTInductorModelContainerRun: takes the inputs over, and gives the outputs.
using Run = AOTITorchError (*)(void*, AtenTensorHandle*, size_t, AtenTensorHandle*, size_t, void*, void*);

constexpr size_t kDimensions = 4;

// Tensors on the CPU that a run takes over; they go with this if it does not come to that.
class Inputs {
 public:
  explicit Inputs(size_t room) { handles_.reserve(room); }

  ~Inputs() {
    for (AtenTensorHandle handle : handles_) aoti_torch_delete_tensor_object(handle);
  }

  void add_integers(int64_t* data, std::initializer_list<int64_t> sizes) {
    const auto strides = contiguous(sizes);
    AtenTensorHandle made = nullptr;
    const auto error =
        aoti_torch_create_tensor_from_blob(data, static_cast<int64_t>(sizes.size()), sizes.begin(), strides.data(), 0,
                                           aoti_torch_dtype_int64(), aoti_torch_device_type_cpu(), 0, &made);
    keep(error, made);
  }

  // Returns its memory, or null.
  void* add_empty(std::initializer_list<int64_t> sizes, int32_t dtype) {
    const auto strides = contiguous(sizes);
    AtenTensorHandle made = nullptr;
    const auto error = aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides.data(), dtype,
                                                aoti_torch_device_type_cpu(), 0, &made);
    keep(error, made);
    void* data = nullptr;
    if (!failed_ && aoti_torch_get_data_ptr(made, &data)) failed_ = true;
    return data;
  }

  void add(AtenTensorHandle given) {
    AtenTensorHandle made = nullptr;
    const auto error = aoti_torch_new_tensor_handle(given, &made);
    keep(error, made);
  }

  bool failed() const { return failed_; }

  // Returns the handles; they are the caller's from now on.
  std::vector<AtenTensorHandle> release() { return std::exchange(handles_, {}); }

 private:
  static std::array<int64_t, kDimensions> contiguous(std::initializer_list<int64_t> sizes) {
    std::array<int64_t, kDimensions> strides{};
    int64_t stride = 1;
    for (size_t i = sizes.size(); i-- > 0; stride *= sizes.begin()[i]) strides[i] = stride;
    return strides;
  }

  void keep(AOTITorchError error, AtenTensorHandle made) {
    if (error) failed_ = true;
    else handles_.push_back(made);
  }

  std::vector<AtenTensorHandle> handles_;
  bool failed_ = false;
};

// What a step is run with.
struct Model {
  Run run;
  void* container;
  int64_t window;  // of a step's second mask, 0 if there is none
  int64_t bytes;   // of a value of a mask: 2 for bfloat16, 4 for float32
  const AtenTensorHandle* cache;  // keys and values of all layers, then pools of linear ones, which stay the caller's
  int64_t num_cache;
};

// The numbers of linear layers in a step; none where there are none.
struct Linear {
  int64_t* numbers = nullptr;
  int64_t count = 0;
};

// StepPlan.inputs of a buffer of `sizes`, and a run.
AOTITorchError run_step(const Model& it, const int64_t* sizes, int64_t* buffer, Linear linear, AtenTensorHandle* outputs,
                        int64_t num_outputs) {
  const paceline::Shape s(sizes);
  const paceline::Fields f(buffer, s);
  Inputs inputs(11 + it.num_cache);
  inputs.add_integers(f.tokens, {1, s.tokens});
  inputs.add_integers(f.positions, {1, s.tokens});
  inputs.add_integers(f.logits_index, {s.logit_rows});
  inputs.add_integers(f.write_rows, {s.writes});
  inputs.add_integers(f.write_tokens, {s.writes});
  inputs.add_integers(f.page_table, {s.rows, s.pages});
  inputs.add_integers(f.gather, {s.rows, s.row_len});
  inputs.add_integers(f.scatter, {s.tokens});
  const int32_t dtype = it.bytes == 2 ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float32();
  void* whole = inputs.add_empty({s.rows, 1, s.row_len, s.keys()}, dtype);
  void* near = it.window ? inputs.add_empty({s.rows, 1, s.row_len, s.keys()}, dtype) : nullptr;
  for (int64_t i = 0; i < it.num_cache; ++i) inputs.add(it.cache[i]);
  if (linear.count) inputs.add_integers(linear.numbers, {linear.count});
  if (inputs.failed()) return AOTI_TORCH_FAILURE;
  paceline::make_masks(s, f, it.window, it.bytes, whole, near);
  std::vector<AtenTensorHandle> given = inputs.release();
  return it.run(it.container, given.data(), given.size(), outputs, static_cast<size_t>(num_outputs), nullptr, nullptr);
}

// paceline_best of rows.cpp.
using Best = void (*)(const void*, int, int64_t, int64_t, int64_t, const uint8_t*, int64_t, const int64_t*, const float*,
                      const float*, const int64_t*, int, int64_t, int64_t*, double*);

// How the tokens of a chain are ranked. As in package.py.
struct Draw {
  Best best;
  int64_t seed, position;  // of the first token that is drawn
  int64_t top_k, stream, fan_out;
  float temperature, floor;
};

// When a chain ends: where the path's probability, of the first token of each place, falls below `least`. That of a token
// is constant[bin] + slope[bin] * prior, by the bin of the gap to the second one.
struct Stop {
  const double *edges, *constant, *slope;
  int64_t num_edges;
  double mass, correction, path, least;
};

// Ranks the next token by a row of logits: ids and scores [fan_out], of which the last ones may be -inf.
bool rank_row(const Draw& it, int64_t depth, AtenTensorHandle logits, int64_t* ids, double* scores) {
  int64_t dim = 0, *sizes = nullptr;
  int32_t dtype = 0;
  void* x = nullptr;
  if (aoti_torch_get_dim(logits, &dim) || aoti_torch_get_sizes(logits, &sizes) || aoti_torch_get_dtype(logits, &dtype) ||
      aoti_torch_get_data_ptr(logits, &x)) {
    return false;
  }
  const int64_t n = sizes[dim - 1];
  const int kind = dtype == aoti_torch_dtype_bfloat16() ? 2 : 0;
  if (kind == 0 && dtype != aoti_torch_dtype_float32()) return false;
  const int64_t key[3] = {it.seed, it.position + depth, 0}, top_k = std::min(it.top_k, n);
  it.best(x, kind, 1, n, n, nullptr, 0, &top_k, &it.floor, &it.temperature, key, static_cast<int>(it.stream), it.fan_out,
          ids, scores);
  return true;
}

// The probability that the first of some ranked tokens is right: Calibration.probabilities of `ranked` scores.
double first_of(const Stop& it, const double* scores, int64_t fan_out) {
  double total = 0;
  for (int64_t i = 0; i < fan_out; ++i) total += std::exp(scores[i] - scores[0]);
  const double gap = fan_out > 1 ? scores[0] - scores[1] : std::numeric_limits<double>::infinity();
  const int64_t bin = std::upper_bound(it.edges, it.edges + it.num_edges, gap) - it.edges;
  return it.constant[bin] + it.slope[bin] * it.mass / total;
}

}  // namespace

extern "C" {

int paceline_run_step(const Model* it, const int64_t* sizes, int64_t* buffer, int64_t* linear, int64_t num_linear,
                      AtenTensorHandle* outputs, int64_t num_outputs) {
  return run_step(*it, sizes, buffer, {linear, num_linear}, outputs, num_outputs);
}

// Up to `most` tokens of a chain, each by a step of a model of one output. The first step has one row of logits; the
// others are `next`, one token with rows of its own, in which the token that was ranked first is put at its place, in row
// rows[i] of the session and `writes[i]` of the cache. Returns how many tokens were ranked, into ids and scores
// [most, fan_out]; -1: a step has failed.
int64_t paceline_run_chain(const Model* it, const int64_t* first_sizes, int64_t* first, const int64_t* next_sizes,
                           int64_t* next, int64_t most, const int64_t* rows, const int64_t* writes, const Draw* draw,
                           const Stop* stop, int64_t* ids, double* scores) {
  double path = stop->path;
  for (int64_t depth = 0; depth < most; ++depth, ids += draw->fan_out, scores += draw->fan_out) {
    if (depth > 0) {
      const paceline::Shape s(next_sizes);
      const paceline::Fields f(next, s);
      f.tokens[0] = ids[-draw->fan_out], f.positions[0] = draw->position + depth - 1;
      f.write_rows[0] = writes[depth - 1];
      for (int64_t place = 0; place < s.row_len; ++place) f.visible[place * s.keys() + rows[depth - 1]] = 1;
    }
    AtenTensorHandle logits = nullptr;
    if (run_step(*it, depth ? next_sizes : first_sizes, depth ? next : first, {}, &logits, 1)) return -1;
    const bool ranked = rank_row(*draw, depth, logits, ids, scores);
    aoti_torch_delete_tensor_object(logits);
    if (!ranked) return -1;
    if (!(scores[0] > -std::numeric_limits<double>::infinity())) return depth;
    path *= std::min(1.0, stop->correction * first_of(*stop, scores, draw->fan_out));
    if (path < stop->least) return depth + 1;
  }
  return most;
}

}  // extern "C"
