// A step of a compiled model in one call: its plan's fields as tensors, its masks, the cache, and the run. See package.py.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>
#include <cstdint>
#include <initializer_list>
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

  // Of those that are there: they are the caller's from now on.
  std::vector<AtenTensorHandle> release() { return std::exchange(handles_, {}); }

 private:
  static std::array<int64_t, kDimensions> contiguous(std::initializer_list<int64_t> sizes) {
    std::array<int64_t, kDimensions> strides{};
    int64_t apart = 1;
    for (size_t i = sizes.size(); i-- > 0; apart *= sizes.begin()[i]) strides[i] = apart;
    return strides;
  }

  void keep(AOTITorchError error, AtenTensorHandle made) {
    if (error) failed_ = true;
    else handles_.push_back(made);
  }

  std::vector<AtenTensorHandle> handles_;
  bool failed_ = false;
};

}  // namespace

// StepPlan.inputs and a run. `sizes`, `buffer`: of the plan; `window`: of its second mask, 0 if there is none; `bytes`:
// of a value of a mask, 2 for bfloat16 and 4 for float32; `cache` [num_cache]: keys and values of all layers, which stay
// the caller's.
extern "C" int paceline_run_step(Run run, void* container, const int64_t* sizes, int64_t* buffer, int64_t window,
                                 int64_t bytes, const AtenTensorHandle* cache, int64_t num_cache,
                                 AtenTensorHandle* outputs, int64_t num_outputs) {
  const paceline::Shape s(sizes);
  const paceline::Fields f(buffer, s);
  Inputs inputs(10 + num_cache);
  inputs.add_integers(f.tokens, {1, s.tokens});
  inputs.add_integers(f.positions, {1, s.tokens});
  inputs.add_integers(f.logits_index, {s.wanted});
  inputs.add_integers(f.write_rows, {s.writes});
  inputs.add_integers(f.write_tokens, {s.writes});
  inputs.add_integers(f.page_table, {s.rows, s.pages});
  inputs.add_integers(f.gather, {s.rows, s.row_len});
  inputs.add_integers(f.scatter, {s.tokens});
  const int32_t dtype = bytes == 2 ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_float32();
  void* whole = inputs.add_empty({s.rows, 1, s.row_len, s.keys()}, dtype);
  void* near = window ? inputs.add_empty({s.rows, 1, s.row_len, s.keys()}, dtype) : nullptr;
  for (int64_t i = 0; i < num_cache; ++i) inputs.add(cache[i]);
  if (inputs.failed()) return AOTI_TORCH_FAILURE;
  paceline::make_masks(s, f, window, bytes, whole, near);
  std::vector<AtenTensorHandle> given = inputs.release();
  return run(container, given.data(), given.size(), outputs, static_cast<size_t>(num_outputs), nullptr, nullptr);
}
