// Weights of bfloat16 in 12 bits, without loss. Of the exponents of a weight's elements nearly all are among sixteen, so a code of
// four bits says which; sign and mantissa are kept as they are. The few elements with another exponent are listed behind, with
// their place. A row of a panel is decoded in registers, so the product is that of the plain words, bit for bit, and reads three
// quarters of their bytes (Zhang et al. 2025, 70% Size, 100% Accuracy, also codes exponents, there by their frequency).
//
//   a row of words, 2 * PANEL elements:   codes, of two elements a byte │ sign and mantissa of the first half │ of the second half
//                                             PANEL bytes               │           PANEL                     │      PANEL
//
// In each lane of 128 bits stand the elements that `unpack` puts side by side there: 8 of an even vector, then 8 of an odd one. The
// codes of the first half are the low four bits of their bytes. With registers of 512 bits a half is one of them, with 256 a lane.

#if (LANES == 16 || LANES == 8) && !defined(HEADRACE_TILES)
#define HEADRACE_CODED 1
static const int64_t CODED_REGISTER = 4 * LANES;
static_assert(LANES == 16 ? PANEL == CODED_REGISTER : 2 * PANEL == CODED_REGISTER, "a half of a row is a register, or a lane");

// The rest of a panel's coded words, from a row on.
struct CodedWords {
  const uint8_t *words;
  const Uncommon *next, *end;
  Words low, high;  // of each code's exponent: its last bit, the highest of a byte; the others, the lowest seven
};

HEADRACE_INLINE CodedWords coded_panel(const Linear &a, int64_t panel, int64_t depth) {
  const int64_t panels = (a.outputs + PANEL - 1) / PANEL;
  const uint32_t *begins = coded_begins(a.codes);
  const Uncommon *all = coded_uncommon(a.codes, panels);
  uint8_t low[CODED_REGISTER], high[CODED_REGISTER];  // the table in each lane, where a shuffle looks it up
  for (int i = 0; i < CODED_REGISTER; i++) {
    const uint8_t exponent = ((const uint8_t *)a.codes)[i % COMMON_EXPONENTS];
    low[i] = (uint8_t)(exponent << 7), high[i] = exponent >> 1;
  }
  CodedWords b = {(const uint8_t *)a.packed + panel * depth * coded_row_bytes(PANEL), all + begins[panel], all + begins[panel + 1], {}, {}};
  __builtin_memcpy(&b.low, low, sizeof low);
  __builtin_memcpy(&b.high, high, sizeof high);
  return b;
}

#if LANES == 16
// The words of row `k`, where all exponents are common.
HEADRACE_INLINE void decode(const CodedWords &b, int64_t k, Words (&words)[VECTORS]) {
  const __m512i seven = _mm512_set1_epi8(0x7f);  // of a code, bits 4 to 6 are not looked at
  const int EITHER_BOTH = 0xf8, EITHER_BUT = 0xf4;  // a | (b & c), a | (b & ~c)
  const uint8_t *const row = b.words + k * coded_row_bytes(PANEL);
  const __m512i both = _mm512_loadu_si512(row);
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    const __m512i codes = _mm512_and_si512(half ? _mm512_srli_epi16(both, 4) : both, seven);
    const __m512i rest = _mm512_loadu_si512(row + 64 * (half + 1));
    const __m512i low = _mm512_ternarylogic_epi32(_mm512_shuffle_epi8((__m512i)b.low, codes), rest, seven, EITHER_BOTH);
    const __m512i high = _mm512_ternarylogic_epi32(_mm512_shuffle_epi8((__m512i)b.high, codes), rest, seven, EITHER_BUT);
    words[2 * half] = (Words)_mm512_unpacklo_epi8(low, high);
    words[2 * half + 1] = (Words)_mm512_unpackhi_epi8(low, high);
  }
}
#else
HEADRACE_INLINE void decode(const CodedWords &b, int64_t k, Words (&words)[VECTORS]) {
  const __m256i seven = _mm256_set1_epi8(0x7f), shifts = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
  const uint8_t *const row = b.words + k * coded_row_bytes(PANEL);
  const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)row));
  const __m256i codes = _mm256_and_si256(_mm256_srlv_epi32(both, shifts), seven);
  const __m256i rest = _mm256_loadu_si256((const __m256i *)(row + PANEL)), mantissa = _mm256_and_si256(rest, seven);
  const __m256i low = _mm256_or_si256(_mm256_shuffle_epi8((__m256i)b.low, codes), mantissa);
  const __m256i high = _mm256_or_si256(_mm256_shuffle_epi8((__m256i)b.high, codes), _mm256_xor_si256(rest, mantissa));
  words[0] = (Words)_mm256_unpacklo_epi8(low, high);
  words[1] = (Words)_mm256_unpackhi_epi8(low, high);
}
#endif

// The same where some are not, which are the next of the list.
__attribute__((noinline)) static void decode_uncommon(CodedWords &b, int64_t k, Words (&words)[VECTORS]) {
  alignas(64) uint16_t elements[2 * PANEL];
  decode(b, k, words);
  __builtin_memcpy(elements, words, sizeof elements);
  for (; b.next < b.end && b.next->row == k; b.next++) elements[b.next->place] = b.next->bits;
  __builtin_memcpy(words, elements, sizeof elements);
}

// add_products of a row's words. All factors of narrow words, sums and what decodes them would not fit in the registers: the odd
// elements are taken only when the even ones are done, which the compiler must not turn round.
template <class Kind, int M>
HEADRACE_INLINE void add_words(Floats (&sum)[M][VECTORS], const uint32_t *rows, int64_t stride, const Words (&words)[VECTORS]) {
  if constexpr (std::is_same_v<Kind, NarrowWords>) {
#if LANES == 8
    const auto of = [&](int i) __attribute__((always_inline)) { return words[i]; };
    add_elements<false>(sum, rows, stride, of);
    add_elements<true>(sum, rows, stride, of);
#else
    using Each = FloatWords::Factor;
    add_factors<FloatWords>(sum, rows, stride, [&](int i) { return Each{(Floats)(words[i] << 16)}; });
    asm volatile("" ::: "memory");
    add_factors<FloatWords>(sum, rows + 1, stride, [&](int i) { return Each{(Floats)(words[i] & 0xffff0000u)}; });
#endif
  } else {
    add_factors<Kind>(sum, rows, stride, [&](int i) __attribute__((always_inline)) { return Kind::of(words[i]); });
  }
}

// multiply_tile for coded words, rows [first, first + depth) of them. KEEP: they are also stored, for the other tiles.
template <class Kind, int M, bool KEEP>
static Ahead multiply_coded_tile(const uint32_t *a, int64_t a_stride, CodedWords &b, int64_t first, int64_t depth, uint32_t *room,
                                 float *c, bool accumulate, Ahead ahead) {
  Floats sum[M][VECTORS];
  load_sums(sum, c, PANEL, accumulate);
  const auto add = [&](int64_t k, const Words(&words)[VECTORS]) __attribute__((always_inline)) {
    fetch(ahead);
#pragma GCC unroll 8
    for (int i = 0; KEEP && i < VECTORS; i++) __builtin_memcpy(room + k * PANEL + i * LANES, &words[i], sizeof words[i]);
    add_words<Kind>(sum, a + k * Kind::ROW_WORDS, a_stride, words);
  };
  for (int64_t k = 0; k < depth; k++) {
    const bool more = b.next < b.end && b.next->row < first + depth;
    Words words[VECTORS];
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

#if LANES == 8
// What one tile asks for: with registers of 256 bits rows are so short that the processor's own prefetcher comes too late.
HEADRACE_INLINE Ahead ahead_of_one_tile(const uint8_t *row) { return {(const uint32_t *)(row + 1536), 1, 0, true}; }
#else
HEADRACE_INLINE Ahead ahead_of_one_tile(const uint8_t *row) { return ahead_of_tiles((const uint32_t *)row, 1, true); }
#endif

// sums [rows, PANEL] of x [rows, depth * ROW_WORDS] times coded words: the first tile decodes a block of them, from which the others
// take them. It has no more than ROWS, as decoding needs registers too.
template <class Kind>
static void multiply_coded(const uint32_t *x, CodedWords b, int64_t depth, int64_t rows, float *sums) {
  alignas(64) uint32_t room[DEEP_WORDS];
  const int64_t parts = (rows + ROWS - 1) / ROWS, leading = (rows + parts - 1) / parts, tiles = 1 + tiles_of<Kind>(rows - leading);
  const int64_t stride = depth * Kind::ROW_WORDS, row_bytes = coded_row_bytes(PANEL);
  const int64_t block = tiles == 1 ? depth : block_depth(tiles, depth);
  for (int64_t k = 0; k < depth; k += block) {
    const int64_t count = depth - k < block ? depth - k : block;
    const uint8_t *const row = b.words + k * row_bytes;
    const uint32_t *const from = x + k * Kind::ROW_WORDS;
    Ahead ahead = tiles == 1 ? ahead_of_one_tile(row) : ahead_of_tiles((const uint32_t *)(row + block * row_bytes), tiles, true);
    ahead.row_words = row_bytes / 4;
    in_tiles<ROWS>(leading, [&](auto tile, int64_t) {
      const int M = decltype(tile)::value;
      if (tiles > 1) ahead = multiply_coded_tile<Kind, M, true>(from, stride, b, k, count, room, sums, k > 0, ahead);
      else ahead = multiply_coded_tile<Kind, M, false>(from, stride, b, k, count, room, sums, k > 0, ahead);
    });
    if (tiles > 1) multiply_rows<Kind>(from + leading * stride, stride, room, count, sums + leading * PANEL, rows - leading, k > 0, ahead);
  }
}
#endif
