// Paged attention of mixed rows with online softmax (arXiv:1805.02867, arXiv:2205.14135). A tile is a run of one row's
// queries; for each chunk of keys, and each key head, all its queries of that head are multiplied by the keys and then,
// as weights, by the values. Long contexts are summed in segments, which are merged in order; a row of few queries is
// cut into tasks along its segments (split-KV) and, where these are too few for the threads, along its heads. Chunks
// and segments begin at fixed positions, so that a query's result depends neither on its tile nor on the rest of the
// batch nor on the cut, bit for bit. How the two products are computed from each type of page is in `attention_pages.h`.

static const int64_t SEGMENT = 512;      // keys that are summed before a merge
static const int64_t TILE_VECTORS = 96;  // queries of a tile, times heads of a group
static const int64_t FEW_VECTORS = 16;   // a tile with no more reads memory faster than it multiplies: see `cut`
static const int64_t JOINED_VECTORS = 4 * TILE_VECTORS;  // of all heads of joined pieces: their sums stay in the second cache

#include "attention_groups.h"

static void clear(const Partial &p, int64_t vectors, int64_t stride) {
  __builtin_memset(p.sum, 0, vectors * stride * sizeof(float));
  __builtin_memset(p.total, 0, vectors * LANES * sizeof(float));
  for (int64_t m = 0; m < vectors; m++) p.best[m] = -INFINITY;
}

// Add what a later segment found. A segment without a visible key for a query changes nothing.
static void merge(const Partial &into, const Partial &later, int64_t vectors, int64_t stride) {
  each_vector(vectors, [&](int64_t first, int lanes) {
    const Floats best = load_at((const Single *)into.best + first, lanes);
    const Floats found = load_at((const Single *)later.best + first, lanes);
    const Floats most = maximum(found, best), from = most == broadcast(-INFINITY) ? Floats{} : most;
    const Floats old = power_of_two<true>(best - from), fresh = power_of_two<true>(found - from);
    store_at((Single *)into.best + first, most, lanes);
    for (int64_t m = first; m < first + lanes; m++) {
      const auto add = [&](float *target, const float *more) {
        const Floats kept = load((const Single *)target) * old[m - first];
        store((Single *)target, kept + load((const Single *)more) * fresh[m - first]);
      };
      for (int64_t i = 0; i < stride; i += LANES) add(into.sum + m * stride + i, later.sum + m * stride + i);
      add(into.total + m * LANES, later.total + m * LANES);
    }
  });
}

// A piece's own results, of `vectors` for each head, from those of joined ones: there a head has `joined`, and they begin at
// `from`.
static void take(const Partial &own, const Partial &all, int64_t heads, int64_t vectors, int64_t joined, int64_t from,
                 int64_t stride) {
  for (int64_t h = 0; h < heads; h++) {
    const int64_t to = h * vectors, at = h * joined + from;
    __builtin_memcpy(own.sum + to * stride, all.sum + at * stride, vectors * stride * sizeof(float));
    __builtin_memcpy(own.total + to * LANES, all.total + at * LANES, vectors * LANES * sizeof(float));
    __builtin_memcpy(own.best + to, all.best + at, vectors * sizeof(float));
  }
}

// Whether a vector of keys or values lies in one block. Smaller blocks and heads are gathered first: those of toys.
HEADRACE_INLINE bool in_place(const Attention &a) { return a.pages.block_size % LANES == 0 && a.head_dim % LANES == 0; }

// Where a chunk's groups lie. Blocks before every query's window may have been given up: `begin` leaves them out.
template <class Element>
HEADRACE_INLINE void locate(const Attention &a, const Piece &p, int64_t first, int64_t end, Chunk &chunk) {
  const int32_t *table = a.tables + p.row * a.width;
  chunk.first = first;
  chunk.count = (int)(end - first < CHUNK ? end - first : CHUNK);
  chunk.begin = 0;
  if (!in_place(a)) return;
  if (first < p.first_key) chunk.begin = (int)(p.first_key - first) / LANES * LANES;
  for (int i = chunk.begin; i < chunk.count; i += LANES) {
    const int64_t block = table[(first + i) / a.pages.block_size], offset = (first + i) % a.pages.block_size;
    chunk.keys[i / LANES] = block * a.pages.stride + offset * FACTOR_OF<Element>;
    chunk.values[i / LANES] = block * a.pages.stride + offset * a.head_dim;
    chunk.scales[i / LANES] = block * a.pages.scale_stride + offset;
  }
}

// A chunk of a head where it lies.
template <class Element>
HEADRACE_INLINE void look(const Attention &a, const Chunk &chunk, int64_t head, View<Element> &view) {
  const int64_t place = head * a.head_dim * a.pages.block_size;
  const int first = chunk.begin / LANES, last = (chunk.count - 1) / LANES;
  view.key_step = a.pages.block_size * FACTOR_OF<Element>;
  view.value_step = a.head_dim * FACTOR_OF<Element>;
  view.odd = CHUNK;
  for (int i = 0; i < GROUPS; i++) {
    const int group = i < first ? first : i > last ? last : i;  // a tile may have more than there are
    view.keys[i] = (const Element *)a.pages.keys + chunk.keys[group] + place;
    view.values[i] = (const Element *)a.pages.values + chunk.values[group] + place;
    if (!a.pages.key_scales) continue;
    view.key_scales[i] = a.pages.key_scales + chunk.scales[group] + head * a.pages.block_size;
    view.value_scales[i] = a.pages.value_scales + chunk.scales[group] + head * a.pages.block_size;
  }
}

// A chunk of a head, brought together from blocks in which a vector would not fit, or from heads that do not fill one.
template <class Element>
static void gather(const Attention &a, const Piece &p, const Chunk &chunk, int64_t head, const Scratch &s, int64_t stride,
                   View<Element> &view) {
  const int factor = FACTOR_OF<Element>;
  const int64_t size = a.pages.block_size, place = head * a.head_dim * size, together = value_tokens(a.pages, factor);
  Element *keys = (Element *)s.keys, *values = (Element *)s.values;
  __builtin_memset(s.keys, 0, CHUNK * stride * sizeof(uint32_t));
  __builtin_memset(s.values, 0, CHUNK * stride * sizeof(uint32_t));
  __builtin_memset(s.scales, 0, 2 * CHUNK * sizeof(float));
  for (int j = chunk.first < p.first_key ? (int)(p.first_key - chunk.first) : 0; j < chunk.count; j++) {
    const int64_t position = chunk.first + j, block = a.tables[p.row * a.width + position / size], offset = position % size;
    const Element *key = (const Element *)a.pages.keys + block * a.pages.stride + place;
    const Element *value = (const Element *)a.pages.values + block * a.pages.stride + place;
    for (int64_t i = 0; i < a.head_dim; i++) {
      keys[(i / factor * CHUNK + j) * factor + i % factor] = key[(i / factor * size + offset) * factor + i % factor];
      values[(j / factor * stride + i) * factor + j % factor] =
          value[(offset / together * a.head_dim + i) * together + offset % together];
    }
    if (!a.pages.key_scales) continue;
    const int64_t scale = block * a.pages.scale_stride + head * size + offset;
    s.scales[j] = a.pages.key_scales[scale];
    s.scales[CHUNK + j] = a.pages.value_scales[scale];
  }
  view.key_step = CHUNK * factor;
  view.value_step = stride * factor;
  view.odd = CHUNK;
  for (int i = 0; i < GROUPS; i++) {
    view.keys[i] = keys + i * LANES * factor;
    view.values[i] = values + i * LANES * stride;
    view.key_scales[i] = s.scales + i * LANES;
    view.value_scales[i] = s.scales + CHUNK + i * LANES;
  }
}

// The last token of an odd count shares its words with one that nobody sees and that may be no number.
template <class Element>
HEADRACE_INLINE void leave_out_the_next(const Chunk &chunk, const Scratch &s, int64_t size, View<Element> &view) {
  const int factor = FACTOR_OF<Element>;
  if (chunk.count % factor == 0) return;
  view.odd = chunk.count / factor;
  const Element *row = view.value(view.odd);
  Element *alone = (Element *)s.values;
  for (int64_t i = 0; i < size * factor; i++) alone[i] = i % factor ? Element{} : row[i];
  view.alone = alone;
}

// Attention of a piece's queries over keys [first_key, end_key), which lie within one segment.
template <class Way>
static void attend(const Attention &a, const Piece &p, int64_t first_key, int64_t end_key, const Scratch &s,
                   const Partial &result, int64_t stride) {
  using Element = typename Way::Page::Element;
  const int64_t group = a.heads / a.kv_heads, vectors = p.joined;
  const int64_t length = a.query_starts[p.row + 1] - a.query_starts[p.row];
  const int64_t start = a.contexts[p.row] - length + p.first_query;
  const bool all = p.earlier;  // rows that share these keys see all of them
  const int64_t seen_by_all = all ? end_key : a.joint && a.joint[p.row] ? a.contexts[p.row] : 0;
  clear(result, p.heads * vectors, stride);
  const bool direct = in_place(a);
  Chunk chunk, following;
  View<Element> view, ahead;
  locate<Element>(a, p, first_key, end_key, chunk);
  if (direct) look(a, chunk, p.first_head, view);
  for (int64_t first = first_key; first < end_key; first += CHUNK) {
    const int64_t next = first + CHUNK;
    if (next < end_key) locate<Element>(a, p, next, end_key, following);
    int64_t visible = 0;  // the first query that sees any of these keys
    while (visible < p.queries && start + visible < first && first >= seen_by_all) visible++;
    for (int64_t h = 0; h < p.heads; h++) {
      const int64_t head = p.first_head + h;
      const bool more = h + 1 < p.heads, goes_on = direct && (more || next < end_key);
      if (goes_on) look(a, more ? chunk : following, more ? head + 1 : p.first_head, ahead);
      if (direct) leave_out_the_next(chunk, s, a.head_dim, view);
      else gather(a, p, chunk, head, s, stride, view);
      for (int64_t begin = visible * group; begin < vectors; begin += STRIP) {
        const int64_t at = h * vectors + begin, count = vectors - begin < STRIP ? vectors - begin : STRIP;
        const View<Element> *then = begin > visible * group || !direct ? nullptr : goes_on ? &ahead : &view;
        const Partial some = {result.sum + at * stride, result.total + at * LANES, result.best + at};
        // No further than the strip's last query sees, in whole vectors.
        const int64_t last = start + (begin + count - 1) / group + 1, sight = (last > seen_by_all ? last : seen_by_all) - first;
        const int64_t end = (sight + LANES - 1) / LANES * LANES;
        Chunk part = chunk;
        if (end < part.count) part.count = (int)end;
        Way::absorb(a, part, view, then, s, at, count, some, stride, [&](int64_t m) {
          if (all) return Seen{0, part.count};
          const int64_t position = start + (begin + m) / group, low = position + 1 - a.window - first;
          const int64_t high = (position + 1 > seen_by_all ? position + 1 : seen_by_all) - first;
          return Seen{low < 0 ? 0 : (int)low, high > part.count ? part.count : (int)high};
        });
      }
      view = ahead;
    }
    chunk = following;
  }
}

// What a query's sum of values is multiplied with. A sink is one more score in the sum of weights, without a value; it may be
// larger than all others, so the larger of both stands for the exponent.
HEADRACE_INLINE float share_of(const Partial &result, int64_t v, const float *sink) {
  const float total = sum(load((const Single *)(result.total + v * LANES)));
  if (!sink) return 1.0f / total;
  const float own = *sink * 1.44269504f, best = result.best[v], most = own > best ? own : best;
  const float kept = power_of_two<true>(broadcast(best - most))[0];
  return kept / (total * kept + power_of_two<true>(broadcast(own - most))[0]);
}

static void write_out(const Attention &a, const Piece &p, const Partial &result, int64_t stride) {
  with_type(a.dtype, [&](auto t) {
    each_query(a, p, p.queries * (a.heads / a.kv_heads), 0, [&](int64_t v, int64_t place) {
      decltype(t) *out = (decltype(t) *)a.out + place;
      const float inverse = share_of(result, v, a.sinks ? a.sinks + place / a.head_dim % a.heads : nullptr);
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

// Let a piece be computed with that of another row, whose pieces begin at `others`, of the same slice of heads.
static void join(Piece &piece, Piece *others, int64_t slice, int64_t segment) {
  Piece &other = others[slice * others->parts + segment - others->first_key / SEGMENT];
  piece.earlier = &other;
  piece.joined += other.joined;
  other.led = true;
}

// The pieces of all rows; returns how many. All tiles of a row meet one head, whose keys stay near, before the next. With
// `pieces` null it only counts. `first_key` is where the tile's first query begins to see; segments are counted from
// position 0. Pieces of rows in one group are joined.
static int64_t cut(const Attention &a, Cut how, const Groups &groups, Piece *pieces, int64_t &partial_vectors) {
  const int64_t group = a.heads / a.kv_heads, tile = TILE_VECTORS > group ? TILE_VECTORS / group : 1;
  int64_t count = 0, partials = 0;
  for (int64_t row = 0; row < a.rows; row++) {
    const int64_t length = a.query_starts[row + 1] - a.query_starts[row], start = a.contexts[row] - length;
    const int64_t before = partials;
    if (pieces && groups.pieces) groups.pieces[row] = count;
    for (int64_t head = 0; head < a.kv_heads; head++) {
      partials = before;
      for (int64_t query = 0; query < length; query += tile) {
        const int64_t queries = length - query < tile ? length - query : tile, vectors = queries * group;
        const int64_t low = start + query + 1 - a.window, first = low < 0 ? 0 : low;
        const int64_t end = a.joint && a.joint[row] ? a.contexts[row] : start + query + queries;
        const bool few = vectors <= FEW_VECTORS;
        const int64_t parts = few || how.split ? (end - 1) / SEGMENT - first / SEGMENT + 1 : 1;
        const int64_t slice = few ? how.few_heads : 1, step = a.kv_heads * vectors;
        const int64_t heads = a.kv_heads - head < slice ? a.kv_heads - head : slice;
        for (int64_t part = 0; part < parts && head % slice == 0; part++, count++) {
          if (!pieces) continue;
          const int64_t edge = (first / SEGMENT + part) * SEGMENT;
          const int64_t from = part ? edge : first, to = part + 1 < parts ? edge + SEGMENT : end;
          const int64_t partial = partials + part * step + head * vectors;
          Piece &piece = pieces[count];
          piece = {row, query, queries, from, to, head, heads, part, parts, partial, step, vectors};
          const int64_t segment = first / SEGMENT + part, other = groups.row_before(a, row, segment);
          if (few && other >= 0) join(piece, pieces + groups.pieces[other], head / slice, segment);
        }
        if (parts > 1) partials += parts * step;
      }
    }
  }
  partial_vectors = partials;
  return count;
}

static Cut choose_cut(const Attention &a, const Groups &groups, int64_t threads) {
  int64_t partial_vectors;
  const int64_t wanted = threads > 1 ? 4 * threads : 1;
  const int64_t whole = cut(a, {a.kv_heads, false}, groups, nullptr, partial_vectors) - groups.joined;
  const int64_t slices = whole < wanted ? (wanted + whole - 1) / whole : 1;
  int64_t heads = a.kv_heads > slices ? a.kv_heads / slices : 1;
  if (groups.most * heads > JOINED_VECTORS) heads = groups.most < JOINED_VECTORS ? JOINED_VECTORS / groups.most : 1;
  return {heads, whole < wanted};
}

// Floats that begin at a line of the cache; null: out of memory.
static float *aligned(int64_t count) {
  return (float *)aligned_alloc(LINE * sizeof(float), (size_t)(count / LINE + 1) * LINE * sizeof(float));
}

// All segments of a piece, merged in order.
template <class Way>
static void attend_piece(const Attention &a, const Piece &p, const Scratch &s, const Partial &result, int64_t stride) {
  Way::load_queries(a, p, s);
  for (int64_t first = p.first_key / CHUNK * CHUNK, begun = 0; first < p.end_key; begun = 1) {
    const int64_t edge = (first / SEGMENT + 1) * SEGMENT, end = edge < p.end_key ? edge : p.end_key;
    attend<Way>(a, p, first, end, s, begun ? s.segment : result, stride);
    if (begun) merge(result, s.segment, p.heads * p.joined, stride);
    first = end;
  }
}

template <class Way>
static int run_attention(const Attention &a) {
  if (!a.rows) return 1;
  const int64_t group = a.heads / a.kv_heads, stride = (a.head_dim + LANES - 1) / LANES * LANES;
  int64_t work = 0;
  for (int64_t row = 0; row < a.rows; row++)
    work += (a.contexts[row] < a.window ? a.contexts[row] : a.window) * (a.query_starts[row + 1] - a.query_starts[row]);
  const int threads = threads_for(work * a.heads * a.head_dim);
  int64_t partial_vectors;
  Groups groups;
  const bool known = find_groups(a, groups);
  const Cut how = choose_cut(a, groups, threads);
  const int64_t count = cut(a, how, groups, nullptr, partial_vectors);
  const int64_t tile = TILE_VECTORS > group ? TILE_VECTORS : group;
  const int64_t few = (groups.most > FEW_VECTORS ? groups.most : FEW_VECTORS) * how.few_heads;
  const int64_t vectors = tile > few ? tile : few;
  Scratch::Source none = {};
  Scratch::at(none, vectors, stride);
  const int64_t floats = none.taken;
  Piece *pieces = (Piece *)malloc((size_t)(count + 1) * sizeof(Piece));
  float *partials = aligned(partial_vectors * (stride + LANES + 1)), *scratch = aligned(threads * floats);
  const bool enough = known && pieces && partials && scratch;
  if (enough) {
    cut(a, how, groups, pieces, partial_vectors);
    const auto partial_of = [&](const Piece &p, int64_t part) {
      const int64_t place = p.partial + (part - p.part) * p.step;
      float *totals = partials + partial_vectors * stride, *bests = totals + partial_vectors * LANES;
      return Partial{partials + place * stride, totals + place * LANES, bests + place};
    };
    share(count, 1, threads, [&](int64_t task, int64_t end, int64_t member) {
      Scratch::Source own = {scratch + member * floats, 0};
      const Scratch s = Scratch::at(own, vectors, stride);
      for (; task < end; task++) {
        const Piece &p = pieces[count - 1 - task];  // a prompt's last queries, which see the most, come first
        if (p.led) continue;
        const Partial result = p.parts == 1 || p.earlier ? s.whole : partial_of(p, p.part);
        attend_piece<Way>(a, p, s, result, stride);
        if (p.parts == 1) write_out(a, p, result, stride);
        int64_t from = 0;
        for (const Piece *q = &p; q && p.earlier; q = q->earlier) {
          take(partial_of(*q, q->part), result, p.heads, q->queries * group, p.joined, from, stride);
          from += q->queries * group;
        }
      }
    });
    if (partial_vectors)
      each_task(count, threads, [&](int64_t i) {
        const Piece &p = pieces[i];
        if (p.parts == 1 || p.part) return;
        const Partial result = partial_of(p, 0);
        for (int64_t part = 1; part < p.parts; part++)
          merge(result, partial_of(p, part), p.heads * p.queries * group, stride);
        write_out(a, p, result, stride);
      });
  }
  free(scratch);
  free(partials);
  free(pieces);
  free(groups.pieces);
  free(groups.before);
  return enough;
}

static int attention(const Attention &a) {
  if (a.pages.dtype == INT8) return run_attention<Integers>(a);
  if (a.pages.dtype == BFLOAT16 && a.dtype == FLOAT32) return run_attention<Plain<NarrowPage>>(a);
#if defined(HEADRACE_TILES)
  if (a.pages.dtype == BFLOAT16 && BrainTiles::fit(a)) return run_attention<BrainTiles>(a);
#endif
  if (a.pages.dtype == BFLOAT16) return run_attention<Plain<BrainPage>>(a);
  return a.pages.dtype == FLOAT16 ? run_attention<Plain<HalfPage>>(a) : run_attention<Plain<SinglePage>>(a);
}
