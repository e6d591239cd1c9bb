// Level avx512_vnni: with products of bytes, and of bfloat16 in float32: Cascade Lake (2019), Ice Lake.
#if defined(__x86_64__)
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include <type_traits>
#include <utility>

#include "operations.h"
#include "team.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#endif

#include <immintrin.h>
#define HEADRACE_BYTE_PRODUCTS 1

#define LANES 16

namespace headrace {
#include "level.h"

const Operations avx512_vnni_operations = {embed, norm, rope_write_kv, gated_activation, gate_heads, weigh, attention, latent, linear, linear_gate, linear_rope, quantized_linear, route, experts, choose, guess, likeliest_outputs, screen, adapt, mix_avx512, ADAPTER_ROWS, PANEL, CODED_REGISTER};
}  // namespace headrace

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
