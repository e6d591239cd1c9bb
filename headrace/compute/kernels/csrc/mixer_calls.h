// The call of a mixer from Python: addresses and sizes in, ranges checked, its kernel run.

#pragma once
#include "arguments.h"

#include "mixers.h"

namespace {

bool is_mixer(const Mixer &m) {
  const bool of_states = m.kind != SHORT_CONVOLUTION;
  return m.weight && m.kind >= SHORT_CONVOLUTION && m.kind <= STATE_SPACE && m.taps >= 2 && m.taps <= MAX_TAPS &&
         m.channels >= 1 &&
         (!of_states || (m.rate && m.step_bias && m.groups >= 1 && m.heads >= m.groups && m.heads % m.groups == 0 &&
                         m.key_dim >= 1 && m.key_dim <= MAX_STATE && m.value_dim >= 1 && m.value_dim <= MAX_STATE &&
                         m.norm_groups >= 1 && mixer_inner(m) % m.norm_groups == 0 &&
                         m.channels == 2 * m.groups * m.key_dim + m.heads * m.value_dim && (m.skip || m.kind != STATE_SPACE) &&
                         (m.norm || m.kind != GATED_DELTA)));
}

// Fails with a Python exception unless the rows divide the tokens, their slots exist, and there is memory for `aheads` states.
bool mixed_rows_fit(int64_t rows, int64_t tokens, const int64_t *slots, const int64_t *starts, const int64_t *kept, int64_t slot_count,
                    int64_t aheads) {
  int64_t behind = 0;
  bool ordered = starts[0] == 0 && starts[rows] == tokens;
  for (int64_t i = 0; i < rows; i++) {
    ordered = ordered && starts[i + 1] > starts[i];
    ordered = ordered && kept[i] >= 0 && kept[i] <= starts[i + 1] - starts[i];
    behind += kept[i] < starts[i + 1] - starts[i];
    if (slots[i] < 0 || slots[i] >= slot_count) {
      PyErr_Format(PyExc_IndexError, "slots[%lld] is %lld; there are %lld", (long long)i, (long long)slots[i], (long long)slot_count);
      return false;
    }
  }
  if (!ordered) PyErr_Format(PyExc_IndexError, "rows do not divide %lld tokens", (long long)tokens);
  else if (behind > aheads)
    PyErr_Format(PyExc_IndexError, "%lld rows have tokens ahead of their state; there is memory for %lld", (long long)behind,
                 (long long)aheads);
  return ordered && behind <= aheads;
}

// mix_rows(level, mixer, x, steps, out, convolved, heads, parts, slots, starts, kept, fresh, inputs, inputs_stride, states,
// states_stride, inputs_ahead, states_ahead, aheads, rows, tokens, slot_count, dtype): see Kernels.mix. The states ahead are
// adjacent, `aheads` of them.
PyObject *mix_rows(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Mix a;
  a.mixer = in.pointer<const Mixer>();
  a.x = in.pointer<const void>();
  a.steps = in.optional<const void>();
  a.out = in.pointer<void>();
  a.convolved = in.optional<float>();
  a.heads = in.optional<float>();
  a.parts = in.pointer<int64_t>();
  a.slots = in.pointer<const int64_t>();
  a.starts = in.pointer<const int64_t>();
  a.kept = in.pointer<const int64_t>();
  a.fresh = in.pointer<const uint8_t>();
  a.inputs.first = in.pointer<float>();
  a.inputs.stride = in.size();
  a.states.first = in.optional<float>();
  a.states.stride = in.size();
  a.inputs_ahead.first = in.optional<float>();
  a.states_ahead.first = in.optional<float>();
  const int64_t aheads = in.size();
  a.rows = in.size();
  a.tokens = in.size();
  const int64_t slot_count = in.size();
  a.dtype = in.dtype();
  if (!in.complete(a.rows)) return nullptr;
  if (!a.rows) Py_RETURN_NONE;
  if (!is_mixer(*a.mixer)) return PyErr_Format(PyExc_ValueError, "these are not the words of a mixer");
  const bool heads = a.mixer->kind != SHORT_CONVOLUTION;
  if ((heads && (!a.convolved || !a.states.first)) || (a.mixer->kind == GATED_DELTA && !a.steps) ||
      (a.mixer->kind == STATE_SPACE && !a.heads))
    return PyErr_Format(PyExc_ValueError, "the address of states or of working memory is null");
  a.inputs_ahead.stride = (a.mixer->taps - 1) * a.mixer->channels;
  a.states_ahead.stride = mixer_state(*a.mixer);
  if (!mixed_rows_fit(a.rows, a.tokens, a.slots, a.starts, a.kept, slot_count, aheads)) return nullptr;
  if (aheads && (!a.inputs_ahead.first || (heads && !a.states_ahead.first)))
    return PyErr_Format(PyExc_IndexError, "the address of states ahead is null");
  PyThreadState *state = PyEval_SaveThread();
  operations->mix(a);
  PyEval_RestoreThread(state);
  Py_RETURN_NONE;
}

}  // namespace
