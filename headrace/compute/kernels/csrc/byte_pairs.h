// Products of weights of 8 and 4 bits on AVX2: a part of quantized.h. AVX2 has no instruction that adds four products of bytes,
// but one that adds two of them in 16 bits, where sums of eight such pairs have room if weights have 4 bits. So activations of
// one byte stay bytes beside them, which cost half of what shorts do. All others are shorts: neither three planes of bytes nor
// products of floats were quicker for few rows. Tiles unpack weights as they meet them, however many they are.
// See docs/decisions/cpu-kernels.md#few-bits-on-avx2.

static const int EIGHT = 8;  // inputs of a step: groups are padded to as many

HEADRACE_INLINE bool in_byte_pairs(int64_t bytes, int64_t bits) { return bytes == 1 && bits != 8; }

struct BytePairs {
  typedef int8_t Integer;
  HEADRACE_INLINE void keep(Integer *out, Ints v, int) {  // there is room for eight
    const Bytes eight = __builtin_convertvector(v, Bytes);
    __builtin_memcpy(out, &eight, sizeof eight);
  }
};

// Writes a token's activations as the product of its weights takes them, in steps of `divisor`.
template <int PLANES>
HEADRACE_INLINE void keep_token(const Quantized &a, const Planes &p, int64_t token, const float *x, float divisor) {
  if constexpr (PLANES == 1)
    if (in_byte_pairs(a.planes, a.bits)) return keep_integers<1, BytePairs>(a, p, token, x, divisor);
  keep_integers<PLANES>(a, p, token, x, divisor);
}

// As fetch, for `rows` steps at once.
HEADRACE_INLINE void fetch_rows(Ahead &ahead, int rows) {
  for (ahead.turn -= rows; ahead.turn < 0; ahead.turn += ahead.turns) {
    if (by_second_cache) __builtin_prefetch(ahead.next + BLOCK_WORDS, 0, 2);
    __builtin_prefetch(ahead.next, 0, 3);
    ahead.next += PANEL;
  }
}

// Rows of a tile, each address in a register of its own: the compiler would else compute them anew for each word.
template <int M>
struct Rows {
  const uint32_t *of[M];
};

// sum[m] = add(sum[m], word k of row m, columns). In this order: the compiler would else gather products of several rows, for
// which there are not enough registers.
template <int M, class Sum, class Add>
HEADRACE_INLINE void add_rows(Sum (&sum)[M][VECTORS], const Rows<M> &a, int64_t k, const Words (&column)[VECTORS], Add add) {
  static_assert(VECTORS == 2, "both are named");
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) {
    const Words row = Words{} + a.of[m][k];
    sum[m][0] = add(sum[m][0], row, column[0]);
    sum[m][1] = add(sum[m][1], row, column[1]);
    asm volatile("" : "+x"(sum[m][0]), "+x"(sum[m][1]));
  }
}

// A span: packed weights, the first word of activations, and how many times eight inputs.
struct SpanWords {
  const uint32_t *b;
  int64_t k, steps;
};

template <int BITS>
static constexpr int STEP_ROWS = BITS == 8 ? 2 : 1;  // of packed words

// Of weights of 4 bits or fp4, the first four of a word's inputs, or the others, a byte each.
template <int BITS>
HEADRACE_INLINE Words half_bytes(Words packed, int half) {
  const Words halves = packed >> 4 * half & 0x0f0f0f0fu;
  return BITS == FP4 ? fp4_integers<0x01010101u>(halves) : halves;
}

// As Product::unpack, with the fewest instructions that AVX2 has for it.
template <int BITS>
HEADRACE_INLINE Words shorts_of(Words packed, int part) {
  const Words bytes = BITS == FP4 ? half_bytes<FP4>(packed, part / 2) : packed;
  const int place = (BITS == 4 ? 4 * (part / 2) : 0) + 8 * (part % 2), width = BITS == 4 ? 4 : 8;
  if (place + width == 16) return (Words)_mm256_srli_epi16((__m256i)bytes, place);
  return bytes >> place & ((1u << width) - 1) * 0x00010001u;
}

// sum[m] += row m of `a` times a span.
template <int BITS, int M>
HEADRACE_INLINE Ahead add_shorts(Ints (&sum)[M][VECTORS], const Rows<M> &a, SpanWords s, Ahead ahead) {
#pragma GCC unroll 1
  for (; s.steps > 0; s.steps--, s.k += EIGHT / 2, s.b += STEP_ROWS<BITS> * PANEL) {
    fetch_rows(ahead, STEP_ROWS<BITS>);
#pragma GCC unroll 4
    for (int word = 0; word < EIGHT / 2; word++) {
      Words column[VECTORS];
#pragma GCC unroll 2
      for (int i = 0; i < VECTORS; i++)
        column[i] = shorts_of<BITS>(load_words(s.b + word / PARTS<BITS> * PANEL + i * LANES), word % PARTS<BITS>);
      add_rows(sum, a, s.k + word, column, [](Ints sum, Words row, Words column) { return Product::add(sum, row, column); });
    }
  }
  return ahead;
}

// sum[m] += row m of `a`, which are bytes, times so few steps that their sums have room in 16 bits.
template <int BITS, int M>
HEADRACE_INLINE void add_together(Ints (&sum)[M][VECTORS], const Rows<M> &a, SpanWords s, int steps) {
  typedef int16_t Sixteens __attribute__((vector_size(32)));
  Sixteens some[M][VECTORS];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) some[m][0] = some[m][1] = Sixteens{};
#pragma GCC unroll 4
  for (int step = 0; step < steps; step++, s.k += 2, s.b += PANEL)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      Words column[VECTORS];
#pragma GCC unroll 2
      for (int i = 0; i < VECTORS; i++) column[i] = half_bytes<BITS>(load_words(s.b + i * LANES), half);
      add_rows(some, a, s.k + half, column, [](Sixteens sum, Words row, Words column) {
        return (Sixteens)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)column, (__m256i)row));
      });
    }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int i = 0; i < VECTORS; i++) sum[m][i] += (Ints)_mm256_madd_epi16((__m256i)some[m][i], _mm256_set1_epi16(1));
}

// As add_shorts. A step adds four products of at most 15 times 127 to a sum; of fp4, 24 times 127.
template <int BITS, int M>
HEADRACE_INLINE Ahead add_bytes(Ints (&sum)[M][VECTORS], const Rows<M> &a, SpanWords s, Ahead ahead) {
  const int MOST = BITS == FP4 ? 2 : 4;
#pragma GCC unroll 1
  for (; s.steps >= MOST; s.steps -= MOST, s.k += 2 * MOST, s.b += MOST * PANEL) {
    fetch_rows(ahead, MOST);
    add_together<BITS>(sum, a, s, MOST);
  }
#pragma GCC unroll 1
  for (; s.steps > 0; s.steps--, s.k += 2, s.b += PANEL) {
    fetch_rows(ahead, 1);
    add_together<BITS>(sum, a, s, 1);
  }
  return ahead;
}

// Spans [begin, end) of a panel, whose weights begin at `b`. `groups` are those of a row of weights.
struct Spans {
  const Quantized &a;
  const Planes &p;
  int64_t panel, groups, begin, end;
  const uint32_t *b;
};

// sums[t, 0:PANEL] += spans times TOKENS tokens from `first` on, of PLANES planes of shorts, or of BYTES. Returns what is left to
// fetch.
template <int BITS, int TOKENS, int PLANES, bool BYTES>
__attribute__((noinline)) static Ahead multiply_tokens(const Spans &s, int64_t first, float *sums, Ahead ahead) {
  const int M = TOKENS * PLANES, INPUTS = BYTES ? 4 : Product::INPUTS;
  const bool HELD = TOKENS < 3;
  const Planes &p = s.p;
  const int64_t spans = p.spans;
  Rows<M> a;
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) {
    a.of[m] = (const uint32_t *)p.integers + (first * PLANES + m) * p.words;
    asm volatile("" : "+r"(a.of[m]));
  }
  int64_t part = s.begin % p.group_spans, place = (s.panel * s.groups + s.begin / p.group_spans) * PANEL;
  const float *totals = p.totals + first * spans + s.begin;
  SpanWords at = {s.b, word_of(p, s.begin) * Product::INPUTS / INPUTS, 0};
  Floats held[HELD ? TOKENS : 1][VECTORS];
  if constexpr (HELD) load_sums(held, sums, PANEL, true);
  for (int64_t span = s.begin; span < s.end; span++, totals++) {
    Ints sum[M][VECTORS] = {};
    at.steps = span_words(p, part * SPAN) * Product::INPUTS / EIGHT;
    if constexpr (BYTES) ahead = add_bytes<BITS>(sum, a, at, ahead);
    else ahead = add_shorts<BITS>(sum, a, at, ahead);
    at.k += at.steps * EIGHT / INPUTS, at.b += at.steps * STEP_ROWS<BITS> * PANEL;
    const Grid grid = grid_at<BITS>(s.a, place);  // only now: registers would hold it
#pragma GCC unroll 8
    for (int t = 0; t < TOKENS; t++) {
      const auto product = [&](int plane, int i) __attribute__((always_inline)) { return sum[t * PLANES + plane][i]; };
      const float total = totals[t * spans];
      if constexpr (HELD) {
#pragma GCC unroll 2
        for (int i = 0; i < VECTORS; i++) held[t][i] = with_scaled<PLANES>(held[t][i], product, i, total, grid);
      } else {
        add_scaled<PLANES>(product, total, grid, sums + t * PANEL);
      }
    }
    if (++part == p.group_spans) part = 0, place += PANEL;
  }
  if constexpr (HELD) store_sums(held, sums, PANEL);
  return ahead;
}

// sums [tokens, PANEL] of a panel: one tile meets all of it, several a block together.
template <int BITS, int PLANES, bool BYTES>
static void multiply_met(const Quantized &a, const Planes &p, int64_t panel, int64_t first, int64_t tokens, float *sums) {
  const int MOST = ROWS / PLANES;
  const int64_t tiles = (tokens + MOST - 1) / MOST, span_of = p.group_words < SPAN ? p.group_words : SPAN;
  const int64_t near = BLOCK_WORDS * PARTS<BITS> / PANEL / span_of, together = tiles == 1 ? p.spans : near > 1 ? near : 1;
  const uint32_t *const packed = (const uint32_t *)a.packed + panel * p.words / PARTS<BITS> * PANEL;
  const auto words_at = [&](int64_t span) { return packed + word_of(p, span) / PARTS<BITS> * PANEL; };
  Spans s = {a, p, panel, p.spans / p.group_spans, 0, 0, packed};
  for (; s.begin < p.spans; s.begin = s.end, s.b = words_at(s.end)) {
    s.end = s.begin + together < p.spans ? s.begin + together : p.spans;
    Ahead ahead = ahead_of_tiles(words_at(tiles == 1 ? s.begin + 1 : s.end), tiles);
    in_tiles<MOST>(tokens, [&](auto count, int64_t token) {
      ahead = multiply_tokens<BITS, decltype(count)::value, PLANES, BYTES>(s, first + token, sums + token * PANEL, ahead);
    });
  }
}

template <int BITS, int PLANES>
HEADRACE_INLINE void multiply_as_met(const Quantized &a, const Planes &p, int64_t panel, int64_t first, int64_t tokens,
                                     float *sums) {
  if constexpr (BITS != 8 && PLANES == 1)
    if (in_byte_pairs(a.planes, BITS)) return multiply_met<BITS, 1, true>(a, p, panel, first, tokens, sums);
  multiply_met<BITS, PLANES, false>(a, p, panel, first, tokens, sums);
}
