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

template <class T>
static void embed_rows(const Embed &a) {
  const Floats scale = broadcast(a.scale);
  each_row(a.count, a.count * a.size, [&](int64_t row) {
    const T *x = (const T *)a.embedding + a.tokens[row] * a.size;
    T *out = (T *)a.out + row * a.size;
    each_vector(a.size, [&](int64_t i, int lanes) { store_at(out + i, load_at(x + i, lanes) * scale, lanes); });
  });
}

static void embed(const Embed &a) {
  with_type(a.dtype, [&](auto t) { embed_rows<decltype(t)>(a); });
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
      each_vector(a.size, [&](int64_t i, int lanes) {
        store_at(residual + i, load_at(residual + i, lanes) + load_at(x + i, lanes), lanes);
      });
      x = residual;
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

// One head: norm (rounded to T, as a norm of its own would be) and rotation, from x to float32 `out`.
template <class T>
HEADRACE_INLINE void turn_head(const T *x, const float *norm, const Rope &a, const float *rotation, float *out) {
  Single *turned = (Single *)out;
  float scale = norm ? inverse_rms(x, a.head_dim, a.eps) : 1.0f;
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

// To where they lie in a page: words of WORD elements, `step` of them apart.
template <int WORD, class KV>
HEADRACE_INLINE void spread(const KV *x, int64_t size, KV *out, int64_t step) {
  for (int64_t i = 0; i < size / WORD; i++) __builtin_memcpy(out + i * step * WORD, x + i * WORD, WORD * sizeof(KV));
}

template <class T, class KV>
static void rope_rows(const Rope &a) {
  const int FACTOR = FACTOR_OF<KV>;
  const int64_t size = a.pages.block_size, together = value_tokens(a.pages, FACTOR);
  const int64_t packed = (a.heads + 2 * a.kv_heads) * a.head_dim;
  each_row(a.tokens, a.tokens * packed, [&](int64_t token) {
    float head[MAX_HEAD_DIM + LANES];
    T rounded[MAX_HEAD_DIM + LANES];
    KV kept[MAX_HEAD_DIM + LANES];
    const T *x = (const T *)a.qkv + token * packed;
    T *queries = (T *)a.queries + token * a.heads * a.head_dim;
    const int64_t block = a.slots[token] / size, offset = a.slots[token] % size;
    const int64_t place = block * a.pages.stride, scale = block * a.pages.scale_stride + offset;
    const float *rotation = a.rotation + (a.positions ? a.positions[token] : token) * 2 * a.rotary;
    for (int64_t h = 0; h < a.heads + a.kv_heads; h++, x += a.head_dim) {
      turn_head(x, a.norm ? a.norm + h * a.head_dim : nullptr, a, rotation, head);
      T *query = h < a.heads ? queries + h * a.head_dim : rounded;
      each_vector(a.head_dim, [&](int64_t i, int lanes) { store_at(query + i, load_at((const Single *)head + i, lanes), lanes); });
      if (h < a.heads) continue;
      const int64_t g = h - a.heads;
      widen(rounded, a.head_dim, head);
      keep_head(head, a.head_dim, kept, a.pages.key_scales + scale + g * size);
      spread<FACTOR>(kept, a.head_dim, (KV *)a.pages.keys + place + g * a.head_dim * size + offset * FACTOR, size);
    }
    for (int64_t g = 0; g < a.kv_heads; g++, x += a.head_dim) {
      widen(x, a.head_dim, head);
      keep_head(head, a.head_dim, kept, a.pages.value_scales + scale + g * size);
      KV *values = (KV *)a.pages.values + place + (g * size + offset / together * together) * a.head_dim;
      spread<1>(kept, a.head_dim, values + offset % together, together);
    }
  });
}

static void rope_write_kv(const Rope &a) {
  with_type(a.dtype, [&](auto t) {
    if (a.pages.dtype == INT8) rope_rows<decltype(t), Byte>(a);
    else rope_rows<decltype(t), decltype(t)>(a);
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

template <class T>
static void gate_rows(const Gate &a) {
  const bool FINE = std::is_same_v<T, Single>;
  each_row(a.count, a.count * a.size, [&](int64_t row) {
    const T *gate = (const T *)a.x + row * 2 * a.size, *up = gate + a.size;
    T *out = (T *)a.out + row * a.size;
    each_vector(a.size, [&](int64_t i, int lanes) {
      Floats g = load_at(gate + i, lanes);
      T rounded[LANES];
      store(rounded, a.gelu ? gelu_tanh<FINE>(g) : silu<FINE>(g));
      store_at(out + i, load(rounded) * load_at(up + i, lanes), lanes);
    });
  });
}

static void gated_activation(const Gate &a) {
  with_type(a.dtype, [&](auto t) { gate_rows<decltype(t)>(a); });
}
