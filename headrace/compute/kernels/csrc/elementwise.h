// Norms, rotation and write of keys and values, gated activation: rows in parallel, float32 inside.

// Threads are only asked when there is enough to do for them: below this many elements one is quicker.
static const int64_t PARALLEL_ELEMENTS = 16384;

// Tasks that a thread takes at once: enough to be worth asking for, few enough that nobody waits long at the end for
// one that lost its core.
static inline int64_t tasks_at_once(int64_t tasks, int64_t threads) {
  const int64_t some = tasks / (threads * 16);
  return some > 1 ? some : 1;
}

template <class Task>
static void each_task(int64_t count, int threads, Task task) {
  share(count, tasks_at_once(count, threads), threads, [&](int64_t first, int64_t end, int64_t) {
    for (; first < end; first++) task(first);
  });
}

template <class Row>
static void each_row(int64_t count, int64_t elements, Row row) {
  each_task(count, elements > PARALLEL_ELEMENTS ? team_threads() : 1, row);
}

template <class Call>
HEADRACE_INLINE void with_type(int dtype, Call call) {
  if (dtype == FLOAT32) call(Single{});
  else if (dtype == BFLOAT16) call(Brain{});
  else call(Half{});
}

// The element type of pages beside activations of type T.
template <class T, class Call>
HEADRACE_INLINE void with_pages(const Pages &pages, T activation, Call call) {
  if (pages.dtype == INT8) call(Byte{});
  else if (std::is_same_v<T, Single> && pages.dtype == BFLOAT16) call(Brain{});
  else call(activation);
}

template <class T, class E>
static void embed_rows(const Embed &a) {
  const Floats scale = broadcast(a.scale);
  each_row(a.count, a.count * a.size, [&](int64_t row) {
    const E *x = (const E *)a.embedding + a.tokens[row] * a.size;
    T *out = (T *)a.out + row * a.size;
    each_vector(a.size, [&](int64_t i, int lanes) { store_at(out + i, load_at(x + i, lanes) * scale, lanes); });
  });
}

static void embed(const Embed &a) {
  if (a.embedding_dtype != a.dtype) return embed_rows<Single, Brain>(a);  // the only pair
  with_type(a.dtype, [&](auto t) { embed_rows<decltype(t), decltype(t)>(a); });
}

template <class T>
HEADRACE_INLINE float inverse_rms(const T *x, int64_t size, float eps) {
  Floats squares = {};
  each_vector(size, [&](int64_t i, int lanes) {
    Floats v = load_at(x + i, lanes);
    squares += v * v;
  });
  return 1.0f / __builtin_sqrtf(sum(squares) / (float)size + eps);
}

template <class T>
static void norm_rows(const Norm &a) {
  each_row(a.count, a.count * a.size, [&](int64_t row) {
    const T *x = (const T *)a.x + row * a.size;
    T *out = (T *)a.out + row * a.size;
    if (a.residual) {
      T *residual = (T *)a.residual + row * a.size;
      const Floats kept = broadcast(a.scale);
      each_vector(a.size, [&](int64_t i, int lanes) {
        store_at(residual + i, load_at(residual + i, lanes) * kept + load_at(x + i, lanes), lanes);
      });
      x = residual;
    }
    if (!a.weight) {
      __builtin_memcpy(out, x, a.size * sizeof(T));
      return;
    }
    Floats scale = broadcast(inverse_rms(x, a.size, a.eps));
    const Single *weight = (const Single *)a.weight;
    each_vector(a.size, [&](int64_t i, int lanes) {
      store_at(out + i, load_at(x + i, lanes) * scale * load_at(weight + i, lanes), lanes);
    });
  });
}

static void norm(const Norm &a) {
  with_type(a.dtype, [&](auto t) { norm_rows<decltype(t)>(a); });
}

// One head: norm (rounded to T, as a norm of its own would be) by `scale`, and rotation, from x to float32 `out`.
template <class T>
HEADRACE_INLINE void turn_head(const T *x, const float *norm, float scale, const Rope &a, const float *rotation,
                               float *out) {
  Single *turned = (Single *)out;
  each_vector(a.head_dim, [&](int64_t i, int lanes) {
    Floats v = load_at(x + i, lanes);
    if (norm) {
      T rounded[LANES];
      store(rounded, v * scale * load_at((const Single *)norm + i, lanes));
      v = load(rounded);
    }
    store_at(turned + i, v, lanes);
  });
  const int64_t half = a.rotary / 2;
  const Single *cos = (const Single *)rotation, *sin = cos + a.rotary;
  each_vector(half, [&](int64_t i, int lanes) {
    Floats first = load_at(turned + i, lanes), second = load_at(turned + half + i, lanes);
    Floats low = first * load_at(cos + i, lanes) + second * load_at(sin + i, lanes);
    Floats high = second * load_at(cos + half + i, lanes) + first * load_at(sin + half + i, lanes);
    store_at(turned + i, low, lanes);
    store_at(turned + half + i, high, lanes);
  });
}

// One head, normed and not turned.
template <class T>
HEADRACE_INLINE void norm_head(const T *x, const float *norm, const Rope &a, T *out) {
  const Floats scale = broadcast(inverse_rms(x, a.head_dim, a.eps));
  each_vector(a.head_dim, [&](int64_t i, int lanes) {
    store_at(out + i, load_at(x + i, lanes) * scale * load_at((const Single *)norm + i, lanes), lanes);
  });
}

template <class T>
HEADRACE_INLINE void widen(const T *x, int64_t size, float *out) {
  each_vector(size, [&](int64_t i, int lanes) { store_at((Single *)out + i, load_at(x + i, lanes), lanes); });
}

HEADRACE_INLINE float largest_size(const float *x, int64_t size) {
  Floats top = {};
  each_vector(size, [&](int64_t i, int lanes) { top = maximum(top, absolute(load_at((const Single *)x + i, lanes))); });
  return largest(top);
}

// A head's elements as they are kept: rounded, or as integers with a scale for all of them (see Kernels.Pages).
template <class KV>
HEADRACE_INLINE void keep_head(const float *x, int64_t size, KV *out, float *scale) {
  Floats factor = broadcast(1.0f);
  if constexpr (std::is_same_v<KV, Byte>) {
    const float most = largest_size(x, size);
    *scale = most / 127.0f;
    factor = broadcast(most > SMALLEST ? 127.0f / most : 0.0f);
  }
  each_vector(size, [&](int64_t i, int lanes) { store_at(out + i, load_at((const Single *)x + i, lanes) * factor, lanes); });
}

// Tokens [first, first + count) that lie side by side in a block, LANES at most.
struct Run {
  int64_t first, count, block, offset;
};

// The run that a token begins, before `end`. It ends with a vector of tokens of its block.
HEADRACE_INLINE Run run_from(const Rope &a, int64_t token, int64_t end) {
  const int64_t slot = a.slots[token], offset = slot % a.pages.block_size;
  const int64_t left = a.pages.block_size - offset, most = left < LANES - offset % LANES ? left : LANES - offset % LANES;
  int64_t count = 1;
  while (count < most && token + count < end && a.slots[token + count] == slot + count) count++;
  return {token, count, slot / a.pages.block_size, offset};
}

// Rows become columns: at distances of 1, 2, 4, ... squares beside the diagonal change places.
template <int H, int... I>
HEADRACE_INLINE void transpose(Words (&rows)[LANES], std::integer_sequence<int, I...> lanes) {
  if constexpr (H < LANES) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
      if (i & H) continue;
      const Words low = rows[i], high = rows[i + H];
#if defined(__clang__)
      rows[i] = __builtin_shufflevector(low, high, (I & H ? LANES + I - H : I)...);
      rows[i + H] = __builtin_shufflevector(low, high, (I & H ? LANES + I : I + H)...);
#else
      rows[i] = __builtin_shuffle(low, high, Ints{(I & H ? LANES + I - H : I)...});
      rows[i + H] = __builtin_shuffle(low, high, Ints{(I & H ? LANES + I : I + H)...});
#endif
    }
    transpose<2 * H>(rows, lanes);
  }
}

// A head's keys [count, size] of a run to where they lie in a page: words of FACTOR elements, `step` of them from feature
// to feature.
template <class KV>
HEADRACE_INLINE void keep_keys(const KV *x, int64_t count, int64_t size, KV *out, int64_t step) {
  const int WORD = FACTOR_OF<KV>;
  int64_t i = 0;
  if constexpr (WORD * sizeof(KV) == sizeof(uint32_t))
    for (; count == LANES && i + LANES <= size / WORD; i += LANES) {
      Words words[LANES];
      for (int t = 0; t < LANES; t++) __builtin_memcpy(&words[t], x + t * size + i * WORD, sizeof words[t]);
      transpose<1>(words, std::make_integer_sequence<int, LANES>{});
      for (int w = 0; w < LANES; w++) __builtin_memcpy(out + (i + w) * step * WORD, &words[w], sizeof words[w]);
    }
  for (; i < size / WORD; i++)
    for (int64_t t = 0; t < count; t++)
      __builtin_memcpy(out + (i * step + t) * WORD, x + t * size + i * WORD, WORD * sizeof(KV));
}

// Its values: a feature of `together` tokens after the other.
template <class KV>
HEADRACE_INLINE void keep_values(const KV *x, int64_t count, int64_t size, KV *values, int64_t offset, int64_t together) {
  for (int64_t t = 0; t < count; t++, offset++, x += size) {
    KV *out = values + offset / together * together * size;
    if (together == 2 && offset % 2 == 0 && t + 1 < count) {
      for (int64_t i = 0; i < size; i++) out[2 * i] = x[i], out[2 * i + 1] = x[size + i];
      t++, offset++, x += size;
    } else {
      for (int64_t i = 0; i < size; i++) out[i * together + offset % together] = x[i];
    }
  }
}

// Where in the pages a key head of a run begins, and in it what lies `within`.
HEADRACE_INLINE int64_t place_of(const Rope &a, const Run &run, int64_t head, int64_t within) {
  return run.block * a.pages.stride + head * a.head_dim * a.pages.block_size + within;
}

// Memory is asked for the lines where a key head of a run will lie: a token's keys are spread over as many as it has words.
template <class KV>
HEADRACE_INLINE void fetch_places(const Rope &a, const Run &run, int64_t head) {
  const int FACTOR = FACTOR_OF<KV>;
  const int64_t word = run.offset - run.offset % value_tokens(a.pages, FACTOR), step = a.pages.block_size * FACTOR;
  const KV *keys = (const KV *)a.pages.keys + place_of(a, run, head, run.offset * FACTOR);
  const KV *values = (const KV *)a.pages.values + place_of(a, run, head, word * a.head_dim);
  for (int64_t i = 0; i < a.head_dim / FACTOR; i++) __builtin_prefetch(keys + i * step, 1, 3);
  const int64_t elements = (run.offset + run.count - word) * a.head_dim;
  for (int64_t i = 0; i < elements; i += 64 / sizeof(KV)) __builtin_prefetch(values + i, 1, 3);
}

// Head `h` of a run's packed rows, whose elements x are `stride` apart, to where it belongs. `together`: null, or for each
// token of the run what all heads of h's kind are normed by.
template <class T, class KV>
HEADRACE_INLINE void finish_head(const Rope &a, const Run &run, int64_t h, const T *x, int64_t stride,
                                 const float *together) {
  float head[MAX_HEAD_DIM + LANES];
  T rounded[MAX_HEAD_DIM + LANES];
  KV kept[LANES * MAX_HEAD_DIM + LANES];
  const auto turn = [&](int64_t t, T *out) {
    const int64_t position = a.positions ? a.positions[run.first + t] : run.first + t;
    const float *norm = a.norm ? a.norm + h * a.head_dim : nullptr, *before = a.head_norm == NORM_ROTATED ? nullptr : norm;
    const float scale = together ? together[t] : before ? inverse_rms(x + t * stride, a.head_dim, a.eps) : 1.0f;
    turn_head(x + t * stride, before, scale, a, a.rotation + position * 2 * a.rotary, head);
    each_vector(a.head_dim, [&](int64_t i, int lanes) { store_at(out + i, load_at((const Single *)head + i, lanes), lanes); });
    if (norm == before) return;
    const Floats after = broadcast(inverse_rms(out, a.head_dim, a.eps));
    each_vector(a.head_dim, [&](int64_t i, int lanes) {
      store_at(out + i, load_at(out + i, lanes) * after * load_at((const Single *)norm + i, lanes), lanes);
    });
  };
  if (h < a.heads) {
    for (int64_t t = 0; t < run.count; t++) turn(t, (T *)a.queries + ((run.first + t) * a.heads + h) * a.head_dim);
    return;
  }
  const bool key = h < a.heads + a.kv_heads;
  const int64_t g = h - a.heads - (key ? 0 : a.kv_heads);
  const int64_t scale = run.block * a.pages.scale_stride + g * a.pages.block_size + run.offset;
  const float *of_values = !key && a.norm && a.head_norm == NORM_VALUES ? a.norm + h * a.head_dim : nullptr;
  for (int64_t t = 0; t < run.count; t++) {
    if (key) turn(t, rounded);
    if (of_values) norm_head(x + t * stride, of_values, a, rounded);
    widen(key || of_values ? rounded : x + t * stride, a.head_dim, head);
    keep_head(head, a.head_dim, kept + t * a.head_dim, (key ? a.pages.key_scales : a.pages.value_scales) + scale + t);
  }
  if (key)
    keep_keys(kept, run.count, a.head_dim, (KV *)a.pages.keys + place_of(a, run, g, run.offset * FACTOR_OF<KV>),
              a.pages.block_size);
  else
    keep_values(kept, run.count, a.head_dim, (KV *)a.pages.values + place_of(a, run, g, 0), run.offset,
                value_tokens(a.pages, FACTOR_OF<KV>));
}

// A task is a token, or, of many, as many as often lie side by side.
template <class T, class KV>
static void rope_rows(const Rope &a) {
  const int64_t packed = (a.heads + 2 * a.kv_heads) * a.head_dim, group = a.kv_heads ? a.heads / a.kv_heads : 0;
  const int64_t lot = a.tokens < 8 * LANES ? 1 : LANES;
  each_row((a.tokens + lot - 1) / lot, a.tokens * packed, [&](int64_t task) {
    const int64_t end = (task + 1) * lot < a.tokens ? (task + 1) * lot : a.tokens;
    for (int64_t token = task * lot; token < end;) {
      const Run run = run_from(a, token, end);
      const T *rows = (const T *)a.qkv + token * packed;
      float scales[2][LANES];  // of queries and of keys
      const bool as_one = a.norm && a.head_norm == NORM_PROJECTION;
      for (int64_t t = 0; as_one && t < run.count; t++) {
        scales[0][t] = inverse_rms(rows + t * packed, a.heads * a.head_dim, a.eps);
        scales[1][t] = inverse_rms(rows + t * packed + a.heads * a.head_dim, a.kv_heads * a.head_dim, a.eps);
      }
      for (int64_t h = 0; h < a.heads + 2 * a.kv_heads; h++) {
        if (group && h < a.heads && h % group == 0) fetch_places<KV>(a, run, h / group);
        finish_head<T, KV>(a, run, h, rows + h * a.head_dim, packed, as_one ? scales[h >= a.heads] : nullptr);
      }
      token += run.count;
    }
  });
}

static void rope_write_kv(const Rope &a) {
  with_type(a.dtype, [&](auto t) {
    with_pages(a.pages, t, [&](auto kept) { rope_rows<decltype(t), decltype(kept)>(a); });
  });
}

template <bool FINE>
HEADRACE_INLINE Floats silu(Floats x) {
  return x / one_and_exponential<FINE>(-x);
}

// 0.5 x (1 + tanh(u)) is x / (1 + e^(-2u)), without the cancellation.
template <bool FINE>
HEADRACE_INLINE Floats gelu_tanh(Floats x) {
  return x / one_and_exponential<FINE>(-1.5957691216057308f * (x + 0.044715f * x * x * x));
}

// The comparisons keep what is not a number.
template <bool FINE>
HEADRACE_INLINE Floats clamped_swiglu(Floats gate, Floats up) {
  const Floats limit = broadcast(SWIGLU_LIMIT);
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return (up + 1.0f) * gate / one_and_exponential<FINE>(-SWIGLU_ALPHA * gate);
}

// activation(gate) * up of `size` elements; the activation is rounded to T, as it would be alone.
// The square of what is positive.
template <class T>
HEADRACE_INLINE void square_row(const T *x, int64_t size, T *out) {
  each_vector(size, [&](int64_t i, int lanes) {
    const Floats v = load_at(x + i, lanes), positive = v < 0.0f ? Floats{} : v;  // what is not a number stays so
    store_at(out + i, positive * positive, lanes);
  });
}

template <class T>
HEADRACE_INLINE void gate_row(const T *gate, const T *up, int64_t size, int activation, T *out) {
  const bool FINE = std::is_same_v<T, Single>;
  each_vector(size, [&](int64_t i, int lanes) {
    Floats g = load_at(gate + i, lanes);
    if (activation == CLAMPED_SWIGLU) {
      store_at(out + i, clamped_swiglu<FINE>(g, load_at(up + i, lanes)), lanes);
      return;
    }
    T rounded[LANES];
    store(rounded, activation == GELU_TANH ? gelu_tanh<FINE>(g) : silu<FINE>(g));
    store_at(out + i, load(rounded) * load_at(up + i, lanes), lanes);
  });
}

template <class T>
static void gate_rows(const Gate &a) {
  each_row(a.count, a.count * a.size, [&](int64_t row) {
    if (a.activation == SQUARED_RELU) return square_row((const T *)a.x + row * a.size, a.size, (T *)a.out + row * a.size);
    const T *gate = (const T *)a.x + row * (a.up ? 1 : 2) * a.size;
    const T *up = a.up ? (const T *)a.up + row * a.step : gate + a.size;
    gate_row(gate, up, a.size, a.activation, (T *)a.out + row * a.size);
  });
}

static void gated_activation(const Gate &a) {
  with_type(a.dtype, [&](auto t) { gate_rows<decltype(t)>(a); });
}

// The factors are rounded to T, as they would be alone.
template <class T>
static void gate_heads_of(const GateHeads &a) {
  const int64_t PART = 4096, parts = (a.count + PART - 1) / PART;
  each_row(parts, a.count, [&](int64_t part) {
    const int64_t first = part * PART, left = a.count - first;
    T *x = (T *)a.x + first;
    const T *gates = (const T *)a.gates + first;
    each_vector(left < PART ? left : PART, [&](int64_t i, int lanes) {
      T rounded[LANES];
      store(rounded, 1.0f / one_and_exponential<true>(-load_at(gates + i, lanes)));
      store_at(x + i, load_at(x + i, lanes) * load(rounded), lanes);
    });
  });
}

static void gate_heads(const GateHeads &a) {
  with_type(a.dtype, [&](auto t) { gate_heads_of<decltype(t)>(a); });
}

// Each product is rounded to T, as it would be alone.
template <class T>
static void weigh_rows(const Weigh &a) {
  each_row(a.count, a.count * a.size, [&](int64_t row) {
    T *x = (T *)a.x + row * a.step;
    const T *other = a.other ? (const T *)a.other + row * a.size : nullptr;
    each_vector(a.size, [&](int64_t i, int lanes) {
      T rounded[LANES], second[LANES];
      store(rounded, load_at(x + i, lanes) * a.factor);
      Floats sum = load(rounded);
      if (other) {
        store(second, load_at(other + i, lanes) * a.other_factor);
        sum += load(second);
      }
      store_at(x + i, sum, lanes);
    });
  });
}

static void weigh(const Weigh &a) {
  with_type(a.dtype, [&](auto t) { weigh_rows<decltype(t)>(a); });
}
