// Mixtures of experts (see kernels/experts.py): tokens are sorted by expert, so that every expert that has tokens is read once
// in a step, by tasks of a panel of its weights and a block of its rows. Experts follow each other in waves of rows that the
// caches keep between the products:
//
//   rows of x, sorted ── gate and up ──▶ wide ── gate ──▶ narrow ── down ──▶ results ──▶ weighted sum of each token
//
// Experts without gates have the square of what is positive in wide.
// Results are rounded as those of a linear layer, and summed in float32 in the order of the experts. So a token's result
// depends on no other token.

// Scores, and the experts of a token.
struct Scored {
  float scores[MAX_EXPERTS], ranked[MAX_EXPERTS];
  bool taken[MAX_EXPERTS];
};

HEADRACE_INLINE void score(const Router &r, const float *logits, Scored &s) {
  float most = logits[0];
  for (int64_t e = 1; e < r.experts; e++) most = logits[e] > most ? logits[e] : most;
  float total = 0;
  each_vector(r.experts, [&](int64_t i, int lanes) {
    const Floats x = load_at((const Single *)(logits + i), lanes);
    Floats v;
    if (r.scoring == SCORE_SOFTMAX) v = power_of_two<true>((x - most) * 1.44269504f);
    else v = 1.0f / one_and_exponential<true>(-x);
    store_at((Single *)(s.scores + i), v, lanes);
  });
  for (int64_t e = 0; e < r.experts; e++)
    if (logits[e] != logits[e]) s.scores[e] = logits[e];  // the exponential bounds what is not a number
  if (r.scoring == SCORE_SOFTMAX) {
    for (int64_t e = 0; e < r.experts; e++) total += s.scores[e];
    for (int64_t e = 0; e < r.experts; e++) s.scores[e] /= total;
  }
  for (int64_t e = 0; e < r.experts; e++) {
    const float rank = r.correction ? s.scores[e] + r.correction[e] : s.scores[e];
    s.ranked[e] = rank == rank ? rank : INFINITY;  // what is not a number is chosen, so that the result is not one either
    s.taken[e] = false;
  }
}

// The first of the best of `count` that are not taken, of which there is one at least.
HEADRACE_INLINE int64_t best_of(const float *ranked, const bool *taken, int64_t count) {
  int64_t best = -1;
  for (int64_t e = 0; e < count; e++)
    if (!taken[e] && (best < 0 || ranked[e] > ranked[best])) best = e;
  return best;
}

// Marks the best `count` of those that are not taken: of equal ones, the first.
HEADRACE_INLINE void mark_best(const Scored &s, int64_t experts, int64_t count, bool *marked) {
  int64_t best[MAX_EXPERTS], found = 0;  // descending
  for (int64_t e = 0; e < experts; e++) {
    if (s.taken[e] || (found == count && !(s.ranked[e] > s.ranked[best[count - 1]]))) continue;
    int64_t at = found < count ? found++ : count - 1;
    for (; at > 0 && s.ranked[e] > s.ranked[best[at - 1]]; at--) best[at] = best[at - 1];
    best[at] = e;
  }
  for (int64_t k = 0; k < found; k++) marked[best[k]] = true;
}

// Experts outside of the best groups are taken. A group counts as much as its two best experts.
HEADRACE_INLINE void keep_groups(const Router &r, Scored &s) {
  float groups[MAX_EXPERTS];
  bool kept[MAX_EXPERTS];
  const int64_t size = r.experts / r.groups;
  for (int64_t g = 0; g < r.groups; g++) {
    const float *of = s.ranked + g * size;
    float first = -INFINITY, second = -INFINITY;
    for (int64_t i = 0; i < size; i++) {
      if (of[i] > first) second = first, first = of[i];
      else if (of[i] > second) second = of[i];
    }
    groups[g] = size > 1 ? first + second : first;
    kept[g] = false;
  }
  for (int64_t i = 0; i < r.kept_groups; i++) kept[best_of(groups, kept, r.groups)] = true;
  for (int64_t e = 0; e < r.experts; e++) s.taken[e] = !kept[e / size];
}

HEADRACE_INLINE void route_token(const Router &r, const float *logits, int64_t *indices, float *weights) {
  Scored s;
  score(r, logits, s);
  if (r.groups > 1) keep_groups(r, s);
  bool chosen[MAX_EXPERTS] = {};
  mark_best(s, r.experts, r.chosen, chosen);
  float total = 0;
  int64_t k = 0;
  for (int64_t e = 0; e < r.experts; e++) {
    if (!chosen[e]) continue;
    indices[k] = e;
    total += weights[k++] = s.scores[e];
  }
  for (k = 0; k < r.chosen; k++) {
    if (r.normalized) weights[k] /= total + 1e-20f;
    weights[k] *= (float)r.scale;
  }
  if (r.shared == SHARED_NONE) return;
  indices[k] = r.experts;
  const float gate = r.shared == SHARED_GATED ? logits[r.experts] : 0.0f;
  weights[k] = r.shared == SHARED_GATED ? (1.0f / one_and_exponential<true>(-broadcast(gate)))[0] : 1.0f;
  if (gate != gate) weights[k] = gate;
}

// All threads read a router of some rows: one alone would take longer for its bytes than another takes to come.
template <class T, class Kind>
static void router_logits(const Linear &a) {
  const int64_t depth = depth_of<Kind>(a), panels = (a.outputs + PANEL - 1) / PANEL;
  const int threads = a.outputs * depth > PARALLEL_ELEMENTS ? team_threads() : 1;
  each_block(panels, a.count, BLOCK_ROWS, BLOCK_ROWS * depth * 4, threads, false, [&](int64_t panel, int64_t first, int64_t rows) {
    linear_block<T, Kind, Single>(a, panel, first, rows, false);
  });
}

// Logits are float32, whatever the dtype of the activations.
static int route(const Route &a) {
  if (!a.count) return 1;
  const Router &r = *a.router;
  const int64_t outputs = router_outputs(r), columns = router_columns(r);
  const bool widened = r.dtype == FLOAT32 && a.dtype != FLOAT32;
  float *logits = (float *)malloc((size_t)(a.count * (outputs + (widened ? r.hidden : 0))) * sizeof(float));
  if (!logits) return 0;
  const void *x = a.x;
  if (widened) {
    float *wide = logits + a.count * outputs;
    with_type(a.dtype, [&](auto t) {
      const decltype(t) *from = (const decltype(t) *)a.x;
      each_row(a.count, a.count * r.hidden, [&](int64_t row) {
        each_vector(r.hidden, [&](int64_t i, int lanes) {
          store_at((Single *)(wide + row * r.hidden + i), load_at(from + row * r.hidden + i, lanes), lanes);
        });
      });
    });
    x = wide;
  }
  const Linear linear = {x, r.packed, nullptr, logits, a.count, r.hidden, outputs, (int)r.dtype};
  if (r.dtype == FLOAT32) router_logits<Single, FloatWords>(linear);
  else router_logits<Brain, PairWords>(linear);
  each_row(a.count, a.count * r.experts * r.chosen, [&](int64_t token) {
    float *const own = logits + token * outputs;
    for (int64_t e = 0; r.bias && e < outputs; e++) own[e] += r.bias[e];
    route_token(r, own, a.indices + token * columns, a.weights + token * columns);
  });
  free(logits);
  return 1;
}

static const int64_t WAVE_ROWS = 1024;  // of a wave of several experts

// The outputs of an expert's first product.
HEADRACE_INLINE int64_t wide_outputs(const Experts &a, int64_t inner) { return a.activation == SQUARED_RELU ? inner : 2 * inner; }

// The rows of an expert in its wave, and the memory of its products.
struct ExpertRows {
  const StackLinear *gate_up, *down;
  int64_t first, count;
};

// Where the rows of tokens are: those of an expert lie together.
struct Sorted {
  int64_t *begins;    // [experts + 1], of the rows of each expert
  int64_t *tokens;    // [rows], whose each row is
  int64_t *places;    // [tokens, columns], the rows of each token, ascending; those of no expert are behind all rows
  float *factors;     // [tokens, columns], of these rows
};

static void sort_rows(const Experts &a, const Sorted &s) {
  const int64_t experts = a.set->count, all = a.count * a.columns;
  __builtin_memset(s.begins, 0, (experts + 1) * sizeof *s.begins);
  for (int64_t i = 0; i < all; i++)
    if (a.indices[i] < experts) s.begins[a.indices[i] + 1]++;
  for (int64_t e = 0; e < experts; e++) {
    if (a.set->loads) a.set->loads[e] += s.begins[e + 1];
    s.begins[e + 1] += s.begins[e];
  }
  for (int64_t i = 0; i < all; i++) {
    const int64_t token = i / a.columns, e = a.indices[i];
    int64_t place = e < experts ? s.begins[e]++ : all, k = i;
    if (e < experts) s.tokens[place] = token;
    const float factor = a.weights[i];
    for (; k > token * a.columns && s.places[k - 1] > place; k--) s.places[k] = s.places[k - 1], s.factors[k] = s.factors[k - 1];
    s.places[k] = place, s.factors[k] = factor;
  }
  for (int64_t e = experts; e > 0; e--) s.begins[e] = s.begins[e - 1];  // each was moved to its end
  s.begins[0] = 0;
}

// Rows of an expert in a wave that have the same adapter: their numbers among those of the expert.
struct AdaptedRows {
  const ExpertRows *part;
  const AdapterChange *change;
  const int64_t *rows;
  int64_t count;
};

// The memory of a wave: its rows of x, then of results; gates and factors, then of these products; planes of quantized rows.
struct Wave {
  const Experts &a;
  const Sorted &sorted;
  const ExpertRows *parts;
  int64_t *tasks;        // [parts + 1], at which those of a part begin
  int64_t part_count, first, rows;
  char *x, *wide, *narrow, *results;
  int64_t wide_bytes, narrow_bytes;  // of a row
  uint32_t *planes;
  int64_t plane_words;   // of a row
  float *floats;
  int64_t float_count;   // of a thread
  int threads;
  AdaptedRows *adapted;  // [rows], room for those of one product
  int64_t *adapted_rows; // [rows]
  char *inner;           // of each thread: ADAPTER_ROWS rows of the widest x, and of the highest rank
  int64_t gathered_bytes, inner_bytes;
  const StackLinear *like;  // the first product of an expert, beside which the tokens have these planes; null: they have none
  Planes token_planes;
};

HEADRACE_INLINE int64_t element_bytes(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

// The planes of a row beside a quantized linear layer, or 0 if it is multiplied as it is.
static int planes_of(const StackLinear &l, int dtype) {
  return is_quantized(l) && !in_pairs(l.bits, dtype) ? Product::planes((int)l.planes) : 0;
}

static int64_t plane_words_of(const StackLinear &l, int dtype) {
  const int planes = planes_of(l, dtype);
  return planes ? words_of_planes(sizes_of_planes(l.inputs, l.group_size), planes, 1) : 0;
}

#if defined(HEADRACE_TILES)
static const int64_t UNIT_ROWS = TILE;
#else
static const int64_t UNIT_ROWS = ROWS;
#endif

// The rows of a block of `rows` of an expert. Blocks are about equal: a short last one would have all weights brought again for
// few rows.
static int64_t block_rows(const Wave &w, const StackLinear &l, int64_t rows) {
  const int planes = planes_of(l, w.a.dtype);
  const int64_t most = planes ? BLOCK_ROWS / planes : BLOCK_ROWS, blocks = (rows + most - 1) / most;
  const int64_t each = (rows + blocks - 1) / blocks, whole = (each + UNIT_ROWS - 1) / UNIT_ROWS * UNIT_ROWS;
  return whole < most ? whole : most;
}

static int64_t row_bytes(const Wave &w, const StackLinear &l) {
  const int planes = planes_of(l, w.a.dtype);
  if (planes) return planes * sizes_of_planes(l.inputs, l.group_size).words * 4;
  return l.inputs * element_bytes(w.a.dtype);
}

static int64_t task_count(const Wave &w, const StackLinear &l, int64_t rows) {
  const int64_t most = block_rows(w, l, rows);
  return (l.outputs + PANEL - 1) / PANEL * ((rows + most - 1) / most);
}

static Quantized quantized_part(const Wave &w, const StackLinear &l, int64_t rows, const void *x, void *out) {
  return {x, l.packed, l.scales, l.offsets, l.minima, l.order, l.bias, out, rows, l.inputs, l.outputs, l.group_size,
          l.planes, w.a.dtype, (int)l.bits};
}

static Planes planes_at(const Wave &w, const StackLinear &l, const ExpertRows &part) {
  Planes p = sizes_of_planes(l.inputs, l.group_size);
  place_planes(p, planes_of(l, w.a.dtype), part.count, w.planes + part.first * w.plane_words);
  return p;
}

// Whether rows have the same planes beside both linear layers.
static bool alike(const StackLinear &a, const StackLinear &b, int dtype) {
  return planes_of(a, dtype) == planes_of(b, dtype) && a.planes == b.planes && a.inputs == b.inputs &&
         a.group_size == b.group_size && a.order == b.order && same_form(a.bits, b.bits);
}

// Makes planes of all tokens, which the rows of their experts take: each would make the same.
static void quantize_tokens(const Wave &w) {
  const StackLinear &l = *w.like;
  const Quantized q = quantized_part(w, l, w.a.count, w.a.x, nullptr);
  const int threads = w.a.count * l.inputs > PARALLEL_ELEMENTS ? w.threads : 1;
  share(w.a.count, tasks_at_once(w.a.count, threads), threads, [&](int64_t token, int64_t end, int64_t member) {
    with_type(w.a.dtype, [&](auto t) {
      with_planes(l.planes, [&](auto planes) {
        for (; token < end; token++)
          quantize_token<decltype(t), decltype(planes)::value>(q, w.token_planes, token, w.floats + member * w.float_count);
      });
    });
  });
}

static void take_planes(const Wave &w, const ExpertRows &part, int64_t token, int64_t row) {
  const Planes &from = w.token_planes, to = planes_at(w, *part.gate_up, part);
  const int64_t words = planes_of(*part.gate_up, w.a.dtype) * to.words;
  __builtin_memcpy((uint32_t *)to.integers + row * words, (const uint32_t *)from.integers + token * words, words * 4);
  __builtin_memcpy(to.totals + row * to.spans, from.totals + token * to.spans, to.spans * sizeof *to.totals);
  to.steps[row] = from.steps[token];
}

// Makes planes of a row of a part where its linear layer is quantized.
static void quantize_row(const Wave &w, const StackLinear &l, const ExpertRows &part, const void *x, int64_t row,
                         int64_t member) {
  if (!planes_of(l, w.a.dtype)) return;
  const Quantized q = quantized_part(w, l, part.count, x, nullptr);
  const Planes p = planes_at(w, l, part);
  with_type(w.a.dtype, [&](auto t) {
    with_planes(l.planes, [&](auto planes) {
      quantize_token<decltype(t), decltype(planes)::value>(q, p, row, w.floats + member * w.float_count);
    });
  });
}

static void multiply_part(const Wave &w, const StackLinear &l, const ExpertRows &part, const void *x, void *out, int64_t i) {
  const int64_t rows = block_rows(w, l, part.count);
  const Meeting at = meeting_at(i, (l.outputs + PANEL - 1) / PANEL, part.count, rows, rows * row_bytes(w, l));
  if (is_quantized(l)) {
    const Quantized q = quantized_part(w, l, part.count, x, out);
#if defined(HEADRACE_TILES)
    if (in_pairs(l.bits, w.a.dtype)) return pairs_block<Brain>(q, at.panel, at.row, at.rows);
#endif
    const Planes p = planes_at(w, l, part);
    with_planes(l.planes, [&](auto planes) {
      const int PLANES = decltype(planes)::value;
      with_bits(l.bits, [&](auto bits) { quantized_block<decltype(bits)::value, PLANES>(q, p, at.panel, at.row, at.rows); });
    });
    return;
  }
  const Linear linear = plain_linear(l, w.a.dtype, part.count, x, out);
  with_words(linear, [&](auto t, auto kind) {
    linear_block<decltype(t), decltype(kind), decltype(t)>(linear, at.panel, at.row, at.rows, false);
  });
}

// The part of a row or task, of which that of the one before was `part`.
HEADRACE_INLINE int64_t part_of(const int64_t *begins, int64_t part, int64_t i) {
  while (begins[part + 1] <= i) part++;
  return part;
}

// One product of all parts of a wave, from rows of `x` to rows of `out`.
template <bool DOWN>
static void multiply_wave(const Wave &w, const char *x, int64_t x_bytes, char *out, int64_t out_bytes) {
  const auto of = [&](const ExpertRows &part) -> const StackLinear & { return DOWN ? *part.down : *part.gate_up; };
  w.tasks[0] = 0;
  for (int64_t i = 0; i < w.part_count; i++) w.tasks[i + 1] = w.tasks[i] + task_count(w, of(w.parts[i]), w.parts[i].count);
  const int64_t count = w.tasks[w.part_count], some = count / (w.threads * 64);
  share(count, some > 1 ? some : 1, w.threads, [&](int64_t i, int64_t end, int64_t) {
    for (int64_t at = 0; i < end; i++) {
      at = part_of(w.tasks, at, i);
      const ExpertRows &part = w.parts[at];
      multiply_part(w, of(part), part, x + part.first * x_bytes, out + part.first * out_bytes, i - w.tasks[at]);
    }
  });
}

// task(part, row of it, member) for all rows of a wave.
template <class Task>
static void each_wave_row(const Wave &w, int64_t elements, Task task) {
  for (int64_t i = 0; i < w.part_count; i++) w.tasks[i] = w.parts[i].first;
  w.tasks[w.part_count] = w.rows;
  const int threads = w.rows * elements > PARALLEL_ELEMENTS ? w.threads : 1;
  share(w.rows, tasks_at_once(w.rows, threads), threads, [&](int64_t row, int64_t end, int64_t member) {
    for (int64_t at = 0; row < end; row++) {
      at = part_of(w.tasks, at, row);
      task(w.parts[at], row - w.parts[at].first, member);
    }
  });
}

// Lists the rows of a wave that adapters change in one of the products, at most ADAPTER_ROWS together; returns how many lists.
template <bool DOWN>
static int64_t list_adapted(const Wave &w) {
  const ExpertAdapters &adapters = *w.a.adapters;
  int64_t lists = 0, used = 0;
  for (int64_t i = 0; i < w.part_count; i++) {
    const ExpertRows &part = w.parts[i];
    const int64_t place = part.gate_up - w.a.set->each + DOWN, *tokens = w.sorted.tokens + w.first + part.first;
    for (int64_t g = 0; g < adapters.count; g++) {
      if (!adapters.changes[g] || !adapters.changes[g][place].down) continue;
      const auto begin = [&] { w.adapted[lists++] = {&part, adapters.changes[g] + place, w.adapted_rows + used, 0}; };
      int64_t left = 0;  // of the last list
      for (int64_t row = 0; row < part.count; row++) {
        if (adapters.of_token[tokens[row]] != g) continue;
        if (!left) begin(), left = ADAPTER_ROWS;
        w.adapted_rows[used++] = row;
        w.adapted[lists - 1].count++, left--;
      }
    }
  }
  return lists;
}

// Adds what adapters change in a product of a wave, from rows of `x` to rows of `out`.
template <bool DOWN>
static void adapt_wave(const Wave &w, const char *x, int64_t x_bytes, char *out, int64_t out_bytes) {
  if (!w.a.adapters) return;
  share(list_adapted<DOWN>(w), 1, w.threads, [&](int64_t i, int64_t end, int64_t member) {
    char *const gathered = w.inner + member * (w.gathered_bytes + w.inner_bytes);
    for (; i < end; i++) {
      const AdaptedRows &each = w.adapted[i];
      const StackLinear &l = DOWN ? *each.part->down : *each.part->gate_up;
      const AdapterRows rows = {each.change, each.rows, each.count, nullptr};
      adapt({&rows, 1, 0, x + each.part->first * x_bytes, out + each.part->first * out_bytes, gathered + w.gathered_bytes,
             gathered, l.inputs, l.outputs, w.a.dtype, 1});
    }
  });
}

static const int64_t GATED = 4;  // how much more a gate and its rounding take than an element that is only copied

static void compute_wave(const Wave &w) {
  const int64_t bytes = element_bytes(w.a.dtype), x_bytes = w.a.set->hidden * bytes;
  each_wave_row(w, w.a.set->hidden, [&](const ExpertRows &part, int64_t row, int64_t member) {
    char *x = w.x + part.first * x_bytes;
    const int64_t token = w.sorted.tokens[w.first + part.first + row];
    const bool taken = w.like && alike(*part.gate_up, *w.like, w.a.dtype);
    if (taken) take_planes(w, part, token, row);
    if (!taken || w.a.adapters) __builtin_memcpy(x + row * x_bytes, (const char *)w.a.x + token * x_bytes, x_bytes);
    if (!taken) quantize_row(w, *part.gate_up, part, x, row, member);
  });
  multiply_wave<false>(w, w.x, x_bytes, w.wide, w.wide_bytes);
  adapt_wave<false>(w, w.x, x_bytes, w.wide, w.wide_bytes);
  each_wave_row(w, GATED * (w.narrow_bytes / bytes), [&](const ExpertRows &part, int64_t row, int64_t member) {
    const int64_t inner = part.down->inputs;
    char *narrow = w.narrow + part.first * w.narrow_bytes;  // rows of a part are dense in its memory
    with_type(w.a.dtype, [&](auto t) {
      using T = decltype(t);
      const T *gate = (const T *)(w.wide + part.first * w.wide_bytes) + row * wide_outputs(w.a, inner);
      if (w.a.activation == SQUARED_RELU) square_row(gate, inner, (T *)narrow + row * inner);
      else gate_row(gate, gate + inner, inner, w.a.activation, (T *)narrow + row * inner);
    });
    quantize_row(w, *part.down, part, narrow, row, member);
  });
  multiply_wave<true>(w, w.narrow, w.narrow_bytes, w.results, x_bytes);
  adapt_wave<true>(w, w.narrow, w.narrow_bytes, w.results, x_bytes);
}

// Adds what a wave returned to the sums of its tokens; `sums` is null if it is the only one. The last one writes them.
static void add_wave(const Wave &w, float *sums, bool last) {
  const int64_t hidden = w.a.set->hidden, end = w.first + w.rows;
  with_type(w.a.dtype, [&](auto t) {
    using T = decltype(t);
    const T *results = (const T *)w.results;
    each_row(w.a.count, w.rows * hidden, [&](int64_t token) {
      const int64_t *places = w.sorted.places + token * w.a.columns;
      const float *factors = w.sorted.factors + token * w.a.columns;
      int64_t from = 0, to = w.a.columns;
      while (from < to && places[from] < w.first) from++;
      while (to > from && places[to - 1] >= end) to--;
      if (from == to && !last) return;
      float *sum = sums ? sums + token * hidden : nullptr;
      T *out = (T *)w.a.out + token * hidden;
      each_vector(hidden, [&](int64_t i, int lanes) {
        Floats v = sum ? load_at((const Single *)(sum + i), lanes) : Floats{};
        for (int64_t k = from; k < to; k++)
          v += load_at(results + (places[k] - w.first) * hidden + i, lanes) * factors[k];
        if (last) store_at(out + i, v, lanes);
        else store_at((Single *)(sum + i), v, lanes);
      });
    });
  });
}

// Takes pieces of one piece of memory, or only counts how large it has to be.
struct Pieces {
  char *at;
  int64_t used;

  template <class T>
  T *take(int64_t count) {
    T *const piece = (T *)(at + used);
    used += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
    return piece;
  }
};

static int experts(const Experts &a) {
  const ExpertSet &set = *a.set;
  const int64_t all = a.count * a.columns, bytes = element_bytes(a.dtype);
  if (!a.count) return 1;
  char *const lists = (char *)malloc((size_t)((2 * set.count + 2 + 2 * all) * 8 + all * 4 + set.count * sizeof(ExpertRows) + 512));
  if (!lists) return 0;
  Pieces pieces = {lists, 0};
  Sorted sorted;
  sorted.begins = pieces.take<int64_t>(set.count + 1);
  int64_t *const tasks = pieces.take<int64_t>(set.count + 1);
  sorted.tokens = pieces.take<int64_t>(all);
  sorted.places = pieces.take<int64_t>(all);
  sorted.factors = pieces.take<float>(all);
  ExpertRows *const parts = pieces.take<ExpertRows>(set.count);
  sort_rows(a, sorted);

  const int64_t total = sorted.begins[set.count];
  int64_t wave_rows = 0, inner = 0, plane_words = 0, float_count = 0, products = 0;
  const StackLinear *like = nullptr;
  const auto next_wave = [&](int64_t e) {  // the expert at which the wave that begins with `e` ends
    const int64_t first = sorted.begins[e];
    do e++;
    while (e < set.count && sorted.begins[e + 1] - first <= WAVE_ROWS);
    return e;
  };
  for (int64_t e = 0, end; e < set.count; e = end) {
    end = next_wave(e);
    const int64_t rows = sorted.begins[end] - sorted.begins[e];
    wave_rows = rows > wave_rows ? rows : wave_rows;
  }
  for (int64_t e = 0; e < set.count; e++) {
    const int64_t rows = sorted.begins[e + 1] - sorted.begins[e];
    if (!rows) continue;
    const StackLinear *const pair = set.each + 2 * e;
    products += rows * pair->inputs * pair->outputs;
    inner = pair[1].inputs > inner ? pair[1].inputs : inner;
    if (!like && a.columns > 1 && planes_of(pair[0], a.dtype)) like = pair;
    for (int i = 0; i < 2; i++) {
      const int64_t words = plane_words_of(pair[i], a.dtype);
      plane_words = words > plane_words ? words : plane_words;
      if (words && pair[i].inputs > float_count) float_count = pair[i].inputs;
    }
  }
  plane_words = (plane_words + 15) / 16 * 16;
  const int threads = threads_for(products);
  int64_t most_rank = 0;
  for (int64_t g = 0; a.adapters && g < a.adapters->count; g++)
    for (int64_t place = 0; a.adapters->changes[g] && place < 2 * set.count; place++)
      most_rank = a.adapters->changes[g][place].rank > most_rank ? a.adapters->changes[g][place].rank : most_rank;
  const int64_t listed = most_rank ? wave_rows : 0, widest = inner > set.hidden ? inner : set.hidden;
  const bool at_once = wave_rows == total;
  const auto take = [&](Pieces &from, Wave &w) {
    w.x = from.take<char>(wave_rows * set.hidden * bytes);
    w.wide = from.take<char>(wave_rows * wide_outputs(a, inner) * bytes);
    w.narrow = from.take<char>(wave_rows * inner * bytes);
    w.planes = from.take<uint32_t>(wave_rows * plane_words);
    if (like) {
      const int planes = planes_of(*like, a.dtype);
      w.token_planes = sizes_of_planes(like->inputs, like->group_size);
      place_planes(w.token_planes, planes, a.count, from.take<uint32_t>(words_of_planes(w.token_planes, planes, a.count)));
    }
    w.floats = from.take<float>(threads * float_count);
    w.adapted = from.take<AdaptedRows>(listed);
    w.adapted_rows = from.take<int64_t>(listed);
    w.inner = from.take<char>(listed ? threads * (w.gathered_bytes + w.inner_bytes) : 0);
    w.results = from.take<char>(wave_rows * set.hidden * bytes);
    return from.take<float>(at_once ? 0 : a.count * set.hidden);
  };
  Wave w = {a, sorted, parts, tasks, 0, 0, 0, nullptr, nullptr, nullptr, nullptr, wide_outputs(a, inner) * bytes,
            inner * bytes, nullptr, plane_words, nullptr, float_count, threads, nullptr, nullptr, nullptr,
            (ADAPTER_ROWS * widest * bytes + 63) / 64 * 64, (ADAPTER_ROWS * most_rank * bytes + 63) / 64 * 64, like, {}};
  Pieces counted = {nullptr, 0};
  take(counted, w);
  char *const memory = (char *)malloc((size_t)counted.used + 64);
  if (!memory) return free(lists), 0;
  Pieces from = {memory + (64 - (uintptr_t)memory % 64) % 64, 0};
  float *const room = take(from, w), *const sums = at_once ? nullptr : room;
  if (sums) __builtin_memset(sums, 0, a.count * set.hidden * sizeof *sums);
  if (like) quantize_tokens(w);
  for (int64_t e = 0, end; e < set.count; e = end) {
    end = next_wave(e);
    w.first = sorted.begins[e], w.rows = sorted.begins[end] - w.first, w.part_count = 0;
    for (int64_t i = e; i < end; i++)
      if (sorted.begins[i + 1] > sorted.begins[i])
        parts[w.part_count++] = {set.each + 2 * i, set.each + 2 * i + 1, sorted.begins[i] - w.first,
                                 sorted.begins[i + 1] - sorted.begins[i]};
    if (w.rows) compute_wave(w);
    const bool last = sorted.begins[end] == total;
    if (w.rows || last) add_wave(w, sums, last);
    if (last) break;
  }
  free(memory);
  free(lists);
  return 1;
}
