// The two products of attention, from each type of page: queries by keys, weights by values. `absorb` takes in one chunk
// of one key head for some queries; a callback turns a query's scores into weights and says by how much what was summed
// before shrinks. Floats are packed for one small matrix product each (`matrix.h`). Integers are multiplied as integers,
// exactly: queries, and each chunk's weights, become int16 with a scale of their own (a hundred times finer than what
// they are multiplied with), and the pages' scales go to scores and weights.

static const int CHUNK = 64;  // keys that are multiplied at once

struct Chunk {
  int64_t place[CHUNK], scale[CHUNK];  // of each token, for the first key head; behind `count` the last one's again
  bool together[CHUNK / LANES];        // whether LANES tokens lie in one block, one after the other
  int count;

  int columns() const { return (count + LANES - 1) / LANES * LANES; }
};

// Some key heads of a tile over some of its segments: what one thread does at a time. Its results lie at `partial`,
// counted in vectors, when the tile has several parts; those of the same heads in the next part `step` further.
struct Piece {
  int64_t row, first_query, queries, first_key, end_key, first_head, heads, part, parts, partial, step;
};

// What is known of some queries: weighted sums of values, and for each the largest score and the sum of weights.
struct Partial {
  float *sum, *best, *total;
};

// A thread's memory, for `vectors` queries of a tile's heads.
struct Scratch {
  uint32_t *keys, *values, *query;  // [CHUNK * stride], [CHUNK * stride], [vectors * stride]
  float *score, *product;           // [vectors * CHUNK], [vectors * stride]
  float *query_scale, *worth;       // [vectors] each, of integers
  uint16_t *weights;                // [vectors * CHUNK]
  Partial segment, whole;

  static int64_t floats(int64_t vectors, int64_t stride) {
    return 2 * CHUNK * stride + vectors * (2 * stride + CHUNK + CHUNK / 2 + 2 + 2 * (stride + 2));
  }

  static Scratch at(float *memory, int64_t vectors, int64_t stride) {
    Scratch s;
    float *p = memory;
    const auto take = [&](int64_t count) {
      float *taken = p;
      p += count;
      return taken;
    };
    const auto partial = [&] {
      float *sum = take(vectors * stride), *best = take(vectors);
      return Partial{sum, best, take(vectors)};
    };
    s.keys = (uint32_t *)take(CHUNK * stride);
    s.values = (uint32_t *)take(CHUNK * stride);
    s.query = (uint32_t *)take(vectors * stride);
    s.score = take(vectors * CHUNK);
    s.product = take(vectors * stride);
    s.query_scale = take(vectors);
    s.worth = take(vectors);
    s.weights = (uint16_t *)take(vectors * CHUNK / 2);
    s.segment = partial();
    s.whole = partial();
    return s;
  }
};

// Calls body(vector, query) for each query of a piece's heads: its element's place among the activations.
template <class Body>
HEADRACE_INLINE void each_query(const Attention &a, const Piece &p, Body body) {
  const int64_t group = a.heads / a.kv_heads, vectors = p.queries * group;
  const int64_t packed = a.query_starts[p.row] + p.first_query;
  for (int64_t v = 0; v < p.heads * vectors; v++) {
    const int64_t head = p.first_head + v / vectors, m = v % vectors;
    body(v, ((packed + m / group) * a.heads + head * group + m % group) * a.head_dim);
  }
}

// Keys [key][feature] become [words of features][CHUNK], by squares of LANES words.
template <class Page>
static void pack_keys(const typename Page::Element *const *keys, int count, int64_t size, uint32_t *out) {
  for (int first = 0; first < count; first += LANES)
    for (int64_t i = 0; i < size; i += LANES * Page::FACTOR) {
      Floats square[LANES];
#pragma GCC unroll 16
      for (int j = 0; j < LANES; j++) square[j] = Page::words(keys[first + j] + i, size - i);
      transpose(square);
      uint32_t *target = out + i / Page::FACTOR * CHUNK + first;
      const int64_t words = (size - i + Page::FACTOR - 1) / Page::FACTOR;
#pragma GCC unroll 16
      for (int j = 0; j < LANES; j++)
        if (j < words) store((Single *)(target + j * CHUNK), square[j]);
    }
}

template <class Element>
HEADRACE_INLINE void find(const Attention &a, const Chunk &chunk, int64_t head, const void *pages, const Element **out) {
  for (int j = 0; j < CHUNK; j++) out[j] = (const Element *)pages + chunk.place[j] + head * a.head_dim;
}

// Element types as words of a product; `FACTOR` elements to a word.
template <class T>
struct Float {
  using Kind = FloatWords;
  using Element = T;
  static const int FACTOR = 1;

  HEADRACE_INLINE Floats words(const T *p, int64_t left) { return load_at(p, left < LANES ? (int)left : LANES); }

  // Values [key][feature] as they are, in float32.
  HEADRACE_INLINE void pack_values(const T *const *values, int count, int64_t size, int64_t stride, uint32_t *out) {
    for (int key = 0; key < count; key++)
      for (int64_t i = 0; i < size; i += LANES) store((Single *)(out + key * stride + i), words(values[key] + i, size - i));
  }

  HEADRACE_INLINE const uint32_t *weights(const float *score, uint16_t *, int64_t) { return (const uint32_t *)score; }
};

struct Pairs {
  using Kind = PairWords;
  using Element = Brain;
  static const int FACTOR = 2;

  HEADRACE_INLINE Floats words(const Brain *p, int64_t left) {
    Brain buffer[2 * LANES] = {};
    if (left < 2 * LANES) {
      for (int64_t i = 0; i < left; i++) buffer[i] = p[i];
      p = buffer;
    }
    return load((const Single *)p);
  }

  // Values of two keys side by side: [key / 2][feature] of pairs; an odd last one is paired with zeros.
  HEADRACE_INLINE void pack_values(const Brain *const *values, int count, int64_t size, int64_t stride, uint32_t *out) {
    for (int key = 0; key < count; key += 2)
      for (int64_t i = 0; i < size; i += LANES) {
        const int lanes = size - i < LANES ? (int)(size - i) : LANES;
        Words low = (Words)load_at(values[key] + i, lanes) >> 16;
        Words high = key + 1 < count ? (Words)load_at(values[key + 1] + i, lanes) : Words{};
        store((Single *)(out + key / 2 * stride + i), (Floats)(low | high));
      }
  }

  HEADRACE_INLINE const uint32_t *weights(const float *score, uint16_t *out, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store((Brain *)out + i, load((const Single *)score + i));
    return (const uint32_t *)out;
  }
};

HEADRACE_INLINE void scale_sum(float *sum, int64_t stride, float factor) {
  if (factor == 1.0f) return;
  for (int64_t i = 0; i < stride; i += LANES) store((Single *)(sum + i), load((const Single *)(sum + i)) * factor);
}

// Pages of floats, whose words are `Type`'s.
template <class Type>
struct Plain {
  using Element = typename Type::Element;
  static const int WIDTH = LANES;  // sums are padded to a multiple of it

  static void load_queries(const Attention &a, const Piece &p, const Scratch &s) {
    const int64_t words = (a.head_dim + Type::FACTOR - 1) / Type::FACTOR;
    each_query(a, p, [&](int64_t v, int64_t place) {
      uint32_t *row = s.query + v * words;
      if (Type::FACTOR == 2) {
        row[words - 1] = 0;
        __builtin_memcpy(row, (const Brain *)a.queries + place, a.head_dim * sizeof(Brain));
      } else {
        with_type(a.dtype, [&](auto t) { widen((const decltype(t) *)a.queries + place, a.head_dim, (float *)row); });
      }
    });
  }

  // Queries [at, at + vectors) of the piece take in a chunk of a head; `result` is theirs.
  template <class Weigh>
  static void absorb(const Attention &a, const Chunk &chunk, int64_t head, const Scratch &s, int64_t at, int64_t vectors,
                     const Partial &result, int64_t stride, Weigh weigh) {
    using Kind = typename Type::Kind;
    const int64_t size = a.head_dim, words = (size + Type::FACTOR - 1) / Type::FACTOR;
    const Element *keys[CHUNK], *values[CHUNK];
    find(a, chunk, head, a.pages.keys, keys);
    find(a, chunk, head, a.pages.values, values);
    pack_keys<Type>(keys, chunk.columns(), size, s.keys);
    Type::pack_values(values, chunk.count, size, stride, s.values);
    multiply<Kind>(s.query + at * words, words, s.keys, CHUNK, words, s.score, CHUNK, vectors, chunk.columns(), false);
    for (int64_t m = 0; m < vectors; m++) {
      scale_sum(result.sum + m * stride, stride, weigh(m, s.score + m * CHUNK));
    }
    const uint32_t *weights = Type::weights(s.score, s.weights, vectors * CHUNK);
    multiply<Kind>(weights, CHUNK / Type::FACTOR, s.values, stride, (chunk.count + Type::FACTOR - 1) / Type::FACTOR,
                   result.sum, stride, vectors, stride, true);
  }
};

// Words of two int16, multiplied and summed in int32, whose bits stand where the others have float32. Exact: nothing
// depends on the order.
struct IntegerWords {
#if LANES >= 8
  struct Factor { Words value; };
  HEADRACE_INLINE Factor column(const uint32_t *p) { return of((Words)load((const Single *)p)); }
  HEADRACE_INLINE Factor row(uint32_t word) { return {Words{} + word}; }
  HEADRACE_INLINE Factor of(Words w) { return {w}; }
  HEADRACE_INLINE Floats add(Floats sum, Factor a, Factor b) {
#if defined(HEADRACE_BYTE_PRODUCTS)
    return (Floats)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a.value, (__m512i)b.value);
#elif LANES == 16
    return (Floats)((Ints)sum + (Ints)_mm512_madd_epi16((__m512i)a.value, (__m512i)b.value));
#else
    return (Floats)((Ints)sum + (Ints)_mm256_madd_epi16((__m256i)a.value, (__m256i)b.value));
#endif
  }
#else
  struct Factor { Ints low, high; };
  HEADRACE_INLINE Factor column(const uint32_t *p) { return of((Words)load((const Single *)p)); }
  HEADRACE_INLINE Factor row(uint32_t word) { return of(Words{} + word); }
  HEADRACE_INLINE Factor of(Words w) { return {(Ints)(w << 16) >> 16, (Ints)w >> 16}; }
  HEADRACE_INLINE Floats add(Floats sum, Factor a, Factor b) {
    return (Floats)((Ints)sum + a.low * b.low + a.high * b.high);
  }
#endif
};

// Words of two int16 from floats: returns what one is worth. `count` is a multiple of LANES.
static float to_shorts(const float *x, int64_t count, uint16_t *out) {
  const float most = largest_size(x, count);
  const float inverse = most > SMALLEST ? 32767.0f / most : 0.0f;
  for (int64_t i = 0; i < count; i += LANES) store_bits(out + i, (Words)rounded(load((const Single *)x + i) * inverse));
  return most / 32767.0f;
}

struct Integers {
  using Element = Byte;
  static const int FACTOR = 2, WIDTH = 2 * LANES;
  static const int64_t FEW = 8;  // queries for which keys and values are not worth packing

  HEADRACE_INLINE Floats words(const Byte *p, int64_t left) { return (Floats)shorts(p, left); }

  HEADRACE_INLINE Shorts shorts(const Byte *p, int64_t left) {
    Byte buffer[2 * LANES] = {};
    if (left < 2 * LANES) {
      for (int64_t i = 0; i < left; i++) buffer[i] = p[i];
      p = buffer;
    }
    typedef int8_t Octets __attribute__((vector_size(2 * LANES)));
    Octets octets;
    __builtin_memcpy(&octets, p, sizeof octets);
#if LANES == 16
    return (Shorts)_mm512_cvtepi8_epi16((__m256i)octets);  // one instruction, of which gcc would make five
#else
    return __builtin_convertvector(octets, Shorts);
#endif
  }

  // Values of two keys side by side: [key / 2][feature] of pairs; an odd last one is paired with zeros.
  HEADRACE_INLINE void pack_values(const Byte *const *values, int count, int64_t size, int64_t stride, uint32_t *out) {
    for (int key = 0; key < count; key += 2)
      for (int64_t i = 0; i < size; i += LANES) {
        const int lanes = size - i < LANES ? (int)(size - i) : LANES;
        const Ints low = integers_at(values[key] + i, lanes);
        const Ints high = key + 1 < count ? integers_at(values[key + 1] + i, lanes) : Ints{};
        store((Single *)(out + key / 2 * stride + i), (Floats)((low & 0xffff) | (high << 16)));
      }
  }

  HEADRACE_INLINE Ints integers_at(const Byte *p, int lanes) {
    if (lanes == LANES) return load_integers(p);
    Byte buffer[LANES] = {};
    for (int i = 0; i < lanes; i++) buffer[i] = p[i];
    return load_integers(buffer);
  }

  // Scores without packing: a key's words are multiplied where they lie, then the sums of LANES keys folded at once.
  static void score_few(const Byte *keys, const Chunk &chunk, int64_t size, const uint32_t *query, int64_t words,
                        float *score, int64_t vectors) {
    for (int first = 0; first < chunk.count; first += LANES)
      for (int64_t m = 0; m < vectors; m++) {
        Floats sums[LANES] = {};
        for (int64_t w = 0; w < words; w += LANES) {
          const IntegerWords::Factor factor = IntegerWords::column(query + m * words + w);
#pragma GCC unroll 16
          for (int j = 0; j < LANES; j++)
            sums[j] = IntegerWords::add(
                sums[j], IntegerWords::of((Words)shorts(keys + chunk.place[first + j] + 2 * w, size - 2 * w)), factor);
        }
        store((Single *)(score + m * CHUNK + first), (Floats)sums_of(sums));
      }
  }

  // Weighted sums of values without packing, for M queries: two keys side by side, WIDTH features after the other.
  template <int M>
  static void sum_few(const Byte *values, const Chunk &chunk, int64_t size, const uint32_t *weights, float *out,
                      int64_t stride) {
    const int64_t pairs = (chunk.count + 1) / 2;
    for (int64_t i = 0; i < size; i += WIDTH) {
      Floats sums[M][2] = {};
      for (int64_t k = 0; k < pairs; k++) {
        const Shorts even = shorts(values + chunk.place[2 * k] + i, size - i);
        const Shorts odd = shorts(values + chunk.place[2 * k + 1] + i, size - i);
        const auto all = std::make_integer_sequence<int, WIDTH>{};
        const IntegerWords::Factor low = IntegerWords::of((Words)interleave<0>(even, odd, all));
        const IntegerWords::Factor high = IntegerWords::of((Words)interleave<LANES>(even, odd, all));
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
          const IntegerWords::Factor weight = IntegerWords::row(weights[m * (CHUNK / 2) + k]);
          sums[m][0] = IntegerWords::add(sums[m][0], weight, low);
          sums[m][1] = IntegerWords::add(sums[m][1], weight, high);
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) store((Single *)(out + m * stride + i + half * LANES), sums[m][half]);
    }
  }

  HEADRACE_INLINE void find_scales(const Chunk &chunk, const float *scales, float *out) {
    for (int i = 0; i < CHUNK; i += LANES) {
      if (chunk.together[i / LANES]) store((Single *)out + i, load((const Single *)scales + chunk.scale[i]));
      else
        for (int j = i; j < i + LANES; j++) out[j] = scales[chunk.scale[j]];
    }
  }

  static int64_t query_words(const Attention &a) { return (a.head_dim + 2 * LANES - 1) / (2 * LANES) * LANES; }

  static void load_queries(const Attention &a, const Piece &p, const Scratch &s) {
    const int64_t words = query_words(a);
    float query[MAX_HEAD_DIM + 2 * LANES] = {};
    each_query(a, p, [&](int64_t v, int64_t place) {
      with_type(a.dtype, [&](auto t) { widen((const decltype(t) *)a.queries + place, a.head_dim, query); });
      s.query_scale[v] = to_shorts(query, 2 * words, (uint16_t *)(s.query + v * words));
    });
  }

  template <class Weigh>
  static void absorb(const Attention &a, const Chunk &chunk, int64_t head, const Scratch &s, int64_t at, int64_t vectors,
                     const Partial &result, int64_t stride, Weigh weigh) {
    const int64_t size = a.head_dim, words = query_words(a);
    const Byte *keys = (const Byte *)a.pages.keys + head * size, *values = (const Byte *)a.pages.values + head * size;
    const Byte *tokens[CHUNK];
    float key_scale[CHUNK], value_scale[CHUNK];
    find_scales(chunk, a.pages.key_scales + head * a.pages.block_size, key_scale);
    find_scales(chunk, a.pages.value_scales + head * a.pages.block_size, value_scale);
    const bool few = vectors <= FEW;
    if (few) {
      score_few(keys, chunk, size, s.query + at * words, words, s.score, vectors);
    } else {
      find(a, chunk, head, a.pages.keys, tokens);
      pack_keys<Integers>(tokens, chunk.columns(), size, s.keys);
      multiply<IntegerWords>(s.query + at * words, words, s.keys, CHUNK, (size + 1) / 2, s.score, CHUNK, vectors,
                             chunk.columns(), false);
    }
    for (int64_t m = 0; m < vectors; m++) {
      float *score = s.score + m * CHUNK;
      const Floats factor = broadcast(s.query_scale[at + m]);
      for (int i = 0; i < chunk.columns(); i += LANES) {
        const Ints product = (Ints)load((const Single *)score + i);
        store((Single *)score + i, __builtin_convertvector(product, Floats) * (factor * load((const Single *)key_scale + i)));
      }
      scale_sum(result.sum + m * stride, stride, weigh(m, score));
      for (int i = 0; i < chunk.columns(); i += LANES)
        store((Single *)score + i, load((const Single *)score + i) * load((const Single *)value_scale + i));
      s.worth[m] = to_shorts(score, chunk.columns(), s.weights + m * CHUNK);
    }
    const uint32_t *weights = (const uint32_t *)s.weights;
    if (few) {
      int64_t m = 0;
      for (; m + 2 <= vectors; m += 2) sum_few<2>(values, chunk, size, weights + m * (CHUNK / 2), s.product + m * stride, stride);
      if (m < vectors) sum_few<1>(values, chunk, size, weights + m * (CHUNK / 2), s.product + m * stride, stride);
    } else {
      find(a, chunk, head, a.pages.values, tokens);
      pack_values(tokens, chunk.count, size, stride, s.values);
      multiply<IntegerWords>(weights, CHUNK / 2, s.values, stride, (chunk.count + 1) / 2, s.product, stride, vectors, stride, false);
    }
    for (int64_t i = 0; i < vectors * stride; i += LANES) {
      const Ints product = (Ints)load((const Single *)s.product + i);
      Single *sum = (Single *)result.sum + i;
      store(sum, load(sum) + __builtin_convertvector(product, Floats) * s.worth[i / stride]);
    }
  }
};
