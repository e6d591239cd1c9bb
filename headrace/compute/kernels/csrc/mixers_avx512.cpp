// Mixers for level avx512 and those above: states are float32, which bfloat16 pairs and tiles do not multiply.
#if defined(__x86_64__)
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include <type_traits>
#include <utility>

#include "mixers.h"
#include "operations.h"
#include "team.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include <immintrin.h>
#define HEADRACE_SHORT_PAIRS(a, b) _mm512_madd_epi16((__m512i)(a), (__m512i)(b))

#define LANES 16

namespace headrace {
namespace {
#include "vectors.h"
#include "elementwise.h"
#include "matrix.h"
#include "recurrent.h"
}  // namespace

void mix_avx512(const Mix &a) { mix(a); }
}  // namespace headrace

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
