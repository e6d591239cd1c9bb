// A decoder's layers in one call, from tokens on: the operations that kernels/stack.py calls one by one, in its order.
// The words of the tables are written by kernels/native_calls.py.

#pragma once
#include <string.h>

#include <chrono>

#include "operations.h"
#include "step_adapters.h"
#include "team.h"

namespace headrace {

struct InputGate {       // see kernels/per_layer.py; words of a table, as those of StackLinear
  StackLinear gate, projection;
  const float *norm;
};

struct StackMixer {      // words of a table, too
  const Mixer *mixer;
  StackLinear first, output;  // those of a mixer beside attention; empty where it stands in its place
};

struct HeadCounts {
  int64_t heads, kv_heads, head_dim;
};

struct StackLayer {
  StackLinear qkv, output, gate_up, down;  // the last two are empty where there are experts, or nothing behind attention
  const float *qk_norm, *post_attention_norm, *mlp_norm, *post_mlp_norm, *following_norm;  // null where there is none
  int64_t window, rope;
  const Router *router;  // null: an MLP
  const ExpertSet *experts;
  const float *sinks;  // of each head; null where there are none
  HeadCounts heads;
  int64_t shares;       // not 0: it has only queries, and its pages are those of an earlier layer
  const InputGate *input_gate;  // or null
  double scale;         // of the states before the last sum
  int64_t joint;        // not 0: its attention knows joint rows
  StackLinear gates;    // those of attention, or the second linear layer of a mixer; empty where there is none
  const StackMixer *mixer;  // or null
};

inline bool attends(const StackLayer &l) { return !l.mixer || l.mixer->output.packed; }

struct StackRotation {
  const float *table;  // [positions, 2, rotary]
  int64_t rotary;
};

struct LayerStates {      // of a layer: those of its convolution and of its heads
  MixStates inputs, heads;
};

struct StackStates {     // the rows of a step as mixers need them, see Mix; words of a table
  const int64_t *slots, *starts, *kept;
  const uint8_t *fresh;
  int64_t *parts;
  const LayerStates *layers;  // [layer_count]
  float *inputs_ahead, *heads_ahead;
  int64_t rows, slot_count, aheads;  // aheads: rows with tokens ahead of their states for which there is memory
};

static_assert(sizeof(StackLayer) == 78 * 8 && sizeof(StackMixer) == 25 * 8 && sizeof(LayerStates) == 4 * 8 && sizeof(StackStates) == 11 * 8 && sizeof(InputGate) == 25 * 8 && sizeof(StackRotation) == 2 * 8 && sizeof(StackLinear) == 12 * 8 &&
                  sizeof(Router) == 13 * 8 && sizeof(ExpertSet) == 4 * 8,
              "tables are of words of 64 bits");

struct Stack {
  const void *embedding;          // [vocab, hidden]
  const StackLayer *layers;
  const Pages *pages;             // of each layer
  const StackRotation *rotations;
  const float *input_norm;        // of the first layer, or null; each layer has the norm that follows it
  int64_t layer_count;
  void *residual, *x, *y, *wide, *narrow;  // room for the widest that goes in each; see run_stack
  int64_t *chosen;                // room for the experts of all tokens; null where no layer has some
  float *weights;                 // and their weights
  void *beside;                   // room for gates, or for what a mixer beside attention returns
  float *convolved, *mixed;       // room for mixers, see Mix
  void *out;                      // [kept, hidden]
  const int32_t *token_ids, *query_starts, *contexts, *tables;
  const int64_t *positions, *slots, *kept_at;  // kept_at: ascending; not read where all tokens are kept
  int64_t rows, width, tokens, kept, hidden, element_bytes;
  const int64_t *groups;  // of each layer: which of the group_count tables [rows, width] and slots [tokens] are its own; null: the first
  int64_t group_count;
  void *inputs;         // null, or [tokens, layer_count, input_width]: what each layer with an InputGate gets beside its states
  int64_t input_width;
  int dtype, embedding_dtype, activation, head_norm;
  float eps, scale, softcap, embedding_scale;
  double *seconds;      // to which is added what each StackPart took; null where nobody asks
  const uint8_t *interrupt;  // not 0 once the step is to be broken off, by another thread; null where it never is
  void *taps;           // [tokens, tap_count, hidden], see kernels/__init__.py: hidden states before layers
  const int64_t *tapped;  // [tap_count], the layers; the number of layers: after the last one, where all tokens are kept
  int64_t tap_count;
  const AdapterRows *adapters;  // [adapter_count], see step_adapters.h
  int64_t adapter_count;
  const void *deep;          // [deep_layers, deep_rows, hidden], added to the states behind the first layers, see batch.Features
  int64_t deep_layers;       // fewer than layer_count
  const int64_t *deep_at;    // [deep_rows], the tokens
  int64_t deep_rows;
  const uint8_t *joint;      // [rows] or null, see Attention
  const StackStates *states;  // null where no layer has a mixer
  float attention_factor, mixer_factor, gate_factor, mlp_factor;  // see kernels/mixers.py: Multipliers
};

enum StackPart { LINEAR_PART, ATTENTION_PART, ELEMENTWISE_PART };  // a linear layer with what is done to its outputs at once

enum class StackEnd { WHOLE, BROKEN_OFF, NO_MEMORY };

static Linear plain(const Stack &s, const StackLinear &l, int64_t count, const void *x, void *out) {
  return plain_linear(l, s.dtype, count, x, out);
}

static bool stack_linear(const Operations &run, const Stack &s, const StackLinear &l, int64_t count, const void *x,
                         void *out, bool wide = false) {
  if (is_quantized(l))
    return run.quantized_linear({x, l.packed, l.scales, l.offsets, l.minima, l.order, l.bias, out, count, l.inputs, l.outputs,
                                 l.group_size, l.planes, s.dtype, static_cast<int>(l.bits), wide});
  Linear a = plain(s, l, count, x, out);
  a.wide = wide;
  run.linear(a);
  return true;
}

// Of few rows so little is computed between two linear layers that most threads wait: they read what the second one needs.
static const int64_t WAITING_ROWS = 32;

static void read_soon(const Stack &s, const StackLinear &l) {
  const int64_t bits = l.codes ? 12 : l.bits == 8 || l.bits == NARROW ? l.bits : l.bits ? 4 : 8 * s.element_bytes;
  if (s.tokens <= WAITING_ROWS) read_ahead(l.packed, l.inputs * l.outputs * bits / 8);
}

static void read_soon(const Stack &s, const Router &r) {
  if (s.tokens <= WAITING_ROWS) read_ahead(r.packed, router_outputs(r) * r.hidden * (r.dtype == FLOAT32 ? 4 : 2));
}

template <class Call>
static bool stack_timed(const Stack &s, StackPart part, Call call) {
  if (!s.seconds) return call();
  const auto begin = std::chrono::steady_clock::now();
  const bool result = call();
  s.seconds[part] += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

static void keep_rows(const Stack &s, void *rows, int64_t row_bytes) {
  char *bytes = static_cast<char *>(rows);
  for (int64_t i = 0; i < s.kept; i++)
    if (s.kept_at[i] != i) memcpy(bytes + i * row_bytes, bytes + s.kept_at[i] * row_bytes, row_bytes);
}

static void copy_tapped(const Stack &s, int64_t layer, int64_t count) {
  const int64_t bytes = s.hidden * s.element_bytes;
  for (int64_t t = 0; t < s.tap_count; t++) {
    if (s.tapped[t] != layer) continue;
    for (int64_t i = 0; i < count; i++)
      memcpy(static_cast<char *>(s.taps) + (i * s.tap_count + t) * bytes,
             static_cast<const char *>(s.residual) + i * bytes, bytes);
  }
}

// Adds the rows of images that belong behind layer `i`, in runs of neighbours; `scratch` holds as many rows as there are tokens.
static void add_deep(const Operations &run, const Stack &s, int64_t i, void *scratch) {
  const int64_t bytes = s.hidden * s.element_bytes;
  const char *rows = static_cast<const char *>(s.deep) + i * s.deep_rows * bytes;
  for (int64_t begin = 0, end; begin < s.deep_rows; begin = end) {
    for (end = begin + 1; end < s.deep_rows && s.deep_at[end] == s.deep_at[end - 1] + 1; end++) {}
    char *states = static_cast<char *>(s.residual) + s.deep_at[begin] * bytes;
    run.norm({rows + begin * bytes, states, nullptr, scratch, end - begin, s.hidden, s.dtype, s.eps, 1.0f});
  }
}

// What layer `i` adds to its states for its input, before its norm.
static bool add_input(const Operations &run, const Stack &s, int64_t i, int64_t count, const void *states, void *out) {
  const InputGate &gate = *s.layers[i].input_gate;
  const char *inputs = static_cast<const char *>(s.inputs) + i * s.input_width * s.element_bytes;
  const Gate gated = {s.wide, s.narrow, count, s.input_width, s.dtype, s.activation, inputs, s.layer_count * s.input_width};
  return stack_timed(s, LINEAR_PART, [&] { return stack_linear(run, s, gate.gate, count, states, s.wide); }) &&
         stack_timed(s, ELEMENTWISE_PART, [&] { return run.gated_activation(gated), true; }) &&
         stack_timed(s, LINEAR_PART, [&] { return stack_linear(run, s, gate.projection, count, s.narrow, out); });
}

// What the mixer of layer `i` returns for the outputs of its linear layers.
static void stack_mix(const Operations &run, const Stack &s, int64_t i, const void *x, const void *steps, void *out) {
  if (!s.tokens) return;
  const StackStates &r = *s.states;
  const Mixer &m = *s.layers[i].mixer->mixer;
  const LayerStates &held = r.layers[i];
  const MixStates inputs_ahead = {r.inputs_ahead, (m.taps - 1) * m.channels}, heads_ahead = {r.heads_ahead, mixer_state(m)};
  stack_timed(s, ELEMENTWISE_PART, [&] {
    run.mix({&m, x, steps, out, s.convolved, r.parts, s.mixed, r.slots, r.starts, r.kept, r.fresh, held.inputs, held.heads,
             inputs_ahead, heads_ahead, r.rows, s.tokens, s.dtype});
    return true;
  });
}

// Broken off only between two layers: what was written to the pages will be written again. In x and y lie by turns what is
// hidden (and y: what attention returns), in `wide` queries with keys and values, or gates with their factors, in `narrow`
// turned queries, or what is left of gates.
static StackEnd run_stack(const Operations &run, const Stack &s) {
  int64_t count = s.tokens;
  void *x = s.x, *y = s.y;
  int64_t i = 0;
  StepAdapters adapters(s.adapters, s.adapter_count, s.layer_count, s.element_bytes, s.dtype);
  auto linear = [&](const StackLinear &l, const void *in, void *out, AdapterPlace place) {
    return stack_timed(s, LINEAR_PART, [&] {
      if (!stack_linear(run, s, l, count, in, out)) return false;
      adapters.add(run, i, place, l, in, out);
      return true;
    });
  };
  auto norm = [&](const void *in, void *residual, const float *weight, void *out, double scale = 1) {
    stack_timed(s, ELEMENTWISE_PART, [&] {
      run.norm({in, residual, weight, out, count, s.hidden, s.dtype, s.eps, static_cast<float>(scale)});
      return true;
    });
  };
  auto swap = [&] {
    void *const other = x;
    x = y;
    y = other;
  };
  // The norm of a projection needs all heads of a token, and adapters add to outputs that are written out.
  const bool fused = s.head_norm != NORM_PROJECTION && !adapters.any();
  const bool gated_at_once = !adapters.any() && s.activation != SQUARED_RELU && s.gate_factor == 1.0f;
  auto weigh = [&](void *rows, int64_t size, int64_t step, float factor, const void *other = nullptr, float other_factor = 0) {
    stack_timed(s, ELEMENTWISE_PART, [&] {
      run.weigh({rows, other, count, size, step, s.dtype, factor, other_factor});
      return true;
    });
  };
  auto plain_linear = [&](const StackLinear &l, const void *in, void *out) {
    return stack_timed(s, LINEAR_PART, [&] { return stack_linear(run, s, l, count, in, out); });
  };
  run.embed({s.embedding, s.token_ids, s.residual, count, s.hidden, s.dtype, s.embedding_dtype, s.embedding_scale});
  norm(s.residual, nullptr, s.input_norm, x);
  copy_tapped(s, 0, count);
  for (; i < s.layer_count; i++) {
    if (s.interrupt && __atomic_load_n(s.interrupt, __ATOMIC_RELAXED)) return StackEnd::BROKEN_OFF;
    const StackLayer &layer = s.layers[i];
    const HeadCounts &h = layer.heads;
    const StackRotation &turn = s.rotations[layer.rope];
    const StackMixer *mixing = layer.mixer;
    const bool last = i + 1 == s.layer_count, attending = attends(layer), gated = layer.gates.packed;
    const int64_t group = s.groups ? s.groups[i] : 0;
    const int64_t inner = attending ? h.heads * h.head_dim : mixer_inner(*mixing->mixer);  // of what `output` reads
    if (!attending) {
      if (!linear(layer.qkv, x, s.wide, ADAPT_QKV) || (gated && !plain_linear(layer.gates, x, s.beside))) return StackEnd::NO_MEMORY;
      stack_mix(run, s, i, s.wide, gated ? s.beside : nullptr, y);
    } else {
      const Rope rope = {s.wide, turn.table, layer.qk_norm, s.slots + group * s.tokens, s.positions, s.narrow, s.pages[i], count, h.heads,
                         layer.shares ? 0 : h.kv_heads, h.head_dim, turn.rotary, s.dtype, s.head_norm, s.eps};
      const auto rotated = [&] { return !is_quantized(layer.qkv) && fused && run.linear_rope(plain(s, layer.qkv, count, x, s.wide), rope); };
      const bool turned = stack_timed(s, LINEAR_PART, rotated);
      if (!turned && !linear(layer.qkv, x, s.wide, ADAPT_QKV)) return StackEnd::NO_MEMORY;
      read_soon(s, layer.output);
      if (!turned) stack_timed(s, ATTENTION_PART, [&] { return run.rope_write_kv(rope), true; });
      if (gated && !plain_linear(layer.gates, x, s.beside)) return StackEnd::NO_MEMORY;
      if (mixing) {
        if (!plain_linear(mixing->first, x, s.wide)) return StackEnd::NO_MEMORY;
        stack_mix(run, s, i, s.wide, nullptr, s.beside);
      }
      if (!stack_timed(s, ATTENTION_PART, [&] {
            return run.attention({s.narrow, s.pages[i], y, s.query_starts, s.contexts, s.tables + group * s.rows * s.width, s.rows, s.width, h.heads,
                                  h.kv_heads, h.head_dim, layer.window, s.dtype, s.scale, s.softcap, layer.sinks, layer.joint ? s.joint : nullptr});
          }))
        return StackEnd::NO_MEMORY;
      if (gated)
        stack_timed(s, ELEMENTWISE_PART, [&] { return run.gate_heads({y, s.beside, count * inner, s.dtype}), true; });
    }
    if (last && s.kept < count) {  // nobody attends to the last layer's output: only wanted positions go on
      keep_rows(s, y, inner * s.element_bytes);
      if (mixing && attending) keep_rows(s, s.beside, mixer_inner(*mixing->mixer) * s.element_bytes);
      keep_rows(s, s.residual, s.hidden * s.element_bytes);
      if (s.inputs) keep_rows(s, s.inputs, s.layer_count * s.input_width * s.element_bytes);
      count = s.kept;
      adapters.keep(s.kept_at, count);
      if (!count) return StackEnd::WHOLE;
    }
    if (!linear(layer.output, y, x, ADAPT_OUTPUT)) return StackEnd::NO_MEMORY;
    if (mixing && attending) {
      if (!plain_linear(mixing->output, s.beside, y)) return StackEnd::NO_MEMORY;
      weigh(x, s.hidden, s.hidden, s.attention_factor, y, s.mixer_factor);
    }
    if (layer.post_attention_norm) {
      norm(x, nullptr, layer.post_attention_norm, y);
      swap();
    }
    const bool feeds = layer.experts || layer.down.packed;
    if (layer.experts) read_soon(s, *layer.router);
    else if (feeds) read_soon(s, layer.gate_up);
    if (feeds) norm(x, s.residual, layer.mlp_norm, y);
    if (layer.experts) {
      const Router &router = *layer.router;
      const auto routed = [&] { return run.route({&router, y, s.chosen, s.weights, count, s.dtype}); };
      const auto computed = [&] {
        return run.experts({layer.experts, y, s.chosen, s.weights, x, count, router_columns(router), s.dtype, s.activation,
                            adapters.experts(i, count)});
      };
      if (!stack_timed(s, LINEAR_PART, routed)) return StackEnd::NO_MEMORY;
      read_ahead(nullptr, 0);  // the router has been read
      if (!stack_timed(s, LINEAR_PART, computed)) return StackEnd::NO_MEMORY;
    } else if (feeds) {
      const Gate gate = {s.wide, s.narrow, count, layer.down.inputs, s.dtype, s.activation};
      const auto gated_up = [&] {
        return gated_at_once && !is_quantized(layer.gate_up) && run.linear_gate(plain(s, layer.gate_up, count, y, s.wide), gate);
      };
      if (!stack_timed(s, LINEAR_PART, gated_up)) {
        if (!linear(layer.gate_up, y, s.wide, ADAPT_GATE_UP)) return StackEnd::NO_MEMORY;
        read_soon(s, layer.down);
        if (s.gate_factor != 1.0f) weigh(s.wide, layer.down.inputs, layer.gate_up.outputs, s.gate_factor);
        stack_timed(s, ELEMENTWISE_PART, [&] { return run.gated_activation(gate), true; });
      }
      if (!linear(layer.down, s.narrow, x, ADAPT_DOWN)) return StackEnd::NO_MEMORY;
      if (s.mlp_factor != 1.0f) weigh(x, s.hidden, s.hidden, s.mlp_factor);
    }
    if (layer.post_mlp_norm) {
      norm(x, nullptr, layer.post_mlp_norm, y);
      swap();
    }
    if (layer.input_gate) {
      norm(x, s.residual, nullptr, y);
      if (!add_input(run, s, i, count, y, x)) return StackEnd::NO_MEMORY;
      norm(x, nullptr, layer.input_gate->norm, y);
      swap();
    }
    if (i < s.deep_layers)
      stack_timed(s, ELEMENTWISE_PART, [&] { return add_deep(run, s, i, y), true; });
    if (last) read_ahead(nullptr, 0);
    else read_soon(s, s.layers[i + 1].qkv);
    norm(x, s.residual, layer.following_norm, last ? s.out : y, layer.scale);
    copy_tapped(s, i + 1, count);
    swap();
  }
  return StackEnd::WHOLE;
}

}  // namespace headrace
