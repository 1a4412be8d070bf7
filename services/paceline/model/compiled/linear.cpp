// Products by packed weights that are read once, from end to end, at the speed of the memory. See linear.py.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <new>

#include "blocks.h"
#include "product.h"

#ifdef __AVX512BF16__
#include "../exponential.h"
#include "bfloat16.h"
#endif

namespace {

constexpr int64_t kGated = 16 * 1024;  // values that are gated and more: these are worth the helpers

using paceline::helpers;

template <class Format>
void multiply_rows(const paceline::BlockRows& x, const uint8_t* packed, const float* bias, char* y, int64_t y_bytes,
                   int64_t m, int64_t n) {
  paceline::multiply_all<Format>({x.rows<Format>(), packed, bias, y, y_bytes, m, n, x.steps});
}

#ifdef __AVX512BF16__
int64_t bfloat16_steps(int64_t k) {
  constexpr int64_t kWhole = paceline::BFloat16::kWhole, kValues = paceline::BFloat16::kInputs * kWhole;
  return (k + kValues - 1) / kValues * kWhole;
}

// y [m, n] = x [m, k], rows `stride` values apart, by `packed`, + bias unless it is null.
void multiply_bfloat16(const uint16_t* x, int64_t stride, const uint8_t* packed, const float* bias, char* y, int64_t m,
                       int64_t n, int64_t k, bool alone = false) {
  const paceline::BFloat16Rows rows(x, m, k, stride);
  const int64_t steps = bfloat16_steps(k);
#ifdef __AMX_BF16__
  if (paceline::Tiles::usable()) {
    paceline::multiply_all<paceline::Tiles>({rows.rows, packed, bias, y, 2, m, n, steps}, alone);
    return;
  }
#endif
  paceline::multiply_all<paceline::BFloat16>({rows.rows, packed, bias, y, 2, m, n, steps}, alone);
}

// silu(x[:n]) * x[n:] in float32, rounded once; value by value, whatever else is computed.
void gate(const uint16_t* x, int64_t n, uint16_t* y) {
  const auto widen = [](__mmask16 mask, const uint16_t* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
  };
  const __m512 one = _mm512_set1_ps(1.0f), minus_log2e = _mm512_set1_ps(-1.44269504f);
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = n - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (n - i)) - 1);
    const __m512 a = widen(mask, x + i), b = widen(mask, x + n + i);
    const __m512 silu = _mm512_div_ps(a, _mm512_add_ps(one, paceline::exp2(_mm512_mul_ps(a, minus_log2e))));
    _mm256_mask_storeu_epi16(y + i, mask, (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(silu, b)));
  }
}

#endif

// Whether packed weights have the blocks of `n` outputs and the steps of `k` inputs.
bool holds(const int64_t* packed_sizes, int64_t n, int64_t k, bool quantized) {
  const auto parts = [](int64_t size, int64_t part) { return size / part + (size % part != 0); };
  const int64_t blocks = parts(k, paceline::kBlockInputs);  // with 16 pairs each, in steps of bfloat16
  return n >= 0 && packed_sizes[0] == parts(n, quantized ? 16 : 32) && packed_sizes[1] == (quantized ? 1 : 16) * blocks;
}

}  // namespace

#pragma GCC visibility push(default)  // all else is hidden: another build in this process has functions of these names
extern "C" {

// What this thread does is shared with `count` helpers from now on.
void paceline_helpers(int64_t count) {
  helpers.reset();
  if (count > 0) helpers = std::make_unique<paceline::Helpers>(static_cast<int>(count));
}

// work(it, i) for all i below `pieces`, each once, by this thread and its helpers: whatever else is worth them. False: it
// has none, and nothing was done.
bool paceline_share(int64_t pieces, void (*work)(const void* it, int64_t piece), const void* it) {
  if (helpers == nullptr) return false;
  helpers->share(pieces, work, it);
  return true;
}

// y [m, n] = x [m, k], rows `stride` values apart, by `packed`, + bias [n] float32 unless it is null. Values of x and y
// take `value_bytes`: 2 in bfloat16, 4 in float32. `step_bytes` tells the format of the weights: bytes of a block's for one
// step. False: there is no such format here.
bool paceline_linear(const void* x, int64_t value_bytes, int64_t stride, const uint8_t* packed, int64_t step_bytes,
                     const float* bias, void* y, int64_t m, int64_t n, int64_t k) {
  if (m <= 0 || n <= 0) return true;
  char* to = static_cast<char*>(y);
#ifdef __AVX512BF16__
  if (step_bytes == paceline::BFloat16::kStepBytes && value_bytes == 2) {
    multiply_bfloat16(static_cast<const uint16_t*>(x), stride, packed, bias, to, m, n, k);
    return true;
  }
#endif
  const auto multiply = [&](auto multiply_format) {
    const paceline::BlockRows rows = value_bytes == 4
                                         ? paceline::BlockRows(static_cast<const float*>(x), m, k, stride)
                                         : paceline::BlockRows(static_cast<const uint16_t*>(x), m, k, stride);
    multiply_format(rows, packed, bias, to, value_bytes, m, n);
    return true;
  };
  using paceline::Blocks;
  switch (step_bytes) {
    case Blocks<4, false>::kStepBytes: return multiply(multiply_rows<Blocks<4, false>>);
    case Blocks<4, true>::kStepBytes: return multiply(multiply_rows<Blocks<4, true>>);
    case Blocks<8, false>::kStepBytes: return multiply(multiply_rows<Blocks<8, false>>);
    default: return false;
  }
}

#ifdef __AVX512BF16__
// y [m, n] = silu(x[:, :n]) * x[:, n:] of x [m, 2 n]
void paceline_gated_silu(const uint16_t* x, uint16_t* y, int64_t m, int64_t n) {
  const auto gate_row = [&](int64_t row) { gate(x + row * 2 * n, n, y + row * n); };
  if (helpers != nullptr && m > 1 && m * n >= kGated) {
    helpers->share(m, gate_row);
    return;
  }
  for (int64_t row = 0; row < m; ++row) gate_row(row);
}

// out [heads, m, n] = x [heads, m, k], each head by its own of the packed weights. The dimensions of x may lie in any order,
// but the values of a row follow each other.
AOTITorchError aoti_torch_cpu_packed_heads(AtenTensorHandle x, AtenTensorHandle packed, int64_t outputs,
                                           AtenTensorHandle* out) {
  int64_t dim = 0, *sizes = nullptr, *strides = nullptr, count = 0;
  int32_t dtype = 0, packed_dtype = 0;
  void *from = nullptr, *weights = nullptr, *to = nullptr;
  if (aoti_torch_get_dim(x, &dim) || dim != 3 || aoti_torch_get_sizes(x, &sizes) || aoti_torch_get_strides(x, &strides) ||
      aoti_torch_get_dtype(x, &dtype) || dtype != aoti_torch_dtype_bfloat16() ||
      aoti_torch_get_dtype(packed, &packed_dtype) || packed_dtype != dtype || aoti_torch_get_numel(packed, &count) ||
      aoti_torch_get_data_ptr(x, &from) || aoti_torch_get_data_ptr(packed, &weights)) {
    return AOTI_TORCH_FAILURE;
  }
  const int64_t heads = sizes[0], m = sizes[1], k = sizes[2], stride = strides[1], between = strides[0];
  const int64_t blocks = (outputs + paceline::BFloat16::kOutputs - 1) / paceline::BFloat16::kOutputs;
  const int64_t bytes = blocks * bfloat16_steps(k) * paceline::BFloat16::kStepBytes;  // of a head's weights
  const int64_t shape[] = {heads, m, outputs}, order[] = {m * outputs, outputs, 1};
  if ((strides[2] != 1 && k > 1) || count * 2 != heads * bytes ||
      aoti_torch_empty_strided(3, shape, order, dtype, aoti_torch_device_type_cpu(), 0, out) ||
      aoti_torch_get_data_ptr(*out, &to)) {
    return AOTI_TORCH_FAILURE;
  }
  const auto multiply_head = [&](int64_t head) {
    multiply_bfloat16(static_cast<const uint16_t*>(from) + head * between, stride,
                      static_cast<const uint8_t*>(weights) + head * bytes, nullptr,
                      static_cast<char*>(to) + head * m * outputs * 2, m, outputs, k, true);
  };
  if (m <= 0 || outputs <= 0) return AOTI_TORCH_SUCCESS;
  try {
    if (helpers != nullptr && heads > 1 && heads * k * outputs >= paceline::kShared) {
      helpers->share(heads, multiply_head);
      return AOTI_TORCH_SUCCESS;
    }
    for (int64_t head = 0; head < heads; ++head) multiply_head(head);
  } catch (const std::bad_alloc&) {
    return AOTI_TORCH_FAILURE;
  }
  return AOTI_TORCH_SUCCESS;
}

// What compiled models call, without the dispatcher and the interpreter.
AOTITorchError aoti_torch_cpu_gated_silu(AtenTensorHandle x, AtenTensorHandle* out) {
  int64_t dim = 0, count = 0, *sizes = nullptr;
  int32_t dtype = 0;
  bool contiguous = false;
  void *from = nullptr, *to = nullptr;
  if (aoti_torch_get_dtype(x, &dtype) || dtype != aoti_torch_dtype_bfloat16() || aoti_torch_get_dim(x, &dim) || dim < 1 || aoti_torch_get_sizes(x, &sizes) || aoti_torch_get_numel(x, &count) ||
      aoti_torch_is_contiguous(x, &contiguous) || !contiguous || sizes[dim - 1] % 2 || aoti_torch_get_data_ptr(x, &from)) {
    return AOTI_TORCH_FAILURE;
  }
  try {
    std::vector<int64_t> shape(sizes, sizes + dim), stride(dim, 1);
    const int64_t n = shape.back() /= 2;
    for (int64_t i = dim - 1; i > 0; --i) stride[i - 1] = stride[i] * shape[i];
    if (aoti_torch_empty_strided(dim, shape.data(), stride.data(), aoti_torch_dtype_bfloat16(),
                                 aoti_torch_device_type_cpu(), 0, out) ||
        aoti_torch_get_data_ptr(*out, &to)) {
      return AOTI_TORCH_FAILURE;
    }
    if (n > 0) paceline_gated_silu(static_cast<const uint16_t*>(from), static_cast<uint16_t*>(to), count / (2 * n), n);
  } catch (const std::bad_alloc&) {
    return AOTI_TORCH_FAILURE;
  }
  return AOTI_TORCH_SUCCESS;
}

#endif

AOTITorchError aoti_torch_cpu_packed_linear(AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle* bias,
                                            int64_t outputs, AtenTensorHandle* out) {
  int64_t dim = 0, *sizes = nullptr, *strides = nullptr, packed_dim = 0, *packed_sizes = nullptr, num_added = outputs;
  int32_t dtype = 0, packed_dtype = 0, added_dtype = aoti_torch_dtype_float32();
  bool contiguous = false;
  void *from = nullptr, *weights = nullptr, *added = nullptr, *to = nullptr;
  if (aoti_torch_get_dim(x, &dim) || dim < 1 || aoti_torch_get_sizes(x, &sizes) || aoti_torch_get_strides(x, &strides) ||
      aoti_torch_get_dtype(x, &dtype) || aoti_torch_get_dtype(packed, &packed_dtype) ||
      aoti_torch_get_dim(packed, &packed_dim) || aoti_torch_get_sizes(packed, &packed_sizes) ||
      aoti_torch_get_data_ptr(x, &from) || aoti_torch_get_data_ptr(packed, &weights) ||
      aoti_torch_is_contiguous(packed, &contiguous) || !contiguous || packed_dim < 3 ||
      (bias != nullptr && (aoti_torch_get_data_ptr(*bias, &added) || aoti_torch_get_numel(*bias, &num_added) ||
                           aoti_torch_get_dtype(*bias, &added_dtype)))) {
    return AOTI_TORCH_FAILURE;
  }
  const bool quantized = packed_dtype == aoti_torch_dtype_uint8(), wide = dtype == aoti_torch_dtype_float32();
  if (num_added != outputs || added_dtype != aoti_torch_dtype_float32() ||
      !(dtype == aoti_torch_dtype_bfloat16() || (quantized && wide)) ||
      !(quantized || packed_dtype == aoti_torch_dtype_bfloat16()) ||
      !holds(packed_sizes, outputs, sizes[dim - 1], quantized)) {
    return AOTI_TORCH_FAILURE;
  }
  try {
    std::vector<int64_t> shape(sizes, sizes + dim), stride(dim, 1);
    const int64_t k = shape.back();
    shape.back() = outputs;
    int64_t rows = 1, between = k;  // rows of x, and values from one to the next: x may be columns of a wider product
    for (int64_t i = dim - 1; i > 0; --i) stride[i - 1] = stride[i] * shape[i];
    if (strides[dim - 1] != 1 && k > 1) return AOTI_TORCH_FAILURE;
    for (int64_t i = dim - 2; i >= 0; --i) {
      if (shape[i] != 1 && rows == 1) between = strides[i];
      if (shape[i] != 1 && strides[i] != between * rows) return AOTI_TORCH_FAILURE;
      rows *= shape[i];
    }
    if (aoti_torch_empty_strided(dim, shape.data(), stride.data(), dtype, aoti_torch_device_type_cpu(), 0, out) ||
        aoti_torch_get_data_ptr(*out, &to)) {
      return AOTI_TORCH_FAILURE;
    }
    const int64_t value_bytes = wide ? 4 : 2;
    int64_t step_bytes = quantized ? 1 : 2;
    for (int64_t i = 2; i < packed_dim; ++i) step_bytes *= packed_sizes[i];
    if (!paceline_linear(from, value_bytes, between, static_cast<const uint8_t*>(weights), step_bytes,
                         static_cast<const float*>(added), to, rows, outputs, k)) {
      return AOTI_TORCH_FAILURE;
    }
  } catch (const std::bad_alloc&) {
    return AOTI_TORCH_FAILURE;
  }
  return AOTI_TORCH_SUCCESS;
}

}  // extern "C"
#pragma GCC visibility pop
