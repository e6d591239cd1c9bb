// Paged attention of mixed rows with online softmax (arXiv:1805.02867, arXiv:2205.14135). A tile is a run of one row's
// queries; for each chunk of keys, and each key head, all its queries of that head are multiplied by the keys and then,
// as weights, by the values. Long contexts are summed in segments, which are merged in order; a row of few queries is
// cut into tasks along its segments (split-KV) and, where these are too few for the threads, along its heads. Chunks
// and segments begin at fixed positions, so that a query's result depends neither on its tile nor on the rest of the
// batch nor on the cut, bit for bit. How the two products are computed from each type of page is in `attention_pages.h`.

static const int64_t SEGMENT = 512;      // keys that are summed before a merge
static const int64_t TILE_VECTORS = 48;  // queries of a tile, times heads of a group
static const int64_t FEW_VECTORS = 16;   // a tile with no more reads memory faster than it multiplies: see `cut`

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

HEADRACE_INLINE int chunk_of(int64_t first, int64_t end) { return (int)(end - first < CHUNK ? end - first : CHUNK); }

// Where the tokens of a chunk lie, for the first key head: elements in `place`, scales in `scale`.
static void locate(const Attention &a, const Piece &p, int64_t first, int count, Chunk &chunk) {
  const int32_t *table = a.tables + p.row * a.width;
  // Blocks before every query's window may have been given up: keys there stand for the first one that is seen.
  const int64_t from = first > p.first_key ? first : p.first_key, last = first + count - 1;
  const int64_t token = a.kv_heads * a.head_dim;
  int64_t block = from / a.pages.block_size, offset = from % a.pages.block_size, position = from;
  chunk.count = count;
  for (int j = 0; j < CHUNK; j++) {
    if (j % LANES == 0)
      chunk.together[j / LANES] =
          first + j >= from && j + LANES <= count && offset + LANES <= a.pages.block_size;
    chunk.place[j] = table[block] * a.pages.stride + offset * token;
    chunk.scale[j] = table[block] * a.pages.scale_stride + offset;
    if (first + j < position || position >= last) continue;
    position++;
    if (++offset == a.pages.block_size) {
      offset = 0;
      block++;
    }
  }
}

// Asking for a head's part of the next chunk while this one is computed hides the memory's latency: pages are
// scattered, and a head is a small part of a token, so that no hardware sees what comes next.
template <class Element>
HEADRACE_INLINE void ask_for(const Attention &a, const Chunk &chunk, int64_t head) {
  for (int j = 0; j < chunk.count; j++) {
    const int64_t place = chunk.place[j] + head * a.head_dim;
    for (int64_t i = 0; i < a.head_dim; i += 64 / (int64_t)sizeof(Element)) {
      __builtin_prefetch((const Element *)a.pages.keys + place + i, 0, 2);
      __builtin_prefetch((const Element *)a.pages.values + place + i, 0, 2);
    }
  }
}

// Attention of a piece's queries over keys [first_key, end_key), which lie within one segment.
template <class Page>
static void attend(const Attention &a, const Piece &p, int64_t first_key, int64_t end_key, const Scratch &s,
                   const Partial &result, int64_t stride) {
  const int64_t group = a.heads / a.kv_heads, vectors = p.queries * group;
  const int64_t length = a.query_starts[p.row + 1] - a.query_starts[p.row];
  const int64_t start = a.contexts[p.row] - length + p.first_query;
  clear(result, p.heads * vectors, stride);
  Chunk chunks[2];
  locate(a, p, first_key, chunk_of(first_key, end_key), chunks[0]);
  for (int64_t first = first_key, turn = 0; first < end_key; first += CHUNK, turn ^= 1) {
    Chunk &chunk = chunks[turn], &following = chunks[turn ^ 1];
    const int64_t next = first + CHUNK;
    if (next < end_key) locate(a, p, next, chunk_of(next, end_key), following);
    int64_t visible = 0;  // the first query that sees any of these keys
    while (visible < p.queries && start + visible < first) visible++;
    for (int64_t h = 0; h < p.heads; h++) {
      const int64_t head = p.first_head + h;
      if (next < end_key) ask_for<typename Page::Element>(a, following, head);
      const int64_t begin = visible * group, at = h * vectors + begin;
      const Partial some = {result.sum + at * stride, result.best + at, result.total + at};
      Page::absorb(a, chunk, head, s, at, vectors - begin, some, stride, [&](int64_t m, float *score) {
        const int64_t position = start + (begin + m) / group;
        int64_t low = position + 1 - a.window - first, high = position + 1 - first;
        low = low < 0 ? 0 : low;
        high = high > chunk.count ? chunk.count : high;
        if (low < high) return soften(score, (int)low, (int)high, chunk.columns(), a, some.best[m], some.total[m]);
        __builtin_memset(score, 0, CHUNK * sizeof(float));
        return 1.0f;
      });
    }
  }
}

static void write_out(const Attention &a, const Piece &p, const Partial &result, int64_t stride) {
  with_type(a.dtype, [&](auto t) {
    each_query(a, p, [&](int64_t v, int64_t place) {
      decltype(t) *out = (decltype(t) *)a.out + place;
      const float inverse = 1.0f / result.total[v];
      each_vector(a.head_dim, [&](int64_t i, int lanes) {
        store_at(out + i, load((const Single *)(result.sum + v * stride + i)) * inverse, lanes);
      });
    });
  });
}

// How rows become pieces. A tile of few queries is a piece for each segment, of `few_heads` heads each: it reads the
// pages once and in the order in which they lie. One of many is a piece for each head, so that its sums stay in the
// nearest cache; it is cut into segments only with `split`.
struct Cut {
  int64_t few_heads;
  bool split;
};

// The pieces of all rows; returns how many. With `pieces` null it only counts. `first_key` is where the tile's first
// query begins to see; segments are counted from position 0.
static int64_t cut(const Attention &a, Cut how, Piece *pieces, int64_t &partial_vectors) {
  const int64_t group = a.heads / a.kv_heads, tile = TILE_VECTORS > group ? TILE_VECTORS / group : 1;
  int64_t count = 0;
  partial_vectors = 0;
  for (int64_t row = 0; row < a.rows; row++) {
    const int64_t length = a.query_starts[row + 1] - a.query_starts[row], start = a.contexts[row] - length;
    for (int64_t query = 0; query < length; query += tile) {
      const int64_t queries = length - query < tile ? length - query : tile, vectors = queries * group;
      const int64_t low = start + query + 1 - a.window, first = low < 0 ? 0 : low, end = start + query + queries;
      const bool few = vectors <= FEW_VECTORS;
      const int64_t parts = few || how.split ? (end - 1) / SEGMENT - first / SEGMENT + 1 : 1;
      const int64_t slice = few ? how.few_heads : 1, step = a.kv_heads * vectors;
      for (int64_t part = 0; part < parts; part++)
        for (int64_t head = 0; head < a.kv_heads; head += slice, count++) {
          if (!pieces) continue;
          const int64_t edge = (first / SEGMENT + part) * SEGMENT;
          const int64_t from = part ? edge : first, to = part + 1 < parts ? edge + SEGMENT : end;
          const int64_t heads = a.kv_heads - head < slice ? a.kv_heads - head : slice;
          const int64_t partial = partial_vectors + part * step + head * vectors;
          pieces[count] = {row, query, queries, from, to, head, heads, part, parts, partial, step};
        }
      if (parts > 1) partial_vectors += parts * step;
    }
  }
  return count;
}

static Cut choose_cut(const Attention &a, int64_t threads) {
  int64_t partial_vectors;
  const int64_t wanted = threads > 1 ? 4 * threads : 1, whole = cut(a, {a.kv_heads, false}, nullptr, partial_vectors);
  const int64_t slices = whole < wanted ? (wanted + whole - 1) / whole : 1;
  return {a.kv_heads > slices ? a.kv_heads / slices : 1, whole < wanted};
}

static Partial partial_at(float *memory, int64_t vectors, int64_t stride) {
  return {memory, memory + vectors * stride, memory + vectors * (stride + 1)};
}

// All segments of a piece, merged in order.
template <class Page>
static void attend_piece(const Attention &a, const Piece &p, const Scratch &s, const Partial &result, int64_t stride) {
  Page::load_queries(a, p, s);
  for (int64_t first = p.first_key / CHUNK * CHUNK, begun = 0; first < p.end_key; begun = 1) {
    const int64_t edge = (first / SEGMENT + 1) * SEGMENT, end = edge < p.end_key ? edge : p.end_key;
    attend<Page>(a, p, first, end, s, begun ? s.segment : result, stride);
    if (begun) merge(result, s.segment, p.heads * p.queries * (a.heads / a.kv_heads), stride);
    first = end;
  }
}

template <class Page>
static int run_attention(const Attention &a) {
  const int64_t group = a.heads / a.kv_heads, stride = (a.head_dim + Page::WIDTH - 1) / Page::WIDTH * Page::WIDTH;
  int64_t work = 0;
  for (int64_t row = 0; row < a.rows; row++)
    work += (a.contexts[row] < a.window ? a.contexts[row] : a.window) * (a.query_starts[row + 1] - a.query_starts[row]);
  const int threads = work * a.heads * a.head_dim > PARALLEL_PRODUCTS ? omp_get_max_threads() : 1;
  int64_t partial_vectors;
  const Cut how = choose_cut(a, threads);
  const int64_t count = cut(a, how, nullptr, partial_vectors);
  const int64_t tile = TILE_VECTORS > group ? TILE_VECTORS : group, few = FEW_VECTORS * how.few_heads;
  const int64_t vectors = tile > few ? tile : few;
  const int64_t floats = Scratch::floats(vectors, stride);
  Piece *pieces = (Piece *)malloc((size_t)(count + 1) * sizeof(Piece));
  float *partials = (float *)malloc((size_t)(partial_vectors * (stride + 2) + 1) * sizeof(float));
  float *scratch = (float *)malloc((size_t)(threads * floats) * sizeof(float));
  const bool enough = pieces && partials && scratch;
  if (enough) {
    cut(a, how, pieces, partial_vectors);
    const auto partial_of = [&](const Piece &p, int64_t part) {
      const int64_t place = p.partial + (part - p.part) * p.step;
      return partial_at(partials + place * (stride + 2), p.heads * p.queries * group, stride);
    };
#pragma omp parallel num_threads(threads)
    {
      const Scratch s = Scratch::at(scratch + omp_get_thread_num() * floats, vectors, stride);
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < count; i++) {
        const Piece &p = pieces[i];
        const Partial result = p.parts == 1 ? s.whole : partial_of(p, p.part);
        attend_piece<Page>(a, p, s, result, stride);
        if (p.parts == 1) write_out(a, p, result, stride);
      }
      if (partial_vectors) {
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; i++) {
          const Piece &p = pieces[i];
          if (p.parts == 1 || p.part) continue;
          const Partial result = partial_of(p, 0);
          for (int64_t part = 1; part < p.parts; part++)
            merge(result, partial_of(p, part), p.heads * p.queries * group, stride);
          write_out(a, p, result, stride);
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
  if (a.pages.dtype == INT8) return run_attention<Integers>(a);
  if (a.pages.dtype == FLOAT32) return run_attention<Plain<Float<Single>>>(a);
  if (a.pages.dtype == FLOAT16) return run_attention<Plain<Float<Half>>>(a);
  return a.dtype == BFLOAT16 ? run_attention<Plain<Pairs>>(a) : run_attention<Plain<Float<Brain>>>(a);
}
