// Attention over latent keys and values (see kernels/latent.py), for rows of few tokens. The matrices that would expand a
// latent to keys and values of each head are multiplied with queries and results instead:
//
//   queries ── keys of each head ──▶ inner [tokens, heads, rank + rotary]
//           ── segments of latents ──▶ partial sums [segments, tokens, heads, rank], merged in order ──▶ mean
//           ── values of each head ──▶ out [tokens, heads, value]
//
// All heads meet the same latents, which lie token by token: [blocks, block_size, rank + rotary]. A chunk of them is turned
// once for all queries of a tile into what both products of attention read: rows of a word of features for the scores, and
// rows of a word of tokens for the sums. So a key is read once, and multiplied heads * tokens times.

static const int64_t LATENT_TILE = 128;  // queries, times heads, that meet a turned chunk: their sums stay in the second cache
static const int64_t LATENT_TASKS = 8;   // segments for each thread that are computed before they are merged

// Some queries of a row, counted in heads of tokens: what one thread computes of a segment at a time.
struct LatentTile {
  int64_t row, first, vectors, segments, partial;  // partial: place of its first segment's sums, in vectors
};

// The rows of a step, and the memory of its products.
template <class Page>
struct LatentStep {
  using Element = typename Page::Element;
  static const int FACTOR = FACTOR_OF<Element>;
  static const int HALF = 2 * LANES;  // elements of 16 bits in a vector

  const LatentAttention &a;
  Attention scored;  // what the products of attention read of `a`
  int64_t width, words, stride;
  uint32_t *inner, *mean;  // [tokens * heads, words], [tokens * heads, rank / FACTOR]
  float *partials;
  int64_t partial_vectors;

  Partial partial(int64_t place) const {
    float *totals = partials + partial_vectors * stride, *bests = totals + partial_vectors * LANES;
    return {partials + place * stride, totals + place * LANES, bests + place};
  }

  int64_t begin_of(int64_t row) const { return a.query_starts[row] * a.heads; }
};

// Rows 0 to LANES of words become columns: at each stage those that differ in one bit change the lanes that differ in it.
template <int H, int... I>
HEADRACE_INLINE void exchange(Words &low, Words &high, std::integer_sequence<int, I...>) {
  const Words a = low, b = high;
#if defined(__clang__)
  low = __builtin_shufflevector(a, b, (I & H ? LANES + (I ^ H) : I)...);
  high = __builtin_shufflevector(a, b, (I & H ? LANES + I : I ^ H)...);
#else
  low = __builtin_shuffle(a, b, Ints{(I & H ? LANES + (I ^ H) : I)...});
  high = __builtin_shuffle(a, b, Ints{(I & H ? LANES + I : I ^ H)...});
#endif
}

template <int H = 1>
HEADRACE_INLINE void transpose(Words (&rows)[LANES]) {
  if constexpr (H < LANES) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
      if (!(i & H)) exchange<H>(rows[i], rows[i + H], std::make_integer_sequence<int, LANES>{});
    transpose<2 * H>(rows);
  }
}

// keys [words, CHUNK]: the words of LANES tokens, one beside the other.
static void turn_keys(const uint32_t *const (&tokens)[CHUNK], int first, int64_t words, uint32_t *keys) {
  int64_t w = 0;
  for (; w + LANES <= words; w += LANES) {
    Words rows[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) __builtin_memcpy(&rows[i], tokens[first + i] + w, sizeof rows[i]);
    transpose(rows);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) __builtin_memcpy(keys + (w + i) * CHUNK + first, &rows[i], sizeof rows[i]);
  }
  for (; w < words; w++)
    for (int i = 0; i < LANES; i++) keys[w * CHUNK + first + i] = tokens[first + i][w];
}

template <int... I>
HEADRACE_INLINE void interleave(Shorts a, Shorts b, uint32_t *out, std::integer_sequence<int, I...>) {
  constexpr int N = 2 * LANES;
#if defined(__clang__)
  const Shorts low = __builtin_shufflevector(a, b, (I / 2 + I % 2 * N)...);
  const Shorts high = __builtin_shufflevector(a, b, (I / 2 + LANES + I % 2 * N)...);
#else
  const Shorts low = __builtin_shuffle(a, b, Shorts{(I / 2 + I % 2 * N)...});
  const Shorts high = __builtin_shuffle(a, b, Shorts{(I / 2 + LANES + I % 2 * N)...});
#endif
  __builtin_memcpy(out, &low, sizeof low);
  __builtin_memcpy(out + LANES, &high, sizeof high);
}

// values [tokens / FACTOR, stride]: words of the first `rank` features of one token, or of two.
HEADRACE_INLINE void pair_values(const Single *first, const Single *, int64_t rank, uint32_t *values) {
  __builtin_memcpy(values, first, rank * sizeof *values);
}

HEADRACE_INLINE void pair_values(const Brain *first, const Brain *second, int64_t rank, uint32_t *values) {
  int64_t i = 0;
  for (; i + 2 * LANES <= rank; i += 2 * LANES) {
    Shorts a, b;
    __builtin_memcpy(&a, first + i, sizeof a);
    __builtin_memcpy(&b, second + i, sizeof b);
    interleave(a, b, values + i, std::make_integer_sequence<int, 2 * LANES>{});
  }
  for (; i < rank; i++) values[i] = first[i].bits | (uint32_t)second[i].bits << 16;
}

// A chunk of a row's latents as both products read them, in `s.keys` and `s.values`. `nothing`: a token of zeros.
template <class Page>
static void turn_chunk(const LatentStep<Page> &step, int64_t row, const Chunk &chunk, const Scratch &s,
                       const uint32_t *nothing) {
  using Element = typename Page::Element;
  constexpr int FACTOR = FACTOR_OF<Element>;
  const LatentAttention &a = step.a;
  const int32_t *table = a.tables + row * a.width;
  const uint32_t *tokens[CHUNK];
  for (int j = 0; j < chunk.columns(); j++) {
    const int64_t position = chunk.first + j, block = j < chunk.count ? table[position / a.block_size] : 0;
    const Element *latent = (const Element *)a.pages + block * a.stride + position % a.block_size * step.width;
    tokens[j] = j < chunk.count ? (const uint32_t *)latent : nothing;
  }
  for (int first = 0; first < chunk.columns(); first += LANES) {
    turn_keys(tokens, first, step.words, s.keys);
    for (int j = first; j < first + LANES; j += FACTOR)
      pair_values((const Element *)tokens[j], (const Element *)tokens[j + FACTOR - 1], a.rank, s.values + j / FACTOR * step.stride);
  }
}

// What the queries of a tile find in a segment.
template <class Page>
static void attend_segment(const LatentStep<Page> &step, const LatentTile &tile, int64_t segment, const Scratch &s,
                           const uint32_t *nothing) {
  using Element = typename Page::Element;
  constexpr int FACTOR = FACTOR_OF<Element>;
  const LatentAttention &a = step.a;
  const int64_t length = a.query_starts[tile.row + 1] - a.query_starts[tile.row], start = a.contexts[tile.row] - length;
  const int64_t last = start + (tile.first + tile.vectors - 1) / a.heads + 1;
  const int64_t edge = (segment + 1) * SEGMENT, end = edge < last ? edge : last;
  const Partial result = step.partial(tile.partial + segment * tile.vectors);
  clear(result, tile.vectors, step.stride);
  View<Element> view = {};
  view.key_step = CHUNK * FACTOR;
  view.value_step = step.stride * FACTOR;
  view.odd = CHUNK;
  for (int i = 0; i < GROUPS; i++) {
    view.keys[i] = (const Element *)s.keys + i * LANES * FACTOR;
    view.values[i] = (const Element *)s.values + i * LANES * step.stride;
  }
  Scratch own = s;
  own.query = step.inner + (step.begin_of(tile.row) + tile.first) * step.words;
  for (int64_t first = segment * SEGMENT; first < end; first += CHUNK) {
    Chunk chunk;
    chunk.first = first;
    chunk.begin = 0;
    chunk.count = (int)(end - first < CHUNK ? end - first : CHUNK);
    turn_chunk(step, tile.row, chunk, s, nothing);
    for (int64_t at = 0; at < tile.vectors; at += STRIP) {
      const int64_t count = tile.vectors - at < STRIP ? tile.vectors - at : STRIP;
      const Partial some = {result.sum + at * step.stride, result.total + at * LANES, result.best + at};
      Plain<Page>::absorb(step.scored, chunk, view, nullptr, own, at, count, some, step.stride, [&](int64_t m) {
        const int64_t seen = start + (tile.first + at + m) / a.heads + 1 - first;
        return Seen{0, seen < chunk.count ? (int)seen : chunk.count};
      });
    }
  }
}

// out [rows, outputs] = x [rows, depth words] times a head's panels, rows `x_stride` words and `out_stride` elements apart.
template <class Kind, class Out>
static void multiply_head(const uint32_t *x, int64_t x_stride, const uint32_t *panels, int64_t depth, int64_t rows,
                          int64_t outputs, Out *out, int64_t out_stride) {
  float sums[BLOCK_ROWS * PANEL];
  for (int64_t column = 0; column < outputs; column += PANEL, panels += depth * PANEL)
    for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
      const int64_t count = rows - first < BLOCK_ROWS ? rows - first : BLOCK_ROWS;
      for (int64_t k = 0; k < depth; k += BLOCK_DEPTH)
        multiply_rows<Kind>(x + first * x_stride + k, x_stride, panels + k * PANEL, depth - k < BLOCK_DEPTH ? depth - k : BLOCK_DEPTH,
                            sums, count, k > 0, {panels + (k + BLOCK_DEPTH) * PANEL, tiles_of<Kind>(count), 0});
      const int64_t columns = outputs - column < PANEL ? outputs - column : PANEL;
      for (int64_t m = 0; m < count; m++)
        each_vector(columns, [&](int64_t i, int lanes) {
          store_at(out + (first + m) * out_stride + column + i, load((const Single *)(sums + m * PANEL + i)), lanes);
        });
    }
}

// The queries of all tokens as they meet latents, by heads.
template <class Page>
static void absorb_queries(const LatentStep<Page> &step, int64_t tokens, int threads) {
  using Element = typename Page::Element;
  constexpr int FACTOR = FACTOR_OF<Element>;
  const LatentAttention &a = step.a;
  const int64_t size = a.plain + a.rotary, depth = a.plain / FACTOR, panels = (a.rank + PANEL - 1) / PANEL;
  each_task(a.heads, threads, [&](int64_t head) {
    const Element *query = (const Element *)a.query + head * size;
    Element *inner = (Element *)step.inner + head * step.width;
    multiply_head<typename Page::Kind>((const uint32_t *)query, a.heads * size / FACTOR, (const uint32_t *)a.keys + head * panels * depth * PANEL,
                                       depth, tokens, a.rank, inner, a.heads * step.width);
    for (int64_t t = 0; t < tokens; t++)
      __builtin_memcpy(inner + t * a.heads * step.width + a.rank, query + t * a.heads * size + a.plain, a.rotary * sizeof(Element));
  });
}

// What all heads return for the mean of the latents that each attended to.
template <class Page>
static void expand_means(const LatentStep<Page> &step, int64_t tokens, int threads) {
  using Element = typename Page::Element;
  constexpr int FACTOR = FACTOR_OF<Element>;
  const LatentAttention &a = step.a;
  const int64_t depth = a.rank / FACTOR, panels = (a.value + PANEL - 1) / PANEL;
  each_task(a.heads, threads, [&](int64_t head) {
    multiply_head<typename Page::Kind>(step.mean + head * depth, a.heads * depth, (const uint32_t *)a.values + head * panels * depth * PANEL,
                                       depth, tokens, a.value, (Element *)a.out + head * a.value, a.heads * a.value);
  });
}

// All segments of a tile, merged in order, divided by the sums of their weights.
template <class Page>
static void finish_tile(const LatentStep<Page> &step, const LatentTile &tile) {
  using Element = typename Page::Element;
  const LatentAttention &a = step.a;
  const Partial whole = step.partial(tile.partial);
  for (int64_t segment = 1; segment < tile.segments; segment++)
    merge(whole, step.partial(tile.partial + segment * tile.vectors), tile.vectors, step.stride);
  for (int64_t v = 0; v < tile.vectors; v++) {
    Element *mean = (Element *)step.mean + (step.begin_of(tile.row) + tile.first + v) * a.rank;
    const float inverse = share_of(whole, v, nullptr);
    each_vector(a.rank, [&](int64_t i, int lanes) {
      store_at(mean + i, load((const Single *)(whole.sum + v * step.stride + i)) * inverse, lanes);
    });
  }
}

// The scratch of a thread: without queries, which lie in `inner`, nor a second partial.
static Scratch latent_scratch(Scratch::Source &take, int64_t words, int64_t stride) {
  Scratch s = {};
  s.keys = (uint32_t *)take(CHUNK * words);
  s.values = (uint32_t *)take(CHUNK * stride);
  s.score = take(STRIP * CHUNK);
  s.peak = take(STRIP);
  s.shrink = take(STRIP);
  s.worth = take(STRIP);
  s.weights = (uint16_t *)take(STRIP * CHUNK / 2);
  return s;
}

// The next tiles, from `at` on, that are computed before they are merged: at least one.
struct LatentWave {
  int64_t row = 0, first = 0;  // where the next begins

  int64_t next(const LatentAttention &a, int64_t tasks, LatentTile *tiles, int64_t most, int64_t &vectors) {
    int64_t count = 0;
    vectors = 0;
    for (int64_t taken = 0; row < a.rows && taken < tasks && count < most; count++) {
      const int64_t length = a.query_starts[row + 1] - a.query_starts[row], all = length * a.heads;
      const int64_t left = (all - first + LATENT_TILE - 1) / LATENT_TILE, size = (all - first + left - 1) / left;
      const int64_t last = a.contexts[row] - length + (first + size - 1) / a.heads + 1, segments = (last + SEGMENT - 1) / SEGMENT;
      tiles[count] = {row, first, size, segments, vectors};
      vectors += size * segments;
      taken += segments;
      first += size;
      if (first == all) row++, first = 0;
    }
    return count;
  }
};

static const int64_t MOST_TILES = 256;  // of a wave

// The tiles of one wave: their segments by all threads, then their merges.
template <class Page>
static void run_wave(const LatentStep<Page> &step, const LatentTile *tiles, int64_t count, int threads, float *scratch,
                     int64_t floats, const uint32_t *nothing) {
  int64_t begins[MOST_TILES + 1] = {};
  for (int64_t i = 0; i < count; i++) begins[i + 1] = begins[i] + tiles[i].segments;
  share(begins[count], 1, threads, [&](int64_t task, int64_t end, int64_t member) {
    Scratch::Source own = {scratch + member * floats, 0};
    const Scratch s = latent_scratch(own, step.words, step.stride);
    for (; task < end; task++) {
      int64_t i = 0;
      while (begins[i + 1] <= task) i++;
      attend_segment(step, tiles[i], task - begins[i], s, nothing);
    }
  });
  each_task(count, threads, [&](int64_t i) { finish_tile(step, tiles[i]); });
}

template <class Page>
static int run_latent(const LatentAttention &a) {
  constexpr int FACTOR = FACTOR_OF<typename Page::Element>;
  if (!a.rows) return 1;
  const int64_t tokens = a.query_starts[a.rows], width = a.rank + a.rotary, words = width / FACTOR;
  const int64_t stride = (a.rank + LANES - 1) / LANES * LANES;
  int64_t work = 0;
  for (int64_t row = 0; row < a.rows; row++) work += a.contexts[row] * (a.query_starts[row + 1] - a.query_starts[row]);
  const int threads = threads_for((work * width + tokens * a.rank * (a.plain + a.value)) * a.heads);
  const int64_t tasks = LATENT_TASKS * threads;
  LatentTile tiles[MOST_TILES];
  int64_t most = 0, vectors;
  for (LatentWave wave; wave.next(a, tasks, tiles, MOST_TILES, vectors);) most = vectors > most ? vectors : most;
  Scratch::Source none = {};
  latent_scratch(none, words, stride);
  const int64_t of_tokens = tokens * a.heads * (words + a.rank / FACTOR);
  float *room = aligned(of_tokens + words + 2 * LINE), *partials = aligned(most * (stride + LANES + 1)), *scratch = aligned(threads * none.taken);
  const bool enough = room && partials && scratch;
  if (enough) {
    uint32_t *inner = (uint32_t *)room, *mean = inner + tokens * a.heads * words, *nothing = inner + of_tokens;
    __builtin_memset(nothing, 0, words * sizeof *nothing);
    Attention scored = {};
    scored.head_dim = width;
    scored.scale = a.scale;
    const LatentStep<Page> step = {a, scored, width, words, stride, inner, mean, partials, most};
    absorb_queries(step, tokens, threads);
    int64_t count;
    for (LatentWave wave; (count = wave.next(a, tasks, tiles, MOST_TILES, vectors));)
      run_wave(step, tiles, count, threads, scratch, none.taken, nothing);
    expand_means(step, tokens, threads);
  }
  free(scratch);
  free(partials);
  free(room);
  return enough;
}

static int latent(const LatentAttention &a) {
  return a.dtype == FLOAT32 ? run_latent<SinglePage>(a) : run_latent<BrainPage>(a);
}
