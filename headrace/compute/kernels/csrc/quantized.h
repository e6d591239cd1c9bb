// Linear layers whose weights have 8 or 4 bits: products of integers, exact until a span of them is scaled.
//
// Activations are rounded per token to integers of as many bytes as they need, one plane of signed bytes for each: with
// one plane (8-bit activations) to steps of max / 127; with two (bfloat16) of max / 32639; with three (float32) of
// max / 2^22. A token of p planes is p rows of one integer product, whose results are added with the weights 256^i. So
// activations of 16 bits need no second kernel and no weights turned into floats: two byte products cost what one of
// bfloat16 costs. They move an activation by at most max / 65278, and so an output by less than rounding it to
// bfloat16 does wherever the largest activations count.
//
// Weights are unsigned bytes or halves, value + 2^(bits - 1), so that they can be the unsigned factor of vpdpbusd. What
// that and the zero points add is taken off through the sum of a token's activations. Panels are [words][PANEL] of 4
// bytes: 4 inputs of an output, or 8 in halves, the second 4 in the upper ones. A group of inputs with its own scale is
// padded to 8. Integers are summed over a span, which lies within a group and begins at a fixed place, and then scaled
// into float32: a row's result does not depend on the others.

static const int64_t SPAN = 128;  // words: a panel's span of bytes is 32 KiB on AVX-512, and stays in the first cache
typedef int8_t Bytes __attribute__((vector_size(LANES)));

// The four products of a word's unsigned bytes (of a column) with another's signed bytes (of a row), added to a sum.
#if defined(HEADRACE_BYTE_PRODUCTS)
struct ByteWords {
  HEADRACE_INLINE Words column(Words word) { return word; }
  HEADRACE_INLINE Words row(uint32_t word) { return Words{} + word; }
  HEADRACE_INLINE Ints add(Ints sum, Words row, Words column) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)column, (__m512i)row);
  }
};
#else
struct ByteWords {
  typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));
  struct Factor { Shorts even, odd; };
  HEADRACE_INLINE Factor column(Words word) { return {(Shorts)(word & 0x00ff00ffu), (Shorts)(word >> 8 & 0x00ff00ffu)}; }
  HEADRACE_INLINE Factor row(uint32_t word) {
    const Shorts both = (Shorts)(Words{} + word);
    return {(both << 8) >> 8, both >> 8};
  }
  HEADRACE_INLINE Ints pairs(Shorts a, Shorts b) {
#if defined(HEADRACE_SHORT_PAIRS)
    return (Ints)HEADRACE_SHORT_PAIRS(a, b);
#else
    const Ints x = (Ints)a, y = (Ints)b;
    return (x >> 16) * (y >> 16) + ((x << 16) >> 16) * ((y << 16) >> 16);
#endif
  }
  HEADRACE_INLINE Ints add(Ints sum, Factor row, Factor column) {
    return sum + pairs(row.even, column.even) + pairs(row.odd, column.odd);
  }
};
#endif

HEADRACE_INLINE Words load_words(const uint32_t *p) { return (Words)load((const Single *)p); }

// sums[t, 0:PANEL] += scale * (a[t] * (b - offset)) for tokens whose planes are held in registers, TOKENS * PLANES rows.
// `offsets` may be null: the middle of the values. `totals` are the sums of the tokens' integers over the span. A function
// of its own: within its callers' there are not enough registers, and the loop would keep sums in memory.
template <int TOKENS, int PLANES, int BITS>
__attribute__((noinline)) static Ahead multiply_span(const uint32_t *a, int64_t a_stride, const uint32_t *b,
                                                     int64_t words, const float *totals, int64_t total_stride,
                                                     const float *offsets, const float *scales, float *sums,
                                                     Ahead ahead) {
  const int M = TOKENS * PLANES;
  Ints sum[M][VECTORS];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) sum[m][i] = Ints{};
  for (int64_t k = 0; k < words; k += 8 / BITS, b += PANEL) {
    fetch(ahead);
#pragma GCC unroll 2
    for (int half = 0; half < 8 / BITS; half++) {
      decltype(ByteWords::column(Words{})) column[VECTORS];
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS; i++) {
        const Words word = load_words(b + i * LANES);
        column[i] = ByteWords::column(BITS == 4 ? (half ? word >> 4 : word) & 0x0f0f0f0fu : word);
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const auto row = ByteWords::row(a[m * a_stride + k + half]);
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i++) sum[m][i] = ByteWords::add(sum[m][i], row, column[i]);
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) {
      Floats whole = __builtin_convertvector(sum[t * PLANES][i], Floats);
#pragma GCC unroll 2
      for (int plane = 1; plane < PLANES; plane++)
        whole = whole * 256.0f + __builtin_convertvector(sum[t * PLANES + plane][i], Floats);
      whole -= (offsets ? load((const Single *)(offsets + i * LANES)) : broadcast(1 << (BITS - 1))) * totals[t * total_stride];
      Single *target = (Single *)(sums + t * PANEL + i * LANES);
      store(target, load(target) + whole * load((const Single *)(scales + i * LANES)));
    }
  return ahead;
}

// The activations of a call as planes of bytes. Spans cut each group, so their number is that of all groups.
struct Planes {
  int8_t *bytes;    // [tokens, planes, width], the highest plane first
  float *totals;    // [tokens, spans]
  float *steps;     // [tokens]: what an integer of a token stands for
  int64_t width, group_words, group_spans, spans;
};

HEADRACE_INLINE int64_t span_words(const Planes &p, int64_t begin) {
  return p.group_words - begin < SPAN ? p.group_words - begin : SPAN;
}

static const float PLANE_LIMITS[] = {127.0f, 32639.0f, 4194303.0f};  // the last: where adding 1.5 * 2^23 still rounds

template <class T>
static void quantize_token(const Quantized &a, const Planes &p, int64_t token, float *x) {
  const T *source = (const T *)a.x + token * a.inputs;
  if (a.order) {
    for (int64_t i = 0; i < a.inputs; i++) {
      T one[LANES] = {source[a.order[i]]};
      x[i] = load(one)[0];
    }
  } else {
    each_vector(a.inputs, [&](int64_t i, int lanes) { store_at((Single *)(x + i), load_at(source + i, lanes), lanes); });
  }
  Floats most = {}, faults = {};
  each_vector(a.inputs, [&](int64_t i, int lanes) {
    const Floats v = load_at((const Single *)(x + i), lanes);
    most = maximum(most, maximum(v, -v));
    faults += v - v;  // not a number where an activation is none, or infinite
  });
  const bool finite = sum(faults) == 0.0f;
  const float top = largest(most), step = finite ? top / PLANE_LIMITS[a.planes - 1] : NAN, divisor = top > 0 ? step : 1.0f;
  const int64_t row = token * a.planes, group_bytes = p.group_words * 4;
  __builtin_memset(p.bytes + row * p.width, 0, a.planes * p.width);
  if (finite)
    for (int64_t group = 0; group * a.group_size < a.inputs; group++)
      each_vector(a.group_size, [&](int64_t i, int lanes) {
        const Floats magic = broadcast(12582912.0f);
        Ints q = (Ints)(load_at((const Single *)(x + group * a.group_size + i), lanes) / divisor + magic) - (Ints)magic;
        for (int64_t plane = a.planes - 1; plane >= 0; plane--) {
          const Ints rest = (q + 128) >> 8;
          const Bytes low = __builtin_convertvector(plane ? q - rest * 256 : q, Bytes);
          __builtin_memcpy(p.bytes + (row + plane) * p.width + group * group_bytes + i, &low, lanes);
          q = rest;
        }
      });
  p.steps[token] = step;
  for (int64_t span = 0; span < p.spans; span++) {
    const int64_t begin = span % p.group_spans * SPAN;
    float total = 0.0f;
    for (int64_t plane = 0; plane < a.planes; plane++) {
      const int8_t *bytes = p.bytes + (row + plane) * p.width + span / p.group_spans * group_bytes + begin * 4;
      int32_t of_plane = 0;
      for (int64_t i = 0; i < span_words(p, begin) * 4; i++) of_plane += bytes[i];
      total = total * 256.0f + (float)of_plane;
    }
    p.totals[token * p.spans + span] = total;
  }
}

// sums [tokens, PANEL] of a panel.
template <int PLANES, int BITS>
static void multiply_panel(const Quantized &a, const Planes &p, int64_t panel, int64_t first, int64_t tokens, float *sums) {
  const int64_t word = PANEL * BITS / 8, width = p.width / 4, groups = p.spans / p.group_spans;
  const int TOKENS = ROWS / PLANES;
  const uint32_t *b = (const uint32_t *)a.packed + panel * width * word;
  __builtin_memset(sums, 0, tokens * PANEL * sizeof(float));
  for (int64_t span = 0; span < p.spans; span++) {
    const int64_t group = span / p.group_spans, begin = span % p.group_spans * SPAN, words = span_words(p, begin);
    const float *offsets = a.offsets ? a.offsets + (panel * groups + group) * PANEL : nullptr;
    const float *scales = a.scales + (panel * groups + group) * PANEL;
    const uint32_t *x = (const uint32_t *)p.bytes + first * PLANES * width + group * p.group_words + begin;
    const float *totals = p.totals + first * p.spans + span;
    Ahead ahead = {b + words * word, (tokens + TOKENS - 1) / TOKENS, 0};
    each_tile<TOKENS>(tokens, [&](auto count, int64_t token) {
      ahead = multiply_span<decltype(count)::value, PLANES, BITS>(x + token * PLANES * width, width, b, words,
                                                                  totals + token * p.spans, p.spans, offsets, scales,
                                                                  sums + token * PANEL, ahead);
    });
    b += words * word;
  }
}

template <class T>
static void write_panel(const Quantized &a, const Planes &p, int64_t panel, int64_t first, int64_t tokens, const float *sums) {
  const int64_t column = panel * PANEL, columns = a.outputs - column < PANEL ? a.outputs - column : PANEL;
  for (int64_t token = 0; token < tokens; token++) {
    T *out = (T *)a.out + (first + token) * a.outputs + column;
    const T *bias = a.bias ? (const T *)a.bias + column : nullptr;
    each_vector(columns, [&](int64_t i, int lanes) {
      const Floats v = load((const Single *)(sums + token * PANEL + i)) * p.steps[first + token];
      store_at(out + i, bias ? v + load_at(bias + i, lanes) : v, lanes);
    });
  }
}

template <int PLANES, int BITS>
static void multiply_planes(const Quantized &a, const Planes &p, int threads) {
  const int64_t panels = (a.outputs + PANEL - 1) / PANEL, most = BLOCK_ROWS / PLANES, blocks = (a.count + most - 1) / most;
#pragma omp parallel for schedule(dynamic, tasks_at_once(panels * blocks, threads)) num_threads(threads)
  for (int64_t task = 0; task < panels * blocks; task++) {
    float sums[BLOCK_ROWS * PANEL];
    const int64_t panel = task / blocks, first = task % blocks * most, tokens = a.count - first < most ? a.count - first : most;
    multiply_panel<PLANES, BITS>(a, p, panel, first, tokens, sums);
    with_type(a.dtype, [&](auto t) { write_panel<decltype(t)>(a, p, panel, first, tokens, sums); });
  }
}

static int quantized_linear(const Quantized &a) {
  const int64_t groups = a.inputs / a.group_size, rows = a.count * a.planes;
  const int threads = rows * a.inputs * a.outputs > PARALLEL_PRODUCTS ? omp_get_max_threads() : 1;
  Planes p;
  p.group_words = (a.group_size + 7) / 8 * 2;
  p.width = groups * p.group_words * 4;
  p.group_spans = (p.group_words + SPAN - 1) / SPAN;
  p.spans = groups * p.group_spans;
  char *memory = (char *)malloc((size_t)(rows * p.width + (a.count * (p.spans + 1) + threads * a.inputs) * 4));
  if (!memory) return 0;
  p.bytes = (int8_t *)memory;
  p.totals = (float *)(memory + rows * p.width);
  p.steps = p.totals + a.count * p.spans;
  float *floats = p.steps + a.count;
#pragma omp parallel for schedule(static) num_threads(threads) if (a.count * a.inputs > PARALLEL_ELEMENTS)
  for (int64_t token = 0; token < a.count; token++)
    with_type(a.dtype, [&](auto t) { quantize_token<decltype(t)>(a, p, token, floats + omp_get_thread_num() * a.inputs); });
  const bool halves = a.bits == 4;
  if (a.planes == 1) halves ? multiply_planes<1, 4>(a, p, threads) : multiply_planes<1, 8>(a, p, threads);
  else if (a.planes == 2) halves ? multiply_planes<2, 4>(a, p, threads) : multiply_planes<2, 8>(a, p, threads);
  else halves ? multiply_planes<3, 4>(a, p, threads) : multiply_planes<3, 8>(a, p, threads);
  free(memory);
  return 1;
}
