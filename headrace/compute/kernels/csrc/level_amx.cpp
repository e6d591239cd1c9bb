// Level amx: as avx512_bf16, with products of tiles: Sapphire Rapids (2023).
#if defined(__x86_64__)
#if defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "target_avx512_bf16.h"
#define HEADRACE_TILES 1
#if !defined(HEADRACE_TILE_INSTRUCTIONS)
#define HEADRACE_TILE_INSTRUCTIONS "tile_instructions.h"
#endif

namespace headrace {
#include "level.h"

const Operations amx_operations = {embed, norm, rope_write_kv, gated_activation, gate_heads, weigh, attention, latent, linear, linear_gate, linear_rope, quantized_linear, route, experts, choose, guess, likeliest_outputs, screen, adapt, mix_avx512, ADAPTER_ROWS, PANEL};

bool amx_granted() { return tiles_granted(); }
}  // namespace headrace

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
