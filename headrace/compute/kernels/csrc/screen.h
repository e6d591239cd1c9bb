// The likeliest token of each row of a head, found with a copy of its weights in 8 bits and proved with the weights themselves.
//
// Of an output, the copy has q and a scale s for the weights w. Activations x are rounded to t z. By Cauchy-Schwarz
//
//     |w x - s q t z|  <=  |w - s q| |t z|  +  |w| |x - t z|
//
// so products of bytes tell how large each output can be, at half or a quarter of the bytes and half of the work. Only where
// that reaches the largest output known are weights themselves multiplied: in the same order as in linear.h, so that the
// token is the one that all logits would have given, bit for bit.
//
//   bounds [rows, groups]: the largest that any of LANES neighbouring outputs can be
//
//     1  bounds, by byte products
//     2  of a row: the outputs of the group with the largest bound. The largest of them is `best`
//     3  of a row: the outputs of every other group whose bound reaches `best`

// Groups of a row are computed if they are at most this part of all; more cost about as much as all outputs do.
static const int64_t SCREENED_PART = 16, SCREENED_AT_LEAST = 4;

// What the bounds of a row are made of: an output is at most product + error * reach + norm * miss + least.
struct RowBounds {
  float step, reach, miss, least;
};

// Errors of summing, as a part of |w| |x|: in one chain two roundings for each input, and a few of exact products of bytes.
HEADRACE_INLINE float rounding_of(int64_t inputs) { return (3 * inputs + 256) * 0x1p-24f; }

static const float SLACK = 1.001f;          // of lengths that are summed in float32
static const float LONGEST = 1e15f;         // lengths up to which no product overflows
// Products of bfloat16 take what is below float32's normal range for 0: of the products, and, as lengths, of either factor.
static const float SUBNORMAL_PRODUCTS = 1e-30f, SUBNORMAL_LENGTH = 1e-35f;

// Of a token whose activations are `x`, and whose integers were rounded in steps of `step`. A step that is not a number: there
// are no bounds.
static RowBounds bounds_of_row(const float *x, int64_t inputs, float step) {
  const float divisor = step > 0 ? step : 1.0f;
  Floats lengths = {}, rests = {}, rounds = {};
  each_vector(inputs, [&](int64_t i, int lanes) {
    const Floats v = load_at((const Single *)(x + i), lanes);
    const Floats near = __builtin_convertvector(rounded(v / divisor), Floats) * step, rest = v - near;
    lengths += v * v;
    rests += rest * rest;
    rounds += near * near;
  });
  const float length = __builtin_sqrtf(sum(lengths)) * SLACK, reach = __builtin_sqrtf(sum(rounds)) * SLACK;
  if (!(length < LONGEST)) return {NAN, 0, 0, 0};
  const float miss = __builtin_sqrtf(sum(rests)) * SLACK + length * rounding_of(inputs) + SUBNORMAL_LENGTH;
  return {step, reach, miss, length * SUBNORMAL_LENGTH + SUBNORMAL_PRODUCTS};
}

// The bounds of a panel's groups, from a token's products.
HEADRACE_INLINE void keep_bounds(const Screen &a, const RowBounds &row, int64_t panel, const int32_t *products, float *bounds) {
#pragma GCC unroll 8
  for (int i = 0; i < VECTORS; i++) {
    const int64_t column = panel * PANEL + i * LANES;
    const auto at = [&](const float *numbers) { return load((const Single *)(numbers + column)); };
    const Floats product = __builtin_convertvector((Ints)load_words((const uint32_t *)products + i * LANES), Floats);
    const Floats output = product * (at(a.copy.scales) * row.step);
    bounds[i] = largest(output + at(a.errors) * row.reach + at(a.norms) * row.miss) + row.least;
  }
}

// products[m, 0:PANEL] += words of M tokens, `stride` apart, times packed words of a panel. Returns what is left to fetch. A
// function of its own, as multiply_spans.
template <int M>
__attribute__((noinline)) static Ahead add_integers(const uint32_t *tokens, int64_t stride, const uint32_t *packed, int64_t words,
                                                    int32_t *products, Ahead ahead) {
  Ints sum[M][VECTORS];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) sum[m][i] = (Ints)load_words((const uint32_t *)products + m * PANEL + i * LANES);
  ahead = add_words<8>(sum, tokens, stride, packed, words, ahead);
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) store((Single *)(products + m * PANEL + i * LANES), (Floats)sum[m][i]);
  return ahead;
}

// products [count, PANEL] of a panel of the copy, which are exact: of bytes of `inputs` each no more than 2^31.
static void multiply_copy(const Screen &a, const Planes &p, int64_t panel, int64_t first, int64_t count, int32_t *products) {
  const int64_t tiles = (count + ROWS - 1) / ROWS, block = block_depth(tiles, p.words / PARTS<8>) * PARTS<8>;
  const uint32_t *const packed = (const uint32_t *)a.copy.packed + panel * p.words / PARTS<8> * PANEL;
  for (int64_t token = 0; token < count; token++) {
    float total = 0;
    for (int64_t span = 0; span < p.spans; span++) total += p.totals[(first + token) * p.spans + span];
    const Ints above = Ints{} - 128 * (int32_t)total;  // weights are 128 more than they are
    for (int i = 0; i < VECTORS; i++) store((Single *)(products + token * PANEL + i * LANES), (Floats)above);
  }
  for (int64_t k = 0; k < p.words; k += block) {
    const int64_t words = p.words - k < block ? p.words - k : block;
    const uint32_t *some = packed + k / PARTS<8> * PANEL;
    Ahead ahead = ahead_of_tiles(some + block / PARTS<8> * PANEL, tiles, deep_for(tiles));
    in_tiles<ROWS>(count, [&](auto rows, int64_t token) {
      ahead = add_integers<rows()>((const uint32_t *)p.integers + (first + token) * p.words + k, p.words, some, words,
                                   products + token * PANEL, ahead);
    });
  }
}

// A token's outputs of a group, met by `best`.
template <class Kind>
static void meet_group(const Linear &a, int64_t depth, int64_t token, int64_t group, Likeliest &best) {
  const uint32_t *x = (const uint32_t *)a.x + token * depth * Kind::ROW_WORDS;
  const uint32_t *weights = (const uint32_t *)a.packed + group / VECTORS * depth * PANEL + group % VECTORS * LANES;
  Floats outputs = {};
  for (int64_t k = 0; k < depth; k++) outputs = Kind::add(outputs, Kind::row(x + k * Kind::ROW_WORDS), Kind::column(weights + k * PANEL));
  const int64_t first = group * LANES, left = a.outputs - first;
  if (left > 0) meet_outputs(best, first, left < LANES ? left : LANES, (const float *)&outputs);
}

// The likeliest token of a row with these bounds; how many groups were computed, or -1 if they would have been too many.
template <class Kind>
static int64_t screen_row(const Linear &a, int64_t depth, int64_t token, const float *bounds, int64_t groups, int64_t *found) {
  int64_t first = 0, reaching = 0;
  for (int64_t group = 1; group < groups; group++)
    if (bounds[group] > bounds[first]) first = group;
  Likeliest best = {-__builtin_inff(), NOTHING_ALLOWED};
  meet_group<Kind>(a, depth, token, first, best);
  for (int64_t group = 0; group < groups; group++) reaching += bounds[group] >= best.output;
  if (reaching > groups / SCREENED_PART + SCREENED_AT_LEAST) return -1;
  int64_t computed = 1;
  for (int64_t group = 0; group < groups; group++)
    if (group != first && bounds[group] >= best.output) meet_group<Kind>(a, depth, token, group, best), computed++;
  *found = best.token;
  return computed;
}

// The bounds of all rows, [rows, groups], from the integers of their activations.
static void bound_outputs(const Screen &a, const Planes &p, const RowBounds *rows, float *bounds, int threads) {
  const int64_t panels = (a.copy.outputs + PANEL - 1) / PANEL, groups = panels * VECTORS;
  each_block(panels, a.copy.count, BLOCK_ROWS, BLOCK_ROWS * p.words * 4, threads, false, [&](int64_t panel, int64_t first, int64_t count) {
    alignas(64) int32_t products[BLOCK_ROWS * PANEL];
    multiply_copy(a, p, panel, first, count, products);
    for (int64_t token = 0; token < count; token++)
      keep_bounds(a, rows[first + token], panel, products + token * PANEL, bounds + (first + token) * groups + panel * VECTORS);
  });
}

template <class T, class Kind>
static int64_t screen_of(const Screen &a, int64_t *tokens) {
  const Linear &exact = a.weights;
  const int64_t count = exact.count, depth = depth_of<Kind>(exact), groups = (exact.outputs + PANEL - 1) / PANEL * VECTORS;
  const int threads = threads_for(count * exact.inputs * exact.outputs);
  Planes p = sizes_of_planes(exact.inputs, exact.inputs);
  const int64_t words = words_of_planes(p, 1, count);
  uint32_t *memory = (uint32_t *)malloc((size_t)(words + threads * exact.inputs + count * (groups + 4 + 1)) * 4);
  if (!memory) return SCREEN_NO_MEMORY;
  place_planes(p, 1, count, memory);
  float *floats = (float *)(memory + words), *bounds = floats + threads * exact.inputs;
  RowBounds *rows = (RowBounds *)(bounds + count * groups);
  int32_t *computed = (int32_t *)(rows + count);
  const int few = count * exact.inputs > PARALLEL_ELEMENTS ? threads : 1;
  share(count, tasks_at_once(count, few), few, [&](int64_t token, int64_t end, int64_t member) {
    float *x = floats + member * exact.inputs;
    for (; token < end; token++) {
      quantize_token<T, 1>(a.copy, p, token, x);
      rows[token] = bounds_of_row(x, exact.inputs, p.steps[token]);
    }
  });
  int64_t all = 0;
  for (int64_t token = 0; token < count; token++)
    if (rows[token].step != rows[token].step) all = SCREEN_GAVE_UP;
  if (!all) {
    bound_outputs(a, p, rows, bounds, threads);
    share(count, 1, threads, [&](int64_t token, int64_t end, int64_t) {
      for (; token < end; token++)
        computed[token] = screen_row<Kind>(exact, depth, token, bounds + token * groups, groups, tokens + token);
    });
    for (int64_t token = 0; token < count; token++)
      all = all < 0 || computed[token] < 0 ? SCREEN_GAVE_UP : all + computed[token];
  }
  free(memory);
  if (all == SCREEN_GAVE_UP && !likeliest_outputs(exact, tokens)) return SCREEN_NO_MEMORY;
  return all;
}

static int64_t screen(const Screen &a, int64_t *tokens) {
#if defined(HEADRACE_TILES)
  // Tiles sum in another order than a chain.
  return likeliest_outputs(a.weights, tokens) ? SCREEN_GAVE_UP : SCREEN_NO_MEMORY;
#else
  return with_words(a.weights, [&](auto t, auto kind) { return screen_of<decltype(t), decltype(kind)>(a, tokens); });
#endif
}
