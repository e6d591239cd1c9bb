// Mixers with a recurrent state: short convolutions, and heads whose state S [key_dim, value_dim] each token changes to
// decay * S + key (x) value, and reads as query·S. One definition of a head serves the gated delta rule and Mamba-2.
//
// Rows of few tokens go token by token. Memory bounds them, so a state is read in the order of its addresses, as many
// columns at a time as registers have sums for, and comes from the second cache when it is changed. Longer ones go by
// chunks of 64 tokens, as products of matrices:
//
//   values' = (1 + tril(beta K Kᵀ D))⁻¹ beta (V - since K S)    the delta rule only; D, since: decays within the chunk
//   out     = since Q S + tril(Q Kᵀ D) values'
//   S       = decay S + Kᵀ (left values')                       left: decays until the chunk's end

static const int64_t FEW = 4;        // tokens of a row that go token by token
static const int64_t CHANNELS = 256;  // of a task of a convolution
static const int64_t SOLVED = 16;    // rows of a triangular system that are solved together
static const int STEPPED = LANES == 16 ? 8 : VECTORS;  // vectors of columns of a state that a token changes together

template <class T>
HEADRACE_INLINE float scalar(const T *p) {
  return load_some(p, 1)[0];
}

HEADRACE_INLINE Floats exponential(Floats x) { return power_of_two<true>(minimum(x * 1.44269504f, broadcast(126.0f))); }

static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Tokens [first, first + count) of a row; those of all rows are a wave. They are at `place` in working memory. Tokens ahead of
// the state that stays have their own state, the `ahead`-th, which `begins` with that of the slot; -1: the slot's.
struct Part {
  int64_t row, first, count, place, ahead, begins;
};

// The state of a part after its tokens, and before them (null: an empty one).
struct States {
  const float *before;
  float *after;
};

static States states_of(const Mix &a, const Part &part, const MixStates &states, const MixStates &ahead) {
  float *slot = states.first + a.slots[part.row] * states.stride;
  float *after = part.ahead < 0 ? slot : ahead.first + part.ahead * ahead.stride;
  if (a.fresh[part.row] && !part.first) return {nullptr, after};
  return {part.begins ? slot : after, after};
}

// Convolutions. input(t, c, lanes): the input of the part's token t; put(t, c, lanes, y): what to do with the result.
// Tokens come one after the other, each over all channels of the task: the last inputs stay in the first cache, and no two
// lines that are a power of two apart are needed at once. TAPS 0: those of the mixer.
template <int TAPS, class Input, class Put>
HEADRACE_INLINE void convolve_by(const Mixer &m, const float *before_it, float *state, int64_t count, int64_t first,
                                 int64_t end, Input input, Put put) {
  const int64_t taps = TAPS ? TAPS : m.taps, before = taps - 1, size = end - first;
  alignas(64) float weights[MAX_TAPS][CHANNELS], window[MAX_TAPS][CHANNELS];  // window: a ring of the last inputs
  for (int64_t j = 0; j < taps; j++) __builtin_memcpy(weights[j], m.weight + j * m.channels + first, size * sizeof(float));
  for (int64_t j = 0; j < before; j++) {
    if (before_it) __builtin_memcpy(window[j], before_it + j * m.channels + first, size * sizeof(float));
    else __builtin_memset(window[j], 0, size * sizeof(float));
  }
  const float *bias = m.bias ? m.bias + first : nullptr;
  for (int64_t t = 0, now = before % taps; t < count; t++, now = now + 1 == taps ? 0 : now + 1) {
    const float *each[MAX_TAPS];
    for (int64_t j = 0, at = now; j < taps; j++) {
      at = at + 1 == taps ? 0 : at + 1;
      each[j] = window[at];
    }
    each_vector(size, [&](int64_t i, int lanes) {
      const Floats x = input(t, first + i, lanes);
      store_at((Single *)window[now] + i, x, lanes);
      Floats y = bias ? load_at((const Single *)bias + i, lanes) : Floats{};
#pragma GCC unroll 8
      for (int64_t j = 0; j < before; j++)
        y += load_at((const Single *)weights[j] + i, lanes) * load_at((const Single *)each[j] + i, lanes);
      put(t, first + i, lanes, y + load_at((const Single *)weights[before] + i, lanes) * x);
    });
  }
  for (int64_t j = 0; j < before; j++)
    __builtin_memcpy(state + j * m.channels + first, window[(count + j) % taps], size * sizeof(float));
}

template <class Input, class Put>
HEADRACE_INLINE void convolve(const Mixer &m, const float *before_it, float *state, int64_t count, int64_t first,
                              int64_t end, Input input, Put put) {
  if (m.taps == 4) convolve_by<4>(m, before_it, state, count, first, end, input, put);
  else if (m.taps == 3) convolve_by<3>(m, before_it, state, count, first, end, input, put);
  else convolve_by<0>(m, before_it, state, count, first, end, input, put);
}

// Some channels of a part are a task.
template <class T>
static void convolve_parts(const Mix &a, const Part *parts, int64_t part_count, int64_t tokens) {
  const Mixer &m = *a.mixer;
  const int64_t blocks = (m.channels + CHANNELS - 1) / CHANNELS, width = mixer_width(m), inner = mixer_inner(m);
  each_row(part_count * blocks, tokens * m.channels, [&](int64_t task) {
    const Part part = parts[task / blocks];
    const int64_t first = task % blocks * CHANNELS, begin = a.starts[part.row] + part.first;
    const int64_t end = first + CHANNELS < m.channels ? first + CHANNELS : m.channels;
    const States states = states_of(a, part, a.inputs, a.inputs_ahead);
    const T *x = (const T *)a.x + begin * width;
    if (m.kind == SHORT_CONVOLUTION) {
      T *out = (T *)a.out + begin * inner;
      convolve(
          m, states.before, states.after, part.count, first, end,
          [&](int64_t t, int64_t c, int lanes) {
            const T *p = x + t * width + c;
            return load_at(p, lanes) * load_at(p + 2 * m.channels, lanes);
          },
          [&](int64_t t, int64_t c, int lanes, Floats y) {
            store_at(out + t * inner + c, load_at(x + t * width + m.channels + c, lanes) * y, lanes);
          });
      return;
    }
    const int64_t skipped = m.kind == STATE_SPACE ? inner : 0;  // gates are first
    float *out = a.convolved + part.place * m.channels;
    convolve(
        m, states.before, states.after, part.count, first, end,
        [&](int64_t t, int64_t c, int lanes) { return load_at(x + t * width + skipped + c, lanes); },
        [&](int64_t t, int64_t c, int lanes, Floats y) {
          store_at((Single *)out + t * m.channels + c, silu<true>(y), lanes);
        });
  });
}

// c[m, :] (+)= a[m, 0:depth] b[0:depth, :] of M rows and NV vectors, of which the last one has `lanes` if it is not WHOLE.
template <int M, int NV, bool WHOLE>
static void product_tile(const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t depth, float *c,
                         int64_t c_stride, bool add, int lanes) {
  const auto get = [&](const float *p) { return WHOLE ? load((const Single *)p) : load_some((const Single *)p, lanes); };
  Floats sum[M][NV];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int i = 0; i < NV; i++) sum[m][i] = add ? get(c + m * c_stride + i * LANES) : Floats{};
  for (int64_t k = 0; k < depth; k++) {
    Floats column[NV];
#pragma GCC unroll 8
    for (int i = 0; i < NV; i++) column[i] = get(b + k * b_stride + i * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const Floats row = broadcast(a[m * a_stride + k]);
#pragma GCC unroll 8
      for (int i = 0; i < NV; i++) sum[m][i] += row * column[i];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int i = 0; i < NV; i++) {
      if (WHOLE) store((Single *)(c + m * c_stride + i * LANES), sum[m][i]);
      else store_some((Single *)(c + m * c_stride + i * LANES), sum[m][i], lanes);
    }
}

struct Matrix {
  float *at;
  int64_t stride;
};

// c = a b, as far as it is a lower triangle, up to a vector; its columns are whole vectors, a panel at most.
static void lower_product(int64_t rows, int64_t columns, int64_t depth, Matrix a, Matrix b, Matrix c) {
  in_tiles<ROWS>(rows, [&](auto count, int64_t row) {
    for (int64_t column = 0; column < columns && column < row + count(); column += VECTORS * LANES) {
      const int64_t end = row + count() < columns ? row + count() : columns, vectors = (end - column + LANES - 1) / LANES;
      const auto run = [&](auto wide) {
        product_tile<count(), wide(), true>(a.at + row * a.stride, a.stride, b.at + column, b.stride, depth,
                                            c.at + row * c.stride + column, c.stride, false, LANES);
      };
      if (vectors == 1) run(std::integral_constant<int, 1>{});
      else if (vectors == 2 || VECTORS == 2) run(std::integral_constant<int, 2>{});
      else if (vectors == 3) run(std::integral_constant<int, 3>{});
      else run(std::integral_constant<int, VECTORS>{});
    }
  });
}

// c (+)= a b; `causal`: a is a lower triangle.
static void product(int64_t rows, int64_t columns, int64_t depth, Matrix a, Matrix b, Matrix c, bool add, bool causal) {
  const auto run = [&](int64_t column, auto vectors, auto whole, int lanes) {
    in_tiles<ROWS>(rows, [&](auto count, int64_t row) {
      const int64_t needed = causal && row + count() < depth ? row + count() : depth;
      product_tile<count(), vectors(), whole()>(a.at + row * a.stride, a.stride, b.at + column, b.stride, needed,
                                                c.at + row * c.stride + column, c.stride, add, lanes);
    });
  };
  int64_t column = 0;
  for (; column + PANEL <= columns; column += PANEL)
    run(column, std::integral_constant<int, VECTORS>{}, std::true_type{}, LANES);
  for (; column + LANES <= columns; column += LANES) run(column, std::integral_constant<int, 1>{}, std::true_type{}, LANES);
  if (column < columns) run(column, std::integral_constant<int, 1>{}, std::false_type{}, (int)(columns - column));
}

// What a head reads of a row: queries, keys and values of its tokens, `stride` floats apart.
struct HeadInputs {
  const float *queries, *keys, *values;
  int64_t stride;
};

struct HeadMemory {
  alignas(64) float queries[CHUNK * MAX_STATE], keys[CHUNK * MAX_STATE], turned[MAX_STATE * CHUNK];
  alignas(64) float values[CHUNK * MAX_STATE], out[CHUNK * MAX_STATE], read[CHUNK * MAX_STATE];
  alignas(64) float among_keys[CHUNK * CHUNK], among[CHUNK * CHUNK];
  alignas(64) float decay[CHUNK], beta[CHUNK], step[CHUNK], total[CHUNK], since[CHUNK], left[CHUNK];
};

// x times `scale`, divided by its length if it shall have length 1.
HEADRACE_INLINE void copy_scaled(const float *x, int64_t size, bool unit, float scale, float *out) {
  if (unit) {
    Floats squares = {};
    each_vector(size, [&](int64_t i, int lanes) {
      const Floats v = load_at((const Single *)x + i, lanes);
      squares += v * v;
    });
    scale /= __builtin_sqrtf(sum(squares) + 1e-6f);
  }
  const Floats factor = broadcast(scale);
  each_vector(size, [&](int64_t i, int lanes) {
    store_at((Single *)out + i, load_at((const Single *)x + i, lanes) * factor, lanes);
  });
}

// One token: NV vectors of columns of the state. `out` is query·S after it.
template <int NV, bool DELTA, bool WHOLE>
static void step_columns(const float *q, const float *k, int64_t key_dim, float decay, float beta, float product,
                         float *state, int64_t stride, const float *values, float *out, int lanes) {
  const auto get = [&](const float *p) { return WHOLE ? load((const Single *)p) : load_some((const Single *)p, lanes); };
  const auto put = [&](float *p, Floats v) {
    if (WHOLE) store((Single *)p, v);
    else store_some((Single *)p, v, lanes);
  };
  const Floats kept = broadcast(decay);
  Floats value[NV], found[NV] = {};
#pragma GCC unroll 8
  for (int i = 0; i < NV; i++) value[i] = get(values + i * LANES);
  if (DELTA) {
    Floats known[NV] = {};
    for (int64_t d = 0; d < key_dim; d++) {
      const Floats key = broadcast(k[d]), query = broadcast(q[d]);
#pragma GCC unroll 8
      for (int i = 0; i < NV; i++) {
        const Floats s = get(state + d * stride + i * LANES);
        known[i] += key * s;
        found[i] += query * s;
      }
    }
    const Floats rate = broadcast(beta), shared = broadcast(product);
#pragma GCC unroll 8
    for (int i = 0; i < NV; i++) {
      value[i] = rate * (value[i] - kept * known[i]);
      put(out + i * LANES, kept * found[i] + shared * value[i]);
    }
  }
  for (int64_t d = 0; d < key_dim; d++) {
    const Floats key = broadcast(k[d]), query = broadcast(q[d]);
#pragma GCC unroll 8
    for (int i = 0; i < NV; i++) {
      const Floats s = kept * get(state + d * stride + i * LANES) + key * value[i];
      put(state + d * stride + i * LANES, s);
      if (!DELTA) found[i] += query * s;
    }
  }
  if (!DELTA)
#pragma GCC unroll 8
    for (int i = 0; i < NV; i++) put(out + i * LANES, found[i]);
}

// Queries, keys and values of some tokens as they enter the products.
static void take_inputs(const Mixer &m, const HeadInputs &in, int64_t count, HeadMemory &w) {
  const bool delta = m.kind == GATED_DELTA;
  const float scale = delta ? 1.0f / __builtin_sqrtf((float)m.key_dim) : 1.0f;
  for (int64_t t = 0; t < count; t++) {
    const int64_t at = t * in.stride;
    copy_scaled(in.queries + at, m.key_dim, delta, scale, w.queries + t * m.key_dim);
    copy_scaled(in.keys + at, m.key_dim, delta, 1.0f, w.keys + t * m.key_dim);
    copy_scaled(in.values + at, m.value_dim, false, delta ? 1.0f : w.step[t], w.values + t * m.value_dim);
  }
}

// `count` tokens one after the other; their outputs are in w.out.
template <bool DELTA>
static void step_tokens(const Mixer &m, float *state, int64_t count, HeadMemory &w) {
  const int64_t keys = m.key_dim, values = m.value_dim;
  for (int64_t t = 0; t < count; t++) {
    const float *q = w.queries + t * keys, *k = w.keys + t * keys;
    Floats products = {};
    each_vector(keys, [&](int64_t i, int lanes) {
      products += load_at((const Single *)q + i, lanes) * load_at((const Single *)k + i, lanes);
    });
    const float decay = expf(w.decay[t]), beta = w.beta[t], both = sum(products);
    const auto run = [&](int64_t column, auto vectors, auto whole, int lanes) {
      step_columns<vectors(), DELTA, whole()>(q, k, keys, decay, beta, both, state + column, values,
                                              w.values + t * values + column, w.out + t * values + column, lanes);
    };
    int64_t column = 0;
    for (; column + STEPPED * LANES <= values; column += STEPPED * LANES)
      run(column, std::integral_constant<int, STEPPED>{}, std::true_type{}, LANES);
    if (column + VECTORS * LANES <= values) {
      run(column, std::integral_constant<int, VECTORS>{}, std::true_type{}, LANES);
      column += VECTORS * LANES;
    }
    for (; column + LANES <= values; column += LANES) run(column, std::integral_constant<int, 1>{}, std::true_type{}, LANES);
    if (column < values) run(column, std::integral_constant<int, 1>{}, std::false_type{}, (int)(values - column));
  }
}

// Every row times its factor.
HEADRACE_INLINE void scale_rows(float *x, int64_t size, int64_t count, const float *factor) {
  for (int64_t t = 0; t < count; t++) copy_scaled(x + t * size, size, false, factor[t], x + t * size);
}

// The products of queries or keys with keys, times the decays between their tokens; `strict`: without the diagonal.
static void decay_among(float *products, const float *total, const float *factor, int64_t count, bool strict) {
  for (int64_t i = 0; i < count; i++) {
    float *row = products + i * CHUNK;
    const int64_t end = strict ? i : i + 1;
    const float scale = factor ? factor[i] : 1.0f;
    for (int64_t j = 0; j < count; j += LANES) {  // CHUNK is a multiple of LANES
      if (j >= end) {
        store((Single *)(row + j), Floats{});
        continue;
      }
      const Floats between = minimum(total[i] - load((const Single *)(total + j)), Floats{});
      store((Single *)(row + j), load((const Single *)(row + j)) * exponential(between) * scale);
      for (int64_t l = end; l < j + LANES; l++) row[l] = 0.0f;
    }
  }
}

// values = (1 + system)⁻¹ values: with the negative of the system, some rows at a time.
static void solve(float *negative, float *values, int64_t size, int64_t count) {
  for (int64_t first = 0; first < count; first += SOLVED) {
    const int64_t rows = count - first < SOLVED ? count - first : SOLVED;
    if (first)
      product(rows, size, first, {negative + first * CHUNK, CHUNK}, {values, size}, {values + first * size, size}, true, false);
    for (int64_t i = first + 1; i < first + rows; i++)
      each_vector(size, [&](int64_t c, int lanes) {
        Floats v = load_at((const Single *)values + i * size + c, lanes);
        for (int64_t j = first; j < i; j++)
          v += negative[i * CHUNK + j] * load_at((const Single *)values + j * size + c, lanes);
        store_at((Single *)values + i * size + c, v, lanes);
      });
  }
}

// `count` tokens as products of matrices; their outputs are in w.out.
static void step_chunk(const Mixer &m, float *state, int64_t count, HeadMemory &w) {
  const int64_t keys = m.key_dim, values = m.value_dim, whole = (count + LANES - 1) / LANES * LANES;
  float total = 0.0f;
  for (int64_t t = 0; t < count; t++) w.total[t] = total += w.decay[t];
  for (int64_t t = count; t < whole; t++) w.total[t] = total;
  for (int64_t t = 0; t < count; t++) {
    w.since[t] = expf(w.total[t]);
    w.left[t] = expf(total - w.total[t]);
  }
  for (int64_t d = 0; d < keys; d++) {
    for (int64_t t = 0; t < count; t++) w.turned[d * CHUNK + t] = w.keys[t * keys + d];
    for (int64_t t = count; t < whole; t++) w.turned[d * CHUNK + t] = 0.0f;
  }
  const Matrix turned = {w.turned, CHUNK}, held = {state, values};
  lower_product(count, whole, keys, {w.queries, keys}, turned, {w.among, CHUNK});
  decay_among(w.among, w.total, nullptr, count, false);
  if (m.kind == GATED_DELTA) {
    lower_product(count, whole, keys, {w.keys, keys}, turned, {w.among_keys, CHUNK});
    float minus[CHUNK];
    for (int64_t t = 0; t < count; t++) minus[t] = -w.beta[t];
    decay_among(w.among_keys, w.total, minus, count, true);
    product(count, values, keys, {w.keys, keys}, held, {w.read, values}, false, false);
    for (int64_t t = 0; t < count; t++)
      each_vector(values, [&](int64_t i, int lanes) {
        Single *v = (Single *)w.values + t * values + i;
        const Floats known = load_at((const Single *)w.read + t * values + i, lanes);
        store_at(v, w.beta[t] * (load_at(v, lanes) - w.since[t] * known), lanes);
      });
    solve(w.among_keys, w.values, values, count);
  }
  product(count, values, keys, {w.queries, keys}, held, {w.out, values}, false, false);
  scale_rows(w.out, values, count, w.since);
  product(count, values, count, {w.among, CHUNK}, {w.values, values}, {w.out, values}, true, true);
  scale_rows(w.values, values, count, w.left);
  copy_scaled(state, keys * values, false, w.since[count - 1], state);
  product(keys, values, count, turned, {w.values, values}, held, true, false);
}

// Decays, and what else a token has of its own in a head.
template <class T>
static void take_steps(const Mix &a, int64_t head, int64_t first, int64_t count, HeadMemory &w) {
  const Mixer &m = *a.mixer;
  const int64_t width = mixer_width(m);
  for (int64_t t = 0; t < count; t++) {
    if (m.kind == GATED_DELTA) {
      const T *steps = (const T *)a.steps + (first + t) * 2 * m.heads + head;
      w.beta[t] = sigmoid(scalar(steps));
      w.decay[t] = m.rate[head] * softplus(scalar(steps + m.heads) + m.step_bias[head]);
      continue;
    }
    const float given = scalar((const T *)a.x + (first + t) * width + width - m.heads + head);
    float step = softplus(given * (float)m.step_scale + m.step_bias[head]);
    step = step < (float)m.low ? (float)m.low : step > (float)m.high ? (float)m.high : step;
    w.step[t] = step;
    w.decay[t] = m.rate[head] * step;
    w.beta[t] = 1.0f;
  }
}

// A head's outputs: normalized and gated, or, where other heads share a norm, with what skips the state.
template <class T>
static void finish_of_head(const Mix &a, int64_t head, int64_t first, int64_t count, const HeadInputs &in, HeadMemory &w) {
  const Mixer &m = *a.mixer;
  const int64_t size = m.value_dim, inner = mixer_inner(m), width = mixer_width(m);
  for (int64_t t = 0; t < count; t++) {
    const float *out = w.out + t * size;
    if (m.kind == STATE_SPACE) {
      Single *to = (Single *)a.heads + (first + t) * inner + head * size;
      const Single *values = (const Single *)in.values + t * in.stride;
      each_vector(size, [&](int64_t i, int lanes) {
        store_at(to + i, load_at((const Single *)out + i, lanes) + m.skip[head] * load_at(values + i, lanes), lanes);
      });
      continue;
    }
    const T *gate = (const T *)a.x + (first + t) * width + m.channels + head * size;
    T *to = (T *)a.out + (first + t) * inner + head * size;
    const Floats scale = broadcast(inverse_rms((const Single *)out, size, (float)m.eps));
    each_vector(size, [&](int64_t i, int lanes) {
      const Floats v = load_at((const Single *)out + i, lanes) * scale * load_at((const Single *)m.norm + i, lanes);
      store_at(to + i, v * silu<true>(load_at(gate + i, lanes)), lanes);
    });
  }
}

// While it lives, numbers below 2^-126 are zero: states that fade would be computed a hundred times slower.
struct FlushTiny {
#if defined(__x86_64__)
  unsigned before = __builtin_ia32_stmxcsr();
  FlushTiny() { __builtin_ia32_ldmxcsr(before | 0x8040); }
  ~FlushTiny() { __builtin_ia32_ldmxcsr(before); }
#endif
};

// Every head of a part is a task.
template <class T>
static void mix_heads(const Mix &a, const Part *parts, int64_t part_count, int64_t tokens) {
  const Mixer &m = *a.mixer;
  const int64_t keys = m.groups * m.key_dim, inner = mixer_inner(m), shared = m.heads / m.groups;
  const bool delta = m.kind == GATED_DELTA;
  each_row(part_count * m.heads, tokens * m.heads * m.key_dim * m.value_dim, [&](int64_t task) {
    const Part part = parts[task / m.heads];
    const int64_t head = task % m.heads, begin = a.starts[part.row] + part.first;
    const States states = states_of(a, part, a.states, a.states_ahead);
    const int64_t size = m.key_dim * m.value_dim;
    float *state = states.after + head * size;
    if (!states.before) __builtin_memset(state, 0, size * sizeof(float));
    else if (states.before != states.after) __builtin_memcpy(state, states.before + head * size, size * sizeof(float));
    const float *x = a.convolved + part.place * m.channels;
    const int64_t key = head / shared * m.key_dim, value = head * m.value_dim;
    const HeadInputs in = delta ? HeadInputs{x + key, x + keys + key, x + 2 * keys + value, m.channels}
                                : HeadInputs{x + inner + keys + key, x + inner + key, x + value, m.channels};
    const FlushTiny flush;
    HeadMemory w;
    take_steps<T>(a, head, begin, part.count, w);
    take_inputs(m, in, part.count, w);
    if (part.count > FEW) step_chunk(m, state, part.count, w);
    else if (delta) step_tokens<true>(m, state, part.count, w);
    else step_tokens<false>(m, state, part.count, w);
    finish_of_head<T>(a, head, begin, part.count, in, w);
  });
}

// Gates and norms over several heads.
template <class T>
static void finish_tokens(const Mix &a) {
  const Mixer &m = *a.mixer;
  const int64_t inner = mixer_inner(m), width = mixer_width(m), size = inner / m.norm_groups;
  each_row(a.tokens, a.tokens * inner, [&](int64_t t) {
    float *x = a.heads + t * inner;
    const T *gate = (const T *)a.x + t * width;
    T *out = (T *)a.out + t * inner;
    const auto gated = [&](int64_t i, int lanes) {
      return load_at((const Single *)x + i, lanes) * silu<true>(load_at(gate + i, lanes) * (float)m.gate_scale);
    };
    if (!m.norm) {
      each_vector(inner, [&](int64_t i, int lanes) { store_at(out + i, gated(i, lanes), lanes); });
      return;
    }
    if (!m.norm_first)
      each_vector(inner, [&](int64_t i, int lanes) { store_at((Single *)x + i, gated(i, lanes), lanes); });
    for (int64_t first = 0; first < inner; first += size) {
      const Floats scale = broadcast(inverse_rms((const Single *)x + first, size, (float)m.eps));
      each_vector(size, [&](int64_t i, int lanes) {
        const Floats v = m.norm_first ? gated(first + i, lanes) : load_at((const Single *)x + first + i, lanes);
        store_at(out + first + i, v * scale * load_at((const Single *)m.norm + first + i, lanes), lanes);
      });
    }
  });
}

// In waves: of each row the next chunk, and none has tokens on both sides of the place where a state stays. What a wave has
// convolved is read while it is in the second cache.
static void mix(const Mix &a) {
  with_type(a.dtype, [&](auto t) {
    using T = decltype(t);
    Part *parts = (Part *)a.parts;
    for (int64_t wave = 0, some = 1; some; wave++) {
      int64_t tokens = some = 0, aheads = 0;
      for (int64_t row = 0; row < a.rows; row++) {
        const int64_t length = a.starts[row + 1] - a.starts[row], kept = a.kept[row];
        const int64_t ahead = kept < length ? aheads++ : -1, behind = wave - (kept + CHUNK - 1) / CHUNK;
        const int64_t first = behind < 0 ? wave * CHUNK : kept + behind * CHUNK, end = behind < 0 ? kept : length;
        const int64_t count = end - first < CHUNK ? end - first : CHUNK;
        if (count <= 0) continue;
        parts[some++] = {row, first, count, tokens, behind < 0 ? -1 : ahead, first == kept};
        tokens += count;
      }
      convolve_parts<T>(a, parts, some, tokens);
      if (a.mixer->kind != SHORT_CONVOLUTION) mix_heads<T>(a, parts, some, tokens);
    }
    if (a.mixer->kind == STATE_SPACE) finish_tokens<T>(a);
  });
}
