// Low-rank changes of the outputs of a linear layer, for rows of several adapters: see kernels/adapters.py.
//
//   1. x of an adapter's rows, gathered, times down: `rank` words of each row, one part after the other
//   2. each part's words times its up: added to the outputs where they lie
//
// Both are the products of linear.h on the same panels, so a row's result does not depend on the rows beside it.
//
// A rank below half a panel would leave most of the panel empty, and weights are what takes time to read. So `down` is
// folded: the columns for the first piece of the inputs, those for the second, … stand side by side, and a row of x is
// as many shorter rows. Of their products with the panel, each row's own columns are summed.

static const int64_t ADAPTER_ROWS = 96;  // rows of a product; at most BLOCK_ROWS
static_assert(ADAPTER_ROWS <= BLOCK_ROWS, "the sums of a task fit");

struct AdapterTask {
  const AdapterRows *rows;
  const AdapterChange *change;
  int64_t at;     // where the products of these rows with down begin
  int64_t index;  // of the task among those of these rows
};

// The group of rows that the i-th task belongs to; tasks_of(change, count) says how many a group has.
template <class Count>
HEADRACE_INLINE AdapterTask adapter_task(const Adapted &a, int64_t i, Count tasks_of) {
  AdapterTask task = {a.rows, nullptr, 0, i};
  for (;; task.rows++) {
    task.change = task.rows->changes + a.place;
    const int64_t tasks = task.change->down ? tasks_of(*task.change, task.rows->count) : 0;
    if (task.index < tasks) return task;
    task.index -= tasks;
    task.at += task.rows->count * task.change->rank;
  }
}

template <class Count>
HEADRACE_INLINE int64_t adapter_tasks(const Adapted &a, Count tasks_of) {
  int64_t tasks = 0;
  for (int64_t g = 0; g < a.groups; g++) {
    const AdapterChange &change = a.rows[g].changes[a.place];
    if (change.down) tasks += tasks_of(change, a.rows[g].count);
  }
  return tasks;
}

HEADRACE_INLINE int64_t adapter_blocks(int64_t count, int64_t fold = 1) {
  return (count * fold + ADAPTER_ROWS - 1) / ADAPTER_ROWS;
}

HEADRACE_INLINE int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

template <class T, class Kind>
HEADRACE_INLINE void adapter_down(const Adapted &a, const AdapterTask &task, T *gathered) {
  const AdapterChange &change = *task.change;
  const int64_t fold = change.fold, most = ADAPTER_ROWS / fold, panels = panels_of(change.rank);
  const int64_t depth = (sizeof(T) == 4 ? a.inputs : a.inputs / 2) / fold;
  const int64_t count = task.rows->count, panel = task.index % panels, first = task.index / panels * most;
  const int64_t rows = count - first < most ? count - first : most;
  const int64_t *tokens = task.rows->tokens + first;
  const T *x = (const T *)a.x + tokens[0] * a.inputs;
  if (tokens[rows - 1] - tokens[0] != rows - 1) {
    for (int64_t m = 0; m < rows; m++)
      __builtin_memcpy(gathered + m * a.inputs, (const T *)a.x + tokens[m] * a.inputs, a.inputs * sizeof(T));
    x = gathered;
  }
  const int64_t column = panel * PANEL, columns = change.rank - column < PANEL ? change.rank - column : PANEL;
  multiply_block<Kind>((const uint32_t *)x, (const uint32_t *)change.down + panel * depth * PANEL, depth, rows * fold,
                       [&](int64_t row, int64_t some, const float *sums) {
    // Columns of a part stand together; a panel may have the end of one and the beginning of the next.
    int64_t part = 0, begin = 0;
    for (int64_t c = 0, width; c < columns; c += width) {
      while (column + c >= begin + change.parts[part].rank) begin += change.parts[part++].rank;
      const int64_t rank = change.parts[part].rank, within = column + c - begin;
      width = rank - within < columns - c ? rank - within : columns - c;
      T *inner = (T *)a.inner + task.at + count * begin + (first + row / fold) * rank + within;
      for (int64_t m = 0; m < some / fold; m++)
        each_vector(width, [&](int64_t i, int lanes) {
          const float *own = sums + m * fold * PANEL + c + i;
          Floats sum = load_at((const Single *)own, lanes);
          for (int64_t piece = 1; piece < fold; piece++)
            sum += load_at((const Single *)(own + piece * (PANEL + PANEL / fold)), lanes);
          store_at(inner + m * rank + i, sum, lanes);
        });
    }
  });
}

template <class T, class Kind>
HEADRACE_INLINE void adapter_up(const Adapted &a, const AdapterTask &task) {
  const AdapterChange &change = *task.change;
  const int64_t count = task.rows->count, blocks = adapter_blocks(count);
  int64_t panel = task.index / blocks, part = 0, begin = 0;
  while (panel >= panels_of(change.parts[part].outputs)) {
    panel -= panels_of(change.parts[part].outputs);
    begin += change.parts[part++].rank;
  }
  const AdapterPart &p = change.parts[part];
  const int64_t first = task.index % blocks * ADAPTER_ROWS, depth = sizeof(T) == 4 ? p.rank : p.rank / 2;
  const int64_t rows = count - first < ADAPTER_ROWS ? count - first : ADAPTER_ROWS;
  const int64_t column = panel * PANEL, columns = p.outputs - column < PANEL ? p.outputs - column : PANEL;
  const T *inner = (const T *)a.inner + task.at + count * begin + first * p.rank;
  multiply_block<Kind>((const uint32_t *)inner, (const uint32_t *)p.up + panel * depth * PANEL, depth, rows,
                       [&](int64_t row, int64_t some, const float *sums) {
    for (int64_t m = 0; m < some; m++) {
      T *out = (T *)a.out + task.rows->tokens[first + row + m] * a.outputs + p.offset + column;
      each_vector(columns, [&](int64_t i, int lanes) {
        store_at(out + i, load_at(out + i, lanes) + load_at((const Single *)(sums + m * PANEL + i), lanes), lanes);
      });
    }
  });
}

template <class T, class Kind>
static void adapt_of(const Adapted &a) {
  const auto downs = [](const AdapterChange &change, int64_t count) {
    return panels_of(change.rank) * adapter_blocks(count, change.fold);
  };
  const auto ups = [](const AdapterChange &change, int64_t count) {
    int64_t panels = 0;
    for (int64_t part = 0; part < change.part_count; part++) panels += panels_of(change.parts[part].outputs);
    return panels * adapter_blocks(count);
  };
  const int64_t down_tasks = adapter_tasks(a, downs), up_tasks = adapter_tasks(a, ups);
  share(down_tasks, 1, a.threads, [&](int64_t i, int64_t end, int64_t member) {
    T *gathered = (T *)a.gathered + member * ADAPTER_ROWS * a.inputs;
    for (; i < end; i++) adapter_down<T, Kind>(a, adapter_task(a, i, downs), gathered);
  });
  share(up_tasks, 8, a.threads, [&](int64_t i, int64_t end, int64_t) {
    for (; i < end; i++) adapter_up<T, Kind>(a, adapter_task(a, i, ups));
  });
}

static void adapt(const Adapted &a) {
  if (a.dtype == FLOAT32) adapt_of<Single, FloatWords>(a);
  else adapt_of<Brain, PairWords>(a);
}
