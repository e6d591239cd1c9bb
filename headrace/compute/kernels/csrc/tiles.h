// Products on tiles (AMX): one instruction multiplies 16 rows by 16 words of 16 columns. What it reads are the words that
// the other levels multiply, where they lie: rows of activations, `TILE` words of each, and panels of weights.
//
//        4: activations                5: weights                 0, 1, 2, 3: sums, a panel wide
//        rows x 16 words               16 words x 16 columns      rows x 16 columns each
//
// Loading a tile of weights anew does not wait for those before it: the processor renames tiles.
//
// A result is one chain of additions in the order of k for as long as it stays with these kernels: 32 products of
// bfloat16 are summed by the instruction in an order of its own, the same for every row. So a row's result depends on no
// other here either, as long as no other instruction takes its place for few rows. Sums of bytes are exact.

static const int TILE = 16;  // rows of a tile, and words of each
static_assert(PANEL == 4 * TILE, "sums of a panel are four tiles");
static const int64_t TILE_WORDS = 4096 / PANEL;  // of a panel that several tiles of rows meet: 16 KiB, near all of them

struct alignas(64) TileShapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// Tiles of at most TILE rows, those of what is multiplied with them (5 to 7) of TILE.
HEADRACE_INLINE TileShapes tile_shapes(int64_t rows) {
  TileShapes shapes = {};
  shapes.palette = 1;
  for (int i = 0; i < 8; i++) {
    shapes.row_bytes[i] = TILE * 4;
    shapes.rows[i] = i < 5 && rows < TILE ? (uint8_t)rows : TILE;
  }
  return shapes;
}

#include HEADRACE_TILE_INSTRUCTIONS

// Until end_tiles this thread's tiles have at most `rows` rows.
HEADRACE_INLINE void begin_tiles(int64_t rows) { use_shapes(tile_shapes(rows)); }

// Calls body(tile), as a constant, for the first N tiles.
template <int N, class Body>
HEADRACE_INLINE void each_tile(Body body) {
  static_assert(N == 2 || N == 4, "a case for each");
  body(std::integral_constant<int, 0>{});
  body(std::integral_constant<int, 1>{});
  if constexpr (N == 4) {
    body(std::integral_constant<int, 2>{});
    body(std::integral_constant<int, 3>{});
  }
}

// The first N tiles are sums, side by side; `stride` in elements.
template <int N>
HEADRACE_INLINE void clear_sums() {
  each_tile<N>([](auto i) { clear_tile<i()>(); });
}

template <int N, class T>
HEADRACE_INLINE void load_sums(const T *sums, int64_t stride) {
  each_tile<N>([&](auto i) { load_tile<i()>(sums + i() * TILE, stride * 4); });
}

template <int N, class T>
HEADRACE_INLINE void store_sums(T *sums, int64_t stride) {
  each_tile<N>([&](auto i) { store_tile<i()>(sums + i() * TILE, stride * 4); });
}

// What to ask memory for while tiles are computed: some lines of the cache after each of the four products of a step, so
// that rows from the second cache need not queue behind them. Into the first cache for one tile of rows; for several only
// into the second, since the first is busy bringing rows.
struct LinesAhead {
  const char *next;
  int64_t lines;  // 0: nothing
  bool first_cache;

  LinesAhead(const uint32_t *b, int64_t tiles)
      : next((const char *)b + (tiles == 1 ? 16 << 10 : 64 << 10)), lines((TILE * PANEL / 16 / 4 + tiles - 1) / tiles),
        first_cache(tiles == 1) {}
};

HEADRACE_INLINE void fetch(LinesAhead &ahead) {
  if (ahead.first_cache)
    for (int64_t i = 0; i < ahead.lines; i++) __builtin_prefetch(ahead.next + i * 64, 0, 3);
  else
    for (int64_t i = 0; i < ahead.lines; i++) __builtin_prefetch(ahead.next + i * 64, 0, 2);
  ahead.next += ahead.lines * 64;
}

// sums [rows of a tile, PANEL] (+)= a [, words] times b [words, PANEL]; words are a multiple of TILE.
template <class Kind>
HEADRACE_INLINE void multiply_tile_of_rows(const uint32_t *a, int64_t a_stride, const uint32_t *b, int64_t words,
                                           uint32_t *sums, bool accumulate, LinesAhead &ahead) {
  if (accumulate) load_sums<4>(sums, PANEL);
  else clear_sums<4>();
  for (int64_t k = 0; k < words; k += TILE, b += TILE * PANEL) {
    load_tile<4>(a + k, a_stride * 4);
    each_tile<4>([&](auto i) {
      load_tile<5>(b + i() * TILE, PANEL * 4);
      Kind::template add<i(), 4, 5>();
      fetch(ahead);
    });
  }
  store_sums<4>(sums, PANEL);
}

// The same for two tiles of rows, `below` and the one above it, half a panel after the other: four loads for four products,
// where one tile takes five.
template <class Kind>
HEADRACE_INLINE void multiply_two_tiles_of_rows(const uint32_t *above, const uint32_t *below, int64_t a_stride,
                                                const uint32_t *b, int64_t words, uint32_t *sums, bool accumulate,
                                                LinesAhead &ahead) {
  uint32_t *sums_below = sums + TILE * PANEL;
  for (int half = 0; half < 2; half++, b += PANEL / 2, sums += PANEL / 2, sums_below += PANEL / 2) {
    if (accumulate) {
      load_tile<0>(sums, PANEL * 4);
      load_tile<1>(sums + TILE, PANEL * 4);
      load_tile<2>(sums_below, PANEL * 4);
      load_tile<3>(sums_below + TILE, PANEL * 4);
    } else {
      clear_sums<4>();
    }
    for (int64_t k = 0; k < words; k += TILE) {
      load_tile<6>(b + k * PANEL, PANEL * 4);
      load_tile<4>(above + k, a_stride * 4);
      Kind::template add<0, 4, 6>();
      fetch(ahead);
      load_tile<7>(b + k * PANEL + TILE, PANEL * 4);
      Kind::template add<1, 4, 7>();
      fetch(ahead);
      load_tile<5>(below + k, a_stride * 4);
      Kind::template add<2, 5, 6>();
      fetch(ahead);
      Kind::template add<3, 5, 7>();
      fetch(ahead);
    }
    store_tile<0>(sums, PANEL * 4);
    store_tile<1>(sums + TILE, PANEL * 4);
    store_tile<2>(sums_below, PANEL * 4);
    store_tile<3>(sums_below + TILE, PANEL * 4);
  }
}

// Products of rows [rows, words] with a panel of `words`, of which `weights(first, count)` says where some lie. When those
// of some rows are complete, take(row, count, products [count, PANEL]) is called. Where rows are more than a tile and no
// multiple, the last tile begins early and computes some again. `most_words` are met at once, by all rows before the next.
// Between begin_tiles(rows) and end_tiles. IN_MEMORY: weights are where they always lie, with those that follow behind them.
template <class Kind, bool IN_MEMORY, class Weights, class Take>
HEADRACE_INLINE void multiply_on_tiles(const uint32_t *a, int64_t a_stride, int64_t words, int64_t rows, int64_t most_words,
                                       Weights weights, Take take) {
  alignas(64) uint32_t sums[BLOCK_ROWS * PANEL];
  const int64_t tiles = (rows + TILE - 1) / TILE;
  const bool at_once = words <= most_words && words % TILE == 0;  // then the sums of one step are enough
  for (int64_t k = 0, count; k < words; k += count) {
    const int64_t some = words - k < most_words ? words - k : most_words;
    count = some < TILE ? some : some / TILE * TILE;
    const uint32_t *b = weights(k, count);
    LinesAhead ahead(b, tiles);
    if (!IN_MEMORY) ahead.lines = 0;
    alignas(64) uint32_t last_a[TILE * TILE], last_b[TILE * PANEL];  // with zeros for what is missing of a tile
    if (count < TILE) {
      __builtin_memset(last_a, 0, sizeof last_a);
      __builtin_memset(last_b, 0, sizeof last_b);
      __builtin_memcpy(last_b, b, count * PANEL * 4);
    }
    const auto first_of = [&](int64_t tile) { return tile + 1 < tiles ? tile * TILE : rows < TILE ? 0 : rows - TILE; };
    for (int64_t t = 0, step; t < tiles; t += step) {
      step = count < TILE || t + 1 == tiles ? 1 : 2;
      uint32_t *tile_sums = sums + (at_once ? 0 : t * TILE * PANEL);
      if (count < TILE) {
        for (int64_t m = 0; m < TILE && m < rows; m++)
          __builtin_memcpy(last_a + m * TILE, a + (first_of(t) + m) * a_stride + k, count * 4);
        multiply_tile_of_rows<Kind>(last_a, TILE, last_b, TILE, tile_sums, k > 0, ahead);
      } else if (step == 1) {
        multiply_tile_of_rows<Kind>(a + first_of(t) * a_stride + k, a_stride, b, count, tile_sums, k > 0, ahead);
      } else {
        multiply_two_tiles_of_rows<Kind>(a + first_of(t) * a_stride + k, a + first_of(t + 1) * a_stride + k, a_stride, b,
                                         count, tile_sums, k > 0, ahead);
      }
      if (k + count < words) continue;
      for (int64_t i = t; i < t + step; i++, tile_sums += TILE * PANEL) {
        const int64_t fresh = i * TILE;
        take(fresh, rows - fresh < TILE ? rows - fresh : TILE, tile_sums + (fresh - first_of(i)) * PANEL);
      }
    }
  }
}
