// Paged attention of mixed rows with online softmax (arXiv:1805.02867, arXiv:2205.14135). A tile is a run of one row's
// queries with all query heads of one key head; for each chunk of keys it packs keys and values once and multiplies
// all its queries by them. Long contexts are summed in segments, which are merged in order; when there are too few tiles
// for the threads, each segment is a task of its own (split-KV). Chunks and segments begin at fixed positions,
// so that a query's result depends neither on its tile nor on the rest of the batch, bit for bit.

static const int CHUNK = 64;             // keys that are packed at once
static const int64_t SEGMENT = 512;      // keys that are summed before a merge
static const int64_t TILE_VECTORS = 48;  // queries of a tile, times heads of a group

struct Piece {
  int64_t row, first_query, queries, first_key, end_key, part, parts;
  int64_t partial;  // where the partial results of the tile lie, when it has several parts
};

// What is known of a tile's queries: weighted sums of values, and for each the largest score and the sum of weights.
struct Partial {
  float *sum, *best, *total;
};

struct Scratch {
  uint32_t *query, *keys, *values;
  uint16_t *weights;
  float *score;
  Partial segment, whole;
};

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

// Scores of one query with a chunk of keys become weights; returns by how much what was summed before shrinks.
HEADRACE_INLINE float soften(float *score, int low, int high, int count, const Attention &a, float &best, float &total) {
  Floats top = broadcast(-INFINITY);
  Ints lane;
  for (int i = 0; i < LANES; i++) lane[i] = i;
  for (int i = 0; i < count; i += LANES) {
    Floats v = load((const Single *)score + i) * a.scale;
    if (a.softcap != 0.0f) v = a.softcap * hyperbolic_tangent(v / a.softcap);
    const Ints at = lane + i;
    v = (at >= low) & (at < high) ? v : broadcast(-INFINITY);
    store((Single *)score + i, v);
    top = maximum(top, v);
  }
  float peak = largest(top);
  if (peak < best) peak = best;
  const float shrink = exponential(broadcast(best - peak))[0];
  Floats added[CHUNK / LANES] = {};
  for (int i = 0; i < count; i += LANES) {
    const Floats v = exponential(load((const Single *)score + i) - peak);
    store((Single *)score + i, v);
    added[i / LANES] = v;
  }
  Floats all = {};
  for (int i = 0; i < CHUNK / LANES; i++) all += added[i];
  best = peak;
  total = total * shrink + sum(all);
  return shrink;
}

HEADRACE_INLINE void scale_sum(float *sum, int64_t stride, float factor) {
  for (int64_t i = 0; i < stride; i += LANES) store((Single *)(sum + i), load((const Single *)(sum + i)) * factor);
}

static void clear(const Partial &p, int64_t vectors, int64_t stride) {
  __builtin_memset(p.sum, 0, vectors * stride * sizeof(float));
  for (int64_t m = 0; m < vectors; m++) {
    p.best[m] = -INFINITY;
    p.total[m] = 0.0f;
  }
}

// Add what a later segment found. A segment without a visible key for a query has total 0 and changes nothing.
static void merge(const Partial &into, const Partial &later, int64_t vectors, int64_t stride) {
  for (int64_t m = 0; m < vectors; m++) {
    if (later.total[m] == 0.0f) continue;
    const float peak = later.best[m] > into.best[m] ? later.best[m] : into.best[m];
    const float old = exponential(broadcast(into.best[m] - peak))[0], fresh = exponential(broadcast(later.best[m] - peak))[0];
    for (int64_t i = 0; i < stride; i += LANES) {
      Single *target = (Single *)(into.sum + m * stride + i);
      store(target, load(target) * old + load((const Single *)(later.sum + m * stride + i)) * fresh);
    }
    into.total[m] = into.total[m] * old + later.total[m] * fresh;
    into.best[m] = peak;
  }
}

template <class Page>
static void load_queries(const Attention &a, const Piece &p, int64_t kv_head, uint32_t *out, int64_t words) {
  const int64_t group = a.heads / a.kv_heads, packed = a.query_starts[p.row] + p.first_query;
  for (int64_t m = 0; m < p.queries * group; m++) {
    const int64_t offset = ((packed + m / group) * a.heads + kv_head * group + m % group) * a.head_dim;
    uint32_t *row = out + m * words;
    if (Page::FACTOR == 2) {
      row[words - 1] = 0;
      __builtin_memcpy(row, (const Brain *)a.queries + offset, a.head_dim * sizeof(Brain));
    } else {
      with_type(a.dtype, [&](auto t) {
        const decltype(t) *q = (const decltype(t) *)a.queries + offset;
        each_vector(a.head_dim, [&](int64_t i, int lanes) { store_at((Single *)(row + i), load_at(q + i, lanes), lanes); });
      });
    }
  }
}

HEADRACE_INLINE int chunk_of(int64_t first, int64_t end) { return (int)(end - first < CHUNK ? end - first : CHUNK); }

// Where the keys and values of a chunk lie. Asking for a chunk while the one before is computed hides the memory's
// latency: pages are scattered, and a head is a small part of a token, so that no hardware sees what comes next.
template <class Element>
static void locate(const Attention &a, const Piece &p, int64_t kv_head, int64_t first, int count,
                   const Element **keys, const Element **values) {
  const int32_t *table = a.tables + p.row * a.width;
  // Blocks before every query's window may have been given up: keys there stand for the first one that is seen.
  const int64_t from = first > p.first_key ? first : p.first_key, last = first + count - 1;
  int64_t block = from / a.block_size, offset = from % a.block_size, position = from;
  for (int j = 0; j < CHUNK; j++) {
    const int64_t place = ((table[block] * a.block_size + offset) * a.kv_heads + kv_head) * a.head_dim;
    keys[j] = (const Element *)a.keys + place;
    values[j] = (const Element *)a.values + place;
    if (first + j < position || position >= last) continue;
    for (int64_t i = 0; i < a.head_dim; i += 64 / (int64_t)sizeof(Element)) {
      __builtin_prefetch(keys[j] + i);
      __builtin_prefetch(values[j] + i);
    }
    position++;
    if (++offset == a.block_size) {
      offset = 0;
      block++;
    }
  }
}

// Attention of a tile's queries over keys [first_key, end_key), which lie within one segment.
template <class Page>
static void attend(const Attention &a, const Piece &p, int64_t first_key, int64_t end_key, int64_t kv_head,
                   const Scratch &s, const Partial &result, int64_t stride) {
  using Element = typename Page::Element;
  using Kind = typename Page::Kind;
  const int64_t group = a.heads / a.kv_heads, vectors = p.queries * group, size = a.head_dim;
  const int64_t words = (size + Page::FACTOR - 1) / Page::FACTOR;
  const int64_t length = a.query_starts[p.row + 1] - a.query_starts[p.row];
  const int64_t start = a.contexts[p.row] - length + p.first_query;
  clear(result, vectors, stride);
  const Element *places[2][2][CHUNK];  // of this chunk and the next: keys, values
  locate(a, p, kv_head, first_key, chunk_of(first_key, end_key), places[0][0], places[0][1]);
  for (int64_t first = first_key, turn = 0; first < end_key; first += CHUNK, turn ^= 1) {
    const Element **keys = places[turn][0], **values = places[turn][1];
    const int count = chunk_of(first, end_key), columns = (count + LANES - 1) / LANES * LANES;
    const int64_t next = first + CHUNK;
    if (next < end_key) locate(a, p, kv_head, next, chunk_of(next, end_key), places[turn ^ 1][0], places[turn ^ 1][1]);
    int64_t visible = 0;  // the first query that sees any of these keys
    while (visible < p.queries && start + visible < first) visible++;
    const int64_t begin = visible * group;
    pack_keys<Page>(keys, columns, size, s.keys);
    Page::pack_values(values, count, size, stride, s.values);
    multiply<Kind>(s.query + begin * words, words, s.keys, CHUNK, words, s.score + begin * CHUNK, CHUNK, vectors - begin,
                   columns, false);
    for (int64_t m = begin; m < vectors; m++) {
      const int64_t position = start + m / group;
      int64_t low = position + 1 - a.window - first, high = position + 1 - first;
      low = low < 0 ? 0 : low;
      high = high > count ? count : high;
      float *score = s.score + m * CHUNK;
      if (low >= high) {
        __builtin_memset(score, 0, CHUNK * sizeof(float));
        continue;
      }
      const float shrink = soften(score, (int)low, (int)high, columns, a, result.best[m], result.total[m]);
      if (shrink != 1.0f) scale_sum(result.sum + m * stride, stride, shrink);
    }
    const uint32_t *weights = Page::weights(s.score + begin * CHUNK, s.weights, (vectors - begin) * CHUNK);
    multiply<Kind>(weights, CHUNK / Page::FACTOR, s.values, stride, (count + Page::FACTOR - 1) / Page::FACTOR,
                   result.sum + begin * stride, stride, vectors - begin, stride, true);
  }
}

static void write_out(const Attention &a, const Piece &p, int64_t kv_head, const Partial &result, int64_t stride) {
  const int64_t group = a.heads / a.kv_heads, packed = a.query_starts[p.row] + p.first_query;
  with_type(a.dtype, [&](auto t) {
    for (int64_t m = 0; m < p.queries * group; m++) {
      decltype(t) *out = (decltype(t) *)a.out + ((packed + m / group) * a.heads + kv_head * group + m % group) * a.head_dim;
      const float inverse = 1.0f / result.total[m];
      each_vector(a.head_dim, [&](int64_t i, int lanes) {
        store_at(out + i, load((const Single *)(result.sum + m * stride + i)) * inverse, lanes);
      });
    }
  });
}

// Cut the rows into tiles, and with `split` these into segments; returns how many pieces. With `pieces` null it only
// counts. `first_key` is where the tile's first query begins to see; segments are counted from position 0.
static int64_t cut(const Attention &a, bool split, Piece *pieces, int64_t &partial_vectors) {
  const int64_t group = a.heads / a.kv_heads, tile = TILE_VECTORS > group ? TILE_VECTORS / group : 1;
  int64_t count = 0;
  partial_vectors = 0;
  for (int64_t row = 0; row < a.rows; row++) {
    const int64_t length = a.query_starts[row + 1] - a.query_starts[row], start = a.contexts[row] - length;
    for (int64_t query = 0; query < length; query += tile) {
      const int64_t queries = length - query < tile ? length - query : tile;
      const int64_t low = start + query + 1 - a.window, first = low < 0 ? 0 : low, end = start + query + queries;
      const int64_t parts = split ? (end - 1) / SEGMENT - first / SEGMENT + 1 : 1;
      for (int64_t part = 0; part < parts; part++, count++) {
        if (!pieces) continue;
        const int64_t edge = (first / SEGMENT + part) * SEGMENT;
        const int64_t from = part ? edge : first, to = part + 1 < parts ? edge + SEGMENT : end;
        pieces[count] = {row, query, queries, from, to, part, parts, partial_vectors};
      }
      if (parts > 1) partial_vectors += parts * queries * group;
    }
  }
  return count;
}

static Partial partial_at(float *memory, int64_t vectors, int64_t stride) {
  return {memory, memory + vectors * stride, memory + vectors * (stride + 1)};
}

// Where part `part` of a tile keeps its results for a key head.
static Partial partial_of(float *memory, const Piece &p, int64_t part, int64_t head, int64_t kv_heads, int64_t vectors,
                          int64_t stride) {
  return partial_at(memory + (p.partial * kv_heads + (head * p.parts + part) * vectors) * (stride + 2), vectors, stride);
}

// All segments of a piece, merged in order.
template <class Page>
static void attend_piece(const Attention &a, const Piece &p, int64_t head, const Scratch &s, const Partial &result,
                         int64_t stride) {
  const int64_t vectors = p.queries * (a.heads / a.kv_heads);
  for (int64_t first = p.first_key / CHUNK * CHUNK, begun = 0; first < p.end_key; begun = 1) {
    const int64_t edge = (first / SEGMENT + 1) * SEGMENT, end = edge < p.end_key ? edge : p.end_key;
    attend<Page>(a, p, first, end, head, s, begun ? s.segment : result, stride);
    if (begun) merge(result, s.segment, vectors, stride);
    first = end;
  }
}

template <class Page>
static int run_attention(const Attention &a) {
  const int64_t group = a.heads / a.kv_heads, stride = (a.head_dim + LANES - 1) / LANES * LANES;
  const int64_t tile = TILE_VECTORS > group ? TILE_VECTORS / group * group : group;
  int64_t partial_vectors, work = 0;
  for (int64_t row = 0; row < a.rows; row++)
    work += (a.contexts[row] < a.window ? a.contexts[row] : a.window) * (a.query_starts[row + 1] - a.query_starts[row]);
  const int threads = work * a.heads * a.head_dim > PARALLEL_PRODUCTS ? omp_get_max_threads() : 1;
  int64_t count = cut(a, false, nullptr, partial_vectors);
  const bool split = threads > 1 && count * a.kv_heads < 4 * threads;
  count = cut(a, split, nullptr, partial_vectors);
  const int64_t tasks = count * a.kv_heads;
  const int64_t floats = tile * (stride + CHUNK + CHUNK / 2 + 2 * (stride + 2)) + 2 * CHUNK * stride;
  Piece *pieces = (Piece *)malloc((size_t)(count + 1) * sizeof(Piece));
  float *partials = (float *)malloc((size_t)(partial_vectors * a.kv_heads * (stride + 2) + 1) * sizeof(float));
  float *scratch = (float *)malloc((size_t)(threads * floats) * sizeof(float));
  const bool enough = pieces && partials && scratch;
  if (enough) {
    cut(a, split, pieces, partial_vectors);
#pragma omp parallel num_threads(threads)
    {
      float *own = scratch + omp_get_thread_num() * floats;
      Scratch s;
      s.keys = (uint32_t *)own;
      s.values = s.keys + CHUNK * stride;
      s.query = s.values + CHUNK * stride;
      s.score = (float *)(s.query + tile * stride);
      s.weights = (uint16_t *)(s.score + tile * CHUNK);
      s.segment = partial_at(s.score + tile * (CHUNK + CHUNK / 2), tile, stride);
      s.whole = partial_at(s.segment.sum + tile * (stride + 2), tile, stride);
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < tasks; task++) {
        const Piece &p = pieces[task / a.kv_heads];
        const int64_t head = task % a.kv_heads;
        load_queries<Page>(a, p, head, s.query, (a.head_dim + Page::FACTOR - 1) / Page::FACTOR);
        if (p.parts == 1) {
          attend_piece<Page>(a, p, head, s, s.whole, stride);
          write_out(a, p, head, s.whole, stride);
        } else {
          const Partial result = partial_of(partials, p, p.part, head, a.kv_heads, p.queries * group, stride);
          attend_piece<Page>(a, p, head, s, result, stride);
        }
      }
      if (partial_vectors) {
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++) {
          const Piece &p = pieces[task / a.kv_heads];
          if (p.parts == 1 || p.part) continue;
          const int64_t head = task % a.kv_heads, vectors = p.queries * group;
          const Partial result = partial_of(partials, p, 0, head, a.kv_heads, vectors, stride);
          for (int64_t part = 1; part < p.parts; part++)
            merge(result, partial_of(partials, p, part, head, a.kv_heads, vectors, stride), vectors, stride);
          write_out(a, p, head, result, stride);
        }
      }
    }
  }
  free(scratch);
  free(partials);
  free(pieces);
  return enough;
}

static int attention(const Attention &a) {
  if (a.kv_dtype == FLOAT32) return run_attention<Float<Single>>(a);
  if (a.kv_dtype == FLOAT16) return run_attention<Float<Half>>(a);
  return a.dtype == BFLOAT16 ? run_attention<Pairs>(a) : run_attention<Float<Brain>>(a);
}
