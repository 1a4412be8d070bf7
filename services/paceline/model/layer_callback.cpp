// A place in the middle of a compiled step where it calls the interpreter, and goes on. See layer_callback.py.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <atomic>

namespace {

// Takes two handles, which it owns then, and the interpreter's lock.
using Told = void (*)(AtenTensorHandle, AtenTensorHandle);
std::atomic<Told> told = nullptr;

}  // namespace

extern "C" {

void paceline_layer_callback(Told function) { told = function; }

// out = a copy of `states`, so that what follows waits for the call. What compiled models call.
AOTITorchError aoti_torch_cpu_layer_callback(AtenTensorHandle states, AtenTensorHandle index, AtenTensorHandle* out) {
  if (const Told function = told) {
    AtenTensorHandle given = nullptr, rows = nullptr;
    if (aoti_torch_new_tensor_handle(states, &given) || aoti_torch_new_tensor_handle(index, &rows)) {
      return AOTI_TORCH_FAILURE;
    }
    function(given, rows);
  }
  return aoti_torch_clone(states, out);
}

}  // extern "C"
