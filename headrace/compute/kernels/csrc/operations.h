// What the Python module asks of every instruction-set level: plain arguments and one table of functions.
// All sizes are elements; tensors are contiguous. The module has checked ranges before a function runs.

#pragma once
#include <stdint.h>

namespace headrace {

const int64_t MAX_HEAD_DIM = 512;

enum DType : int { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

struct Norm {            // out = x / sqrt(mean(x^2) + eps) * weight, of rows [count, size]
  const void *x;
  void *residual;        // null, or [count, size]: residual += x first, and the norm is the residual's
  const float *weight;
  void *out;
  int64_t count, size;
  int dtype;
  float eps;
};

struct Rope {            // see Kernels.rope_write_kv
  const void *qkv;
  const float *rotation, *norm;  // norm: null or [heads + kv_heads, head_dim]
  const int64_t *slots;
  void *keys, *values, *queries;
  int64_t tokens, heads, kv_heads, head_dim, rotary;
  int dtype, kv_dtype;
  float eps;
};

struct Gate {            // out [count, size] = activation(x[:, :size]) * x[:, size:]
  const void *x;
  void *out;
  int64_t count, size;
  int dtype, gelu;
};

struct Attention {       // see Kernels.paged_attention
  const void *queries, *keys, *values;
  void *out;
  const int32_t *query_starts, *contexts, *tables;
  int64_t rows, width, block_size, heads, kv_heads, head_dim, window;  // window: INT64_MAX is all keys
  int dtype, kv_dtype;
  float scale, softcap;  // softcap 0: none
};

struct Linear {          // out [count, outputs] = x [count, inputs] times packed weights (+ bias)
  const void *x, *packed, *bias;
  void *out;
  int64_t count, inputs, outputs;
  int dtype;
};

struct Quantized {       // as Linear, by a weight in 8 or 4 bits: see quantized.h
  const void *x, *packed;
  const float *scales, *offsets;  // [panels, groups, panel]; offsets: null, or 2^(bits - 1) plus the zero point
  const int64_t *order;  // null or [inputs]
  const void *bias;
  void *out;
  int64_t count, inputs, outputs, group_size, planes;
  int dtype, bits;
};

struct Operations {
  void (*norm)(const Norm &);
  void (*rope_write_kv)(const Rope &);
  void (*gated_activation)(const Gate &);
  int (*attention)(const Attention &);  // 0: out of memory
  void (*linear)(const Linear &);
  int (*quantized_linear)(const Quantized &);  // 0: out of memory
  int64_t panel;  // columns of a panel of packed weights
};

extern const Operations generic_operations;
#if defined(__x86_64__)
extern const Operations avx2_operations, avx512_operations, avx512_bf16_operations;
#endif

}  // namespace headrace
