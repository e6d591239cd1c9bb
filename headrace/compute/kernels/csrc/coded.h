// Weights of bfloat16 in 12 bits, without loss. Of the exponents of a weight's elements nearly all are among sixteen, so a code of
// four bits says which; sign and mantissa are kept as they are. The few elements with another exponent are listed behind, with
// their place. A row of a panel is decoded in registers, so the product is that of the plain words, bit for bit, and reads three
// quarters of their bytes (Zhang et al. 2025, 70% Size, 100% Accuracy, also codes exponents, there by their frequency).
//
//   a row of words, 2 * PANEL elements:   codes, of two elements a byte │ sign and mantissa of the first half │ of the second half
//                                                  64 bytes             │              64                     │       64
//
// In each lane of 128 bits stand the elements that `unpack` puts side by side there: 8 of an even vector, then 8 of an odd one.

#if defined(HEADRACE_BF16_PAIRS) && !defined(HEADRACE_TILES)
#define HEADRACE_CODED 1
static_assert(PANEL == CODED_PANEL, "a row of a panel is coded in three lines");

// The rest of a panel's coded words, from a row on.
struct CodedWords {
  const uint8_t *words;
  const Uncommon *next, *end;
  __m512i low, high;  // of each code's exponent: its last bit, the highest of a byte; the others, the lowest seven
};

HEADRACE_INLINE CodedWords coded_panel(const Linear &a, int64_t panel, int64_t depth) {
  const int64_t panels = (a.outputs + PANEL - 1) / PANEL;
  const uint32_t *begins = coded_begins(a.codes);
  const Uncommon *all = coded_uncommon(a.codes, panels);
  const __m512i exponents = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)a.codes));
  return {(const uint8_t *)a.packed + panel * depth * CODED_ROW_BYTES, all + begins[panel], all + begins[panel + 1],
          _mm512_and_si512(_mm512_slli_epi16(exponents, 7), _mm512_set1_epi8((char)0x80)),
          _mm512_and_si512(_mm512_srli_epi16(exponents, 1), _mm512_set1_epi8(0x7f))};
}

// The words of row `k`, where all exponents are common.
HEADRACE_INLINE void decode(const CodedWords &b, int64_t k, __m512i (&words)[VECTORS]) {
  const __m512i seven = _mm512_set1_epi8(0x7f);  // of a code, bits 4 to 6 are not looked at
  const int EITHER_BOTH = 0xf8, EITHER_BUT = 0xf4;  // a | (b & c), a | (b & ~c)
  const uint8_t *const row = b.words + k * CODED_ROW_BYTES;
  const __m512i both = _mm512_loadu_si512(row);
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    const __m512i codes = _mm512_and_si512(half ? _mm512_srli_epi16(both, 4) : both, seven);
    const __m512i rest = _mm512_loadu_si512(row + 64 * (half + 1));
    const __m512i low = _mm512_ternarylogic_epi32(_mm512_shuffle_epi8(b.low, codes), rest, seven, EITHER_BOTH);
    const __m512i high = _mm512_ternarylogic_epi32(_mm512_shuffle_epi8(b.high, codes), rest, seven, EITHER_BUT);
    words[2 * half] = _mm512_unpacklo_epi8(low, high);
    words[2 * half + 1] = _mm512_unpackhi_epi8(low, high);
  }
}

// The same where some are not, which are the next of the list.
__attribute__((noinline)) static void decode_uncommon(CodedWords &b, int64_t k, __m512i (&words)[VECTORS]) {
  alignas(64) uint16_t elements[2 * PANEL];
  decode(b, k, words);
  __builtin_memcpy(elements, words, sizeof elements);
  for (; b.next < b.end && b.next->row == k; b.next++) elements[b.next->place] = b.next->bits;
  __builtin_memcpy(words, elements, sizeof elements);
}

// multiply_tile for coded words, rows [first, first + depth) of them. KEEP: they are also stored, for the other tiles.
template <int M, bool KEEP>
static Ahead multiply_coded_tile(const uint32_t *a, int64_t a_stride, CodedWords &b, int64_t first, int64_t depth, uint32_t *room,
                                 float *c, bool accumulate, Ahead ahead) {
  Floats sum[M][VECTORS];
  load_sums(sum, c, PANEL, accumulate);
  const auto add = [&](int64_t k, const __m512i(&words)[VECTORS]) __attribute__((always_inline)) {
    fetch(ahead);
    PairWords::Factor column[VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) {
      if constexpr (KEEP) _mm512_store_si512(room + k * PANEL + i * LANES, words[i]);
      column[i] = {(__m512bh)words[i]};
    }
    add_products<PairWords>(sum, a + k, a_stride, column);
  };
  for (int64_t k = 0; k < depth; k++) {
    const bool more = b.next < b.end && b.next->row < first + depth;
    __m512i words[VECTORS];
    for (const int64_t stop = more ? b.next->row - first : depth; k < stop; k++) {
      decode(b, first + k, words);
      add(k, words);
    }
    if (!more) break;
    decode_uncommon(b, first + k, words);
    add(k, words);
  }
  store_sums(sum, c, PANEL);
  return ahead;
}

// sums [rows, PANEL] of x [rows, depth] times coded words: the first tile decodes a block of them, from which the others take them.
static void multiply_coded(const uint32_t *x, CodedWords b, int64_t depth, int64_t rows, float *sums) {
  alignas(64) uint32_t room[DEEP_WORDS];
  const int64_t tiles = (rows + ROWS - 1) / ROWS;
  const int64_t block = tiles == 1 ? depth : (deep_for(tiles) ? DEEP_WORDS : BLOCK_WORDS) / PANEL;
  for (int64_t k = 0; k < depth; k += block) {
    const int64_t count = depth - k < block ? depth - k : block;
    Ahead ahead = ahead_of_tiles((const uint32_t *)(b.words + (k + block) * CODED_ROW_BYTES), tiles, true);
    ahead.row_words = CODED_ROW_BYTES / 4;
    in_tiles<ROWS>(rows, [&](auto tile, int64_t row) {
      const uint32_t *const from = x + row * depth + k;
      float *const c = sums + row * PANEL;
      const int M = decltype(tile)::value;
      if (row) ahead = multiply_tile<PairWords, M>(from, depth, room, count, c, k > 0, ahead);
      else if (tiles > 1) ahead = multiply_coded_tile<M, true>(from, depth, b, k, count, room, c, k > 0, ahead);
      else ahead = multiply_coded_tile<M, false>(from, depth, b, k, count, room, c, k > 0, ahead);
    });
  }
}
#endif
