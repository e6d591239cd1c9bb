// Paged attention of mixed rows with online softmax (arXiv:1805.02867, arXiv:2205.14135). A tile is a run of one row's
// queries with all query heads of one key head, so that a key or value is read once for all of them. When the tiles
// are too few for the threads, the keys of a tile are cut too, and the pieces are merged at the end (split-KV).

static const int CHUNK = 64;            // keys whose scores are held at once
static const int64_t TILE_VECTORS = 32; // queries of a tile, times heads of a group
static const int64_t MIN_PIECE = 256;   // keys of a piece, at least

struct Piece {
  int64_t row, first_query, queries, first_key, end_key, part, parts;
  int64_t partial;  // where its partial results lie, when parts > 1
};

struct Scratch {
  float *query, *score, *sum, *best, *total;
  uint16_t *pairs;
};

// Dot products of one query with LANES keys, one per lane.
template <class KV>
HEADRACE_INLINE Floats dots(const float *query, const KV *const *keys, int64_t head_dim) {
  Floats each[LANES];
#pragma GCC unroll 16
  for (int j = 0; j < LANES; j++) {
    Floats v = {};
    int64_t i = 0;
    for (; i + LANES <= head_dim; i += LANES) v += load((const Single *)query + i) * load(keys[j] + i);
    if (i < head_dim) v += load_at((const Single *)query + i, (int)(head_dim - i)) * load_at(keys[j] + i, (int)(head_dim - i));
    each[j] = v;
  }
  return sum_each(each);
}

// sum[m] += sum over keys of score[m][key] * value[key], for ROWS queries and VECTORS * LANES features.
template <int ROWS, int VECTORS, class KV>
HEADRACE_INLINE void weigh(const float *score, const KV *const *values, int count, int64_t feature, int64_t stride, float *sum) {
  Floats acc[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) acc[m][i] = load((const Single *)(sum + m * stride + feature + i * LANES));
  for (int key = 0; key < count; key++) {
    Floats v[VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) v[i] = load(values[key] + feature + i * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
      Floats weight = broadcast(score[m * CHUNK + key]);
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS; i++) acc[m][i] += weight * v[i];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) store((Single *)(sum + m * stride + feature + i * LANES), acc[m][i]);
}

template <int ROWS, class KV>
HEADRACE_INLINE void weigh_rows(const float *score, const KV *const *values, int count, int64_t head_dim, int64_t stride, float *sum) {
  int64_t i = 0;
  for (; i + 4 * LANES <= head_dim; i += 4 * LANES) weigh<ROWS, 4>(score, values, count, i, stride, sum);
  for (; i + 2 * LANES <= head_dim; i += 2 * LANES) weigh<ROWS, 2>(score, values, count, i, stride, sum);
  for (; i + LANES <= head_dim; i += LANES) weigh<ROWS, 1>(score, values, count, i, stride, sum);
  if (i == head_dim) return;
  for (int m = 0; m < ROWS; m++)
    for (int key = 0; key < count; key++) {
      Single *target = (Single *)(sum + m * stride + i);
      Floats v = load_at(values[key] + i, (int)(head_dim - i));
      store(target, load(target) + broadcast(score[m * CHUNK + key]) * v);
    }
}

// Scores of one query with a chunk of keys become weights; returns by how much what was summed before shrinks.
HEADRACE_INLINE float soften(float *score, int low, int high, int count, const Attention &a, float &best, float &total) {
  Floats top = broadcast(-INFINITY);
  const Ints lane = []() { Ints v; for (int i = 0; i < LANES; i++) v[i] = i; return v; }();
  for (int i = 0; i < count; i += LANES) {
    Floats v = load((const Single *)score + i) * a.scale;
    if (a.softcap != 0.0f) v = a.softcap * hyperbolic_tangent(v / a.softcap);
    Ints at = lane + i;
    v = (at >= low) & (at < high) ? v : broadcast(-INFINITY);
    store((Single *)score + i, v);
    top = maximum(top, v);
  }
  float peak = largest(top);
  if (peak < best) peak = best;
  const float shrink = exponential(broadcast(best - peak))[0];
  Floats added = {};
  for (int i = 0; i < count; i += LANES) {
    Floats v = exponential(load((const Single *)score + i) - peak);
    store((Single *)score + i, v);
    added += v;
  }
  best = peak;
  total = total * shrink + sum(added);
  return shrink;
}

template <class T, class KV>
static void attend(const Attention &a, const Piece &p, int64_t kv_head, const Scratch &s, int64_t stride) {
  const int64_t group = a.heads / a.kv_heads, vectors = p.queries * group, size = a.head_dim;
  const int32_t *table = a.tables + p.row * a.width;
  const int64_t packed = a.query_starts[p.row] + p.first_query;
  const int64_t start = a.contexts[p.row] - (a.query_starts[p.row + 1] - a.query_starts[p.row]) + p.first_query;
  for (int64_t m = 0; m < vectors; m++) {
    const T *q = (const T *)a.queries + ((packed + m / group) * a.heads + kv_head * group + m % group) * size;
    each_vector(size, [&](int64_t i, int lanes) { store((Single *)(s.query + m * stride + i), load_at(q + i, lanes)); });
    for (int64_t i = 0; i < stride; i += LANES) store((Single *)(s.sum + m * stride + i), Floats{});
    s.best[m] = -INFINITY;
    s.total[m] = 0.0f;
  }
  const KV *keys[CHUNK], *values[CHUNK];
  for (int64_t first = p.first_key; first < p.end_key; first += CHUNK) {
    const int count = (int)(p.end_key - first < CHUNK ? p.end_key - first : CHUNK);
    for (int j = 0; j < CHUNK; j++) {
      const int64_t position = first + (j < count ? j : count - 1);
      const int64_t slot = table[position / a.block_size] * a.block_size + position % a.block_size;
      keys[j] = (const KV *)a.keys + (slot * a.kv_heads + kv_head) * size;
      values[j] = (const KV *)a.values + (slot * a.kv_heads + kv_head) * size;
    }
    for (int64_t m = 0; m < vectors; m++) {
      const int64_t position = start + m / group;
      int64_t low = position + 1 - a.window - first, high = position + 1 - first;
      low = low < 0 ? 0 : low;
      high = high > count ? count : high;
      float *score = s.score + m * CHUNK;
      if (low >= high) {
        __builtin_memset(score, 0, CHUNK * sizeof(float));
        continue;
      }
      for (int j = 0; j < count; j += LANES)
        store((Single *)score + j, dots(s.query + m * stride, keys + j, size));
      const float shrink = soften(score, (int)low, (int)high, count, a, s.best[m], s.total[m]);
      if (shrink != 1.0f)
        for (int64_t i = 0; i < stride; i += LANES) {
          Single *target = (Single *)(s.sum + m * stride + i);
          store(target, load(target) * shrink);
        }
    }
    int64_t m = 0;
    for (; m + 4 <= vectors; m += 4)
      weigh_rows<4>(s.score + m * CHUNK, values, count, size, stride, s.sum + m * stride);
    for (; m + 2 <= vectors; m += 2)
      weigh_rows<2>(s.score + m * CHUNK, values, count, size, stride, s.sum + m * stride);
    if (m < vectors) weigh_rows<1>(s.score + m * CHUNK, values, count, size, stride, s.sum + m * stride);
  }
}

template <class T>
static void write_out(const Attention &a, const Piece &p, int64_t kv_head, const float *sum, const float *total, int64_t stride) {
  const int64_t group = a.heads / a.kv_heads, packed = a.query_starts[p.row] + p.first_query;
  for (int64_t m = 0; m < p.queries * group; m++) {
    T *out = (T *)a.out + ((packed + m / group) * a.heads + kv_head * group + m % group) * a.head_dim;
    const Floats inverse = broadcast(1.0f / total[m]);
    each_vector(a.head_dim, [&](int64_t i, int lanes) {
      store_at(out + i, load((const Single *)(sum + m * stride + i)) * inverse, lanes);
    });
  }
}

// The pieces of one tile into the first of them. A piece without visible keys for a query has total 0.
static void merge(float *partials, int64_t parts, int64_t vectors, int64_t stride) {
  const int64_t step = vectors * (stride + 2);
  for (int64_t m = 0; m < vectors; m++) {
    float peak = -INFINITY, total = 0.0f;
    for (int64_t part = 0; part < parts; part++) {
      const float best = partials[part * step + vectors * stride + m];
      peak = best > peak ? best : peak;
    }
    for (int64_t part = 0; part < parts; part++) {
      float *own = partials + part * step;
      const float weight = exponential(broadcast(own[vectors * stride + m] - peak))[0];
      total += weight * own[vectors * (stride + 1) + m];
      for (int64_t i = 0; i < stride; i += LANES) {
        Floats v = load((const Single *)(own + m * stride + i)) * weight;
        Single *target = (Single *)(partials + m * stride + i);
        store(target, part ? load(target) + v : v);
      }
    }
    partials[vectors * (stride + 1) + m] = total;
  }
}

// Cut the rows into pieces; returns how many. With `pieces` null only counts. `share` is the keys that one piece
// should have at most, so that every thread gets work.
static int64_t cut(const Attention &a, int64_t share, Piece *pieces, int64_t &partial_vectors) {
  const int64_t group = a.heads / a.kv_heads;
  const int64_t tile = TILE_VECTORS / group > 1 ? TILE_VECTORS / group : 1;
  int64_t count = 0;
  partial_vectors = 0;
  for (int64_t row = 0; row < a.rows; row++) {
    const int64_t length = a.query_starts[row + 1] - a.query_starts[row], start = a.contexts[row] - length;
    for (int64_t query = 0; query < length; query += tile) {
      const int64_t queries = length - query < tile ? length - query : tile;
      const int64_t low = start + query + 1 - a.window, first = low < 0 ? 0 : low, end = start + query + queries;
      const int64_t parts = (end - first + share - 1) / share;
      const int64_t span = ((end - first + parts - 1) / parts + CHUNK - 1) / CHUNK * CHUNK;
      const int64_t used = (end - first + span - 1) / span;
      for (int64_t part = 0; part < used; part++, count++) {
        if (!pieces) continue;
        const int64_t from = first + part * span;
        pieces[count] = {row, query, queries, from, from + span < end ? from + span : end, part, used, partial_vectors + part * queries * group};
      }
      if (used > 1) partial_vectors += used * queries * group;
    }
  }
  return count;
}

static int64_t keys_to_read(const Attention &a) {
  int64_t keys = 0;
  for (int64_t row = 0; row < a.rows; row++) {
    const int64_t length = a.query_starts[row + 1] - a.query_starts[row], seen = a.contexts[row];
    keys += (seen < a.window ? seen : a.window) * ((length + TILE_VECTORS - 1) / TILE_VECTORS);
  }
  return keys * a.kv_heads;
}

template <class T, class KV>
static int run_attention(const Attention &a) {
  const int64_t group = a.heads / a.kv_heads, stride = (a.head_dim + LANES - 1) / LANES * LANES;
  const int64_t tile = TILE_VECTORS > group ? TILE_VECTORS : group;
  const int64_t work = keys_to_read(a);
  const int threads = work * a.head_dim * group > 4 * PARALLEL_ELEMENTS ? omp_get_max_threads() : 1;
  int64_t share = threads > 1 ? work / (4 * threads) : INT64_MAX / 4;
  if (share < MIN_PIECE) share = MIN_PIECE;
  int64_t partial_vectors;
  const int64_t count = cut(a, share, nullptr, partial_vectors);
  Piece *pieces = (Piece *)malloc(count * sizeof(Piece) + 1);
  float *partials = (float *)malloc(partial_vectors * a.kv_heads * (stride + 2) * sizeof(float) + 1);
  const int64_t floats = tile * (2 * stride + CHUNK + 2);
  float *scratch = (float *)malloc((threads * floats + LANES) * sizeof(float));
  const bool enough = pieces && partials && scratch;
  if (enough) {
    cut(a, share, pieces, partial_vectors);
#pragma omp parallel num_threads(threads)
    {
      float *own = scratch + omp_get_thread_num() * floats;
      Scratch s = {own, own + tile * stride, nullptr, nullptr, nullptr, nullptr};
      s.sum = s.score + tile * CHUNK;
      s.best = s.sum + tile * stride;
      s.total = s.best + tile;
#pragma omp for schedule(dynamic)
      for (int64_t task = 0; task < count * a.kv_heads; task++) {
        const Piece &p = pieces[task / a.kv_heads];
        const int64_t head = task % a.kv_heads, vectors = p.queries * group;
        Scratch mine = s;
        if (p.parts > 1) {
          mine.sum = partials + ((p.partial - p.part * vectors) * a.kv_heads + (head * p.parts + p.part) * vectors) * (stride + 2);
          mine.best = mine.sum + vectors * stride;
          mine.total = mine.best + vectors;
        }
        attend<T, KV>(a, p, head, mine, stride);
        if (p.parts == 1) write_out<T>(a, p, head, mine.sum, mine.total, stride);
      }
      if (partial_vectors) {
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < count * a.kv_heads; task++) {
          const Piece &p = pieces[task / a.kv_heads];
          if (p.parts == 1 || p.part) continue;
          const int64_t head = task % a.kv_heads, vectors = p.queries * group;
          float *base = partials + (p.partial * a.kv_heads + head * p.parts * vectors) * (stride + 2);
          merge(base, p.parts, vectors, stride);
          write_out<T>(a, p, head, base, base + vectors * (stride + 1), stride);
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
  int enough = 1;
  with_type(a.dtype, [&](auto t) {
    with_type(a.kv_dtype, [&](auto kv) { enough = run_attention<decltype(t), decltype(kv)>(a); });
  });
  return enough;
}
