// The Python module headrace.compute.kernels._cpu: addresses and sizes in, ranges checked, kernels run.
// It does not use torch; `kernels/cpp.py` keeps the tensors alive and contiguous.

#include "arguments.h"

#include <string.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <vector>

#include "coding.h"
#include "drafts.h"
#include "greedy.h"
#include "mixer_calls.h"
#include "operations.h"
#include "stack.h"
#include "step_arrays.h"
#include "team.h"

namespace headrace {
const bool by_second_cache = [] {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
  const long bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE);
  return bytes > 0 && bytes < 48 << 10;
#else
  return false;
#endif
}();
}  // namespace headrace

namespace {

const int64_t MAX_THREADS = 4096;

PyObject *threads(PyObject *, PyObject *) { return PyLong_FromLong(team_threads()); }

PyObject *set_threads(PyObject *, PyObject *value) {
  const long count = PyLong_AsLong(value);
  if (count == -1 && PyErr_Occurred()) return nullptr;
  if (count < 1 || count > MAX_THREADS)
    return PyErr_Format(PyExc_ValueError, "threads must be 1 to 4096, not %ld", count);
  set_team_threads(static_cast<int>(count));
  Py_RETURN_NONE;
}

PyObject *supported_levels(PyObject *, PyObject *) {
  PyObject *found = PyDict_New();
  if (!found) return nullptr;
  for (int64_t i = 0; i < LEVELS; i++) {
    if (!levels[i].supported()) continue;
    PyObject *index = PyLong_FromLongLong(i);
    if (!index || PyDict_SetItemString(found, levels[i].name, index) < 0) {
      Py_XDECREF(index);
      Py_DECREF(found);
      return nullptr;
    }
    Py_DECREF(index);
  }
  return found;
}

// Short calls keep the GIL: releasing it costs more than it gains, and another thread that takes it holds it for
// milliseconds.
template <class Run>
void run_unlocked_if(bool long_enough, Run run) {
  if (!long_enough) return run();
  PyThreadState *state = PyEval_SaveThread();
  run();
  PyEval_RestoreThread(state);
}

const int64_t LONG_CALL_ELEMENTS = 1 << 16, LONG_CALL_PRODUCTS = 1 << 22;

PyObject *norm(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Norm a;
  a.x = in.pointer<const void>();
  a.residual = in.optional<void>();
  a.weight = in.pointer<const float>();
  a.out = in.pointer<void>();
  a.count = in.size();
  a.size = in.size();
  a.dtype = in.dtype();
  a.eps = in.real();
  const int64_t elements = in.elements({a.count, a.size});
  if (!in.complete(elements)) return nullptr;
  run_unlocked_if(elements > LONG_CALL_ELEMENTS, [&] { operations->norm(a); });
  Py_RETURN_NONE;
}

template <class Integer>
bool all_below(const char *name, const Integer *values, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; i++)
    if (values[i] < 0 || values[i] >= limit) {
      PyErr_Format(PyExc_IndexError, "%s[%lld] is %lld; there are %lld", name, (long long)i, (long long)values[i],
                   (long long)limit);
      return false;
    }
  return true;
}

bool are_heads(int64_t heads, int64_t kv_heads, int64_t head_dim) {
  return kv_heads >= 1 && heads >= kv_heads && heads % kv_heads == 0 && head_dim >= 1 && head_dim <= MAX_HEAD_DIM;
}

void require_heads(Arguments &in, int64_t heads, int64_t kv_heads, int64_t head_dim) {
  in.require(are_heads(heads, kv_heads, head_dim), "heads must be a multiple of those of keys, and have 1 to 512 elements");
}

int activation(Arguments &in, Activation last = CLAMPED_SWIGLU) {
  const int64_t kind = in.integer();
  in.require(kind >= SILU && kind <= last, "no such activation");
  return static_cast<int>(kind);
}

int head_norm(Arguments &in) {
  const int64_t kind = in.integer();
  in.require(kind >= NORM_HEAD && kind <= NORM_VALUES, "no such norm of heads");
  return static_cast<int>(kind);
}

PyObject *rope_write_kv(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Rope a;
  a.qkv = in.pointer<const void>();
  a.rotation = in.pointer<const float>();
  a.norm = in.optional<const float>();
  a.slots = in.pointer<const int64_t>();
  a.positions = nullptr;
  a.pages = in.pages();
  a.queries = in.pointer<void>();
  a.tokens = in.size();
  a.heads = in.size();
  a.kv_heads = in.size();
  a.head_dim = in.size();
  a.rotary = in.size();
  const int64_t num_slots = in.size();
  a.dtype = in.dtype();
  a.head_norm = head_norm(in);
  a.eps = in.real();
  const int64_t elements = in.elements({a.tokens, a.heads + 2 * a.kv_heads, a.head_dim});
  require_heads(in, a.heads, a.kv_heads ? a.kv_heads : 1, a.head_dim);
  in.require(a.rotary <= a.head_dim && a.rotary % 2 == 0, "the rotated part of a head must be even and within it");
  if (!in.complete(elements) || !all_below("slots", a.slots, a.tokens, num_slots)) return nullptr;
  run_unlocked_if(elements > LONG_CALL_ELEMENTS, [&] { operations->rope_write_kv(a); });
  Py_RETURN_NONE;
}

PyObject *gated_activation(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Gate a;
  a.x = in.pointer<const void>();
  a.out = in.pointer<void>();
  a.count = in.size();
  a.size = in.size();
  a.dtype = in.dtype();
  a.activation = activation(in);
  const int64_t elements = in.elements({a.count, a.size});
  if (!in.complete(elements)) return nullptr;
  run_unlocked_if(elements > LONG_CALL_ELEMENTS, [&] { operations->gated_activation(a); });
  Py_RETURN_NONE;
}

// check_rows(query_starts, contexts, tables, rows, width, block_size, window, tokens): everything that attention will follow.
// Returns one more than the largest block that is read; whether the pages have as many is asked at each call.
PyObject *check_rows(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const int32_t *query_starts = in.pointer<const int32_t>();
  const int32_t *contexts = in.pointer<const int32_t>();
  const int32_t *tables = in.pointer<const int32_t>();
  const int64_t rows = in.size(), width = in.size(), block_size = in.size(), window = in.integer();
  const int64_t tokens = in.size();
  in.elements({width, block_size});
  if (!in.complete(rows)) return nullptr;
  int64_t blocks = 0;
  if (rows > 0 && query_starts[0] != 0) return PyErr_Format(PyExc_IndexError, "query_starts[0] must be 0");
  if (block_size < 1 || window < 1)
    return PyErr_Format(PyExc_ValueError, "block_size is %lld and window %lld; both must be at least 1",
                        (long long)block_size, (long long)window);
  for (int64_t row = 0; row < rows; row++) {
    const int64_t length = int64_t{query_starts[row + 1]} - query_starts[row], context = contexts[row];
    if (length < 1 || context < length || context > width * block_size)
      return PyErr_Format(PyExc_IndexError, "row %lld: %lld tokens with a context of %lld do not fit %lld blocks of %lld",
                          (long long)row, (long long)length, (long long)context, (long long)width, (long long)block_size);
    const int64_t first = context - length + 1 - window;
    for (int64_t i = first > 0 ? first / block_size : 0; i <= (context - 1) / block_size; i++) {
      const int32_t block = tables[row * width + i];
      if (block < 0) return PyErr_Format(PyExc_IndexError, "row %lld reads block %d", (long long)row, (int)block);
      if (block >= blocks) blocks = int64_t{block} + 1;
    }
  }
  const int64_t queries = rows > 0 ? query_starts[rows] : 0;
  if (queries != tokens)
    return PyErr_Format(PyExc_IndexError, "the rows have %lld tokens, the batch has %lld", (long long)queries, (long long)tokens);
  return PyLong_FromLongLong(blocks);
}

PyObject *attention(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Attention a;
  a.queries = in.pointer<const void>();
  a.pages = in.pages();
  a.out = in.pointer<void>();
  a.sinks = in.optional<const float>();
  a.joint = in.optional<const uint8_t>();
  a.query_starts = in.pointer<const int32_t>();
  a.contexts = in.pointer<const int32_t>();
  a.tables = in.pointer<const int32_t>();
  a.rows = in.size();
  a.width = in.size();
  a.window = in.integer();
  a.heads = in.size();
  a.kv_heads = in.size();
  a.head_dim = in.size();
  a.dtype = in.dtype();
  a.scale = in.real();
  a.softcap = in.real();
  require_heads(in, a.heads, a.kv_heads, a.head_dim);
  in.require(a.window >= 1, "a window must be at least 1");
  if (!in.complete(a.rows)) return nullptr;
  int enough = 0;
  run_unlocked_if(true, [&] { enough = operations->attention(a); });
  if (!enough) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

PyObject *latent(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  LatentAttention a;
  a.query = in.pointer<const void>();
  a.keys = in.pointer<const void>();
  a.values = in.pointer<const void>();
  a.pages = in.pointer<const void>();
  a.out = in.pointer<void>();
  a.query_starts = in.pointer<const int32_t>();
  a.contexts = in.pointer<const int32_t>();
  a.tables = in.pointer<const int32_t>();
  for (int64_t *size : {&a.rows, &a.width, &a.block_size, &a.stride, &a.heads, &a.plain, &a.rank, &a.rotary, &a.value}) *size = in.size();
  a.dtype = in.dtype(BFLOAT16);
  a.scale = in.real();
  const bool pairs = a.dtype == BFLOAT16;
  in.require(a.heads >= 1 && a.plain >= 1 && a.rank >= 1 && a.value >= 1 && !(pairs && (a.plain % 2 || a.rank % 2 || a.rotary % 2)),
             "heads over latents need sizes of at least 1, even ones in bfloat16");
  in.elements({a.heads, a.plain + a.rotary + a.value, a.rank});
  if (!in.complete(a.rows)) return nullptr;
  int enough = 0;
  run_unlocked_if(true, [&] { enough = operations->latent(a); });
  if (!enough) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

// The packed weights of a linear layer whose sizes are read later: address, codes, whether they are narrow.
void read_weights(Arguments &in, Linear &a) {
  a.packed = in.pointer<const void>();
  a.codes = in.optional<const void>();
  a.narrow = in.integer() != 0;
}

// Requires that the weights are those of a linear layer at this level.
void check_weights(Arguments &in, const Operations *operations, const Linear &a) {
  in.require(a.dtype == FLOAT32 || a.dtype == BFLOAT16, "activations are float32 or bfloat16");
  in.require(!a.narrow || a.dtype == FLOAT32, "narrow weights are those of activations in float32");
  const bool pairs = a.narrow || a.dtype == BFLOAT16;
  in.require(!pairs || a.inputs % 2 == 0, "weights are float32, or bfloat16 of an even number of inputs");
  in.require(!a.codes || (pairs && operations && operations->coded_register),
             "coded weights are bfloat16, at a level that has them");
}

PyObject *linear(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Linear a;
  a.x = in.pointer<const void>();
  read_weights(in, a);
  a.bias = in.optional<const void>();
  a.out = in.pointer<void>();
  a.count = in.size();
  a.inputs = in.size();
  a.outputs = in.size();
  a.dtype = in.dtype();
  a.wide = in.integer() != 0;
  check_weights(in, operations, a);
  const int64_t products = in.elements({a.count, a.inputs, a.outputs});
  if (!in.complete(products)) return nullptr;
  run_unlocked_if(products > LONG_CALL_PRODUCTS, [&] { operations->linear(a); });
  Py_RETURN_NONE;
}

// mlp(level, x, gate_up (see read_weights), gate_up_bias, down, down_bias, inner, out, count, hidden, size, dtype, activation): see
// Kernels.mlp. `inner` [count, size] is working memory, of whole panels.
PyObject *mlp(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Linear first, last;
  first.x = in.pointer<const void>();
  read_weights(in, first);
  first.bias = in.optional<const void>();
  read_weights(in, last);
  last.bias = in.optional<const void>();
  void *inner = in.pointer<void>();
  last.x = first.out = inner;
  last.out = in.pointer<void>();
  first.count = last.count = in.size();
  first.inputs = last.outputs = in.size();
  last.inputs = in.size();
  first.outputs = 2 * last.inputs;
  first.dtype = last.dtype = in.dtype();
  const Gate gate = {nullptr, inner, first.count, last.inputs, first.dtype, activation(in)};
  check_weights(in, operations, first);
  check_weights(in, operations, last);
  in.require(operations && last.inputs > 0 && last.inputs % operations->panel == 0, "gates are not of whole panels");
  const int64_t products = in.elements({first.count, first.inputs, first.outputs});
  if (!in.complete(products)) return nullptr;
  run_unlocked_if(products > LONG_CALL_PRODUCTS, [&] {
    operations->linear_gate(first, gate);
    operations->linear(last);
  });
  Py_RETURN_NONE;
}

PyObject *quantized_linear(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Quantized a;
  a.x = in.pointer<const void>();
  a.packed = in.pointer<const void>();
  a.scales = in.pointer<const float>();
  a.offsets = in.optional<const uint8_t>();
  a.minima = in.optional<const float>();
  a.order = in.optional<const int64_t>();
  a.bias = in.optional<const void>();
  a.out = in.pointer<void>();
  a.count = in.size();
  a.inputs = in.size();
  a.outputs = in.size();
  a.group_size = in.size();
  a.planes = in.size();
  a.dtype = in.dtype();
  a.bits = static_cast<int>(in.integer());
  a.wide = in.integer() != 0;
  in.require(a.bits == 4 || a.bits == 8 || a.bits == FP4 || a.bits == MXFP4, "quantized weights have 4 or 8 bits");
  in.require(a.planes >= 1 && a.planes <= 3, "activations have 1 to 3 planes");
  in.require(a.group_size >= 1 && a.inputs % a.group_size == 0, "groups must divide the inputs");
  const int64_t products = in.elements({a.count, a.inputs, a.outputs});
  if (!in.complete(products)) return nullptr;
  int enough = 0;
  run_unlocked_if(products > LONG_CALL_PRODUCTS, [&] { enough = operations->quantized_linear(a); });
  if (!enough) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

// A router's words are checked where they are made (kernels/native_experts.py); here, that they are those of one.
bool is_router(const Router &r) {
  return r.packed && r.experts >= 1 && r.experts <= MAX_EXPERTS && r.chosen >= 1 && r.chosen <= r.experts && r.groups >= 1 &&
         r.experts % r.groups == 0 && r.kept_groups >= 1 && r.kept_groups <= r.groups &&
         r.chosen <= r.kept_groups * (r.experts / r.groups);
}

// route(level, router, x, indices, weights, count, dtype): see Kernels.route.
PyObject *route(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Route a;
  a.router = in.pointer<const Router>();
  a.x = in.pointer<const void>();
  a.indices = in.pointer<int64_t>();
  a.weights = in.pointer<float>();
  a.count = in.size();
  a.dtype = in.dtype();
  if (!in.complete(a.count)) return nullptr;
  if (a.count && !is_router(*a.router)) return PyErr_Format(PyExc_ValueError, "these are not the words of a router");
  int enough = 0;
  run_unlocked_if(true, [&] { enough = operations->route(a); });
  if (!enough) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

// experts(level, set, x, indices, weights, out, count, columns, dtype, activation): see Kernels.experts.
PyObject *experts(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Experts a;
  a.set = in.pointer<const ExpertSet>();
  a.x = in.pointer<const void>();
  a.indices = in.pointer<const int64_t>();
  a.weights = in.pointer<const float>();
  a.out = in.pointer<void>();
  a.count = in.size();
  a.columns = in.size();
  a.dtype = in.dtype();
  a.activation = activation(in, SQUARED_RELU);
  const int64_t rows = in.elements({a.count, a.columns});
  if (!in.complete(a.count)) return nullptr;
  for (int64_t i = 0; i < rows; i++)
    if (a.indices[i] < 0)
      return PyErr_Format(PyExc_IndexError, "indices[%lld] is %lld", (long long)i, (long long)a.indices[i]);
  int enough = 0;
  run_unlocked_if(true, [&] { enough = operations->experts(a); });
  if (!enough) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

// What the arrays of a stack must stay within, and where its pages are: PAGE_WORDS words to a layer, in the order of
// Arguments::pages.
struct StackBounds {
  const int64_t *pages;
  int64_t vocab, turns, num_slots;
};

// First what changes from step to step, then what stays for as long as the arrays of a batch do.
void read_stack(Arguments &in, Stack &a, StackBounds &bounds) {
  a.residual = in.pointer<void>();
  a.x = in.pointer<void>();
  a.y = in.pointer<void>();
  a.wide = in.pointer<void>();
  a.narrow = in.pointer<void>();
  a.chosen = in.optional<int64_t>();
  a.weights = in.optional<float>();
  a.beside = in.pointer<void>();
  a.convolved = in.pointer<float>();
  a.mixed = in.pointer<float>();
  a.out = in.optional<void>();
  a.seconds = in.optional<double>();
  a.interrupt = in.optional<const uint8_t>();
  a.taps = in.optional<void>();
  a.tapped = in.optional<const int64_t>();
  a.tap_count = in.size();
  a.inputs = in.optional<void>();
  a.input_width = in.size();
  a.adapters = in.optional<const AdapterRows>();
  a.adapter_count = in.size();
  a.deep = in.optional<const void>();
  a.deep_layers = in.size();
  a.deep_at = in.optional<const int64_t>();
  a.deep_rows = in.size();
  a.joint = in.optional<const uint8_t>();
  a.states = in.optional<const StackStates>();
  a.embedding = in.pointer<const void>();
  a.layers = in.pointer<const StackLayer>();
  bounds.pages = in.pointer<const int64_t>();
  a.rotations = in.pointer<const StackRotation>();
  a.input_norm = in.optional<const float>();
  a.layer_count = in.size();
  a.token_ids = in.pointer<const int32_t>();
  a.query_starts = in.pointer<const int32_t>();
  a.contexts = in.pointer<const int32_t>();
  a.tables = in.pointer<const int32_t>();
  a.positions = in.pointer<const int64_t>();
  a.slots = in.pointer<const int64_t>();
  a.kept_at = in.optional<const int64_t>();
  a.rows = in.size();
  a.width = in.size();
  a.tokens = in.size();
  a.kept = in.size();
  bounds.vocab = in.size();
  bounds.turns = in.size();
  bounds.num_slots = in.size();
  a.groups = in.optional<const int64_t>();
  a.group_count = in.size();
  a.hidden = in.size();
  a.element_bytes = in.size();
  a.dtype = in.dtype();
  a.activation = activation(in, SQUARED_RELU);
  a.head_norm = head_norm(in);
  a.eps = in.real();
  a.scale = in.real();
  a.softcap = in.real();
  a.embedding_dtype = in.dtype();
  a.embedding_scale = in.real();
  for (float *factor : {&a.attention_factor, &a.mixer_factor, &a.gate_factor, &a.mlp_factor}) *factor = in.real();
  in.require(a.embedding_dtype == a.dtype || (a.dtype == FLOAT32 && a.embedding_dtype == BFLOAT16),
             "an embedding has the type of activations, or bfloat16 for float32");
  in.require(a.group_count >= 1, "a stack has one group of layers at least");
  in.require(!a.kept || (a.out && a.kept_at), "the address of wanted positions or of their results is null");
  in.require(!a.adapter_count || (a.adapters && a.dtype <= BFLOAT16), "adapters need rows, and float32 or bfloat16");
  in.require(!a.deep_layers || (a.deep && a.deep_at && a.deep_layers < a.layer_count), "states of images need places, and a layer behind them");
  in.require(!a.tap_count || (a.taps && a.tapped), "the address of tapped layers or of their states is null");
}

// Fails with a Python exception unless mixers have states, and the step's rows fit them.
bool states_fit(const Stack &a) {
  bool mixed = false;
  for (int64_t i = 0; i < a.layer_count; i++) {
    const StackMixer *mixing = a.layers[i].mixer;
    if (!mixing) continue;
    mixed = true;
    const bool heads = mixing->mixer && mixing->mixer->kind != SHORT_CONVOLUTION;
    if (!mixing->mixer || !is_mixer(*mixing->mixer) || !a.states || !a.states->layers[i].inputs.first ||
        (heads && !a.states->layers[i].heads.first) || (a.states->aheads && heads && !a.states->heads_ahead)) {
      PyErr_Format(PyExc_ValueError, "layer %lld has no words of a mixer, or no states", (long long)i);
      return false;
    }
  }
  if (!mixed) return true;
  const StackStates &r = *a.states;
  return mixed_rows_fit(r.rows, a.tokens, r.slots, r.starts, r.kept, r.slot_count, r.aheads);
}

// Fails with a Python exception where what the arrays hold is out of bounds: kernels/native_calls.py has checked the rest.
bool stack_fits(const Stack &a, const StackBounds &bounds) {
  for (int64_t i = 0; a.tokens && i < a.layer_count; i++) {
    const HeadCounts &h = a.layers[i].heads;
    if (a.groups && (a.groups[i] < 0 || a.groups[i] >= a.group_count)) {
      PyErr_Format(PyExc_IndexError, "layer %lld is in group %lld of %lld", (long long)i, (long long)a.groups[i], (long long)a.group_count);
      return false;
    }
    if (!are_heads(h.heads, h.kv_heads, h.head_dim) || (a.layers[i].input_gate && !a.inputs)) {
      PyErr_Format(PyExc_ValueError, "layer %lld has no heads, or no input for its gate", (long long)i);
      return false;
    }
  }
  if (!all_below("slots", a.slots, a.tokens * a.group_count, bounds.num_slots) ||
      !all_below("tokens", a.token_ids, a.tokens, bounds.vocab) ||
      !all_below("positions", a.positions, a.tokens, bounds.turns))
    return false;
  if (a.tokens && !states_fit(a)) return false;
  if (a.deep_layers && !all_below("places of images", a.deep_at, a.deep_rows, a.tokens)) return false;
  for (int64_t i = 0; i < a.kept; i++)
    if (a.kept_at[i] < 0 || a.kept_at[i] >= a.tokens || (i && a.kept_at[i] <= a.kept_at[i - 1])) {
      PyErr_Format(PyExc_IndexError, "logits_indices must ascend within %lld tokens", (long long)a.tokens);
      return false;
    }
  for (int64_t g = 0; g < a.adapter_count; g++)
    for (int64_t i = 0; i < a.adapters[g].count; i++) {
      const int64_t *tokens = a.adapters[g].tokens;
      if (tokens[i] < 0 || tokens[i] >= a.tokens || (i && tokens[i] <= tokens[i - 1])) {
        PyErr_Format(PyExc_IndexError, "the tokens of an adapter must ascend within %lld", (long long)a.tokens);
        return false;
      }
    }
  for (int64_t i = 0; i < a.tap_count; i++)
    if (a.tapped[i] < 0 || a.tapped[i] > a.layer_count || (a.tapped[i] == a.layer_count && a.kept < a.tokens)) {
      PyErr_Format(PyExc_IndexError, "hidden states before layer %lld of %lld, with %lld of %lld tokens wanted",
                   (long long)a.tapped[i], (long long)a.layer_count, (long long)a.kept, (long long)a.tokens);
      return false;
    }
  return true;
}

std::vector<Pages> stack_pages(const Stack &a, const StackBounds &bounds) {
  std::vector<Pages> layers;
  for (int64_t i = 0; i < a.layer_count; i++) layers.push_back(pages_of(bounds.pages + i * PAGE_WORDS));
  return layers;
}

// run_stack: whether it was not interrupted.
PyObject *run_stack(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Stack a;
  StackBounds bounds;
  read_stack(in, a, bounds);
  if (!in.complete(a.tokens) || !stack_fits(a, bounds)) return nullptr;
  const std::vector<Pages> layers = stack_pages(a, bounds);
  a.pages = layers.data();
  StackEnd end = StackEnd::NO_MEMORY;
  run_unlocked_if(true, [&] { end = run_stack(*operations, a); });
  if (end == StackEnd::NO_MEMORY) return PyErr_NoMemory();
  return PyBool_FromLong(end == StackEnd::WHOLE);
}

// Whether each kept token is the last of its row, and the row's blocks and rotations reach to the end of its draft.
bool drafts_fit(const Drafts &d, const StackBounds &bounds) {
  const Stack &s = d.first;
  for (int64_t i = 0, row = 0; i < s.kept; i++, row++) {
    while (row < s.rows && s.query_starts[row + 1] <= s.kept_at[i]) row++;
    bool fits = row < s.rows && s.kept_at[i] == s.query_starts[row + 1] - 1 && d.most[i] >= 1 && d.most[i] <= d.longest;
    const int64_t reached = fits ? s.contexts[row] + d.most[i] - 1 : 0;
    fits = fits && reached <= bounds.turns && reached <= s.width * d.block_size;
    for (int64_t page = 0; fits && page * d.block_size < reached; page++) {
      const int64_t block = s.tables[row * s.width + page];
      fits = block >= 0 && (block + 1) * d.block_size <= bounds.num_slots;
    }
    if (!fits) {
      PyErr_Format(PyExc_IndexError, "the draft of row %lld does not fit its blocks, or is none", (long long)row);
      return false;
    }
  }
  return true;
}

// drafts: the arguments of run_stack, then those of Drafts. See kernels/native_drafts.py.
PyObject *drafts(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Drafts d;
  StackBounds bounds;
  read_stack(in, d.first, bounds);
  int64_t words, most, tokens, probabilities, counts, computed;
  const int64_t *head = in.array<const int64_t>(words);
  d.most = in.array<const int64_t>(most);
  d.logits = in.optional<float>();
  d.tokens = in.array<int64_t>(tokens);
  d.probabilities = in.array<float>(probabilities);
  d.counts = in.array<int64_t>(counts);
  d.computed = in.array<int64_t>(computed);
  d.longest = in.size();
  d.block_size = in.size();
  d.least = in.real();
  in.require(!d.first.groups && !d.first.states, "no drafts are computed with groups of window layers, nor with recurrent states");
  in.require(!d.first.kept || (d.logits && d.block_size >= 1), "drafts need room for logits, and blocks of a size");
  if (!in.complete(d.first.tokens) || !stack_fits(d.first, bounds)) return nullptr;
  const int64_t kept = d.first.kept, all = kept * d.longest;
  if (words * sizeof *head != sizeof d.head || most != kept || counts != kept || computed != kept || tokens != all ||
      probabilities != all)
    return PyErr_Format(PyExc_ValueError, "arrays of drafts do not fit %lld rows of %lld", (long long)kept,
                        (long long)d.longest);
  if (!drafts_fit(d, bounds)) return nullptr;
  memcpy(&d.head, head, sizeof d.head);
  const std::vector<Pages> layers = stack_pages(d.first, bounds);
  d.first.pages = layers.data();
  StackEnd end = StackEnd::NO_MEMORY;
  run_unlocked_if(true, [&] { end = run_drafts(*operations, d); });
  if (end == StackEnd::NO_MEMORY) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

// likeliest(level, logits, tokens, rows, size, dtype): see Operations::guess; tokens int64 [rows].
PyObject *likeliest(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Guess a = {};
  a.logits = in.pointer<const void>();
  a.tokens = in.pointer<int64_t>();
  a.count = in.size();
  a.size = in.size();
  a.dtype = in.dtype();
  if (!in.complete(in.elements({a.count, a.size}))) return nullptr;
  int enough = 0;
  run_unlocked_if(a.count * a.size > LONG_CALL_ELEMENTS, [&] { enough = operations->guess(a); });
  if (!enough) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

// likeliest_outputs(level, x, weights (see read_weights), tokens, count, inputs, outputs, dtype): see Operations; tokens int64 [count].
PyObject *likeliest_outputs(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Linear a = {};
  a.x = in.pointer<const void>();
  read_weights(in, a);
  int64_t *tokens = in.pointer<int64_t>();
  a.count = in.size();
  a.inputs = in.size();
  a.outputs = in.size();
  a.dtype = in.dtype();
  check_weights(in, operations, a);
  const int64_t products = in.elements({a.count, a.inputs, a.outputs});
  if (!in.complete(products)) return nullptr;
  int enough = 0;
  run_unlocked_if(products > LONG_CALL_PRODUCTS, [&] { enough = operations->likeliest_outputs(a, tokens); });
  if (!enough) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

// The weights of a head (see read_weights) and its copy: values, scales, errors, norms, all 0 where there is no copy.
void read_head(Arguments &in, Screen &a) {
  read_weights(in, a.weights);
  a.copy.packed = in.optional<const void>();
  a.copy.scales = in.optional<const float>();
  a.errors = in.optional<const float>();
  a.norms = in.optional<const float>();
  a.copy.planes = 1;
  a.copy.bits = 8;
  const bool copied = a.copy.packed && a.copy.scales && a.errors && a.norms;
  in.require(copied || !(a.copy.packed || a.copy.scales || a.errors || a.norms), "the copy of a head has four addresses");
}

// The sizes of a head with the type of its weights, which is that of what it is multiplied with.
void size_head(Arguments &in, const Operations *operations, Screen &a, int64_t inputs, int64_t outputs, int dtype) {
  a.weights.inputs = a.copy.inputs = a.copy.group_size = inputs;
  a.weights.outputs = a.copy.outputs = outputs;
  a.weights.dtype = a.copy.dtype = dtype;
  check_weights(in, operations, a.weights);
  in.require(!a.weights.codes || !a.errors, "a head that has a copy is not coded");
}

// screen(level, x, head and its copy (see read_head), tokens, count, inputs, outputs, dtype): see Operations; tokens int64
// [count]. How many groups of outputs were computed, or SCREEN_GAVE_UP.
PyObject *screen(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Screen a = {};
  a.weights.x = a.copy.x = in.pointer<const void>();
  read_head(in, a);
  int64_t *tokens = in.pointer<int64_t>();
  a.weights.count = a.copy.count = in.size();
  const int64_t inputs = in.size(), outputs = in.size();
  size_head(in, operations, a, inputs, outputs, in.dtype());
  in.require(a.errors, "a head without a copy has no screen");
  const int64_t products = in.elements({a.weights.count, inputs, outputs});
  if (!in.complete(products)) return nullptr;
  int64_t groups = SCREEN_NO_MEMORY;
  run_unlocked_if(products > LONG_CALL_PRODUCTS, [&] { groups = operations->screen(a, tokens); });
  if (groups == SCREEN_NO_MEMORY) return PyErr_NoMemory();
  return PyLong_FromLongLong(groups);
}

// greedy(the arguments of run_stack, packed, values, scales, errors, norms, outputs, tokens): the stack, then `likeliest_outputs`
// or, with a copy, `screen` of the head on what it returns; tokens int64 [kept]. None if it was interrupted.
PyObject *greedy(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Greedy g = {};
  StackBounds bounds;
  read_stack(in, g.stack, bounds);
  read_head(in, g.head);
  const int64_t outputs = in.size();
  int64_t drawn;
  g.tokens = in.array<int64_t>(drawn);
  size_head(in, operations, g.head, g.stack.hidden, outputs, g.stack.dtype);
  in.elements({g.stack.kept, g.stack.hidden, outputs});
  if (!in.complete(g.stack.tokens) || !stack_fits(g.stack, bounds)) return nullptr;
  if (drawn != g.stack.kept) return PyErr_Format(PyExc_ValueError, "%lld tokens for %lld rows", (long long)drawn, (long long)g.stack.kept);
  const std::vector<Pages> layers = stack_pages(g.stack, bounds);
  g.stack.pages = layers.data();
  StackEnd end = StackEnd::NO_MEMORY;
  int64_t groups = SCREEN_GAVE_UP;
  run_unlocked_if(true, [&] { end = run_greedy(*operations, g, groups); });
  if (end == StackEnd::NO_MEMORY) return PyErr_NoMemory();
  if (end == StackEnd::BROKEN_OFF) Py_RETURN_NONE;
  return PyLong_FromLongLong(groups);
}

// A row of `size` tokens with `never` in place of those whose bit in `words` is 0. Most of a grammar's words are all zeros,
// and after an opening quote nearly all are all ones: both are done 32 tokens at a time.
template <class T>
void restrict_row(const T *in, T *out, const uint32_t *words, int64_t size, T never) {
  const int64_t BITS = 32;
  for (int64_t begin = 0; begin < size; begin += BITS) {
    const uint32_t word = words[begin / BITS];
    const int64_t count = begin + BITS < size ? BITS : size - begin;
    if (word == 0) {
      std::fill_n(out + begin, count, never);
    } else if (word == ~uint32_t{0}) {
      std::copy_n(in + begin, count, out + begin);
    } else {
      for (int64_t i = 0; i < count; i++) {
        const T keep = static_cast<T>(0) - static_cast<T>((word >> i) & 1);
        out[begin + i] = static_cast<T>((in[begin + i] & keep) | (never & static_cast<T>(~keep)));
      }
    }
  }
}

// permit(logits, out, lines, words, rows, size, itemsize, never): each row as it is, where `lines` says -1, or
// `restrict_row` of it with the row of `words` that `lines` names. `never` are the bits of minus infinity.
PyObject *permit(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const char *logits = in.pointer<const char>();
  char *out = in.pointer<char>();
  const int64_t *lines = in.pointer<const int64_t>();
  const uint32_t *words = in.pointer<const uint32_t>();
  const int64_t rows = in.size(), size = in.size(), itemsize = in.integer(), never = in.integer();
  in.require(itemsize == 2 || itemsize == 4, "logits have 2 or 4 bytes");
  if (!in.complete(in.elements({rows, size}))) return nullptr;
  const int64_t width = (size + 31) / 32, bytes = size * itemsize;
  const bool large = rows * size > LONG_CALL_ELEMENTS;
  run_unlocked_if(large, [&] {
    share(rows, 1, large ? team_threads() : 1, [&](int64_t row, int64_t end, int64_t) {
      for (; row < end; row++) {
        const char *from = logits + row * bytes;
        char *to = out + row * bytes;
        if (lines[row] < 0) {
          std::copy_n(from, bytes, to);
        } else if (itemsize == 2) {
          restrict_row(reinterpret_cast<const uint16_t *>(from), reinterpret_cast<uint16_t *>(to),
                       words + lines[row] * width, size, static_cast<uint16_t>(never));
        } else {
          restrict_row(reinterpret_cast<const uint32_t *>(from), reinterpret_cast<uint32_t *>(to),
                       words + lines[row] * width, size, static_cast<uint32_t>(never));
        }
      }
    });
  });
  Py_RETURN_NONE;
}

PyObject *choose(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Choice a;
  a.logits = in.pointer<const void>();
  a.temperature = in.pointer<const double>();
  a.min_p = in.pointer<const double>();
  a.top_k = in.pointer<const int64_t>();
  a.top_p = in.pointer<const double>();
  a.uniform = in.pointer<const double>();
  a.tokens = in.pointer<int64_t>();
  a.count = in.size();
  a.size = in.size();
  a.dtype = in.dtype();
  if (!in.complete(in.elements({a.count, a.size}))) return nullptr;
  int enough = 0;
  run_unlocked_if(a.count * a.size > LONG_CALL_ELEMENTS, [&] { enough = operations->choose(a); });
  if (!enough) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

// read(address, words, threads): their sum, modulo 2^64, by `threads` threads of which each reads one stretch after another.
// A measure of what memory gives: nothing but loads, in lots that are large beside a page and small beside the whole.
PyObject *read(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const uint64_t *words = in.pointer<const uint64_t>();
  const int64_t size = in.size(), threads = in.integer(), lot = 1 << 17;
  in.require(threads >= 1 && threads <= MAX_THREADS, "threads must be 1 to 4096");
  if (!in.complete(size)) return nullptr;
  std::atomic<uint64_t> total{0};
  run_unlocked_if(true, [&] {
    share(size, lot, static_cast<int>(threads), [&](int64_t i, int64_t end, int64_t) {
      uint64_t sums[16] = {};
      for (; i + 16 <= end; i += 16)
        for (int j = 0; j < 16; j++) sums[j] += words[i + j];
      for (; i < end; i++) sums[0] += words[i];
      for (int j = 0; j < 16; j++) total += sums[j];
    });
  });
  return PyLong_FromUnsignedLongLong(total);
}

// From memory to memory that does not overlap. What is written is not read soon: it goes past the caches, whose lines would be
// read first.
void copy_far(char *to, const char *from, int64_t bytes) {
#if defined(__x86_64__)
  const int64_t LINE = 64;
  if (reinterpret_cast<uintptr_t>(to) % LINE == 0) {
    const int64_t whole = bytes / LINE * LINE;
    for (int64_t i = 0; i < whole; i += LINE)
      for (int64_t j = i; j < i + LINE; j += 16)
        _mm_stream_si128(reinterpret_cast<__m128i *>(to + j), _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + j)));
    _mm_sfence();
    to += whole, from += whole, bytes -= whole;
  }
#endif
  memcpy(to, from, bytes);
}

// copy(target, source, bytes): see Kernels.copy.
PyObject *copy(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  char *target = in.pointer<char>();
  const char *source = in.pointer<const char>();
  const int64_t bytes = in.size(), lot = 1 << 18;
  if (!in.complete(bytes)) return nullptr;
  run_unlocked_if(bytes > lot, [&] {
    share(bytes, lot, team_threads(), [&](int64_t i, int64_t end, int64_t) { copy_far(target + i, source + i, end - i); });
  });
  Py_RETURN_NONE;
}

// count_exponents(elements, count, counts): adds to counts int64 [256] how many elements of bfloat16 have each exponent.
PyObject *count_exponents(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const uint16_t *elements = in.pointer<const uint16_t>();
  const int64_t size = in.size();
  int64_t *counts = in.pointer<int64_t>();
  if (!in.complete(1)) return nullptr;
  run_unlocked_if(true, [&] { headrace::count_exponents(elements, size, counts); });
  Py_RETURN_NONE;
}

// narrow(elements, count, narrow): see narrow_elements.
PyObject *narrow(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const uint32_t *elements = in.pointer<const uint32_t>();
  const int64_t size = in.size();
  uint16_t *out = in.pointer<uint16_t>();
  if (!in.complete(1)) return nullptr;
  bool exact = false;
  run_unlocked_if(true, [&] { exact = narrow_elements(elements, size, out); });
  return PyBool_FromLong(exact);
}

// code(level, words, panels, depth, outputs, exponents, coded, begins, list, most): see Coding and code_panels.
PyObject *code(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Coding c;
  c.panel = operations ? operations->panel : 1;
  c.register_bytes = operations ? operations->coded_register : 0;
  c.words = in.pointer<const uint16_t>();
  c.panels = in.size();
  c.depth = in.size();
  c.outputs = in.size();
  c.exponents = in.pointer<const uint8_t>();
  c.coded = in.pointer<uint8_t>();
  uint32_t *begins = in.pointer<uint32_t>();
  Uncommon *list = in.optional<Uncommon>();
  const int64_t most = in.size();
  in.require(list || !most, "there is no room for a list");
  in.require(c.register_bytes, "coded weights are at a level that has them");
  in.require(c.outputs <= c.panels * c.panel, "there are more outputs than panels have");
  in.elements({c.panels, c.depth, coded_row_bytes(c.panel)});
  if (!in.complete(1)) return nullptr;
  bool enough = false;
  run_unlocked_if(true, [&] { enough = code_panels(c, begins, list, most); });
  if (!enough) return PyErr_Format(PyExc_ValueError, "more than %lld elements are uncommon", (long long)most);
  Py_RETURN_NONE;
}

// panel(level): columns of a panel of packed weights.
PyObject *panel(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  return in.complete() ? PyLong_FromLongLong(operations->panel) : nullptr;
}

#define FAST(name) {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(name)), METH_FASTCALL, nullptr}

PyMethodDef methods[] = {
    {"supported_levels", supported_levels, METH_NOARGS, nullptr},
    {"threads", threads, METH_NOARGS, nullptr},
    {"set_threads", set_threads, METH_O, nullptr},
    FAST(norm),
    FAST(rope_write_kv),
    FAST(gated_activation),
    FAST(check_rows),
    FAST(attention),
    FAST(latent),
    FAST(linear),
    FAST(mlp),
    FAST(quantized_linear),
    FAST(route),
    FAST(experts),
    FAST(mix_rows),
    FAST(run_stack),
    FAST(drafts),
    FAST(likeliest),
    FAST(likeliest_outputs),
    FAST(screen),
    FAST(greedy),
    FAST(choose),
    FAST(permit),
    FAST(count_exponents),
    FAST(narrow),
    FAST(code),
    FAST(panel),
    FAST(read),
    FAST(copy),
    FAST(columns),
    FAST(pack),
    FAST(store),
    FAST(accept),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cpu", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__cpu(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  PyObject *module = PyModule_Create(&definition);
  if (module && PyModule_AddIntConstant(module, "interface", INTERFACE) < 0) Py_CLEAR(module);
  return module;
}
