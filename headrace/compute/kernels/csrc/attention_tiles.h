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

// What memory is asked for while four groups of keys or of values are multiplied: lines of groups that are needed next. For
// one tile of queries, which takes less time than memory does, these are the next four, into the first cache: rows of tiles
// from the second would queue behind them. For several, those of the next chunk, into the second: both would not fit.
struct GroupsAhead {
  const Brain *const *groups;  // null: nothing
  int64_t step;                // from line to line
  bool first_cache;
};

HEADRACE_INLINE void fetch(const GroupsAhead &ahead, int64_t group, int64_t line, int lines) {
  if (!ahead.groups) return;
  const Brain *next = ahead.groups[group] + line * ahead.step;
  if (ahead.first_cache)
    for (int i = 0; i < lines; i++) __builtin_prefetch(next + i * ahead.step, 0, 3);
  else
    for (int i = 0; i < lines; i++) __builtin_prefetch(next + i * ahead.step, 0, 2);
}

// Scores of a tile of queries with four groups of keys.
HEADRACE_INLINE void score_groups(const uint32_t *query, int64_t words, const Brain *const *keys, int64_t step,
                                  const GroupsAhead &ahead, float *score) {
  clear_sums<4>();
  for (int64_t w = 0; w < words; w += TILE) {
    load_tile<4>(query + w, words * 4);
    each_tile<4>([&](auto group) {
      load_tile<5>(keys[group()] + w * step, step * 2);
      PairTiles::add<group(), 4, 5>();
      fetch(ahead, group(), w, TILE);
    });
  }
  store_sums<4>(score, CHUNK);
}

// result[rows of a tile, 0 : N * LANES] += weights of groups [first, end) times their values at a feature. `ahead`: groups
// in place of these.
template <int N>
HEADRACE_INLINE void weigh_groups(const uint32_t *weights, const Brain *const *values, const GroupsAhead &ahead,
                                  int64_t feature, int64_t step, int first, int end, float *result, int64_t stride) {
  load_sums<N>(result, stride);
  for (int g = first; g < end; g++) {
    load_tile<6>(weights + g * GROUP_WORDS, CHUNK / 2 * 4);
    each_tile<N>([&](auto column) {
      load_tile<7>(values[g] + (feature + column() * LANES) * 2, step * 2);
      PairTiles::add<column(), 6, 7>();
      fetch(ahead, g, (feature / LANES + column()) * GROUP_WORDS, GROUP_WORDS);
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
    const int begin = chunk.begin / LANES, first = begin / 4 * 4, end = (chunk.count + LANES - 1) / LANES;
    const bool few = vectors <= TILE;
    const int64_t line = 64 / sizeof(Brain);  // values of a group lie together
    const GroupsAhead nothing = {};
    AttentionTiles tiles;
    in_row_tiles(vectors, tiles, [&](int64_t from, int64_t to) {
      for (int i = first; i < end; i += 4) {
        GroupsAhead next = {ahead ? ahead->keys + i : nullptr, view.key_step, false};
        if (few && i + 4 < end) next = {view.keys + i + 4, view.key_step, true};
        else if (few) next = {view.values + first, line, true};
        for (int64_t m = from; m < to; m += TILE)
          score_groups(s.query + (at + m) * words, words, view.keys + i, view.key_step, m ? nothing : next,
                       s.score + m * CHUNK + i * LANES);
      }
    });
    soften<false>(a, chunk, s, vectors, result, stride, [&](int64_t) { return a.scale; }, see,
                  [&](int64_t m, int i, Floats v) { store((Brain *)s.weights + m * CHUNK + i, v); });
    View<Brain> values = view;
    if (chunk.count % LANES) {  // tokens of the last group that nobody sees may be no numbers
      Brain *seen = (Brain *)s.values + 2 * a.head_dim;
      __builtin_memset(seen, 0, GROUP_WORDS * view.value_step * sizeof(Brain));
      for (int word = (end - 1) * GROUP_WORDS; 2 * word < chunk.count; word++)
        __builtin_memcpy(seen + word % GROUP_WORDS * view.value_step, word == view.odd ? view.alone : view.value(word),
                         view.value_step * sizeof(Brain));
      values.values[end - 1] = seen;
    }
    const int together = few ? 4 : GROUPS;
    in_row_tiles(vectors, tiles, [&](int64_t from, int64_t to) {
      for (int g = begin / together * together; g < end; g += together) {
        const int low = g < begin ? begin - g : 0, high = end - g < together ? end - g : together;
        GroupsAhead next = {ahead ? ahead->values + g : nullptr, line, false};
        if (few && g + together < end) next = {view.values + g + together, line, true};
        else if (few) next = {ahead ? ahead->keys : nullptr, view.key_step, true};
        for (int64_t i = 0; i < a.head_dim; i += 4 * LANES)
          for (int64_t m = from; m < to; m += TILE) {
            const uint32_t *weights = (const uint32_t *)s.weights + m * (CHUNK / 2) + g * GROUP_WORDS;
            const GroupsAhead &then = m ? nothing : next;
            float *sums = result.sum + m * stride + i;
            if (i + 4 * LANES <= a.head_dim)
              weigh_groups<4>(weights, values.values + g, then, i, view.value_step, low, high, sums, stride);
            else weigh_groups<2>(weights, values.values + g, then, i, view.value_step, low, high, sums, stride);
          }
      }
    });
  }
};
