// Mixers for level avx2.
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
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include <immintrin.h>
#define HEADRACE_SHORT_PAIRS(a, b) _mm256_madd_epi16((__m256i)(a), (__m256i)(b))

#define LANES 8

namespace headrace {
namespace {
#include "vectors.h"
#include "elementwise.h"
#include "matrix.h"
#include "recurrent.h"
}  // namespace

void mix_avx2(const Mix &a) { mix(a); }
}  // namespace headrace

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
