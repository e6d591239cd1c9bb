// Level amx: as avx512_bf16, with products of tiles: Sapphire Rapids (2023).
#if defined(__x86_64__)
#if defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "target_avx512_bf16.h"
#define HEADRACE_TILES 1

namespace headrace {
#include "level.h"

const Operations amx_operations = {embed, norm, rope_write_kv, gated_activation, attention, linear, linear_gate, linear_rope, quantized_linear, choose, PANEL};

// The kernel saves tiles only for processes that have asked for them.
bool amx_granted() {
#if defined(__linux__)
  unsigned a, b, c, d, low, high;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const unsigned bf16 = 1u << 22, tiles = 1u << 24, bytes = 1u << 25, wanted = bf16 | tiles | bytes;
  if ((d & wanted) != wanted) return false;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  const unsigned state = 3u << 17;  // XTILECFG and XTILEDATA
  if ((low & state) != state) return false;
  const long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}
}  // namespace headrace

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
