// Linear layers whose weights have 8 or 4 bits: products of integers, exact until a span of them is scaled.
//
// Activations are rounded per token to integers of as many bytes as they need: one (8-bit activations) in steps of
// max / 127; two (bfloat16) of max / 32639; three (float32) of max / 4194303. An integer that one factor of a product
// cannot hold is cut into planes, and a token of p planes is p rows of one product: where bytes are multiplied, a plane is
// a byte; elsewhere shorts are, and a plane holds two bytes. So activations of 16 bits need no weights turned into floats:
// two byte products cost what one of bfloat16 costs. They move an activation by at most max / 65278, and so an output by
// less than rounding it to bfloat16 does wherever the largest activations count.
//
// Weights are unsigned, value + 2^(bits - 1), so that they can be the unsigned factor of vpdpbusd. What that and the zero
// points add is taken off through the sum of a token's activations. Codes of fp4 become such integers as they are unpacked.
// Panels are [words][PANEL] of 4 bytes: 4 inputs of an output, or 8 in halves, the second 4 in the upper ones. A group of
// inputs with its own scale is padded to 8. Integers are summed over a span, which lies within a group and begins at a fixed
// place, and then scaled into float32: a row's result does not depend on the others.

#if defined(HEADRACE_TILES)
static const int64_t SPAN = 256;  // words of a product: so many that scaling its sums costs little beside it
#else
static const int64_t SPAN = 64;  // words of a product: of a panel 16 KiB on AVX-512, which stay in the first cache
#endif
static const int UNPACKED = 0;   // "bits" of weights that are words of the product already

// Twice the values of e2m1, plus FP4_MIDDLE, from codes where ONES has a 1. The sign of a code is its highest bit; of the
// rest, up to 3 is the double itself, and 4 to 7 stand for 4, 6, 8 and 12.
static const int FP4_MIDDLE = 12;

template <uint32_t ONES>
HEADRACE_INLINE Words fp4_integers(Words codes) {
#if LANES >= 8
  const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
#endif
#if LANES == 16
  return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)codes) & ONES * 255;
#elif LANES == 8
  const Words integers = (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)codes);
  return ONES == 0x01010101u ? integers : integers & ONES * 255;
#else
  const Words low = codes & ONES * 3, high = (codes >> 2 & ONES) * 15, sign = (codes >> 3 & ONES) * 15;
  const Words size = low + (high & (ONES * 4 + low + ((low & low >> 1 & ONES) << 1)));
  return ONES * FP4_MIDDLE + size - ((size & sign) << 1);
#endif
}

// A word of the product holds INPUTS activations of a token, or weights of an output; a packed word of weights holds
// several such.
#if defined(HEADRACE_BYTE_PRODUCTS)
struct Product {
  typedef int8_t Integer;
  static const int INPUTS = 4, PLANE_BITS = 8;
  static constexpr int planes(int bytes) { return bytes; }

  template <int BITS>
  HEADRACE_INLINE Words unpack(Words packed, int part) {
    if (BITS == 8) return packed;
    const Words halves = packed >> 4 * part & 0x0f0f0f0fu;
    return BITS == FP4 ? fp4_integers<0x01010101u>(halves) : halves;
  }
  HEADRACE_INLINE Ints add(Ints sum, Words row, Words column) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)column, (__m512i)row);
  }
  // Writes `count` integers of a vector as rows hold them, and what is missing of four.
  HEADRACE_INLINE void keep(Integer *out, Ints v, int count) {
    const Bytes some = __builtin_convertvector(v, Bytes);
    if (count == LANES) __builtin_memcpy(out, &some, sizeof some);
    else __builtin_memcpy(out, &some, (count + 3) & ~3);
  }
};
#else
struct Product {
  typedef int16_t Integer;
  static const int INPUTS = 2, PLANE_BITS = 11;
  static constexpr int planes(int bytes) { return (bytes + 1) / 2; }

  // Of four bytes, or halves, the first and third make a word, and then the others.
  template <int BITS>
  HEADRACE_INLINE Words unpack(Words packed, int part) {
    if (BITS == 8) return packed >> 8 * part & 0x00ff00ffu;
    const Words halves = packed >> (4 * (part / 2) + 8 * (part % 2)) & 0x000f000fu;
    return BITS == FP4 ? fp4_integers<0x00010001u>(halves) : halves;
  }
  HEADRACE_INLINE Ints add(Ints sum, Words row, Words column) {
#if defined(HEADRACE_SHORT_PAIRS)
    return sum + (Ints)HEADRACE_SHORT_PAIRS(row, column);
#else
    const Ints x = (Ints)row, y = (Ints)column;
    return sum + (x >> 16) * (y >> 16) + ((x << 16) >> 16) * ((y << 16) >> 16);
#endif
  }
  template <int... I>
  HEADRACE_INLINE Ints in_order(Ints v, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(v, v, ((I & ~3) | (I & 1) << 1 | (I & 2) >> 1)...);
#else
    return __builtin_shuffle(v, Ints{((I & ~3) | (I & 1) << 1 | (I & 2) >> 1)...});
#endif
  }
  // Writes `count` integers of a vector as rows hold them, and what is missing of four.
  HEADRACE_INLINE void keep(Integer *out, Ints v, int count) {
    typedef Integer Some __attribute__((vector_size(2 * LANES)));
    const Some some = __builtin_convertvector(in_order(v, std::make_integer_sequence<int, LANES>{}), Some);
    if (count == LANES) __builtin_memcpy(out, &some, sizeof some);
    else __builtin_memcpy(out, &some, ((count + 3) & ~3) * sizeof(Integer));
  }
};
#endif

static const int PLANE = 1 << Product::PLANE_BITS;  // how much more a plane counts than the next one

// How many words of the product a packed word holds.
template <int BITS>
static constexpr int PARTS = BITS == UNPACKED ? 1 : 32 / ((BITS == FP4 ? 4 : BITS) * Product::INPUTS);

HEADRACE_INLINE Words load_words(const uint32_t *p) { return (Words)load((const Single *)p); }

// A span's weights as words of the product, [words][PANEL]. Returns what is left to fetch.
template <int BITS>
static Ahead unpack_span(const uint32_t *b, int64_t words, uint32_t *out, Ahead ahead) {
  for (int64_t k = 0; k < words; k += PARTS<BITS>, b += PANEL) {
    fetch(ahead);
#pragma GCC unroll 4
    for (int part = 0; part < PARTS<BITS>; part++)
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS; i++, out += LANES)
        store((Single *)out, (Floats)Product::unpack<BITS>(load_words(b + i * LANES), part));
  }
  return ahead;
}

// Whether weights of different bits meet activations in the same form.
HEADRACE_INLINE bool same_form(int64_t bits, int64_t others) {
#if defined(HEADRACE_BYTE_PAIRS)
  return bits == others;
#else
  return true;
#endif
}

// What a group of a panel's weights stands for: (weight - offset) * scale, or weight * scale + minimum. Offsets are widened
// once for all tokens of a tile.
struct Grid {
  const float *scales, *minima;
  Floats offsets[VECTORS];  // where there are no minima
};

// `before`, the i-th vector of a token's sums, and what a span adds to it: `product(plane, vector)` in its group's grid.
template <int PLANES, class Products>
HEADRACE_INLINE Floats with_scaled(Floats before, Products product, int i, float total, const Grid &grid) {
  Floats whole = __builtin_convertvector(product(0, i), Floats);
#pragma GCC unroll 2
  for (int plane = 1; plane < PLANES; plane++) whole = whole * PLANE + __builtin_convertvector(product(plane, i), Floats);
  if (grid.minima) before += load((const Single *)(grid.minima + i * LANES)) * total;
  else whole -= grid.offsets[i] * total;
  return before + whole * load((const Single *)(grid.scales + i * LANES));
}

// A token's sums[0:PANEL] += products of a span.
template <int PLANES, class Products>
HEADRACE_INLINE void add_scaled(Products product, float total, const Grid &grid, float *sums) {
#pragma GCC unroll 8
  for (int i = 0; i < VECTORS; i++) {
    Single *target = (Single *)(sums + i * LANES);
    store(target, with_scaled<PLANES>(load(target), product, i, total, grid));
  }
}

// The activations of a call as planes of integers. Spans cut each group, so their number is that of all groups.
struct Planes {
  void *integers;   // Product::Integer [tokens, planes, words * INPUTS]
  float *totals;    // [tokens, spans]
  float *steps;     // [tokens]: what an integer of a token stands for
  int64_t words, group_words, group_spans, spans;
};

HEADRACE_INLINE int64_t span_words(const Planes &p, int64_t begin) {
  return p.group_words - begin < SPAN ? p.group_words - begin : SPAN;
}

// The first word of a span.
HEADRACE_INLINE int64_t word_of(const Planes &p, int64_t span) {
  return span / p.group_spans * p.group_words + span % p.group_spans * SPAN;
}

template <int BITS>
HEADRACE_INLINE Grid grid_at(const Quantized &a, int64_t place) {
  const float middle = BITS == FP4 ? FP4_MIDDLE : 1 << (BITS - 1);
  Grid grid = {a.scales + place, a.minima ? a.minima + place : nullptr, {}};
#pragma GCC unroll 4
  for (int i = 0; i < VECTORS; i++)
    grid.offsets[i] = a.offsets ? load_whole(a.offsets + place + i * LANES) : broadcast(middle);
  return grid;
}

template <int BITS>
HEADRACE_INLINE Grid grid_of(const Quantized &a, const Planes &p, int64_t panel, int64_t group) {
  return grid_at<BITS>(a, (panel * (p.spans / p.group_spans) + group) * PANEL);
}

// sum[m] += row m of `a` times words [0, words) of `b`. Returns what is left to fetch.
template <int BITS, int M>
HEADRACE_INLINE Ahead add_words(Ints (&sum)[M][VECTORS], const uint32_t *a, int64_t a_stride, const uint32_t *b, int64_t words,
                                Ahead ahead) {
  for (int64_t k = 0; k < words; k += PARTS<BITS>, b += PANEL) {
    fetch(ahead);
    Words packed[VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) packed[i] = load_words(b + i * LANES);
#pragma GCC unroll 4
    for (int part = 0; part < PARTS<BITS>; part++) {
      Words column[VECTORS];
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS; i++) {
        column[i] = packed[i];
        if constexpr (BITS != UNPACKED) column[i] = Product::unpack<BITS>(packed[i], part);
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const Words row = Words{} + a[m * a_stride + k + part];
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i++) sum[m][i] = Product::add(sum[m][i], row, column[i]);
      }
    }
  }
  return ahead;
}

// sums[t, 0:PANEL] += spans [begin, end) of a panel's weights, which begin at `b`, times TOKENS tokens from `first` on, whose
// planes are held in registers, and so are their sums if there are enough. UNPACKED words are those of weights of FROM bits.
// Returns what is left to fetch. A function of its own: within its callers' there are not enough registers, and the loop would
// keep sums in memory.
template <int BITS, int FROM, int TOKENS, int PLANES>
__attribute__((noinline)) static Ahead multiply_spans(const Quantized &a, const Planes &p, int64_t panel, int64_t begin,
                                                      int64_t end, const uint32_t *b, int64_t first, float *sums, Ahead ahead) {
  const int M = TOKENS * PLANES;
  const bool HELD = (M + TOKENS) * VECTORS <= (LANES == 16 ? 24 : 8);
  const uint32_t *const rows = (const uint32_t *)p.integers + first * PLANES * p.words;
  const float *const totals = p.totals + first * p.spans;
  Floats held[HELD ? TOKENS : 1][VECTORS];
  if constexpr (HELD) load_sums(held, sums, PANEL, true);
  int64_t group = begin / p.group_spans, part = begin % p.group_spans;
  for (int64_t span = begin; span < end; span++) {
    const int64_t words = span_words(p, part * SPAN);
    const Grid grid = grid_of<FROM>(a, p, panel, group);
    Ints sum[M][VECTORS];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS; i++) sum[m][i] = Ints{};
    ahead = add_words<BITS>(sum, rows + group * p.group_words + part * SPAN, p.words, b, words, ahead);
    b += words / PARTS<BITS> * PANEL;
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++) {
      const auto product = [&](int plane, int i) { return sum[t * PLANES + plane][i]; };
      const float total = totals[t * p.spans + span];
      if constexpr (HELD) {
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i++) held[t][i] = with_scaled<PLANES>(held[t][i], product, i, total, grid);
      } else {
        add_scaled<PLANES>(product, total, grid, sums + t * PANEL);
      }
    }
    if (++part == p.group_spans) part = 0, group++;
  }
  if constexpr (HELD) store_sums(held, sums, PANEL);
  return ahead;
}

// Of activations of one, two and three bytes; the last is where adding 1.5 * 2^23 still rounds.
static const float LIMITS[] = {127.0f, 32639.0f, 4194303.0f};

// Writes a token's activations as planes of integers, in steps of `divisor`.
template <int PLANES, class Form = Product>
HEADRACE_INLINE void keep_integers(const Quantized &a, const Planes &p, int64_t token, const float *x, float divisor) {
  typedef typename Form::Integer Integer;
  const int64_t width = p.words * Product::INPUTS;
  Integer *integers = (Integer *)((uint32_t *)p.integers + token * PLANES * p.words);
  for (int64_t span = 0; span < p.spans; span++) {
    const int64_t group = span / p.group_spans, begin = span % p.group_spans * SPAN * Product::INPUTS;
    const int64_t left = a.group_size - begin, count = left < SPAN * Product::INPUTS ? left : SPAN * Product::INPUTS;
    const float *from = x + group * a.group_size + begin;
    Integer *to = integers + group * p.group_words * Product::INPUTS + begin;
    Ints total = {};
    each_vector(count, [&](int64_t i, int lanes) {
      Ints q = rounded(load_at((const Single *)(from + i), lanes) / divisor);
      total += q;
      for (int plane = PLANES - 1; plane > 0; plane--) {
        const Ints rest = (q + PLANE / 2) >> Product::PLANE_BITS;
        Form::keep(to + plane * width + i, q - rest * PLANE, lanes);
        q = rest;
      }
      Form::keep(to + i, q, lanes);
    });
    p.totals[token * p.spans + span] = sum(__builtin_convertvector(total, Floats));
  }
}

#if defined(HEADRACE_BYTE_PAIRS)
#include "byte_pairs.h"
#else
template <int PLANES>
HEADRACE_INLINE void keep_token(const Quantized &a, const Planes &p, int64_t token, const float *x, float divisor) {
  keep_integers<PLANES>(a, p, token, x, divisor);
}
#endif

template <class T, int PLANES>
static void quantize_token(const Quantized &a, const Planes &p, int64_t token, float *x) {
  const T *source = (const T *)a.x + token * a.inputs;
  if (a.order)
    for (int64_t i = 0; i < a.inputs; i++) {
      T one[LANES] = {source[a.order[i]]};
      x[i] = load(one)[0];
    }
  Floats most = {}, faults = {};
  each_vector(a.inputs, [&](int64_t i, int lanes) {
    const Floats v = a.order ? load_at((const Single *)(x + i), lanes) : load_at(source + i, lanes);
    store_at((Single *)(x + i), v, lanes);
    most = maximum(most, absolute(v));
    faults += v - v;  // not a number where an activation is none, or infinite
  });
  const bool finite = sum(faults) == 0.0f;
  const float top = largest(most), step = finite ? top / LIMITS[a.planes - 1] : NAN;
  __builtin_memset((uint32_t *)p.integers + token * PLANES * p.words, 0, PLANES * p.words * 4);
  __builtin_memset(p.totals + token * p.spans, 0, p.spans * sizeof *p.totals);
  p.steps[token] = step;
  if (finite) keep_token<PLANES>(a, p, token, x, top > 0 ? step : 1.0f);
}

#if defined(HEADRACE_TILES)
static const int64_t FEW_HALVES = 8;

// Whether a product of a block is one of tiles: both ways are exact, and so equal. Few rows are quicker in registers while
// halves are unpacked, and groups that do not fill a tile. Three planes would lie across tiles.
template <int BITS, int PLANES>
HEADRACE_INLINE bool on_tiles(int64_t tokens, int64_t group_words) {
  return PLANES < 3 && group_words >= TILE && (BITS == 8 || tokens * PLANES > FEW_HALVES);
}
#endif

// Tokens times planes up to which each tile unpacks weights as it meets them. Where bytes are multiplied, this hides behind the
// products, and words that are unpacked once for all tiles would have to be stored.
#if defined(HEADRACE_BYTE_PRODUCTS)
static const int64_t PACKED_ROWS = BLOCK_ROWS;
#else
static const int64_t PACKED_ROWS = LANES == 16 ? 4 : 16;
#endif

// sums [tokens, PANEL] of a panel whose weights are multiplied as they are read.
template <int BITS, int PLANES>
static void multiply_packed(const Quantized &a, const Planes &p, int64_t panel, int64_t first, int64_t tokens, float *sums) {
  const int MOST = ROWS / PLANES;
  const int64_t tiles = (tokens + MOST - 1) / MOST;
  const uint32_t *const packed = (const uint32_t *)a.packed + panel * p.words / PARTS<BITS> * PANEL;
  // One tile meets all of the panel, and keeps its sums; several meet a block of it together.
  const int64_t near = BLOCK_WORDS * PARTS<BITS> / PANEL / (p.group_words < SPAN ? p.group_words : SPAN);
  const int64_t together = tiles == 1 ? p.spans : near > 1 ? near : 1;
  for (int64_t span = 0, end; span < p.spans; span = end) {
    end = span + together < p.spans ? span + together : p.spans;
    const auto words_at = [&](int64_t span) { return packed + word_of(p, span) / PARTS<BITS> * PANEL; };
    Ahead ahead = ahead_of_tiles(words_at(tiles == 1 ? span + 1 : end), tiles);
    in_tiles<MOST>(tokens, [&](auto count, int64_t token) {
      ahead = multiply_spans<BITS, BITS, decltype(count)::value, PLANES>(a, p, panel, span, end, words_at(span), first + token,
                                                                         sums + token * PANEL, ahead);
    });
  }
}

// The same where the words of a span are unpacked once for all tiles.
template <int BITS, int PLANES>
static void multiply_unpacked(const Quantized &a, const Planes &p, int64_t panel, int64_t first, int64_t tokens, float *sums) {
  const int MOST = ROWS / PLANES;
  const int64_t tiles = (tokens + MOST - 1) / MOST;
  const uint32_t *b = (const uint32_t *)a.packed + panel * p.words / PARTS<BITS> * PANEL;
  for (int64_t span = 0; span < p.spans; span++) {
    const int64_t words = span_words(p, span % p.group_spans * SPAN);
    const uint32_t *next = b + words / PARTS<BITS> * PANEL;
    uint32_t unpacked[SPAN * PANEL];
    Ahead ahead = unpack_span<BITS>(b, words, unpacked, {next, tiles * PARTS<BITS> + 1, 0});
    in_tiles<MOST>(tokens, [&](auto count, int64_t token) {
      ahead = multiply_spans<UNPACKED, BITS, decltype(count)::value, PLANES>(a, p, panel, span, span + 1, unpacked, first + token,
                                                                             sums + token * PANEL, ahead);
    });
    b = next;
  }
}

#if defined(HEADRACE_TILES)
// The same on tiles.
template <int BITS, int PLANES>
static void multiply_tiled(const Quantized &a, const Planes &p, int64_t panel, int64_t first, int64_t tokens, float *sums) {
  const uint32_t *b = (const uint32_t *)a.packed + panel * p.words / PARTS<BITS> * PANEL;
  begin_tiles(tokens * PLANES);
  for (int64_t span = 0; span < p.spans; span++) {
    const int64_t group = span / p.group_spans, words = span_words(p, span % p.group_spans * SPAN);
    const Grid grid = grid_of<BITS>(a, p, panel, group);
    const float *totals = p.totals + first * p.spans + span;
    uint32_t unpacked[TILE_WORDS * PANEL];
    multiply_on_tiles<ByteTiles, PARTS<BITS> == 1>(
        (const uint32_t *)p.integers + first * PLANES * p.words + word_of(p, span), p.words, words, tokens * PLANES,
        PARTS<BITS> == 1 && tokens * PLANES <= TILE ? words : TILE_WORDS,
        [&](int64_t first, int64_t count) {
          const uint32_t *some = b + first / PARTS<BITS> * PANEL;
          if constexpr (PARTS<BITS> == 1) return some;
          unpack_span<BITS>(some, count, unpacked, {some + count / PARTS<BITS> * PANEL, 1, 0});
          return (const uint32_t *)unpacked;
        },
        [&](int64_t row, int64_t count, const uint32_t *products) {
          const int64_t token = row / PLANES;
          for (int64_t t = 0; t < count / PLANES; t++)
            add_scaled<PLANES>(
                [&](int plane, int i) {
                  return (Ints)load((const Single *)(products + (t * PLANES + plane) * PANEL + i * LANES));
                },
                totals[(token + t) * p.spans], grid, sums + (token + t) * PANEL);
        });
    b += words / PARTS<BITS> * PANEL;
  }
  end_tiles();
}
#endif

// sums [tokens, PANEL] of a panel.
template <int BITS, int PLANES>
static void multiply_panel(const Quantized &a, const Planes &p, int64_t panel, int64_t first, int64_t tokens, float *sums) {
  __builtin_memset(sums, 0, tokens * PANEL * sizeof(float));
#if defined(HEADRACE_TILES)
  if (on_tiles<BITS, PLANES>(tokens, p.group_words)) return multiply_tiled<BITS, PLANES>(a, p, panel, first, tokens, sums);
#endif
#if defined(HEADRACE_BYTE_PAIRS)
  multiply_as_met<BITS, PLANES>(a, p, panel, first, tokens, sums);
#else
  if (PARTS<BITS> == 1 || tokens * PLANES <= PACKED_ROWS) multiply_packed<BITS, PLANES>(a, p, panel, first, tokens, sums);
  else multiply_unpacked<BITS, PLANES>(a, p, panel, first, tokens, sums);
#endif
}

template <class T, class Out>
static void write_panel(const Quantized &a, const Planes &p, int64_t panel, int64_t first, int64_t tokens, const float *sums, bool far) {
  const int64_t column = panel * PANEL, columns = a.outputs - column < PANEL ? a.outputs - column : PANEL;
  for (int64_t token = 0; token < tokens; token++) {
    Out *out = (Out *)a.out + (first + token) * a.outputs + column;
    const T *bias = a.bias ? (const T *)a.bias + column : nullptr;
    const auto result = [&](int64_t i, int lanes) {
      const Floats v = load((const Single *)(sums + token * PANEL + i)) * p.steps[first + token];
      return bias ? v + load_at(bias + i, lanes) : v;
    };
    store_columns<T>(out, columns, far, result);
  }
}

template <int BITS, int PLANES>
HEADRACE_INLINE void quantized_block(const Quantized &a, const Planes &p, int64_t panel, int64_t first, int64_t tokens, bool far = false) {
  float sums[BLOCK_ROWS * PANEL];
  multiply_panel<BITS, PLANES>(a, p, panel, first, tokens, sums);
  with_type(a.dtype, [&](auto t) {
    using T = decltype(t);
    if (a.wide) write_panel<T, Single>(a, p, panel, first, tokens, sums, far);
    else write_panel<T, T>(a, p, panel, first, tokens, sums, far);
  });
}

template <int BITS, int PLANES>
static void multiply_planes(const Quantized &a, const Planes &p, int threads) {
  const int64_t panels = (a.outputs + PANEL - 1) / PANEL, most = BLOCK_ROWS / PLANES, bytes = BLOCK_ROWS * p.words * 4;
  const bool far = a.wide && goes_far<Brain, Single>(a.out, a.count, a.outputs);
  each_block(panels, a.count, most, bytes, threads, far, [&](int64_t panel, int64_t first, int64_t tokens) {
    quantized_block<BITS, PLANES>(a, p, panel, first, tokens, far);
  });
}

// The sizes of the planes of a call, still without memory.
HEADRACE_INLINE Planes sizes_of_planes(int64_t inputs, int64_t group_size) {
  const int64_t groups = inputs / group_size;
  Planes p = {};
  p.group_words = (group_size + 7) / 8 * (8 / Product::INPUTS);
  p.words = groups * p.group_words;
  p.group_spans = (p.group_words + SPAN - 1) / SPAN;
  p.spans = groups * p.group_spans;
  return p;
}

// Words of memory that planes of `count` tokens take.
HEADRACE_INLINE int64_t words_of_planes(const Planes &p, int planes, int64_t count) {
  return count * (planes * p.words + p.spans + 1);
}

HEADRACE_INLINE void place_planes(Planes &p, int planes, int64_t count, uint32_t *memory) {
  p.integers = memory;
  p.totals = (float *)(memory + count * planes * p.words);
  p.steps = p.totals + count * p.spans;
}

// call(bits), as a constant.
template <class Call>
HEADRACE_INLINE void with_bits(int64_t bits, Call call) {
  if (bits == 8) call(std::integral_constant<int, 8>{});
  else if (bits == FP4 || bits == MXFP4) call(std::integral_constant<int, FP4>{});
  else call(std::integral_constant<int, 4>{});
}

template <int PLANES>
static int quantized_linear_of(const Quantized &a) {
  const int threads = threads_for(a.count * PLANES * a.inputs * a.outputs);
  Planes p = sizes_of_planes(a.inputs, a.group_size);
  const int64_t words = words_of_planes(p, PLANES, a.count);
  uint32_t *memory = (uint32_t *)malloc((size_t)(words + threads * a.inputs) * 4);
  if (!memory) return 0;
  place_planes(p, PLANES, a.count, memory);
  float *floats = (float *)(memory + words);
  const int quantizing = a.count * a.inputs > PARALLEL_ELEMENTS ? threads : 1;
  share(a.count, tasks_at_once(a.count, quantizing), quantizing, [&](int64_t token, int64_t end, int64_t member) {
    with_type(a.dtype, [&](auto t) {
      for (; token < end; token++) quantize_token<decltype(t), PLANES>(a, p, token, floats + member * a.inputs);
    });
  });
  with_bits(a.bits, [&](auto bits) { multiply_planes<decltype(bits)::value, PLANES>(a, p, threads); });
  free(memory);
  return 1;
}

// call(planes) with the number of planes that activations of `bytes` have, as a constant.
template <class Call>
HEADRACE_INLINE void with_planes(int64_t bytes, Call call) {
  const int planes = Product::planes((int)bytes);
  if constexpr (Product::planes(3) == 3)
    if (planes == 3) return call(std::integral_constant<int, 3>{});
  if (planes == 1) call(std::integral_constant<int, 1>{});
  else call(std::integral_constant<int, 2>{});
}

// Weights in MXFP4 beside activations in bfloat16, on tiles: pairs of bfloat16 as they are met, which rounds nothing, so that the
// product is that of plain weights, bit for bit. Groups are half of a tile of bytes, which integers would leave empty.
HEADRACE_INLINE bool in_pairs(int64_t bits, int dtype) {
#if defined(HEADRACE_TILES)
  return bits == MXFP4 && dtype == BFLOAT16;
#else
  return false;
#endif
}

#if defined(HEADRACE_TILES)
// Words [first, first + words) of pairs of a panel: whole tiles. Codes are looked up as numbers 2^120 times too large, and the
// exponent of their group takes that off: in a subtraction that stops at zero, so that zero stays what it is. A scale is that
// of doubles: its exponent is one less than that of the values, whose 0.5 has 246 in the table.
static void expand_pairs(const Quantized &a, int64_t panel, int64_t first, int64_t words, uint32_t *out) {
  const __m256i codes = _mm256_setr_epi16(0, 0x7b00, 0x7b80, 0x7bc0, 0x7c00, 0x7c40, 0x7c80, 0x7cc0, 0, (short)0xfb00,
                                          (short)0xfb80, (short)0xfbc0, (short)0xfc00, (short)0xfc40, (short)0xfc80,
                                          (short)0xfcc0);
  const __m512i table = _mm512_broadcast_i64x4(codes);  // twice, as the bit above a code may be anything
  const auto bytes = [](int first) {  // two neighbours of each word, in 16 bits each
    return _mm512_broadcast_i32x4(_mm_setr_epi8(first, -1, first + 1, -1, first + 4, -1, first + 5, -1, first + 8, -1, first + 9,
                                                -1, first + 12, -1, first + 13, -1));
  };
  const __m512i two = bytes(0), others = bytes(2);
  const int64_t groups = a.inputs / a.group_size, group_words = a.group_size / 2;
  const uint32_t *b = (const uint32_t *)a.packed + (panel * a.inputs / 8 + first / 4) * PANEL;
  for (int64_t k = first; k < first + words; k += TILE) {
    const float *scales = a.scales + (panel * groups + k / group_words) * PANEL;
    __m512i down[VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; i++) {
      const __m512i exponent = _mm512_srli_epi32(_mm512_loadu_si512(scales + i * LANES), 16);
      const __m512i less = _mm512_sub_epi32(_mm512_set1_epi32(246 << 7), exponent);
      down[i] = _mm512_or_si512(less, _mm512_slli_epi32(less, 16));
    }
    for (int row = 0; row < TILE / 4; row++, b += PANEL, out += 4 * PANEL) {
#pragma GCC unroll 4
      for (int i = 0; i < VECTORS; i++) {
        __builtin_prefetch(b + 1024 + i * LANES, 0, 3);
        const __m512i halves = _mm512_loadu_si512(b + i * LANES), upper = _mm512_srli_epi32(halves, 4);
        const auto keep = [&](int word, __m512i of, __m512i which) __attribute__((always_inline)) {
          const __m512i raised = _mm512_permutexvar_epi16(_mm512_shuffle_epi8(of, which), table);
          _mm512_storeu_si512(out + word * PANEL + i * LANES, _mm512_subs_epu16(raised, down[i]));
        };
        keep(0, halves, two);
        keep(1, halves, others);
        keep(2, upper, two);
        keep(3, upper, others);
      }
    }
  }
}

// Products of at most a tile of rows: sums stay where they are while words are expanded, tile by tile, beside them.
static void multiply_few_pairs(const Quantized &a, int64_t panel, const uint32_t *x, int64_t depth, uint32_t *sums) {
  alignas(64) uint32_t expanded[2][TILE * PANEL];
  clear_sums<4>();
  for (int64_t k = 0; k < depth; k += TILE) {
    uint32_t *const words = expanded[k / TILE % 2];
    expand_pairs(a, panel, k, TILE, words);
    load_tile<4>(x + k, depth * 4);
    each_tile<4>([&](auto i) {
      load_tile<5>(words + i() * TILE, PANEL * 4);
      PairTiles::add<i(), 4, 5>();
    });
  }
  store_sums<4>(sums, PANEL);
}

template <class Out>
static void pairs_block(const Quantized &a, int64_t panel, int64_t first, int64_t rows) {
  const int64_t depth = a.inputs / 2, column = panel * PANEL;
  const int64_t columns = a.outputs - column < PANEL ? a.outputs - column : PANEL;
  const Brain *bias = a.bias ? (const Brain *)a.bias + column : nullptr;
  const uint32_t *const x = (const uint32_t *)a.x + first * depth;
  const auto take = [&](int64_t row, int64_t count, const uint32_t *sums) {
    for (int64_t m = 0; m < count; m++) {
      Out *out = (Out *)a.out + (first + row + m) * a.outputs + column;
      each_vector(columns, [&](int64_t i, int lanes) {
        const Floats v = load((const Single *)(sums + m * PANEL + i));
        store_at(out + i, bias ? v + load_at(bias + i, lanes) : v, lanes);
      });
    }
  };
  alignas(64) uint32_t room[TILE_WORDS * PANEL];
  begin_tiles(rows);
  if (rows <= TILE) {
    multiply_few_pairs(a, panel, x, depth, room);
    take(0, rows, room);
  } else {
    multiply_on_tiles<PairTiles, false>(
        x, depth, depth, rows, TILE_WORDS,
        [&](int64_t word, int64_t count) {
          expand_pairs(a, panel, word, count, room);
          return (const uint32_t *)room;
        },
        take);
  }
  end_tiles();
}

static int linear_in_pairs(const Quantized &a) {
  const int64_t panels = (a.outputs + PANEL - 1) / PANEL;
  const int threads = threads_for(a.count * a.inputs * a.outputs);
  each_block(panels, a.count, BLOCK_ROWS, BLOCK_ROWS * a.inputs * 2, threads, false, [&](int64_t panel, int64_t first, int64_t rows) {
    if (a.wide) pairs_block<Single>(a, panel, first, rows);
    else pairs_block<Brain>(a, panel, first, rows);
  });
  return 1;
}
#endif

static int quantized_linear(const Quantized &a) {
#if defined(HEADRACE_TILES)
  if (in_pairs(a.bits, a.dtype)) return linear_in_pairs(a);
#endif
  int enough = 0;
  with_planes(a.planes, [&](auto planes) { enough = quantized_linear_of<decltype(planes)::value>(a); });
  return enough;
}
