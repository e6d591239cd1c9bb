// The two products of attention, from each type of page: queries by keys, weights by values. `absorb` takes in one chunk
// of one key head for some queries, of which a callback says what they see. Pages hold words in the order in which both
// products want them (`Pages` in operations.h), so that a register tile reads them where they lie, whether it has the
// queries of one token or of many. Integers are multiplied as integers, exactly: queries, and each chunk's weights,
// become int16 with a scale of their own (a hundred times finer than what they are multiplied with), and the pages'
// scales go to scores and weights.

// A chunk is what a query's softmax takes in at once. Longer ones load and store its sums more seldom; two of keys and
// values, this one and what is fetched of the next, no longer fit the first cache: so memory is asked for the next PANEL
// tokens that are needed, of keys or of values.
static const int CHUNK = 128;
static const int GROUPS = CHUNK / LANES;
#if defined(HEADRACE_TILES)
static const int STRIP = 96;   // queries whose scores are softened at once: as many as meet keys that are near
#else
static const int STRIP = 48;   // queries whose scores are softened at once: whole tiles of ROWS
#endif
static const int LINE = 16;    // floats of a line of the cache

// A chunk's tokens [begin, count), in whole groups of LANES.
struct Chunk {
  int64_t first;                                             // position of its first token
  int64_t keys[GROUPS], values[GROUPS], scales[GROUPS];      // where a group's begin in the pages, for key head 0
  int begin, count;

  int columns() const { return (count + LANES - 1) / LANES * LANES; }
};

// A chunk of one head, in its pages or gathered, by groups: keys are rows of LANES words of a feature, `key_step` elements
// apart; values rows of a word of tokens, `value_step` apart. The row of word `odd` lies at `alone`. Scales: of integers.
template <class Element>
struct View {
  const Element *keys[GROUPS], *values[GROUPS], *alone;
  const float *key_scales[GROUPS], *value_scales[GROUPS];
  int64_t key_step, value_step;
  int odd;

  const Element *value(unsigned word) const {
    const unsigned rows = LANES / FACTOR_OF<Element>;
    return values[word / rows] + word % rows * value_step;
  }
};

// Some key heads of a tile over some of its segments: what one thread does at a time. Its results lie at `partial`,
// counted in vectors, when the tile has several parts; those of the same heads in the next part `step` further. `earlier`: a
// piece of another row with the same keys and heads, which is computed with this one, and so on; both are seen whole.
// `joined`: vectors of a head, with those of the earlier pieces.
struct Piece {
  int64_t row, first_query, queries, first_key, end_key, first_head, heads, part, parts, partial, step;
  int64_t joined = 0;
  const Piece *earlier = nullptr;
  bool led = false;  // it is the earlier one of another
};

// What is known of some queries: weighted sums of values, sums of weights in LANES parts, and the largest score.
struct Partial {
  float *sum, *total, *best;
};

// Which tokens of a chunk a query sees: [low, high).
struct Seen {
  int low, high;
};

// A thread's memory, for `vectors` queries of a tile's heads, of which STRIP are worked on at once. Every part begins at
// a line of the cache: a vector that lies across two takes two accesses.
struct Scratch {
  uint32_t *keys, *values, *query;  // [CHUNK * stride], [CHUNK * stride], [vectors * stride]
  float *scales;                    // [2 * CHUNK]
  float *score;                     // [STRIP * CHUNK]
  float *peak, *shrink, *worth;     // [STRIP] each
  float *query_scale;               // [vectors], of integers
  uint16_t *weights;                // [STRIP * CHUNK]
  Partial segment, whole;

  // Floats from memory, or, without, how many are needed.
  struct Source {
    float *memory;
    int64_t taken;

    float *operator()(int64_t count) {
      float *part = memory ? memory + taken : nullptr;
      taken += (count + LINE - 1) / LINE * LINE;
      return part;
    }
  };

  static Scratch at(Source &take, int64_t vectors, int64_t stride) {
    const auto partial = [&] {
      float *sum = take(vectors * stride), *total = take(vectors * LANES);
      return Partial{sum, total, take(vectors)};
    };
    Scratch s;
    s.keys = (uint32_t *)take(CHUNK * stride);
    s.values = (uint32_t *)take(CHUNK * stride);
    s.query = (uint32_t *)take(vectors * stride);
    s.scales = take(2 * CHUNK);
    s.score = take(STRIP * CHUNK);
    s.peak = take(STRIP);
    s.shrink = take(STRIP);
    s.worth = take(STRIP);
    s.query_scale = take(vectors);
    s.weights = (uint16_t *)take(STRIP * CHUNK / 2);
    s.segment = partial();
    s.whole = partial();
    return s;
  }
};

// Calls body(vector, place) for each query of a piece's heads: its element's place among the activations. Of each head's
// `apart` vectors, those of the piece begin at `from`.
template <class Body>
HEADRACE_INLINE void each_query(const Attention &a, const Piece &p, int64_t apart, int64_t from, Body body) {
  const int64_t group = a.heads / a.kv_heads, vectors = p.queries * group;
  const int64_t packed = a.query_starts[p.row] + p.first_query;
  for (int64_t v = 0; v < p.heads * vectors; v++) {
    const int64_t head = p.first_head + v / vectors, m = v % vectors;
    body(v / vectors * apart + from + m, ((packed + m / group) * a.heads + head * group + m % group) * a.head_dim);
  }
}

// The same for a piece and those that are computed with it.
template <class Body>
HEADRACE_INLINE void each_joined_query(const Attention &a, const Piece &p, Body body) {
  int64_t from = 0;
  for (const Piece *q = &p; q; q = q->earlier) {
    each_query(a, *q, p.joined, from, body);
    from += q->queries * (a.heads / a.kv_heads);
  }
}

// LANES words of a page as factors of a product.
struct SinglePage {
  using Kind = FloatWords;
  using Element = Single;
  HEADRACE_INLINE Kind::Factor column(const Single *p) { return {load(p)}; }
};

struct HalfPage {
  using Kind = FloatWords;
  using Element = Half;
  HEADRACE_INLINE Kind::Factor column(const Half *p) { return {load(p)}; }
};

// Pages of bfloat16 that rows of float32 meet.
struct NarrowPage {
  using Kind = NarrowWords;
  using Element = Brain;
  HEADRACE_INLINE Kind::Factor column(const Brain *p) { return Kind::column((const uint32_t *)p); }
};

struct BrainPage {
  using Kind = PairWords;
  using Element = Brain;
  HEADRACE_INLINE Kind::Factor column(const Brain *p) { return Kind::column((const uint32_t *)p); }
};

// Whether a page's words are columns of the matrix product as they lie.
template <class Page>
static const bool IN_WORDS = std::is_same_v<Page, SinglePage> || std::is_same_v<Page, NarrowPage>;

// So many queries, and fewer, take twice as many columns at once, so that enough additions are under way.
template <class Page>
static const int WIDE_ROWS = LANES == 8 && IN_WORDS<Page> ? 3 : ROWS / 2;

// Words of two int16, multiplied and summed in int32, whose bits stand where the others have float32. Exact: nothing
// depends on the order.
struct IntegerWords {
  static const bool WHOLE = true;
  static const int ROW_WORDS = 1;
#if LANES >= 8
  struct Factor { Words value; };
  HEADRACE_INLINE Factor row(const uint32_t *p) { return {Words{} + *p}; }
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
  HEADRACE_INLINE Factor row(const uint32_t *p) { return of(Words{} + *p); }
  HEADRACE_INLINE Factor of(Words w) { return {(Ints)(w << 16) >> 16, (Ints)w >> 16}; }
  HEADRACE_INLINE Floats add(Floats sum, Factor a, Factor b) {
    return (Floats)((Ints)sum + a.low * b.low + a.high * b.high);
  }
#endif
};

struct BytePage {
  using Kind = IntegerWords;
  using Element = Byte;
  HEADRACE_INLINE Kind::Factor column(const Byte *p) {
    typedef int8_t Octets __attribute__((vector_size(2 * LANES)));
    Octets octets;
    __builtin_memcpy(&octets, p, sizeof octets);
#if LANES == 16
    return Kind::of((Words)_mm512_cvtepi8_epi16((__m256i)octets));  // one instruction, of which gcc would make five
#else
    return Kind::of((Words)__builtin_convertvector(octets, Shorts));
#endif
  }
};

// Adds the products of rows with a page's columns, `at(i)` the i-th vector of them.
template <class Page, int M, int NV, class At>
HEADRACE_INLINE void add_page(Floats (&sum)[M][NV], const uint32_t *rows, int64_t stride, At at) {
  using Kind = typename Page::Kind;
  if constexpr (IN_WORDS<Page>) {
    add_columns<Kind>(sum, rows, stride, [&](int i) __attribute__((always_inline)) { return (const uint32_t *)at(i); });
  } else {
    add_factors<Kind>(sum, rows, stride, [&](int i) __attribute__((always_inline)) { return Page::column(at(i)); });
  }
}

// What to ask memory for while a panel of tokens is multiplied: the panel that is needed next, the first line of each of its
// NV groups, then the second, and so on. So few lines lie between asking and needing that they are near then: lines from
// further off stand behind those that memory was asked for. `step`: elements from line to line of a group.
template <class Element, int NV = VECTORS>
struct PanelAhead {
  // Groups in the same lines of the cache: keys side by side, values one group behind the other (in blocks of 16 tokens or more).
  static const int TOGETHER = LANES == 8 ? 2 : 1;
  static const int64_t LINE_ELEMENTS = TOGETHER * LANES * FACTOR_OF<Element>;

  const Element *groups[NV / TOGETHER];
  int64_t step;

  // Without the first lines.
  PanelAhead(const Element *const *first, int64_t step, int64_t lines = 0) : step(step) {
    for (int i = 0; i < NV / TOGETHER; i++) groups[i] = first[i * TOGETHER] + lines * step;
  }
};

// Calls body(ask) to multiply a panel. ask(line) asks for a line of each group, but not before `line` is there, one of those
// that are multiplied: asked as fast as it multiplies, memory soon has no place for a request, those among them that are
// waited for. The less a loop has to do for a line the more of them are on their way, since a processor looks some hundred
// instructions ahead.
template <class Element, int NV, class Body>
HEADRACE_INLINE void while_asking(const PanelAhead<Element, NV> *ahead, Body body) {
  if (!ahead) return body([](const Element *) {});
  const auto next = *ahead;
  int64_t place = 0;
  body([&](const Element *line) __attribute__((always_inline)) {
    uint32_t part;
    __builtin_memcpy(&part, line, sizeof part);
    uint64_t wide = part;
    asm("" : "+r"(wide));  // the compiler must not know that its upper half is zero
    const int64_t at = place + (int64_t)(wide >> 32);
#pragma GCC unroll 8
    for (const Element *group : next.groups) ask_for(group + at);
    place += next.step;
  });
}

// Scores of M queries with NV groups of keys: each is one chain of additions in the order of features. Not inlined: the sums would
// leave their registers.
template <class Page, int M, int NV>
__attribute__((noinline)) static void score_tile(const uint32_t *query, int64_t words, int64_t query_stride,
                                                 const typename Page::Element *const *keys, int64_t key_step,
                                                 const PanelAhead<typename Page::Element, NV> *ahead, float *score) {
  const typename Page::Element *key[NV];
#pragma GCC unroll 8
  for (int i = 0; i < NV; i++) key[i] = keys[i];
  Floats sum[M][NV] = {};
  while_asking(ahead, [&](auto ask) __attribute__((always_inline)) {
    for (int64_t w = 0, at = 0; w < words; w++, at += key_step) {
      ask(key[NV - 1] + at);
      add_page<Page>(sum, query + w * Page::Kind::ROW_WORDS, query_stride, [&](int i) { return key[i] + at; });
    }
  });
  store_sums(sum, score, CHUNK);
}

// result[m, 0 : NV * LANES] (+)= weights of M queries times the values of words [begin, end) of a panel, in their order.
template <class Page, int M, int NV>
__attribute__((noinline)) static void weigh_tile(const uint32_t *weights, const View<typename Page::Element> &view,
                                                 const PanelAhead<typename Page::Element> *ahead, int64_t feature, int begin,
                                                 int end, bool accumulate, float *result, int64_t stride) {
  const int ROW_WORDS = Page::Kind::ROW_WORDS;
  using Element = typename Page::Element;
  const int factor = FACTOR_OF<Element>, rows = LANES / factor;
  const int whole = view.odd < end ? view.odd : end;
  const int64_t value_step = view.value_step;
  Floats sum[M][NV];
  load_sums(sum, result, stride, accumulate);
  const auto add_word = [&](const Element *row, int k) __attribute__((always_inline)) {
    add_page<Page>(sum, weights + k * ROW_WORDS, CHUNK / factor * ROW_WORDS, [&](int i) { return row + i * LANES * factor; });
  };
  while_asking(ahead, [&](auto ask) __attribute__((always_inline)) {
    for (int k = begin; k < whole;) {
      const Element *row = view.values[k / rows] + feature * factor;
      for (const int until = whole - k < rows ? whole : k + rows; k < until; k++, row += value_step) {
#pragma GCC unroll 8
        for (int i = VECTORS; i <= NV; i += VECTORS) ask(row + (i - 1) * LANES * factor);
        add_word(row, k);
      }
    }
  });
  if (whole < end) add_word(view.alone + feature * factor, whole);
  store_sums(sum, result, stride);
}

// Scores [vectors, CHUNK] of queries that are `query_stride` words apart. Few take the keys of two panels at once. `ahead`: null
// where memory need not be asked.
template <class Page, class View>
static void score_chunk(const uint32_t *query, int64_t words, int64_t query_stride, const Chunk &chunk, const View &view,
                        const View *ahead, float *score, int64_t vectors) {
  const int first = chunk.begin / PANEL * VECTORS;
  const auto tile = [&](auto count, auto columns, int64_t m, int i) {
    constexpr int NV = columns();
    using Lines = PanelAhead<typename Page::Element, NV>;
    const Lines next = (i + NV) * LANES < chunk.count ? Lines(view.keys + i + NV, view.key_step)
                                                      : Lines(view.values + first, Lines::LINE_ELEMENTS);
    score_tile<Page, count(), NV>(query + m * query_stride, words, query_stride, view.keys + i, view.key_step,
                                  m || !ahead ? nullptr : &next, score + m * CHUNK + i * LANES);
  };
  int i = first;
  if constexpr (LANES == 8 && IN_WORDS<Page>)
    for (; vectors <= WIDE_ROWS<Page> && (i + VECTORS) * LANES < chunk.count; i += 2 * VECTORS)
      in_tiles<WIDE_ROWS<Page>>(vectors, [&](auto count, int64_t m) { tile(count, std::integral_constant<int, 2 * VECTORS>{}, m, i); });
  for (; i * LANES < chunk.count; i += VECTORS) {
    in_tiles<ROWS_OF<typename Page::Kind>>(vectors, [&](auto count, int64_t m) {
      tile(count, std::integral_constant<int, VECTORS>{}, m, i);
    });
  }
}

// Sums [vectors, stride] take in values by weights [vectors, CHUNK], as words. Few queries take twice as many features at
// once, so that enough additions are under way. `ahead`: the view that is needed after this one, or null; `worth`: see
// Scratch. Queries that ask memory for it go from panel to panel of tokens; the others sum a whole chunk, and so load and store
// their sums half as often.
template <class Page, class View>
static void weigh_chunk(const uint32_t *weights, const Chunk &chunk, const View &view, const View *ahead,
                        const float *worth, float *result, int64_t stride, int64_t vectors) {
  using Lines = PanelAhead<typename Page::Element>;
  constexpr bool WHOLE = Page::Kind::WHOLE;
  const int factor = FACTOR_OF<typename Page::Element>;
  const int begin = chunk.begin / factor, end = (chunk.count + factor - 1) / factor;
  const View &after = ahead ? *ahead : view;
  in_tiles<ROWS_OF<typename Page::Kind>>(vectors, [&](auto count, int64_t m) {
    constexpr int M = count();
    const int words = (m || !ahead ? CHUNK : PANEL) / factor;
    float products[WHOLE ? M * (MAX_HEAD_DIM + LANES) : 1];
    float *const sums = WHOLE ? products : result + m * stride;
    for (int first = begin / words * words; first < end; first += words) {
      const int from = first < begin ? begin : first, to = end - first < words ? end : first + words;
      const auto tile = [&](auto columns, int64_t i) {
        constexpr int NV = columns();
        const Lines next = to < end ? Lines(view.values + to * factor / LANES, Lines::LINE_ELEMENTS, i / factor)
                                    : Lines(after.keys, after.key_step, i / factor);
        weigh_tile<Page, M, NV>(weights + m * (CHUNK / factor * Page::Kind::ROW_WORDS), view, m || !ahead ? nullptr : &next, i, from, to,
                                !WHOLE || from > begin, sums + i, stride);
      };
      int64_t i = 0;
      if constexpr (M <= WIDE_ROWS<Page>)
        for (; i + 2 * PANEL <= stride; i += 2 * PANEL) tile(std::integral_constant<int, 2 * VECTORS>{}, i);
      for (; i + PANEL <= stride; i += PANEL) tile(std::integral_constant<int, VECTORS>{}, i);
      for (; i < stride; i += LANES) tile(std::integral_constant<int, 1>{}, i);
    }
    for (int64_t row = 0; WHOLE && row < M; row++)
      for (int64_t i = row * stride; i < (row + 1) * stride; i += LANES) {
        Single *target = (Single *)(result + m * stride + i);
        const Floats whole = __builtin_convertvector((Ints)load((const Single *)products + i), Floats);
        store(target, load(target) + whole * worth[m + row]);
      }
  });
}

// Scores [vectors, CHUNK], to be multiplied by `factor(m)`, become weights, which `keep(m, i, weights)` takes; what was
// summed before shrinks. Everything is in exponents of two. In passes over the queries, each of which is a chain of a few
// slow steps: so these overlap. `see(m)` is what a query sees: at most what the next one's end is and the one's before
// begin. What it does not see weighs nothing, by the same arithmetic as what it does.
template <bool FINE, class Factor, class See, class Keep>
HEADRACE_INLINE void soften(const Attention &a, const Chunk &chunk, const Scratch &s, int64_t vectors, const Partial &result,
                            int64_t stride, Factor factor, See see, Keep keep) {
  const float LOG2E = 1.44269504f;
  const int begin = chunk.begin, end = chunk.columns();
  const bool capped = a.softcap != 0.0f, all = see(0).high >= end && see(vectors - 1).low <= begin;
  if (capped || !all) {
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int64_t m = 0; m < vectors; m++) {
      const Seen seen = see(m);
      for (int i = begin; i < end; i += LANES) {
        Single *score = (Single *)s.score + m * CHUNK + i;
        Floats v = load(score);
        if (capped) v = a.softcap * hyperbolic_tangent(v * factor(m) / a.softcap);
        const Ints at = lane + i;
        store(score, (at >= seen.low) & (at < seen.high) ? v : broadcast(-INFINITY));
      }
    }
  }
  const auto unit = [&](int64_t m) { return capped ? LOG2E : factor(m) * LOG2E; };
  for (int64_t m = 0; m < vectors; m++) {
    const Single *score = (const Single *)s.score + m * CHUNK;
    Floats top = load(score + begin);
    for (int i = begin + LANES; i < end; i += LANES) top = maximum(top, load(score + i));
    s.peak[m] = largest(top) * unit(m);
  }
  each_vector(vectors, [&](int64_t m, int lanes) {
    const Floats best = load_at((const Single *)result.best + m, lanes), peak = load((const Single *)s.peak + m);
    const Floats most = maximum(peak, best), from = most == broadcast(-INFINITY) ? Floats{} : most;
    store_at((Single *)result.best + m, most, lanes);
    store((Single *)s.peak + m, from);
    store((Single *)s.shrink + m, power_of_two<FINE>(best - from));
  });
  for (int64_t m = 0; m < vectors; m++) {
    const Single *score = (const Single *)s.score + m * CHUNK;
    const Floats scale = broadcast(unit(m)), peak = broadcast(s.peak[m]);
    Floats added = {};
    for (int i = begin; i < end; i += LANES) {
      const Floats v = power_of_two<FINE>(load(score + i) * scale - peak);
      keep(m, i, v);
      added += v;
    }
    Single *total = (Single *)result.total + m * LANES;
    store(total, load(total) * s.shrink[m] + added);
    if (s.shrink[m] == 1.0f) continue;
    for (int64_t i = 0; i < stride; i += LANES) {
      Single *sum = (Single *)result.sum + m * stride + i;
      store(sum, load(sum) * s.shrink[m]);
    }
  }
}

// Pages of floats.
template <class Type>
struct Plain {
  using Page = Type;
  static const int FACTOR = FACTOR_OF<typename Page::Element>;
  static const bool PAIRS = std::is_same_v<typename Page::Kind, PairWords>;  // rows are words of two bfloat16

  static int64_t query_stride(const Attention &a) { return PAIRS ? a.head_dim / 2 : a.head_dim; }

  static void load_queries(const Attention &a, const Piece &p, const Scratch &s) {
    const int64_t words = query_stride(a);
    each_joined_query(a, p, [&](int64_t v, int64_t place) {
      uint32_t *row = s.query + v * words;
      if (PAIRS) __builtin_memcpy(row, (const Brain *)a.queries + place, a.head_dim * sizeof(Brain));
      else with_type(a.dtype, [&](auto t) { widen((const decltype(t) *)a.queries + place, a.head_dim, (float *)row); });
    });
  }

  // Queries [at, at + vectors) of the piece take in a chunk of a head; `result` is theirs. `ahead`: the next, or this one where
  // it is the last; null where memory need not be asked.
  template <class See>
  static void absorb(const Attention &a, const Chunk &chunk, const View<typename Page::Element> &view,
                     const View<typename Page::Element> *ahead, const Scratch &s, int64_t at, int64_t vectors,
                     const Partial &result, int64_t stride, See see) {
    using Weight = std::conditional_t<PAIRS, Brain, Single>;
    Weight *weights = PAIRS ? (Weight *)s.weights : (Weight *)s.score;
    const int64_t step = query_stride(a);
    score_chunk<Page>(s.query + at * step, a.head_dim / FACTOR, step, chunk, view, ahead, s.score, vectors);
    soften<!PAIRS>(a, chunk, s, vectors, result, stride, [&](int64_t) { return a.scale; }, see,
                        [&](int64_t m, int i, Floats v) { store(weights + m * CHUNK + i, v); });
    weigh_chunk<Page>((const uint32_t *)weights, chunk, view, ahead, s.worth, result.sum, stride, vectors);
  }
};

// Words of two int16 from floats: returns what one is worth. `count` is a multiple of LANES.
static float to_shorts(const float *x, int64_t count, uint16_t *out) {
  const float most = largest_size(x, count);
  const float inverse = most > SMALLEST ? 32767.0f / most : 0.0f;
  for (int64_t i = 0; i < count; i += LANES) store_bits(out + i, (Words)rounded(load((const Single *)x + i) * inverse));
  return most / 32767.0f;
}

struct Integers {
  using Page = BytePage;

  static int64_t query_stride(const Attention &a) { return (a.head_dim / 2 + LANES - 1) / LANES * LANES; }

  static void load_queries(const Attention &a, const Piece &p, const Scratch &s) {
    const int64_t words = query_stride(a);
    float query[MAX_HEAD_DIM + 2 * LANES] = {};
    each_joined_query(a, p, [&](int64_t v, int64_t place) {
      with_type(a.dtype, [&](auto t) { widen((const decltype(t) *)a.queries + place, a.head_dim, query); });
      const float scale = to_shorts(query, 2 * words, (uint16_t *)(s.query + v * words)) * a.scale;
      s.query_scale[v] = scale > 0.0f ? scale : 1.0f;  // of zeros; zero itself times what is hidden would be no number
    });
  }

  template <class See>
  static void absorb(const Attention &a, const Chunk &chunk, const View<Byte> &view, const View<Byte> *ahead,
                     const Scratch &s, int64_t at, int64_t vectors, const Partial &result, int64_t stride, See see) {
    const int64_t words = query_stride(a);
    score_chunk<Page>(s.query + at * words, a.head_dim / 2, words, chunk, view, ahead, s.score, vectors);
    for (int64_t m = 0; m < vectors; m++)
      for (int i = chunk.begin; i < chunk.columns(); i += LANES) {
        Single *score = (Single *)s.score + m * CHUNK + i;
        const Floats product = __builtin_convertvector((Ints)load(score), Floats);
        const Floats scaled = product * load((const Single *)view.key_scales[i / LANES]);
        // Of a broken token, whose integers are numbers all the same: as a peak this leaves no number of the whole sum.
        store(score, scaled == scaled ? scaled : broadcast(INFINITY));
      }
    soften<false>(a, chunk, s, vectors, result, stride, [&](int64_t m) { return s.query_scale[at + m]; }, see,
                  [&](int64_t m, int i, Floats v) {
                    // Where nothing is seen, there may be no number.
                    const Floats scaled = v * load((const Single *)view.value_scales[i / LANES]);
                    store((Single *)s.score + m * CHUNK + i, v > 0.0f ? scaled : Floats{});
                  });
    for (int64_t m = 0; m < vectors; m++)
      s.worth[m] = to_shorts(s.score + m * CHUNK + chunk.begin, chunk.columns() - chunk.begin,
                             s.weights + m * CHUNK + chunk.begin);
    weigh_chunk<Page>((const uint32_t *)s.weights, chunk, view, ahead, s.worth, result.sum, stride, vectors);
  }
};
