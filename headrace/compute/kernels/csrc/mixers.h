// What the Python module asks of the mixers with a recurrent state: plain arguments and a table of functions for each
// level. See kernels/mixers.py for what is computed.

#pragma once
#include <stdint.h>

namespace headrace {

const int64_t CHUNK = 64;      // tokens of a row that are products of matrices
const int64_t MAX_TAPS = 8;    // of a convolution
const int64_t MAX_STATE = 256;  // rows, and columns, of a head's state

enum MixerKind { SHORT_CONVOLUTION = 0, GATED_DELTA = 1, STATE_SPACE = 2 };

struct Mixer {              // words of a table: kernels/native_mixers.py writes them
  const float *weight, *bias;  // of the convolution: [taps, channels], and null or [channels]
  const float *rate, *step_bias, *skip, *norm;  // [heads] each; norm: see mixers.py, or null
  int64_t kind, taps, channels, heads, groups, key_dim, value_dim, norm_groups, norm_first;
  double eps, low, high, gate_scale, step_scale;
};

struct MixStates {          // of each slot, `stride` floats apart
  float *first;
  int64_t stride;
};

const int64_t PART_WORDS = 6;

struct Mix {
  const Mixer *mixer;
  const void *x;            // [tokens, width]: the outputs of the first linear layer
  const void *steps;        // [tokens, 2 * heads]: those of the second one, for GATED_DELTA
  void *out;                // [tokens, inner]
  float *convolved;         // working memory: [CHUNK tokens of each row at most, channels]
  int64_t *parts;           // working memory: [rows, PART_WORDS]
  float *heads;             // [tokens, inner], working memory for STATE_SPACE
  const int64_t *slots, *starts;  // [rows], [rows + 1]
  const int64_t *kept;      // [rows]: the tokens after which the state of a slot stays
  const uint8_t *fresh;     // [rows]
  MixStates inputs, states;
  MixStates inputs_ahead, states_ahead;  // working memory: states of the rows with tokens behind those, in their order
  int64_t rows, tokens;
  int dtype;
};

inline int64_t mixer_inner(const Mixer &m) { return m.kind == SHORT_CONVOLUTION ? m.channels : m.heads * m.value_dim; }
inline int64_t mixer_state(const Mixer &m) { return m.heads * m.key_dim * m.value_dim; }
inline int64_t mixer_width(const Mixer &m) {
  if (m.kind == SHORT_CONVOLUTION) return 3 * m.channels;
  return m.channels + mixer_inner(m) + (m.kind == STATE_SPACE ? m.heads : 0);
}

void mix_generic(const Mix &);
#if defined(__x86_64__)
void mix_avx2(const Mix &);
void mix_avx512(const Mix &);
#endif

}  // namespace headrace
