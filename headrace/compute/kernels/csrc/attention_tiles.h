// The two products of attention on tiles, from pages of bfloat16: keys and values lie in them as tiles want them, 16 words
// of features by 16 tokens, and 8 words of tokens (a group of 16) by 16 features. A score and a weighted sum are chains of
// additions in the order of features and of tokens, whichever rows share a tile.

static const int GROUP_WORDS = LANES / 2;  // of a group of tokens, and rows of a tile of values

// Shapes: 0 to 3 are sums; 4 queries and 5 keys, of TILE words; 6 weights and 7 values, of GROUP_WORDS.
struct AttentionTiles {
  int64_t rows = 0;

  // From now on tiles have `wanted` rows of queries, at most TILE.
  void shape(int64_t wanted) {
    if (wanted == rows) return;
    TileShapes shapes = tile_shapes(wanted);
    shapes.row_bytes[6] = GROUP_WORDS * 4;
    shapes.rows[6] = (uint8_t)wanted;
    shapes.rows[7] = GROUP_WORDS;
    use_shapes(shapes);
    rows = wanted;
  }
  ~AttentionTiles() { end_tiles(); }
};

// Calls body(first, end) for the whole tiles of [0, vectors), and then for what is left of one.
template <class Body>
HEADRACE_INLINE void in_row_tiles(int64_t vectors, AttentionTiles &tiles, Body body) {
  const int64_t whole = vectors / TILE * TILE;
  if (whole > 0) {
    tiles.shape(TILE);
    body(int64_t{0}, whole);
  }
  if (whole < vectors) {
    tiles.shape(vectors - whole);
    body(whole, vectors);
  }
}

// Memory is asked for `rows` rows of what is needed next, into the second cache: both products' would not fit the first.
HEADRACE_INLINE void fetch_rows(const Brain *next, int64_t step, int rows) {
  for (int i = 0; i < rows; i++) __builtin_prefetch(next + i * step, 0, 2);
}

// Scores of a tile of queries with four groups of keys. `ahead`: groups that are needed next, or null.
HEADRACE_INLINE void score_groups(const uint32_t *query, int64_t words, const Brain *const *keys, int64_t step,
                                  const Brain *const *ahead, float *score) {
  clear_sums<4>();
  for (int64_t w = 0; w < words; w += TILE) {
    load_tile<4>(query + w, words * 4);
    each_tile<4>([&](auto group) {
      if (ahead) fetch_rows(ahead[group()] + w * step, step, TILE);
      load_tile<5>(keys[group()] + w * step, step * 2);
      PairTiles::add<group(), 4, 5>();
    });
  }
  store_sums<4>(score, CHUNK);
}

// result[rows of a tile, 0 : N * LANES] += weights of groups [first, last] times their values at a feature.
template <int N>
HEADRACE_INLINE void weigh_groups(const uint32_t *weights, const Brain *const *values, const Brain *const *ahead,
                                  int64_t feature, int64_t step, int first, int last, float *result, int64_t stride) {
  load_sums<N>(result, stride);
  for (int g = first; g <= last; g++) {
    load_tile<6>(weights + g * GROUP_WORDS, CHUNK / 2 * 4);
    each_tile<N>([&](auto column) {
      const int64_t place = (feature + column() * LANES) * 2;
      if (ahead) fetch_rows(ahead[g] + place, step, GROUP_WORDS);
      load_tile<7>(values[g] + place, step * 2);
      PairTiles::add<column(), 6, 7>();
    });
  }
  store_sums<N>(result, stride);
}

// Pages that tiles read where they lie. All tiles of queries meet four groups of keys, or of values at four tiles of
// features, before the next: these stay in the first cache, where a tile is loaded in half of the time that a product takes.
struct BrainTiles : Plain<BrainPage> {
  static bool fit(const Attention &a) { return a.pages.block_size % LANES == 0 && a.head_dim % (2 * TILE) == 0; }

  template <class See>
  static void absorb(const Attention &a, const Chunk &chunk, const View<Brain> &view, const View<Brain> *ahead,
                     const Scratch &s, int64_t at, int64_t vectors, const Partial &result, int64_t stride, See see) {
    const int64_t words = a.head_dim / 2;
    const int first = chunk.begin / LANES, last = (chunk.count - 1) / LANES;
    AttentionTiles tiles;
    in_row_tiles(vectors, tiles, [&](int64_t from, int64_t to) {
      for (int i = first / 4 * 4; i <= last; i += 4)
        for (int64_t m = from; m < to; m += TILE)
          score_groups(s.query + (at + m) * words, words, view.keys + i, view.key_step,
                       ahead && m == 0 ? ahead->keys + i : nullptr, s.score + m * CHUNK + i * LANES);
    });
    soften<false>(a, chunk, s, vectors, result, stride, [&](int64_t) { return a.scale; }, see,
                  [&](int64_t m, int i, Floats v) { store((Brain *)s.weights + m * CHUNK + i, v); });
    View<Brain> values = view;
    if (chunk.count % LANES) {  // tokens of the last group that nobody sees may be no numbers
      Brain *seen = (Brain *)s.values + 2 * a.head_dim;
      __builtin_memset(seen, 0, GROUP_WORDS * view.value_step * sizeof(Brain));
      for (int word = last * GROUP_WORDS; 2 * word < chunk.count; word++)
        __builtin_memcpy(seen + word % GROUP_WORDS * view.value_step, word == view.odd ? view.alone : view.value(word),
                         view.value_step * sizeof(Brain));
      values.values[last] = seen;
    }
    in_row_tiles(vectors, tiles, [&](int64_t from, int64_t to) {
      for (int64_t i = 0; i < a.head_dim; i += 4 * LANES)
        for (int64_t m = from; m < to; m += TILE) {
          const uint32_t *weights = (const uint32_t *)s.weights + m * (CHUNK / 2);
          const Brain *const *next = ahead && m == 0 ? ahead->values : nullptr;
          float *sums = result.sum + m * stride + i;
          if (i + 4 * LANES <= a.head_dim)
            weigh_groups<4>(weights, values.values, next, i, view.value_step, first, last, sums, stride);
          else weigh_groups<2>(weights, values.values, next, i, view.value_step, first, last, sums, stride);
        }
    });
  }
};
