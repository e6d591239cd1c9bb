// The matrix product of linear layers: rows of activations, broadcast word by word, times a panel of weights. A word is a
// float32, or two bfloat16 of consecutive k (a pair), multiplied and summed in float32; attention multiplies the same
// words, of its pages. Rows of float32 also meet pairs: weights that bfloat16 holds exactly are read in half the bytes so.
//
//   FloatWords    row  x[k]                    column  w[k]                  float32 by float32
//   PairWords          x[2k] x[2k + 1]                 w[2k] w[2k + 1]       bfloat16 by bfloat16
//   NarrowWords        x[2k], x[2k + 1]                w[2k] w[2k + 1]       float32 by bfloat16
// Every element of the product is one chain of additions in the order of k, whatever the tiling: so
// a row's result does not depend on how many other rows share the call.

static const int ROWS = LANES == 16 ? 6 : 4;    // rows of the register tile, but see ROWS_OF
static const int VECTORS = LANES == 16 ? 4 : 2;  // vectors of columns of it
static const int PANEL = VECTORS * LANES;

// Words of weights that are multiplied at once: 16 KiB, so that a block and the next one stay in the first cache.
static const int64_t BLOCK_WORDS = 4096;

// As many where three tiles of rows or more meet a block and the first cache is small: sums are loaded and stored an eighth as often,
// and there is time to read words from the second cache. Fewer tiles need words faster than it gives them.
// See docs/decisions/cpu-kernels.md#blocks-of-weights-of-prompts.
static const int64_t DEEP_WORDS = 32768;

struct FloatWords {
  static const bool WHOLE = false;  // whether sums are whole numbers
  static const int FEATURES = 1, ROW_WORDS = 1;  // of a word of a column, and the words of a row that meet it
  struct Factor { Floats value; };
  HEADRACE_INLINE Factor column(const uint32_t *p) { return {load((const Single *)p)}; }
  HEADRACE_INLINE Factor row(const uint32_t *p) { return {(Floats)(Words{} + *p)}; }
  HEADRACE_INLINE Floats add(Floats sum, Factor a, Factor b) { return sum + a.value * b.value; }
};

// Columns of pairs that are multiplied in float32.
struct SplitWords {
  static const bool WHOLE = false;
  static const int FEATURES = 2;
  struct Factor { Floats even, odd; };
  HEADRACE_INLINE Factor of(Words w) { return {(Floats)(w << 16), (Floats)(w & 0xffff0000u)}; }
  HEADRACE_INLINE Factor column(const uint32_t *p) {
    Words w;
    __builtin_memcpy(&w, p, sizeof w);
    return of(w);
  }
  HEADRACE_INLINE Floats add(Floats sum, Factor a, Factor b) { return sum + a.even * b.even + a.odd * b.odd; }
};

#if defined(HEADRACE_BF16_PAIRS)
struct PairWords {
  static const bool WHOLE = false;
  static const int FEATURES = 2, ROW_WORDS = 1;
  struct Factor { __m512bh value; };
  HEADRACE_INLINE Factor of(Words w) { return {(__m512bh)w}; }
  HEADRACE_INLINE Factor column(const uint32_t *p) { return {(__m512bh)_mm512_loadu_si512(p)}; }
  HEADRACE_INLINE Factor row(const uint32_t *p) { return {(__m512bh)_mm512_set1_epi32((int)*p)}; }
  HEADRACE_INLINE Floats add(Floats sum, Factor a, Factor b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, a.value, b.value);
  }
};
#else
struct PairWords : SplitWords {
  static const int ROW_WORDS = 1;
  HEADRACE_INLINE Factor row(const uint32_t *p) { return of(Words{} + *p); }
};
#endif

// The product is that of FloatWords bit for bit, whose additions come in the same order.
struct NarrowWords : SplitWords {
  static const int ROW_WORDS = 2;
  HEADRACE_INLINE Factor row(const uint32_t *p) { return {(Floats)(Words{} + p[0]), (Floats)(Words{} + p[1])}; }
};

// Rows of the register tile of a kind. With sixteen registers those of float32 take twelve sums, two columns and a row. Eight sums are
// as many as the latency of an addition needs, so whatever delays one of them delays all.
template <class Kind>
static const int ROWS_OF = LANES == 8 && (std::is_same_v<Kind, FloatWords> || std::is_same_v<Kind, NarrowWords>) ? 6 : ROWS;

// Asks memory for a line that is wanted later, as near as it can be without being in the way of what is wanted now.
HEADRACE_INLINE void ask_for(const void *line) {
  if (by_second_cache) __builtin_prefetch(line, 0, 2);
  else __builtin_prefetch(line, 0, 3);
}

static const int64_t NEVER = INT64_MAX;  // steps

// What to ask memory for while tiles are computed: the next block of a panel, a row of it at every `turns`-th step that
// they take together, so that memory is as busy with the last tile as with the first. In order and into the first cache:
// there the prefetcher of the processor follows, and the first tile finds its weights as near as the others do; or, where
// that is better, from afar into the second cache, and from there a block later.
struct Ahead {
  const uint32_t *next;
  int64_t turns, turn;  // steps from row to row, steps left to the next one; NEVER: nothing
  bool deep = false;    // a block of DEEP_WORDS: only into the second cache, from which all tiles read it
  int64_t row_words = PANEL;
};

// Whether blocks are of DEEP_WORDS.
HEADRACE_INLINE bool deep_for(int64_t tiles) { return LANES == 16 && by_second_cache && tiles >= 3; }

// Words of a column that `tiles` meet at once. No more than there are: what is asked for ahead lies so far on, and further on than
// the next block it would leave out the begin of what a thread comes to.
HEADRACE_INLINE int64_t block_depth(int64_t tiles, int64_t depth) {
  const int64_t most = (deep_for(tiles) ? DEEP_WORDS : BLOCK_WORDS) / PANEL;
  return depth < most ? depth : most;
}

// What to ask for from `next` on, in as many steps as `tiles` meet a block. One tile alone takes words as fast as they come, and the
// processor's own prefetcher follows it: where the second cache is asked, requests beside it take places that its loads need.
HEADRACE_INLINE Ahead ahead_of_tiles(const uint32_t *next, int64_t tiles, bool deep = false) {
  return {next, tiles, by_second_cache && tiles == 1 ? NEVER : 0, deep};
}

HEADRACE_INLINE void fetch(Ahead &ahead) {
  if (ahead.turn-- != 0) return;
  ahead.turn = ahead.turns - 1;
#pragma GCC unroll 8
  for (int i = 0; i < PANEL; i += 16) {
    if (ahead.deep) {
      __builtin_prefetch(ahead.next + i, 0, 2);
      continue;
    }
    if (by_second_cache) __builtin_prefetch(ahead.next + BLOCK_WORDS + i, 0, 2);
    __builtin_prefetch(ahead.next + i, 0, 3);
  }
  ahead.next += ahead.row_words;
}

// The same for one step or more; returns for how many. AVX2 multiplies so few elements at once that asking at each step whether to
// fetch takes a sixth of a tile's instructions.
HEADRACE_INLINE int64_t fetch_for(Ahead &ahead, int64_t most) {
  const int64_t steps = LANES == 8 ? (ahead.turn ? ahead.turn : ahead.turns) : 1, count = steps < most ? steps : most;
  fetch(ahead);
  ahead.turn -= count - 1;
  return count;
}

// What tiles are made of: sums of M rows and NV vectors of columns, which stay in registers.
template <int M, int NV>
HEADRACE_INLINE void load_sums(Floats (&sum)[M][NV], const float *c, int64_t stride, bool accumulate) {
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int i = 0; i < NV; i++) sum[m][i] = accumulate ? load((const Single *)(c + m * stride + i * LANES)) : Floats{};
}

template <int M, int NV>
HEADRACE_INLINE void store_sums(const Floats (&sum)[M][NV], float *c, int64_t stride) {
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int i = 0; i < NV; i++) store((Single *)(c + m * stride + i * LANES), sum[m][i]);
}

// ROW_WORDS of each row, `stride` apart, times the columns.
template <class Kind, int M, int NV>
HEADRACE_INLINE void add_products(Floats (&sum)[M][NV], const uint32_t *rows, int64_t stride,
                                  const typename Kind::Factor (&column)[NV]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) {
    const typename Kind::Factor row = Kind::row(rows + m * stride);
#pragma GCC unroll 8
    for (int i = 0; i < NV; i++) sum[m][i] = Kind::add(sum[m][i], row, column[i]);
  }
}

// The same for the factors that factor(i) gives.
template <class Kind, int M, int NV, class Factor>
HEADRACE_INLINE void add_factors(Floats (&sum)[M][NV], const uint32_t *rows, int64_t stride, Factor factor) {
  typename Kind::Factor factors[NV];
#pragma GCC unroll 8
  for (int i = 0; i < NV; i++) factors[i] = factor(i);
  add_products<Kind>(sum, rows, stride, factors);
}

#if LANES >= 8
// The same for vectors of float32 that column(i) gives, in the order written, so that a tile fits the registers: of sixteen, twelve
// sums and three rows for a column, or twelve sums and two columns for a row. gcc would load all first, and move sums to memory
// for them.
template <int M, int NV, class Column>
HEADRACE_INLINE void add_in_order(Floats (&sum)[M][NV], const uint32_t *rows, int64_t stride, Column column) {
  const auto row_of = [&](int m) __attribute__((always_inline)) {
    Floats row;
    asm volatile("vbroadcastss %1, %0" : "=v"(row) : "m"(rows[m * stride]));
    return row;
  };
  const auto add = [](Floats to, Floats a, Floats b) __attribute__((always_inline)) {  // of a reference, sums would be in memory
    asm volatile("vfmadd231ps %1, %2, %0" : "+v"(to) : "v"(a), "v"(b));
    return to;
  };
  if constexpr (M < NV) {
    Floats row[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) row[m] = row_of(m);
#pragma GCC unroll 8
    for (int i = 0; i < NV; i++) {
      const Floats factor = column(i);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) sum[m][i] = add(sum[m][i], row[m], factor);
    }
  } else {
    Floats factors[NV];
#pragma GCC unroll 8
    for (int i = 0; i < NV; i++) factors[i] = column(i);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const Floats row = row_of(m);
#pragma GCC unroll 8
      for (int i = 0; i < NV; i++) sum[m][i] = add(sum[m][i], row, factors[i]);
    }
  }
}

HEADRACE_INLINE Words load_in_order(const uint32_t *p) {
  Words w;
  asm volatile("vmovups %1, %0" : "=v"(w) : "m"(*(const uint32_t(*)[LANES])p));
  return w;
}

// The same for the even or the odd elements of narrow words, of which words(i) gives a vector.
template <bool ODD, int M, int NV, class At>
HEADRACE_INLINE void add_elements(Floats (&sum)[M][NV], const uint32_t *rows, int64_t stride, At words) {
  alignas(4 * LANES) static const Words high = Words{} + 0xffff0000u;  // in memory: no register is left for it
  add_in_order(sum, rows + ODD, stride, [&](int i) __attribute__((always_inline)) {
    const Words both = words(i);
    Floats element;
    if (ODD) asm volatile("vandps %1, %2, %0" : "=v"(element) : "m"(high), "v"(both));
    else asm volatile("vpslld $16, %1, %0" : "=v"(element) : "v"(both));
    return element;
  });
}
#endif

// ROW_WORDS of each row, `stride` apart, times columns that column(i) points to.
template <class Kind, int M, int NV, class Column>
HEADRACE_INLINE void add_columns(Floats (&sum)[M][NV], const uint32_t *rows, int64_t stride, Column column) {
#if LANES >= 8
  const auto words = [&](int i) __attribute__((always_inline)) { return load_in_order(column(i)); };
  if constexpr (std::is_same_v<Kind, NarrowWords>) {
    add_elements<false>(sum, rows, stride, words);
    return add_elements<true>(sum, rows, stride, words);  // loads them again: kept, they would take registers of sums
  }
  if constexpr (LANES == 8 && std::is_same_v<Kind, FloatWords> && M < NV)
    return add_in_order(sum, rows, stride, [&](int i) __attribute__((always_inline)) { return (Floats)words(i); });
#endif
  add_factors<Kind>(sum, rows, stride, [&](int i) __attribute__((always_inline)) { return Kind::column(column(i)); });
}

// c[m, 0:PANEL] (+)= a[m, 0:depth] b[0:depth, 0:PANEL], for M rows, of ROW_WORDS for each of b. Returns what is left to fetch.
// Not inlined: sums would leave their registers.
template <class Kind, int M>
__attribute__((noinline)) static Ahead multiply_tile(const uint32_t *a, int64_t a_stride, const uint32_t *b, int64_t depth,
                                                     float *c, bool accumulate, Ahead ahead) {
  Floats sum[M][VECTORS];
  load_sums(sum, c, PANEL, accumulate);
  for (int64_t k = 0; k < depth;) {
    for (const int64_t stop = k + fetch_for(ahead, depth - k); k < stop; k++, b += PANEL) {
      add_columns<Kind>(sum, a + k * Kind::ROW_WORDS, a_stride, [&](int i) { return b + i * LANES; });
    }
  }
  store_sums(sum, c, PANEL);
  return ahead;
}

// Calls tile(count, first) over [0, rows), at most `most` at once, `count` as a std::integral_constant. Tiles are as even
// as they come: one of a row or two has too few sums to hide how long an addition takes.
template <int most, class Tile>
HEADRACE_INLINE void in_tiles(int64_t rows, Tile tile) {
  static_assert(most <= 6, "a case for each");
  for (int64_t first = 0, tiles = (rows + most - 1) / most; tiles > 0; tiles--) {
    const int64_t count = (rows - first + tiles - 1) / tiles;
    switch (count) {
      case 6: if constexpr (most > 5) tile(std::integral_constant<int, 6>{}, first); break;
      case 5: if constexpr (most > 4) tile(std::integral_constant<int, 5>{}, first); break;
      case 4: if constexpr (most > 3) tile(std::integral_constant<int, 4>{}, first); break;
      case 3: if constexpr (most > 2) tile(std::integral_constant<int, 3>{}, first); break;
      case 2: if constexpr (most > 1) tile(std::integral_constant<int, 2>{}, first); break;
      case 1: tile(std::integral_constant<int, 1>{}, first); break;
    }
    first += count;
  }
}

// Tiles that cover `rows`.
template <class Kind>
HEADRACE_INLINE int64_t tiles_of(int64_t rows) {
  return (rows + ROWS_OF<Kind> - 1) / ROWS_OF<Kind>;
}

// As multiply_tile, for any number of rows.
template <class Kind>
static void multiply_rows(const uint32_t *a, int64_t a_stride, const uint32_t *b, int64_t depth, float *c, int64_t rows,
                          bool accumulate, Ahead ahead) {
  in_tiles<ROWS_OF<Kind>>(rows, [&](auto count, int64_t row) {
    ahead = multiply_tile<Kind, count()>(a + row * a_stride, a_stride, b, depth, c + row * PANEL, accumulate, ahead);
  });
}

static const int64_t BLOCK_DEPTH = BLOCK_WORDS / PANEL;
#if defined(HEADRACE_TILES)
static const int64_t BLOCK_ROWS = 192;  // so quick that weights must be read for more of them
#else
static const int64_t BLOCK_ROWS = 96;
#endif
