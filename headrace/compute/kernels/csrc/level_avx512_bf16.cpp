// Level avx512_bf16: with products of bfloat16 pairs and of bytes: Cooper Lake (2020), Zen 4.
#if defined(__x86_64__)
#include "target_avx512_bf16.h"

namespace headrace {
#include "level.h"

const Operations avx512_bf16_operations = {embed, norm, rope_write_kv, gated_activation, gate_heads, weigh, attention, latent, linear, linear_gate, linear_rope, quantized_linear, route, experts, choose, guess, likeliest_outputs, screen, adapt, mix_avx512, ADAPTER_ROWS, PANEL, CODED_REGISTER};
}  // namespace headrace

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
