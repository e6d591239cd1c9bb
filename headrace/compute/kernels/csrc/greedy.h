// A step whose rows all take their likeliest tokens: the stack and the head in one call, so that no Python runs between them.
// After a pass of the weights the processor's caches hold nothing of it, and entering it again takes as long as a layer.

#pragma once
#include "stack.h"

namespace headrace {

struct Greedy {
  Stack stack;
  Screen head;      // of its weights and copy, x and count are those of the stack's result; without errors there is no copy
  int64_t *tokens;  // [kept]
};

// `groups`: see Operations::screen; SCREEN_GAVE_UP where there is no copy.
static StackEnd run_greedy(const Operations &run, const Greedy &g, int64_t &groups) {
  const StackEnd end = run_stack(run, g.stack);
  groups = SCREEN_GAVE_UP;
  if (end != StackEnd::WHOLE || !g.stack.kept) return end;
  Screen head = g.head;
  head.weights.x = head.copy.x = g.stack.out;
  head.weights.count = head.copy.count = g.stack.kept;
  if (head.errors) groups = run.screen(head, g.tokens);
  else if (!run.likeliest_outputs(head.weights, g.tokens)) groups = SCREEN_NO_MEMORY;
  return groups == SCREEN_NO_MEMORY ? StackEnd::NO_MEMORY : end;
}

}  // namespace headrace
