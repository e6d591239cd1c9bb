// What a level is compiled for that has products of bfloat16 pairs and of bytes, and no lesser one. Its file ends with the
// pop that clang's push needs. No include guard, as in level.h.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include <type_traits>
#include <utility>

#include "operations.h"
#include "team.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni")
#endif

#include <immintrin.h>
#define HEADRACE_BF16_PAIRS 1
#define HEADRACE_BYTE_PRODUCTS 1

#define LANES 16
