// Linear layers: blocks of rows times panels of weights.

static const int64_t PARALLEL_PRODUCTS = 1 << 18;  // fewer multiplications than this are not worth a second thread

// Results that no cache of a core would keep until they are read go past the caches: lines would be read first. Those of
// another type than activations are logits, which are read when all are there.
static const int64_t FAR_BYTES = 8 << 20, FAR_LOGITS_BYTES = 1 << 20;
#if defined(HEADRACE_TILES)
template <class T, class Out>
static const bool MAY_GO_FAR = std::is_same_v<Out, Brain> || !std::is_same_v<T, Out>;

HEADRACE_INLINE void store_far(Brain *p, Floats low, Floats high) {
  _mm512_stream_si512((__m512i *)p, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}
#else
template <class T, class Out>
static const bool MAY_GO_FAR = LANES == 16 && !std::is_same_v<T, Out>;
#endif
#if LANES == 16
HEADRACE_INLINE void store_far(Single *p, Floats low, Floats high) {
  _mm512_stream_ps((float *)p, (__m512)low);
  _mm512_stream_ps((float *)p + LANES, (__m512)high);
}

HEADRACE_INLINE void end_far() { _mm_sfence(); }
#else
HEADRACE_INLINE void end_far() {}
#endif

// The columns of a row of a panel, each vector of them from result(column, lanes).
template <class T, class Out, class Result>
HEADRACE_INLINE void store_columns(Out *out, int64_t columns, bool far, Result result) {
  if constexpr (MAY_GO_FAR<T, Out>)
    if (far) {
      for (int64_t i = 0; i < columns; i += 2 * LANES) store_far(out + i, result(i, LANES), result(i + LANES, LANES));
      return;
    }
  each_vector(columns, [&](int64_t i, int lanes) { store_at(out + i, result(i, lanes), lanes); });
}

// Whether results `out` [count, outputs] go past the caches.
template <class T, class Out>
HEADRACE_INLINE bool goes_far(const void *out, int64_t count, int64_t outputs) {
  const int64_t near = std::is_same_v<T, Out> ? FAR_BYTES : FAR_LOGITS_BYTES;
  return MAY_GO_FAR<T, Out> && count * outputs * (int64_t)sizeof(Out) > near && outputs % PANEL == 0 && (uintptr_t)out % 64 == 0;
}

// The order in which blocks of rows meet panels of weights. As many blocks as stay in a core's own cache beside a panel meet
// all panels before the next blocks do: a long prompt's rows would come from afar again for each panel, in short pieces
// that no prefetcher follows, while weights come in one stream that is asked for ahead.
#if defined(HEADRACE_TILES)
static const int64_t NEAR_BYTES = 1 << 20;  // of the two MiB that whoever has tiles has
#else
static const int64_t NEAR_BYTES = 512 << 10;
#endif

struct Meeting {
  int64_t panel, row, rows;
};

// The i-th of the meetings of `panels`, or of as many groups of them, with blocks of at most `most` rows, each of
// `block_bytes`.
HEADRACE_INLINE Meeting meeting_at(int64_t i, int64_t panels, int64_t rows, int64_t most, int64_t block_bytes) {
  const int64_t blocks = (rows + most - 1) / most, near = NEAR_BYTES > block_bytes ? NEAR_BYTES / block_bytes : 1;
  const int64_t first = i / (panels * near) * near, together = blocks - first < near ? blocks - first : near;
  const int64_t left = i - first * panels, row = (first + left % together) * most;
  return {left / together, row, rows - row < most ? rows - row : most};
}

// Rows of a block where there are several: as even as whole tiles allow, so that tasks take equally long.
#if defined(HEADRACE_TILES)
static const int64_t TILE_OF_ROWS = TILE;
#else
static const int64_t TILE_OF_ROWS = ROWS;
#endif

HEADRACE_INLINE int64_t even_block(int64_t rows, int64_t most) {
  const int64_t blocks = (rows + most - 1) / most;
  if (blocks < 2) return most;
  const int64_t even = ((rows + blocks - 1) / blocks + TILE_OF_ROWS - 1) / TILE_OF_ROWS * TILE_OF_ROWS;
  return even < most ? even : most;
}

// Where each thread has fewer tasks than this, one that is left over makes the others wait.
static const int64_t FEW_TASKS = 16;

// meet(panel, first row, rows) for all of them; `far`: results go past the caches. Of few tasks, those that are left over when
// each thread has as many are divided by rows, a part for each thread, unless parts were less than half a tile.
template <class Meet>
HEADRACE_INLINE void each_block(int64_t panels, int64_t rows, int64_t most, int64_t block_bytes, int threads, bool far, Meet meet) {
  const int64_t block = even_block(rows, most), tasks = panels * ((rows + block - 1) / block), bytes = block_bytes * block / most;
  const int64_t left = tasks % threads, of_task = rows < block ? rows : block;
  const bool divided = left && tasks < FEW_TASKS * threads && 2 * of_task > TILE_OF_ROWS * threads;
  const int64_t whole = tasks / threads, own = whole + left;  // of each thread, where they are divided
  const int64_t count = divided ? own * threads : tasks;
  share(count, tasks_at_once(count, threads), threads, [&](int64_t i, int64_t end, int64_t) {
    for (; i < end; i++) {
      const int64_t part = divided ? i / own : 0, at = i - part * own;
      const bool shared = divided && at >= whole;
      Meeting m = meeting_at(shared ? threads * whole + at - whole : divided ? part * whole + at : i, panels, rows, block, bytes);
      if (shared) {
        const int64_t first = m.rows * part / threads;
        m = {m.panel, m.row + first, m.rows * (part + 1) / threads - first};
      }
      if (m.rows) meet(m.panel, m.row, m.rows);
    }
    if (far) end_far();
  });
}

// Words of a column of weights.
template <class Kind>
HEADRACE_INLINE int64_t depth_of(const Linear &a) {
  return a.inputs / Kind::FEATURES;
}

// call(type of activations, kind of words) of a linear layer.
template <class Call>
HEADRACE_INLINE auto with_words(const Linear &a, Call call) {
  if (a.dtype != FLOAT32) return call(Brain{}, PairWords{});
  return a.narrow ? call(Single{}, NarrowWords{}) : call(Single{}, FloatWords{});
}

HEADRACE_INLINE int threads_for(int64_t products) { return products > PARALLEL_PRODUCTS ? team_threads() : 1; }

// Calls take(row, count, sums [count, PANEL]) with x [rows, depth * ROW_WORDS] times a panel of weights, some rows at a time.
template <class Kind, class Take>
HEADRACE_INLINE void multiply_block(const uint32_t *x, const uint32_t *weights, int64_t depth, int64_t rows, Take take) {
#if defined(HEADRACE_TILES)
  if constexpr (std::is_same_v<Kind, PairWords>) {
    // Twice the depth loads and stores the sums of many rows half as often; of fewer, the lesser depth was measured quicker.
    const int64_t most_words = rows > BLOCK_ROWS / 2 ? 2 * TILE_WORDS : rows > TILE ? TILE_WORDS : depth;
    begin_tiles(rows);
    multiply_on_tiles<PairTiles, true>(x, depth, depth, rows, most_words,
                                 [&](int64_t first, int64_t) { return weights + first * PANEL; },
                                 [&](int64_t row, int64_t count, const uint32_t *sums) { take(row, count, (const float *)sums); });
    end_tiles();
    return;
  }
#endif
  float sums[BLOCK_ROWS * PANEL];
  const int64_t tiles = tiles_of<Kind>(rows), block = block_depth(tiles, depth);
  for (int64_t k = 0; k < depth; k += block)
    multiply_rows<Kind>(x + k * Kind::ROW_WORDS, depth * Kind::ROW_WORDS, weights + k * PANEL, depth - k < block ? depth - k : block,
                        sums, rows, k > 0, ahead_of_tiles(weights + (k + block) * PANEL, tiles, deep_for(tiles)));
  take(0, rows, sums);
}

// The same for a panel of a linear layer. Its weights are packed in panels [outputs / PANEL, words of inputs, PANEL], the last one
// padded with zeros; or they are coded.
template <class Kind, class Take>
HEADRACE_INLINE void multiply_panel_of(const Linear &a, int64_t panel, const uint32_t *x, int64_t depth, int64_t rows, Take take) {
#if defined(HEADRACE_CODED)
  if constexpr (Kind::FEATURES == 2)
    if (a.codes) {
      float sums[BLOCK_ROWS * PANEL];
      multiply_coded<Kind>(x, coded_panel(a, panel, depth), depth, rows, sums);
      return take(0, rows, sums);
    }
#endif
  multiply_block<Kind>(x, (const uint32_t *)a.packed + panel * depth * PANEL, depth, rows, take);
}

// The outputs of a panel of weights for some rows.
template <class T, class Kind, class Out>
HEADRACE_INLINE void linear_block(const Linear &a, int64_t panel, int64_t first, int64_t rows, bool far) {
  const int64_t depth = depth_of<Kind>(a);
  const int64_t column = panel * PANEL, columns = a.outputs - column < PANEL ? a.outputs - column : PANEL;
  const T *bias = a.bias ? (const T *)a.bias + column : nullptr;
  const uint32_t *x = (const uint32_t *)a.x + first * depth * Kind::ROW_WORDS;
  multiply_panel_of<Kind>(a, panel, x, depth, rows, [&](int64_t row, int64_t count, const float *sums) {
    for (int64_t m = 0; m < count; m++) {
      Out *out = (Out *)a.out + (first + row + m) * a.outputs + column;
      const auto result = [&](int64_t i, int lanes) {
        const Floats v = load((const Single *)(sums + m * PANEL + i));
        return bias ? v + load_at(bias + i, lanes) : v;
      };
      store_columns<T>(out, columns, far, result);
    }
  });
}

template <class T, class Kind, class Out = T>
static void linear_of(const Linear &a) {
  const bool far = goes_far<T, Out>(a.out, a.count, a.outputs);
  const int64_t row = depth_of<Kind>(a) * Kind::ROW_WORDS, panels = (a.outputs + PANEL - 1) / PANEL;
  const int threads = threads_for(a.count * row * a.outputs);
  const auto meet = [&](int64_t panel, int64_t first, int64_t rows) { linear_block<T, Kind, Out>(a, panel, first, rows, far); };
  each_block(panels, a.count, BLOCK_ROWS, BLOCK_ROWS * row * 4, threads, far, meet);
}

static void linear(const Linear &a) {
  with_words(a, [&](auto t, auto kind) {
    if (a.wide) linear_of<decltype(t), decltype(kind), Single>(a);
    else linear_of<decltype(t), decltype(kind)>(a);
  });
}

// Linear layers whose outputs go on at once, block of rows by block, from the nearest caches: those of a long prompt would
// go to memory and come back. What is computed of an output is the same as where these are calls of their own, bit for bit.

static const int64_t MOST_TOGETHER = 256;  // outputs that are needed before any of them goes on

// finish(task, first row, rows, outputs [rows, width]) for all rows, some at a time, and all tasks: `panel_of(task, i)` says
// which panel of weights a task's i-th PANEL outputs come from.
template <class T, class Kind, class PanelOf, class Finish>
static void finish_outputs(const Linear &a, int64_t tasks, int64_t width, PanelOf panel_of, Finish finish) {
  const int64_t depth = depth_of<Kind>(a), row_words = depth * Kind::ROW_WORDS;
  const int threads = threads_for(a.count * row_words * a.outputs);
  each_block(tasks, a.count, BLOCK_ROWS, BLOCK_ROWS * row_words * 4, threads, false, [&](int64_t task, int64_t first, int64_t rows) {
    alignas(64) T outputs[BLOCK_ROWS * MOST_TOGETHER];
    for (int64_t part = 0; part * PANEL < width; part++) {
      const int64_t panel = panel_of(task, part);
      const T *bias = a.bias ? (const T *)a.bias + panel * PANEL : nullptr;
      multiply_panel_of<Kind>(a, panel, (const uint32_t *)a.x + first * row_words, depth, rows,
                           [&](int64_t row, int64_t count, const float *sums) {
                             for (int64_t m = 0; m < count; m++)
                               for (int64_t j = 0; j < PANEL; j += LANES) {
                                 const Floats v = load((const Single *)(sums + m * PANEL + j));
                                 store(outputs + (row + m) * width + part * PANEL + j, bias ? v + load(bias + j) : v);
                               }
                           });
    }
    finish(task, first, rows, outputs);
  });
}

// 0: the outputs are not whole panels.
static int linear_gate(const Linear &a, const Gate &g) {
  if (g.size % PANEL) return 0;
  const auto run = [&](auto t, auto kind) {
    using T = decltype(t);
    const int64_t panels = g.size / PANEL;
    finish_outputs<T, decltype(kind)>(
        a, panels, 2 * PANEL, [&](int64_t task, int64_t i) { return task + i * panels; },
        [&](int64_t task, int64_t first, int64_t rows, const T *outputs) {
          T *out = (T *)g.out + first * g.size + task * PANEL;
          for (int64_t m = 0; m < rows; m++)
            gate_row(outputs + m * 2 * PANEL, outputs + m * 2 * PANEL + PANEL, PANEL, g.activation, out + m * g.size);
        });
  };
  with_words(a, run);
  return 1;
}

// As linear_gate: heads that are not whole panels.
static int linear_rope(const Linear &a, const Rope &r) {
  if (r.head_dim % PANEL || r.head_dim > MOST_TOGETHER) return 0;
  const auto keep = [&](auto t, auto kind, auto kept) {
    using T = decltype(t);
    using KV = decltype(kept);
    const int64_t panels = r.head_dim / PANEL;
    finish_outputs<T, decltype(kind)>(
        a, r.heads + 2 * r.kv_heads, r.head_dim, [&](int64_t head, int64_t i) { return head * panels + i; },
        [&](int64_t head, int64_t first, int64_t rows, const T *outputs) {
          for (int64_t token = first; token < first + rows;) {
            const Run tokens = run_from(r, token, first + rows);
            finish_head<T, KV>(r, tokens, head, outputs + (token - first) * r.head_dim, r.head_dim, nullptr);
            token += tokens.count;
          }
        });
  };
  with_words(a, [&](auto t, auto kind) {
    with_pages(r.pages, t, [&](auto kept) { keep(t, kind, kept); });
  });
  return 1;
}
