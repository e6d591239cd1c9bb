// Level avx2: x86-64-v3: Haswell (2013), Zen.
#if defined(__x86_64__)
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include <type_traits>
#include <utility>

#include "operations.h"
#include "team.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include <immintrin.h>
#define HEADRACE_SHORT_PAIRS(a, b) _mm256_madd_epi16((__m256i)(a), (__m256i)(b))
#define HEADRACE_BYTE_PAIRS

#define LANES 8

namespace headrace {
#include "level.h"

const Operations avx2_operations = {embed, norm, rope_write_kv, gated_activation, gate_heads, weigh, attention, latent, linear, linear_gate, linear_rope, quantized_linear, route, experts, choose, guess, likeliest_outputs, screen, adapt, mix_avx2, ADAPTER_ROWS, PANEL, CODED_REGISTER};
}  // namespace headrace

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
