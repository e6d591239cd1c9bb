// Vectors of LANES floats, written once in the compilers' vector extension: each level_*.cpp sets LANES and its
// instruction set, then includes the kernels. No standard headers here: whatever this file defines is compiled for
// one level and must not leak, as an inline function shared by name, into code that runs on lesser machines.

#ifndef HEADRACE_INLINE
#define HEADRACE_INLINE static inline __attribute__((always_inline))
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));
typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));  // 2 * LANES of them

HEADRACE_INLINE Floats broadcast(float x) { return x - Floats{}; }
HEADRACE_INLINE Floats absolute(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }
HEADRACE_INLINE Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
HEADRACE_INLINE Floats minimum(Floats a, Floats b) { return a < b ? a : b; }

// Each lane and its partner i ^ H, added.
template <int H, int... I>
HEADRACE_INLINE Floats fold(Floats v, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return v + __builtin_shufflevector(v, v, (I ^ H)...);
#else
  return v + __builtin_shuffle(v, Ints{(I ^ H)...});
#endif
}

template <int H = 1>
HEADRACE_INLINE float sum(Floats v) {
  if constexpr (H == LANES) return v[0];
  else return sum<2 * H>(fold<H>(v, std::make_integer_sequence<int, LANES>{}));
}

template <int H, int... I>
HEADRACE_INLINE Floats fold_largest(Floats v, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return maximum(v, __builtin_shufflevector(v, v, (I ^ H)...));
#else
  return maximum(v, __builtin_shuffle(v, Ints{(I ^ H)...}));
#endif
}

template <int H = 1>
HEADRACE_INLINE float largest(Floats v) {
  if constexpr (H == LANES) return v[0];
  else return largest<2 * H>(fold_largest<H>(v, std::make_integer_sequence<int, LANES>{}));
}

// 2^x for x <= 126, 0 for -inf: x = n + r with 0 <= r < 1, 2^r as a polynomial which is 1 at 0.
// FINE: to 1.5e-7 of it; else to 3e-6, where what follows keeps sixteen bits or less.
template <bool FINE>
HEADRACE_INLINE Floats power_of_two(Floats x) {
#if LANES == 16
  const Floats r = (Floats)_mm512_reduce_ps((__m512)x, 9);  // of -inf it is 0
#else
  x = maximum(x, broadcast(-127.0f));
  const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats n = (x - 0.5f) + magic, r = x - (n - magic);
#endif
  Floats y;
  if constexpr (FINE) {
    y = broadcast(1.867130166e-3f);
    y = y * r + 9.017029777e-3f;
    y = y * r + 5.579991266e-2f;
    y = y * r + 2.401644439e-1f;
    y = y * r + 6.931512952e-1f;
  } else {
    y = broadcast(1.342668477e-2f);
    y = y * r + 5.224247277e-2f;
    y = y * r + 2.412801981e-1f;
    y = y * r + 6.930448413e-1f;
  }
  y = y * r + 1.0f;
#if LANES == 16
  // Where the result would be subnormal it is 0, as in the others: some processors take a hundred cycles to make one.
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_GT_OQ);
  return (Floats)_mm512_maskz_scalef_ps(normal, (__m512)y, (__m512)x);
#else
  y = (Floats)((Ints)y + ((Ints)n << 23));
  return x > -126.0f ? y : Floats{};
#endif
}

// 1 + e^x; where that passes 2^126, about as much.
template <bool FINE>
HEADRACE_INLINE Floats one_and_exponential(Floats x) {
  return 1.0f + power_of_two<FINE>(minimum(x * 1.44269504f, broadcast(126.0f)));
}

HEADRACE_INLINE Floats hyperbolic_tangent(Floats x) { return 1.0f - 2.0f / one_and_exponential<true>(2.0f * x); }

// The element types of activations and of pages.
struct Single { float value; };
struct Brain { uint16_t bits; };   // bfloat16
struct Half { uint16_t bits; };    // IEEE half
struct Byte { int8_t value; };     // of pages only: an integer without its scale

template <class Element>
static const int FACTOR_OF = std::is_same_v<Element, Brain> || std::is_same_v<Element, Byte> ? 2 : 1;  // to a word of pages

HEADRACE_INLINE Floats load(const Single *p) {
  Floats v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

HEADRACE_INLINE Words load_bits(const uint16_t *p) {
  Halves h;
  __builtin_memcpy(&h, p, sizeof h);
#if LANES == 16
  return (Words)_mm512_cvtepu16_epi32((__m256i)h);  // one instruction, of which gcc would make five
#else
  return __builtin_convertvector(h, Words);
#endif
}

HEADRACE_INLINE Floats load(const Brain *p) { return (Floats)(load_bits(&p->bits) << 16); }

// Exponent and mantissa move into place and the bias is mended by a multiplication, which also makes subnormals
// right; infinities and NaNs get the full exponent back.
HEADRACE_INLINE Floats load(const Half *p) {
  Words bits = load_bits(&p->bits), sign = (bits & 0x8000) << 16, rest = (bits & 0x7fff) << 13;
  Floats value = (Floats)rest * 0x1p112f;
  Words special = (Words)(rest >= (uint32_t)0x0f800000) & 0x7f800000u;
  return (Floats)((Words)value | special | sign);
}

// Whole numbers from 0 to 255. Of converting such a vector, gcc would make many instructions.
HEADRACE_INLINE Floats load_whole(const uint8_t *p) {
#if LANES == 16
  const Ints wide = (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif LANES == 8
  const Ints wide = (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
  typedef uint8_t Octets __attribute__((vector_size(LANES)));
  Octets octets;
  __builtin_memcpy(&octets, p, sizeof octets);
  const Ints wide = __builtin_convertvector(octets, Ints);
#endif
  return __builtin_convertvector(wide, Floats);
}

HEADRACE_INLINE void store(Single *p, Floats v) { __builtin_memcpy(p, &v, sizeof v); }

HEADRACE_INLINE void store_bits(uint16_t *p, Words w) {
  Halves h = __builtin_convertvector(w, Halves);
  __builtin_memcpy(p, &h, sizeof h);
}

HEADRACE_INLINE Words to_brain_bits(Floats v) {
  Words bits = (Words)v, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return v != v ? (bits >> 16) | 0x40 : rounded;
}

HEADRACE_INLINE void store(Brain *p, Floats v) {
#if defined(HEADRACE_BF16_PAIRS)
  const __m256bh bits = _mm512_cvtneps_pbh((__m512)v);  // one instruction; what is subnormal becomes zero
  __builtin_memcpy(p, &bits, sizeof bits);
#else
  store_bits(&p->bits, to_brain_bits(v));
#endif
}

// Round to nearest even: normal halves by integer arithmetic, subnormal ones by letting an addition round.
HEADRACE_INLINE void store(Half *p, Floats v) {
  Words bits = (Words)v, sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
  Words normal = (rest + 0xfff + ((rest >> 13) & 1) - (112u << 23)) >> 13;
  Words tiny = (Words)((Floats)rest + 0.5f) - 0x3f000000u;
  Words out = rest < (uint32_t)0x38800000 ? tiny : normal;
  out = rest >= (uint32_t)0x477ff000 ? Words{} + 0x7c00u : out;
  out = rest > (uint32_t)0x7f800000 ? Words{} + 0x7e00u : out;
  store_bits(&p->bits, out | sign);
}

// Whole numbers near x, |x| < 2^22; ties go to the even one.
HEADRACE_INLINE Ints rounded(Floats x) { return (Ints)(x + 12582912.0f) - 0x4b400000; }

HEADRACE_INLINE void store(Byte *p, Floats v) {
  const Bytes b = __builtin_convertvector(rounded(v), Bytes);
  __builtin_memcpy(p, &b, sizeof b);
}

template <class T>
HEADRACE_INLINE Floats load_some(const T *p, int count) {
  T buffer[LANES] = {};
  for (int i = 0; i < count; i++) buffer[i] = p[i];
  return load(buffer);
}

template <class T>
HEADRACE_INLINE void store_some(T *p, Floats v, int count) {
  T buffer[LANES];
  store(buffer, v);
  for (int i = 0; i < count; i++) p[i] = buffer[i];
}

#if LANES == 16
HEADRACE_INLINE Floats load_some(const Single *p, int count) {
  return (Floats)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), p);
}

HEADRACE_INLINE void store_some(Single *p, Floats v, int count) {
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << count) - 1), (__m512)v);
}
#endif

// Calls body(offset, lanes) over [0, size): whole vectors, then what is left of one.
template <class Body>
HEADRACE_INLINE void each_vector(int64_t size, Body body) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) body(i, LANES);
  if (i < size) body(i, (int)(size - i));
}

template <class T>
HEADRACE_INLINE Floats load_at(const T *p, int lanes) {
  return lanes == LANES ? load(p) : load_some(p, lanes);
}

template <class T>
HEADRACE_INLINE void store_at(T *p, Floats v, int lanes) {
  if (lanes == LANES) store(p, v);
  else store_some(p, v, lanes);
}
