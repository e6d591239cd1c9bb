// Temperature, min-p, top-k, top-p and the draw (see Kernels.choose): a row at a time, each by one thread alone, so that
// neither neighbours nor the number of threads change a token.
//
// Nothing is sorted and nothing but a few numbers for each piece of a row is kept: a logit is a load and a weight some
// ten instructions, so every step goes over the row once more, past the pieces whose largest logit says that there is
// nothing in them. All filters are one cut: what is below it has no weight.

static const int64_t CHOICE_PIECE = 128;  // see PIECE in sampling/choice.py
static const float LEAST_LOGIT = -87.0f;  // below it, with the largest at 0, filters count nothing: e^-87 is never drawn
static const int BINS = 1024;

// Logits as x = (logit - peak) / temperature.
template <class T>
struct Row {
  const T *logits;
  int64_t size;
  float peak, inverse;  // of the temperature
  float *tops;          // the largest logit of each piece; null: nothing is passed over
  double *sums;         // the weights of each piece, of what is not cut

  template <class V>
  V scaled(V logit) const {
    return (logit - peak) * inverse;
  }

  int64_t end_of(int64_t piece) const {
    const int64_t end = (piece + 1) * CHOICE_PIECE;
    return end < size ? end : size;
  }
};

static inline int64_t pieces_of(int64_t size) { return (size + CHOICE_PIECE - 1) / CHOICE_PIECE; }

HEADRACE_INLINE Ints lane_numbers() {
  Ints numbers;
  for (int i = 0; i < LANES; i++) numbers[i] = i;
  return numbers;
}

HEADRACE_INLINE bool any(Ints truths) {
#if LANES == 16
  return _mm512_movepi32_mask((__m512i)truths);
#elif LANES == 8
  return _mm256_movemask_ps((__m256)truths);
#else
  int32_t some = 0;
  for (int i = 0; i < LANES; i++) some |= truths[i];
  return some;
#endif
}

HEADRACE_INLINE float larger(float a, float b) { return a > b ? a : b; }
HEADRACE_INLINE float smallest(Floats v) { return -largest(-v); }

HEADRACE_INLINE Floats weight_of(Floats x) { return power_of_two<true>(x * 1.44269504f); }

// body(logits, place) over a piece; behind the row's end the logits are minus infinity, whose weight is zero.
template <class T, class Body>
HEADRACE_INLINE void each_of_piece(const Row<T> &row, int64_t piece, Body body) {
  const int64_t begin = piece * CHOICE_PIECE;
  each_vector(row.end_of(piece) - begin, [&](int64_t i, int lanes) {
    Floats logits = load_at(row.logits + begin + i, lanes);
    if (lanes < LANES) logits = lane_numbers() < lanes ? logits : broadcast(-__builtin_inff());
    body(logits, begin + i);
  });
}

// body(x) over all vectors that may hold something from `lowest` on.
template <class T, class Body>
HEADRACE_INLINE void each_from(const Row<T> &row, float lowest, Body body) {
  for (int64_t piece = 0; piece < pieces_of(row.size); piece++) {
    if (row.tops && row.scaled(row.tops[piece]) < lowest) continue;
    each_of_piece(row, piece, [&](Floats logits, int64_t) { body(row.scaled(logits)); });
  }
}

// Finds the peak and the tops; 0 or what stands for a token.
template <class T>
static int64_t find_peak(Row<T> &row) {
  const float infinity = __builtin_inff();
  Ints wild = {};
  row.peak = -infinity;
  for (int64_t piece = 0; piece < pieces_of(row.size); piece++) {
    Floats top = broadcast(-infinity);
    each_of_piece(row, piece, [&](Floats logits, int64_t) {
      top = maximum(logits, top);
      wild |= ~(Ints)(logits < infinity);  // NaN is not below either
    });
    row.tops[piece] = largest(top);
    if (row.tops[piece] > row.peak) row.peak = row.tops[piece];
  }
  if (any(wild)) return NOT_FINITE;
  return row.peak == -infinity ? NOTHING_ALLOWED : 0;
}

// The largest x such that all from it on together reach `wanted`, in tokens if COUNT, else in weight; nothing below
// `lowest` is looked at, and where all that is left does not reach, nothing of that is cut. The range from 0 down is
// divided into bins, then the one in which it is reached, until that holds a single number.
template <bool COUNT, class T>
static float edge(const Row<T> &row, double wanted, float lowest) {
  const float infinity = __builtin_inff();
  float highest = 0.0f;
  double above = 0.0;
  while (highest - lowest > SMALLEST) {
    const float scale = BINS / (highest - lowest);
    const auto bin_of = [&](Floats x) {
      const Floats bin = maximum(minimum((highest - x) * scale, broadcast(BINS - 1)), Floats{});
      return __builtin_convertvector(bin, Ints);
    };
    const auto within = [&](Floats x) { return (Ints)(x >= lowest) & (Ints)(x <= highest); };
    double bins[BINS + LANES] = {};  // behind them one for each lane that is not within
    each_from(row, lowest, [&](Floats x) {
      const Ints inside = within(x);
      if (!any(inside)) return;
      const Ints bin = inside ? bin_of(x) : BINS + lane_numbers();
      const Floats amount = COUNT ? broadcast(1.0f) : weight_of(x);
      int32_t at[LANES];
      float amounts[LANES];
      __builtin_memcpy(at, &bin, sizeof at);
      __builtin_memcpy(amounts, &amount, sizeof amounts);
      for (int i = 0; i < LANES; i++) bins[at[i]] += amounts[i];
    });
    int32_t reached = 0;
    for (; reached < BINS - 1 && above + bins[reached] < wanted; reached++) above += bins[reached];
    Floats low = broadcast(infinity), high = broadcast(-infinity);
    each_from(row, lowest, [&](Floats x) {
      const Ints inside = within(x);
      if (!any(inside)) return;
      const Ints there = inside & (Ints)(bin_of(x) == reached);
      low = there ? minimum(low, x) : low;
      high = there ? maximum(high, x) : high;
    });
    if (largest(high) == -infinity) return lowest;  // not reached, and the last bin is empty
    lowest = smallest(low), highest = largest(high);
  }
  return lowest;
}

// Fills the sums; what all weigh from `cut` on. In pieces, as sampling/choice.py says.
template <class T>
static double weigh(const Row<T> &row, float cut) {
  double total = 0.0;
  for (int64_t piece = 0; piece < pieces_of(row.size); piece++) {
    Floats weight = {};
    if (row.scaled(row.tops[piece]) >= cut) each_of_piece(row, piece, [&](Floats logits, int64_t) {
      const Floats x = row.scaled(logits);
      weight += x >= cut ? weight_of(x) : Floats{};
    });
    total += row.sums[piece] = sum(weight);
  }
  return total;
}

// The cut of the `k` likeliest from `cut` on.
template <class T>
static float cut_of_count(const Row<T> &row, int64_t k, float cut) {
  const int64_t pieces = pieces_of(row.size);
  float lowest = larger(cut, LEAST_LOGIT);
  if (k <= pieces) {  // the largest of k pieces are k tokens: the k-th token is not below the k-th top
    const Row<Single> tops = {(const Single *)row.tops, pieces, row.peak, row.inverse, nullptr, nullptr};
    lowest = edge<true>(tops, (double)k, lowest);
  }
  return edge<true>(row, (double)k, lowest);
}

// What exactly `k` tokens weigh of those from `cut` on, which weigh `total`: as equals are kept together, there may be more.
template <class T>
static double weight_of_count(const Row<T> &row, int64_t k, float cut, double total) {
  Ints counts = {};
  each_from(row, cut, [&](Floats x) { counts -= (Ints)(x >= cut); });
  int64_t count = 0;
  for (int i = 0; i < LANES; i++) count += counts[i];
  return count > k ? total - (double)(count - k) * weight_of(broadcast(cut))[0] : total;
}

// The cut of the nucleus of `share` of `one`, from `cut` on. All that are less likely than a V-th of what the nucleus may
// leave out hold less than that together, so none of them is looked at: of most rows nearly all.
template <class T>
static float cut_of_nucleus(const Row<T> &row, double share, double one, float cut) {
  const float SLACK = 0.01f;
  const float rare = logf((float)((1.0 - share) * one / (double)row.size)) - SLACK;
  return edge<false>(row, share * one, larger(larger(rare, LEAST_LOGIT), cut));
}

// The token at `target` of the weights one after another, of what `weigh` has summed; none without weight. A fault where
// none has any.
template <class T>
static int64_t token_at(const Row<T> &row, double target, float cut) {
  int64_t piece = -1;
  double before = 0.0, passed = 0.0;
  for (int64_t i = 0; i < pieces_of(row.size); i++) {
    if (!(row.sums[i] > 0.0)) continue;
    piece = i, before = passed, passed += row.sums[i];
    if (passed > target) break;
  }
  if (piece < 0) return NOT_FINITE;
  // The piece's sum and its running sum differ in the last digits: stay inside the piece.
  int64_t token = -1;
  double running = before;
  each_of_piece(row, piece, [&](Floats logits, int64_t begin) {
    const Floats x = row.scaled(logits), weight = x >= cut ? weight_of(x) : Floats{};
    for (int i = 0; i < LANES; i++) {
      if (!(weight[i] > 0.0f) || (token >= 0 && running > target)) continue;
      token = begin + i;
      running += weight[i];
    }
  });
  return token;
}

template <class T>
static int64_t choose_one(const Choice &a, int64_t i, Row<T> &row) {
  if (const int64_t fault = find_peak(row)) return fault;
  float cut = a.min_p[i] > 0.0 ? logf((float)a.min_p[i]) : -__builtin_inff();
  const bool counted = a.top_k[i] > 0 && a.top_k[i] < row.size;
  if (counted) cut = cut_of_count(row, a.top_k[i], cut);
  double total = weigh(row, cut);
  if (a.top_p[i] < 1.0) {
    const double one = counted ? weight_of_count(row, a.top_k[i], cut, total) : total;
    cut = cut_of_nucleus(row, a.top_p[i], one, cut);
    total = weigh(row, cut);
  }
  return token_at(row, a.uniform[i] * total, cut);
}

template <class T>
static int choose_rows(const Choice &a) {
  const int threads = a.count * a.size > PARALLEL_ELEMENTS ? team_threads() : 1;
  const int64_t pieces = pieces_of(a.size);
  float *tops = (float *)malloc((size_t)(threads * pieces + 1) * sizeof(float));
  double *sums = (double *)malloc((size_t)(threads * pieces + 1) * sizeof(double));
  const bool enough = tops && sums;
  if (enough) share(a.count, 1, threads, [&](int64_t i, int64_t end, int64_t member) {
    for (; i < end; i++) {
      const T *logits = (const T *)a.logits + i * a.size;
      Row<T> row = {logits, a.size, 0.0f, 1.0f / (float)a.temperature[i], tops + member * pieces, sums + member * pieces};
      a.tokens[i] = choose_one(a, i, row);
    }
  });
  free(sums);
  free(tops);
  return enough;
}

static int choose(const Choice &a) {
  int enough = 0;
  with_type(a.dtype, [&](auto t) { enough = choose_rows<decltype(t)>(a); });
  return enough;
}

// The first place of the peak, and, where `probability` is not null, what all weigh beside it.
template <class T>
static int64_t guess_one(Row<T> &row, float *probability) {
  if (probability) *probability = __builtin_nanf("");
  if (const int64_t fault = find_peak(row)) return fault;
  int64_t piece = 0, token = -1;
  while (row.tops[piece] < row.peak) piece++;
  each_of_piece(row, piece, [&](Floats logits, int64_t begin) {
    for (int i = 0; i < LANES; i++)
      if (token < 0 && logits[i] == row.peak) token = begin + i;
  });
  if (!probability) return token;
  Floats weight = {};
  each_from(row, LEAST_LOGIT, [&](Floats x) { weight += weight_of(x); });
  *probability = 1.0f / sum(weight);
  return token;
}

template <class T>
static int guess_rows(const Guess &a) {
  const int threads = a.count * a.size > PARALLEL_ELEMENTS ? team_threads() : 1;
  const int64_t pieces = pieces_of(a.size);
  float *tops = (float *)malloc((size_t)(threads * pieces + 1) * sizeof(float));
  if (!tops) return 0;
  share(a.count, 1, threads, [&](int64_t i, int64_t end, int64_t member) {
    for (; i < end; i++) {
      Row<T> row = {(const T *)a.logits + i * a.size, a.size, 0.0f, 1.0f, tops + member * pieces, nullptr};
      a.tokens[i] = guess_one(row, a.probabilities ? a.probabilities + i : nullptr);
    }
  });
  free(tops);
  return 1;
}

static int guess(const Guess &a) {
  int enough = 0;
  with_type(a.dtype, [&](auto t) { enough = guess_rows<decltype(t)>(a); });
  return enough;
}

// The first of the largest outputs that were met so far; `token` is a fault until there is one, and stays NOT_FINITE.
struct Likeliest {
  float output;
  int64_t token;
};

// Some more outputs of a row, a panel at most, of which the first is `first`; in any order.
HEADRACE_INLINE void meet_outputs(Likeliest &best, int64_t first, int64_t count, const float *panel) {
  const float infinity = __builtin_inff();
  const auto found = [&](int64_t i, int lanes) {
    const Floats outputs = load((const Single *)(panel + i));
    return lanes < LANES ? (lane_numbers() < lanes ? outputs : broadcast(-infinity)) : outputs;
  };
  Floats top = broadcast(-infinity);
  Ints wild = {};
  each_vector(count, [&](int64_t i, int lanes) {
    const Floats outputs = found(i, lanes);
    top = maximum(outputs, top);
    wild |= ~(Ints)(outputs < infinity);  // NaN is not below either
  });
  if (any(wild)) best = {infinity, NOT_FINITE};
  if (!any((Ints)(top >= best.output))) return;
  const float output = largest(top);
  if (output == best.output && best.token < first) return;  // a fault, or an earlier one that is as large
  int64_t token = -1;
  each_vector(count, [&](int64_t i, int lanes) {
    const Floats outputs = found(i, lanes);
    for (int j = 0; j < lanes; j++)
      if (token < 0 && outputs[j] == output) token = first + i + j;
  });
  best = {output, token};
}

// Panels of a head as in linear_of. Outputs are compared where they are sums still: those of a large vocabulary would go
// to memory and come back. Each thread has its own likeliest.
template <class Kind>
static int likeliest_of(const Linear &a, int64_t *tokens) {
  const int64_t depth = depth_of<Kind>(a), row = depth * Kind::ROW_WORDS, block_bytes = BLOCK_ROWS * row * 4;
  const int64_t panels = (a.outputs + PANEL - 1) / PANEL;
  const int threads = threads_for(a.count * depth * a.outputs);
  Likeliest *best = (Likeliest *)malloc((size_t)(threads * a.count + 1) * sizeof(Likeliest));
  if (!best) return 0;
  for (int64_t i = 0; i < threads * a.count; i++) best[i] = {-__builtin_inff(), NOTHING_ALLOWED};
  const int64_t tasks = panels * ((a.count + BLOCK_ROWS - 1) / BLOCK_ROWS);
  share(tasks, tasks_at_once(tasks, threads), threads, [&](int64_t i, int64_t end, int64_t member) {
    for (; i < end; i++) {
      const Meeting at = meeting_at(i, panels, a.count, BLOCK_ROWS, block_bytes);
      const int64_t column = at.panel * PANEL, columns = a.outputs - column < PANEL ? a.outputs - column : PANEL;
      const uint32_t *x = (const uint32_t *)a.x + at.row * row;
      multiply_panel_of<Kind>(a, at.panel, x, depth, at.rows, [&](int64_t row, int64_t count, const float *sums) {
        for (int64_t m = 0; m < count; m++)
          meet_outputs(best[member * a.count + at.row + row + m], column, columns, sums + m * PANEL);
      });
    }
  });
  for (int64_t row = 0; row < a.count; row++) {
    Likeliest &first = best[row];
    for (int member = 1; member < threads; member++) {
      const Likeliest &other = best[member * a.count + row];
      const bool earlier = other.output == first.output && other.token < first.token;
      if (first.token != NOT_FINITE && (other.output > first.output || earlier)) first = other;
    }
    tokens[row] = first.token;
  }
  free(best);
  return 1;
}

static int likeliest_outputs(const Linear &a, int64_t *tokens) {
  return with_words(a, [&](auto, auto kind) { return likeliest_of<decltype(kind)>(a, tokens); });
}
