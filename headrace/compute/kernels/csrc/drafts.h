// Rows continued with their likeliest tokens, in one call: a pass of the stack and the head for each token, in which only the
// rows go on that are still confident. What kernels/native_drafts.py calls, and drafting/forward.py does pass by pass.

#pragma once
#include <vector>

#include "stack.h"

namespace headrace {

struct Drafts {
  Stack first;             // the first pass: each kept token is the last one of its row, and is continued
  StackLinear head;
  const int64_t *most;     // [kept], tokens to draft at most, 1 or more
  float *logits;           // [kept, outputs of the head]
  int64_t *tokens;         // [kept, longest]
  float *probabilities;    // [kept, longest]
  int64_t *counts;         // [kept], tokens drafted
  int64_t *computed;       // [kept], of these, tokens whose keys and values were computed
  int64_t longest, block_size;
  float least;             // a draft ends where the chance that all of it is right falls below
};

static int64_t row_of(const Stack &s, int64_t kept) {
  int64_t row = 0;
  while (s.query_starts[row + 1] <= s.kept_at[kept]) row++;
  return row;
}

static StackEnd run_drafts(const Operations &run, const Drafts &d) {
  const Stack &first = d.first;
  const int64_t kept = first.kept, width = first.width;
  std::vector<int64_t> going(kept), source(kept), tokens(kept), positions(kept), slots(kept), at(kept);
  std::vector<int32_t> ids(kept), starts(kept + 1), contexts(kept), tables(kept * width);
  std::vector<float> probabilities(kept), survivals(kept, 1.0f);
  for (int64_t i = 0; i < kept; i++) {
    source[i] = row_of(first, i);
    going[i] = at[i] = i;
    d.counts[i] = d.computed[i] = 0;
  }
  for (int64_t i = 0; i <= kept; i++) starts[i] = static_cast<int32_t>(i);
  Stack s = first;
  StackEnd end = run_stack(run, s);
  for (int64_t rows = kept; end == StackEnd::WHOLE; end = run_stack(run, s)) {
    if (!stack_linear(run, first, d.head, rows, first.out, d.logits, true)) return StackEnd::NO_MEMORY;
    if (!run.guess({d.logits, tokens.data(), probabilities.data(), rows, d.head.outputs, FLOAT32}))
      return StackEnd::NO_MEMORY;
    int64_t on = 0;
    for (int64_t i = 0; i < rows; i++) {
      const int64_t k = going[i];
      survivals[k] *= probabilities[i];
      if (tokens[i] < 0 || !(survivals[k] >= d.least)) continue;
      d.tokens[k * d.longest + d.counts[k]] = tokens[i];
      d.probabilities[k * d.longest + d.counts[k]] = probabilities[i];
      if (++d.counts[k] == d.most[k]) continue;
      going[on] = k;
      ids[on++] = static_cast<int32_t>(tokens[i]);
    }
    if (!on) return StackEnd::WHOLE;
    for (int64_t i = 0; i < on; i++) {
      const int64_t k = going[i], position = first.contexts[source[k]] + d.computed[k]++;
      const int32_t *table = first.tables + source[k] * width;
      positions[i] = position;
      slots[i] = table[position / d.block_size] * d.block_size + position % d.block_size;
      contexts[i] = static_cast<int32_t>(position + 1);
      memcpy(tables.data() + i * width, table, width * sizeof *table);
    }
    rows = on;
    s.token_ids = ids.data(), s.query_starts = starts.data(), s.contexts = contexts.data(), s.tables = tables.data();
    s.positions = positions.data(), s.slots = slots.data(), s.kept_at = at.data();
    s.rows = s.tokens = s.kept = rows;
  }
  return end;
}

}  // namespace headrace
