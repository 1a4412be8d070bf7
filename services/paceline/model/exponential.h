// The exponential function of vectors. For native.cpp and linear.cpp.

#pragma once

#include <immintrin.h>

namespace paceline {

// 2^x within 2e-7 relative; 0 below -126. NaN stays.
inline __m512 exp2(__m512 x) {
  const __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  x = _mm512_min_ps(_mm512_set1_ps(200.0f), x);
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(1.54035304e-4f);
  for (const float c : {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f}) {
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  }
  return _mm512_maskz_mov_ps(some, _mm512_scalef_ps(p, n));
}

}  // namespace paceline
