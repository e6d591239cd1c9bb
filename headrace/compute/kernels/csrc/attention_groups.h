// Rows that read the same blocks, such as those of a common prompt. A key that several rows read is loaded once for all
// their queries: in the segments that such rows share, their pieces are computed as one.
//
//            segment 0   1   2   3   4
//     row 0          a   a   a   a   own       groups of segments 0 and 1: rows 0, 1 and 2
//     row 1          a   a   b   own           groups of segments 2 and 3: rows 0 and 2
//     row 2          a   a   a   a   own       segment 4, and all of row 3: each row alone
//     row 3          c   c   own

// The groups of each segment, as chains of rows.
struct Groups {
  int64_t segments = 0;       // from the first one on; later ones have none
  int64_t joined = 0;         // pieces of one head slice that are computed with another
  int64_t most = 0;           // vectors of a head in the largest group
  int32_t *before = nullptr;  // [segments, rows]: the row before this one in its group, or -1
  int64_t *pieces = nullptr;  // [rows]: the first piece of each row

  int64_t row_before(const Attention &a, int64_t row, int64_t segment) const {
    return segment < segments ? before[segment * a.rows + row] : -1;
  }
};

// Whether all queries of a row see a whole segment, and more: only such a row shares it. Rows of many queries do not: each
// of their tiles has enough for a key.
HEADRACE_INLINE bool may_share(const Attention &a, int64_t row, int64_t segment) {
  const int64_t length = a.query_starts[row + 1] - a.query_starts[row], end = a.contexts[row];
  return length * (a.heads / a.kv_heads) <= FEW_VECTORS && end - length >= (segment + 1) * SEGMENT &&
         end - a.window <= segment * SEGMENT;
}

// Find the groups of one segment; returns how many rows joined one before them. `last` and `vectors` [rows] are scratch, and
// `shared` [rows] the last segment that a row shares: equal blocks follow only equal blocks, so a row that differed in one
// segment shares no later one.
static int64_t find_groups_of(const Attention &a, Groups &g, int64_t segment, int32_t *last, int32_t *vectors,
                              int32_t *shared) {
  const int64_t blocks = SEGMENT / a.pages.block_size;
  int64_t groups = 0, joined = 0;
  for (int64_t row = 0; row < a.rows; row++) {
    int32_t &before = g.before[segment * a.rows + row];
    before = -1;
    if (!may_share(a, row, segment)) continue;
    if (segment && may_share(a, row, segment - 1) && shared[row] != segment - 1) continue;
    const int64_t own = (a.query_starts[row + 1] - a.query_starts[row]) * (a.heads / a.kv_heads);
    const int32_t *table = a.tables + row * a.width + segment * blocks;
    const auto fits = [&](int64_t i) {
      const int32_t *other = a.tables + last[i] * a.width + segment * blocks;
      return other[0] == table[0] && vectors[i] + own <= TILE_VECTORS && !__builtin_memcmp(other, table, blocks * sizeof *table);
    };
    int64_t i = 0;
    while (i < groups && !fits(i)) i++;
    if (i == groups) {
      vectors[groups++] = 0;
    } else {
      before = last[i];
      shared[row] = shared[last[i]] = (int32_t)segment;
      joined++;
    }
    last[i] = (int32_t)row;
    vectors[i] += (int32_t)own;
    if (before >= 0 && vectors[i] > g.most) g.most = vectors[i];
  }
  return joined;
}

// The groups of all rows; false: out of memory, and there are none. Free `before` and `pieces` afterwards.
static bool find_groups(const Attention &a, Groups &g) {
  int64_t segments = 0, first = INT64_MAX;  // those that some row may share
  for (int64_t row = 0; row < a.rows && a.rows > 1 && SEGMENT % a.pages.block_size == 0; row++) {
    const int64_t low = a.contexts[row] - a.window, begin = low <= 0 ? 0 : (low + SEGMENT - 1) / SEGMENT;
    if (!may_share(a, row, begin)) continue;
    const int64_t end = (a.contexts[row] - (a.query_starts[row + 1] - a.query_starts[row])) / SEGMENT;
    if (begin < first) first = begin;
    if (end > segments) segments = end;
  }
  if (!segments) return true;
  g.before = (int32_t *)malloc((size_t)((segments + 3) * a.rows) * sizeof(int32_t));
  g.pieces = (int64_t *)malloc((size_t)a.rows * sizeof(int64_t));
  if (!g.before || !g.pieces) return false;
  int32_t *last = g.before + segments * a.rows, *vectors = last + a.rows, *shared = vectors + a.rows;
  for (int64_t row = 0; row < a.rows; row++) shared[row] = -1;
  for (int64_t segment = 0; segment < segments; segment++) {
    const int64_t joined = find_groups_of(a, g, segment, last, vectors, shared);
    if (!joined && segment >= first && a.window >= ALL_KEYS) break;
    g.joined += joined;
    g.segments = segment + 1;
  }
  return true;
}
