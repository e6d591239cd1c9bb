// Level generic: what every machine of this architecture has (SSE2, NEON): the compiler's baseline.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include <type_traits>
#include <utility>

#include "operations.h"
#include "team.h"

#define LANES 4

namespace headrace {
#include "level.h"

const Operations generic_operations = {embed, norm, rope_write_kv, gated_activation, gate_heads, weigh, attention, latent, linear, linear_gate, linear_rope, quantized_linear, route, experts, choose, guess, likeliest_outputs, screen, adapt, mix_generic, ADAPTER_ROWS, PANEL};
}  // namespace headrace
