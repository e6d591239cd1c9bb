// Each instruction on tiles as a function, and nothing else, so that tests can put arithmetic in their place where no
// processor has them. Included by `tiles.h`, which says what a TileShapes is.

HEADRACE_INLINE void use_shapes(const TileShapes &shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }

HEADRACE_INLINE void end_tiles() { asm volatile("tilerelease"); }

template <int N>
HEADRACE_INLINE void clear_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(N)); }

// `stride`: bytes from row to row.
template <int N>
HEADRACE_INLINE void load_tile(const void *p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(N) : "memory");
}

template <int N>
HEADRACE_INLINE void store_tile(void *p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(N) : "memory");
}

struct PairTiles {
  template <int SUM, int A, int B>
  HEADRACE_INLINE void add() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B)); }
};

struct ByteTiles {  // signed activations, unsigned weights, sums of int32
  template <int SUM, int A, int B>
  HEADRACE_INLINE void add() { asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B)); }
};

// Whether this processor has tiles, and the system saves them for this process: only for one that has asked for it.
static bool tiles_granted() {
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
