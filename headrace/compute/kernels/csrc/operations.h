// What the Python module asks of every instruction-set level: plain arguments and one table of functions.
// All sizes are elements; tensors are contiguous. The module has checked ranges before a function runs.

#pragma once
#include <stdint.h>

#include "mixers.h"

namespace headrace {

const int INTERFACE = 34;  // raised with every change of what cpp.py passes, so that an old build is not called

const int64_t MAX_HEAD_DIM = 512;
const float SMALLEST = 1e-30f;  // see Kernels.SMALLEST
const int64_t NOT_FINITE = -1, NOTHING_ALLOWED = -2;  // see sampling/choice.py
const int64_t NO_DRAFT = -3;  // see step_sampling.py

// Whether lines that are wanted later are better asked into the second cache, as those on their way to the first one take
// places that tiles wait for. Told from the first one's size: measured to be so with 32 KiB (Zen 4), not with 48 (Zen 5).
extern const bool by_second_cache;

enum DType : int { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT8 = 3 };  // INT8: pages only, see Kernels.Pages

// Keys and values of a layer, as the products of attention read them: in words of one element, or of two if they have
// 16 or 8 bits and are multiplied in pairs (bfloat16, int8). From block to block it is a stride; a block's elements are
//
//   keys    [kv_heads][head_dim / 2][block_size][2]      two features of a token       [kv_heads][head_dim][block_size]
//   values  [kv_heads][block_size / 2][head_dim][2]      a feature of two tokens       [kv_heads][block_size][head_dim]
//
// with words of two, and of one; in a block of an odd size values have words of one. Scales, of int8 only, are
// [kv_heads, block_size].
struct Pages {
  void *keys, *values;
  float *key_scales, *value_scales;
  int64_t block_size, stride, scale_stride;
  int dtype;
};

inline int64_t value_tokens(const Pages &p, int factor) { return p.block_size % 2 ? 1 : factor; }

struct Norm {            // out = x / sqrt(mean(x^2) + eps) * weight, of rows [count, size]
  const void *x;
  void *residual;        // null, or [count, size]: residual = residual * scale + x first, and the norm is the residual's
  const float *weight;   // null: out is x, or the sum
  void *out;
  int64_t count, size;
  int dtype;
  float eps;
  float scale = 1;
};

struct Embed {           // out [count, size] of `dtype` = rows `tokens` of embedding [, size], times scale
  const void *embedding;
  const int32_t *tokens;
  void *out;
  int64_t count, size;
  int dtype, embedding_dtype;
  float scale;
};

enum HeadNorm { NORM_HEAD = 0, NORM_PROJECTION = 1, NORM_ROTATED = 2, NORM_VALUES = 3 };  // see kernels/__init__.py

struct Rope {            // see Kernels.rope_write_kv
  const void *qkv;
  const float *rotation, *norm;  // norm: null or [heads + kv_heads, head_dim], and kv_heads more with NORM_VALUES
  const int64_t *slots, *positions;  // positions: null, or those of the tokens in a table of rotations
  void *queries;
  Pages pages;
  int64_t tokens, heads, kv_heads, head_dim, rotary;  // kv_heads 0: there are only queries
  int dtype, head_norm;
  float eps;
};

// See kernels/__init__.py; the last one has no gates.
enum Activation { SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2, SQUARED_RELU = 3 };
const float SWIGLU_ALPHA = 1.702f, SWIGLU_LIMIT = 7.0f;

struct Gate {            // out [count, size] = activation(x[:, :size]) * x[:, size:], or SQUARED_RELU of x [count, size]
  const void *x;
  void *out;
  int64_t count, size;
  int dtype, activation;
  const void *up = nullptr;  // null, or rows of `size` elements, `step` apart: x is [count, size], and these are the factors
  int64_t step = 0;
};

struct GateHeads {       // x [count] *= sigmoid(gates [count])
  void *x;
  const void *gates;
  int64_t count;
  int dtype;
};

struct Weigh {           // x [count, size], of rows `step` apart, = x * factor, then + other [count, size] * other_factor
  void *x;
  const void *other;     // null: nothing is added
  int64_t count, size, step;
  int dtype;
  float factor, other_factor;
};

const int64_t ALL_KEYS = (int64_t)1 << 62;

struct Attention {       // see Kernels.paged_attention
  const void *queries;
  Pages pages;
  void *out;
  const int32_t *query_starts, *contexts, *tables;
  int64_t rows, width, heads, kv_heads, head_dim, window;  // window: ALL_KEYS without one
  int dtype;
  float scale, softcap;  // scale > 0; softcap 0: none
  const float *sinks = nullptr;  // [heads], or null
  const uint8_t *joint = nullptr;  // [rows], or null: not 0 where all queries of a row see all of its keys
};

struct LatentAttention {  // see latent.h
  const void *query;     // [tokens, heads, plain + rotary]
  const void *keys, *values;  // of each head, packed: [rank, plain], [value, rank]
  const void *pages;     // [blocks, block_size, rank + rotary], a block every `stride` elements
  void *out;             // [tokens, heads, value]
  const int32_t *query_starts, *contexts, *tables;
  int64_t rows, width, block_size, stride, heads, plain, rank, rotary, value;
  int dtype;             // FLOAT32 or BFLOAT16, in which plain, rank and rotary are even
  float scale;
};

struct Linear {          // out [count, outputs] = x [count, inputs] times packed weights (+ bias)
  const void *x, *packed, *bias;
  void *out;
  int64_t count, inputs, outputs;
  int dtype;
  bool wide = false;     // out is float32, whatever x is
  bool narrow = false;   // weights are bfloat16, and x is FLOAT32
  const void *codes = nullptr;  // null, or `packed` is coded, see below
};

// Weights of bfloat16 whose exponents are codes of four bits: see coded.h. `packed` is [panels, words of inputs, bytes of a coded row]
// then, and `codes` are 16 exponents, the bytes of them; where the list of each panel begins, and the last one ends; and the list.
struct Uncommon {        // an element whose exponent is not among those
  uint32_t row;          // of words, ascending in a panel
  uint16_t place, bits;  // in the row, and what it is
};

const int64_t COMMON_EXPONENTS = 16;

inline int64_t coded_row_bytes(int64_t panel) { return 3 * panel; }  // of `panel` words of two elements, 12 bits each

inline const uint32_t *coded_begins(const void *codes) {
  return reinterpret_cast<const uint32_t *>(static_cast<const char *>(codes) + COMMON_EXPONENTS);
}

inline const Uncommon *coded_uncommon(const void *codes, int64_t panels) {
  return reinterpret_cast<const Uncommon *>(coded_begins(codes) + panels + 1);
}

// "Bits" of weights of which each half of a byte is a code of e2m1; and if all scales are powers of two, groups multiples of 32
// inputs, and inputs in order.
const int FP4 = 5, MXFP4 = 6;

struct Quantized {       // as Linear, by a weight in 8 or 4 bits: see quantized.h
  const void *x, *packed;
  // [panels, groups, panel]; offsets: null, or 2^(bits - 1) plus the zero point; minima: null, or what 0 stands for
  const float *scales;
  const uint8_t *offsets;
  const float *minima;
  const int64_t *order;  // null or [inputs]
  const void *bias;
  void *out;
  int64_t count, inputs, outputs, group_size, planes;
  int dtype, bits;
  bool wide = false;
};

struct Screen {          // a head without a bias, and its copy in 8 bits with one scale for each output: see screen.h
  Linear weights;        // `out` is not looked at
  Quantized copy;        // x, count and sizes of `weights`; activations of one byte
  const float *errors, *norms;  // [panels, panel]: lengths of what the copy leaves of an output's weights, and of these; no less
};

// In place of a number of groups: all outputs were computed, without the copy's help, or nothing was, for want of memory.
const int64_t SCREEN_GAVE_UP = -1, SCREEN_NO_MEMORY = -2;

struct StackLinear {     // a linear layer as words of a table: kernels/native_calls.py writes them
  const void *packed;
  const float *scales;   // of quantized weights
  const uint8_t *offsets;
  const float *minima;
  const int64_t *order;
  const void *bias;
  int64_t inputs, outputs, group_size, planes, bits;  // bits 0: of the type of activations; NARROW: see Linear
  const void *codes;     // see Linear
};

const int64_t NARROW = 16;

inline bool is_quantized(const StackLinear &l) { return l.bits && l.bits != NARROW; }

inline Linear plain_linear(const StackLinear &l, int dtype, int64_t count, const void *x, void *out) {
  return {x, l.packed, l.bias, out, count, l.inputs, l.outputs, dtype, false, l.bits == NARROW, l.codes};
}

const int64_t MAX_EXPERTS = 1024;

enum Scoring { SCORE_SOFTMAX = 0, SCORE_SIGMOID = 1 };
enum SharedExpert { SHARED_NONE = 0, SHARED_PLAIN = 1, SHARED_GATED = 2 };

struct Router {          // see kernels/experts.py; words of a table, as those of StackLinear
  const void *packed;    // [outputs, hidden] of `dtype`; outputs are experts, and the gate of a shared one
  const float *correction;  // null or [experts]
  const float *bias;     // null or [outputs]
  int64_t dtype, hidden, experts, chosen, groups, kept_groups, scoring, normalized, shared;
  double scale;
};

inline int64_t router_outputs(const Router &r) { return r.experts + (r.shared == SHARED_GATED); }
inline int64_t router_columns(const Router &r) { return r.chosen + (r.shared != SHARED_NONE); }

struct ExpertSet {       // the experts of a layer, the shared one last
  const StackLinear *each;  // [count, 2]: gate and up, or up alone with SQUARED_RELU, and down
  int64_t count, hidden;
  int64_t *loads;        // null, or [count]: to which is added how many tokens each computed
};

struct Route {           // see Kernels.route
  const Router *router;
  const void *x;         // [count, hidden]
  int64_t *indices;      // [count, columns]
  float *weights;        // [count, columns]
  int64_t count;
  int dtype;
};

struct AdapterPart {     // see kernels/adapters.py; words of tables, as those of StackLinear
  const void *up;        // packed [outputs, rank]
  int64_t rank, offset, outputs;  // rank: even
};

struct AdapterChange {
  const void *down;      // packed [rank, inputs], or one panel if it is folded; null: no change
  const AdapterPart *parts;
  int64_t part_count, rank;  // rank: the sum of those of the parts; 0 where there is no change
  int64_t fold;          // 1, 2, 4, …: how many pieces of the inputs stand side by side in the panel
};

struct ExpertAdapters {  // of the tokens of a step, for the experts of a layer
  const int32_t *of_token;  // [count], the adapter of each token, or -1
  const AdapterChange *const *changes;  // of each adapter: [experts, 2], or null
  int64_t count;         // of adapters
};

struct Experts {         // see Kernels.experts
  const ExpertSet *set;
  const void *x;         // [count, hidden]
  const int64_t *indices;  // [count, columns]; none is below 0
  const float *weights;  // [count, columns]
  void *out;             // [count, hidden]
  int64_t count, columns;
  int dtype, activation;
  const ExpertAdapters *adapters = nullptr;  // or null
};

struct AdapterRows {     // the rows of an adapter in a step
  const AdapterChange *changes;  // [layers, ADAPTER_PLACES]
  const int64_t *tokens; // [count], ascending
  int64_t count;
  const AdapterChange *const *experts;  // [layers]: changes of its experts [experts, 2], or null
};

struct Adapted {         // out [, outputs] += what the adapters change at a place, for their rows of x [, inputs]
  const AdapterRows *rows;  // [groups]
  int64_t groups, place;
  const void *x;
  void *out;
  void *inner, *gathered;  // room for all products with down, and for adapter_rows rows of x of each thread
  int64_t inputs, outputs;
  int dtype, threads;    // FLOAT32 or BFLOAT16
};

struct Choice {          // see Kernels.choose
  const void *logits;    // [count, size]
  const double *temperature, *min_p, *top_p, *uniform;
  const int64_t *top_k;
  int64_t *tokens;
  int64_t count, size;
  int dtype;
};

struct Guess {           // the first token of each row's largest logit, and its probability; or a fault, and NaN
  const void *logits;    // [count, size]
  int64_t *tokens;
  float *probabilities;  // or null
  int64_t count, size;
  int dtype;
};

struct Operations {
  void (*embed)(const Embed &);
  void (*norm)(const Norm &);
  void (*rope_write_kv)(const Rope &);
  void (*gated_activation)(const Gate &);
  void (*gate_heads)(const GateHeads &);
  void (*weigh)(const Weigh &);
  int (*attention)(const Attention &);  // 0: out of memory
  int (*latent)(const LatentAttention &);  // 0: out of memory
  void (*linear)(const Linear &);
  // A linear layer whose outputs only meet what comes next: its own `out`, and where that would read it, are not looked
  // at. 0: not for these sizes, nothing was done.
  int (*linear_gate)(const Linear &, const Gate &);
  int (*linear_rope)(const Linear &, const Rope &);
  int (*quantized_linear)(const Quantized &);  // 0: out of memory
  int (*route)(const Route &);  // 0: out of memory
  int (*experts)(const Experts &);  // 0: out of memory
  int (*choose)(const Choice &);  // 0: out of memory
  int (*guess)(const Guess &);  // 0: out of memory
  // The tokens [count] that guess finds in the outputs of a head without a bias; `out` is not looked at. 0: out of memory.
  int (*likeliest_outputs)(const Linear &, int64_t *tokens);
  // The same tokens by way of a copy; how many groups of outputs were computed, or one of SCREEN_*.
  int64_t (*screen)(const Screen &, int64_t *tokens);
  void (*adapt)(const Adapted &);
  void (*mix)(const Mix &);
  int64_t adapter_rows;
  int64_t panel;  // columns of a panel of packed weights
  int64_t coded_register = 0;  // bytes of a register in which coded weights are decoded; 0: they are not
};

extern const Operations generic_operations;
#if defined(__x86_64__)
extern const Operations avx2_operations, avx512_operations, avx512_vnni_operations, avx512_bf16_operations, amx_operations;
bool amx_granted();  // whether this process may use tiles; asks the system for them
#endif

}  // namespace headrace
