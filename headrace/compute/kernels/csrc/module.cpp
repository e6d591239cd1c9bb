// The Python module headrace.compute.kernels._cpu: addresses and sizes in, ranges checked, kernels run.
// It knows no torch; `kernels/cpp.py` keeps the tensors alive and contiguous.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <vector>

#include "drafts.h"
#include "operations.h"
#include "stack.h"
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

using namespace headrace;

struct Level {
  const char *name;
  const Operations *operations;
  bool (*supported)();
};

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }
bool has_amx() {
  static const bool has = has_avx512_bf16() && amx_granted();
  return has;
}
#endif

const Level levels[] = {
#if defined(__x86_64__)
    {"amx", &amx_operations, has_amx},
    {"avx512_bf16", &avx512_bf16_operations, has_avx512_bf16},
    {"avx512_vnni", &avx512_vnni_operations, has_avx512_vnni},
    {"avx512", &avx512_operations, has_avx512},
    {"avx2", &avx2_operations,
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }},
#endif
    {"generic", &generic_operations, [] { return true; }},
};
const int64_t LEVELS = sizeof levels / sizeof *levels;

PyObject *threads(PyObject *, PyObject *) { return PyLong_FromLong(team_threads()); }

PyObject *set_threads(PyObject *, PyObject *value) {
  const long count = PyLong_AsLong(value);
  if (count == -1 && PyErr_Occurred()) return nullptr;
  if (count < 1 || count > 4096) return PyErr_Format(PyExc_ValueError, "threads must be 1 to 4096, not %ld", count);
  set_team_threads(static_cast<int>(count));
  Py_RETURN_NONE;
}

// keys, values, key_scales, value_scales (0: none), block_size, stride, scale_stride, dtype
const int PAGE_WORDS = 8;

Pages pages_of(const int64_t *words) {
  return {reinterpret_cast<void *>(words[0]), reinterpret_cast<void *>(words[1]), reinterpret_cast<float *>(words[2]),
          reinterpret_cast<float *>(words[3]), words[4], words[5], words[6], static_cast<int>(words[7])};
}

// Arguments in order: integers (an address is one), then floats. Fails with a Python exception.
class Arguments {
 public:
  Arguments(PyObject *const *values, Py_ssize_t count) : values_(values), left_(count) {}

  int64_t integer() {
    if (failed_ || !take()) return 0;
    const int64_t value = PyLong_AsLongLong(values_[-1]);
    if (value == -1 && PyErr_Occurred()) failed_ = true;
    return value;
  }

  template <class P>
  P *pointer() {
    return reinterpret_cast<P *>(integer());
  }

  float real() {
    if (failed_ || !take()) return 0;
    const double value = PyFloat_AsDouble(values_[-1]);
    if (value == -1.0 && PyErr_Occurred()) failed_ = true;
    return static_cast<float>(value);
  }

  const Operations *operations() {
    const int64_t level = integer();
    if (!failed_ && (level < 0 || level >= LEVELS || !levels[level].supported())) {
      PyErr_Format(PyExc_ValueError, "level %lld does not exist on this machine", (long long)level);
      failed_ = true;
    }
    return failed_ ? nullptr : levels[level].operations;
  }

  Pages pages() {
    int64_t words[PAGE_WORDS];
    for (int64_t &word : words) word = integer();
    return pages_of(words);
  }

  // The elements of a contiguous array, for as long as these arguments live; null and 0 for None.
  template <class T>
  T *array(int64_t &size) {
    size = 0;
    if (failed_ || !take() || values_[-1] == Py_None) return nullptr;
    Py_buffer &view = views_[view_count_];
    failed_ = PyObject_GetBuffer(values_[-1], &view, std::is_const<T>::value ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0;
    if (failed_) return nullptr;
    view_count_++;
    if (view.itemsize != sizeof(T)) {
      PyErr_Format(PyExc_TypeError, "an array has elements of %zd bytes, not %zd", view.itemsize, sizeof(T));
      failed_ = true;
    }
    size = view.len / view.itemsize;
    return static_cast<T *>(view.buf);
  }

  PyObject *tuple() {
    if (failed_ || !take()) return nullptr;
    if (PyTuple_Check(values_[-1])) return values_[-1];
    PyErr_SetString(PyExc_TypeError, "rows must be a tuple of tuples");
    failed_ = true;
    return nullptr;
  }

  ~Arguments() {
    while (view_count_) PyBuffer_Release(&views_[--view_count_]);
  }

  bool complete() {
    if (!failed_ && left_) {
      PyErr_SetString(PyExc_TypeError, "too many arguments");
      failed_ = true;
    }
    return !failed_;
  }

 private:
  bool take() {
    if (!left_) {
      PyErr_SetString(PyExc_TypeError, "too few arguments");
      failed_ = true;
      return false;
    }
    left_--;
    values_++;
    return true;
  }

  PyObject *const *values_;
  Py_ssize_t left_;
  bool failed_ = false;
  Py_buffer views_[8];
  int view_count_ = 0;
};

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

// Short calls keep the interpreter's lock: giving it up costs more than it frees, and another thread that takes it
// holds it for milliseconds.
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
  a.residual = in.pointer<void>();
  a.weight = in.pointer<const float>();
  a.out = in.pointer<void>();
  a.count = in.integer();
  a.size = in.integer();
  a.dtype = static_cast<int>(in.integer());
  a.eps = in.real();
  if (!in.complete()) return nullptr;
  run_unlocked_if(a.count * a.size > LONG_CALL_ELEMENTS, [&] { operations->norm(a); });
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

PyObject *rope_write_kv(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Rope a;
  a.qkv = in.pointer<const void>();
  a.rotation = in.pointer<const float>();
  a.norm = in.pointer<const float>();
  a.slots = in.pointer<const int64_t>();
  a.positions = nullptr;
  a.pages = in.pages();
  a.queries = in.pointer<void>();
  a.tokens = in.integer();
  a.heads = in.integer();
  a.kv_heads = in.integer();
  a.head_dim = in.integer();
  a.rotary = in.integer();
  const int64_t num_slots = in.integer();
  a.dtype = static_cast<int>(in.integer());
  a.eps = in.real();
  if (!in.complete() || !all_below("slots", a.slots, a.tokens, num_slots)) return nullptr;
  const int64_t elements = a.tokens * (a.heads + 2 * a.kv_heads) * a.head_dim;
  run_unlocked_if(elements > LONG_CALL_ELEMENTS, [&] { operations->rope_write_kv(a); });
  Py_RETURN_NONE;
}

PyObject *gated_activation(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Gate a;
  a.x = in.pointer<const void>();
  a.out = in.pointer<void>();
  a.count = in.integer();
  a.size = in.integer();
  a.dtype = static_cast<int>(in.integer());
  a.gelu = static_cast<int>(in.integer());
  if (!in.complete()) return nullptr;
  run_unlocked_if(a.count * a.size > LONG_CALL_ELEMENTS, [&] { operations->gated_activation(a); });
  Py_RETURN_NONE;
}

// check_rows(query_starts, contexts, tables, rows, width, block_size, window, tokens): everything that attention will follow.
// Returns one more than the largest block that is read; whether the pages have as many is asked at each call.
PyObject *check_rows(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const int32_t *query_starts = in.pointer<const int32_t>();
  const int32_t *contexts = in.pointer<const int32_t>();
  const int32_t *tables = in.pointer<const int32_t>();
  const int64_t rows = in.integer(), width = in.integer(), block_size = in.integer(), window = in.integer();
  const int64_t tokens = in.integer();
  if (!in.complete()) return nullptr;
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
  a.query_starts = in.pointer<const int32_t>();
  a.contexts = in.pointer<const int32_t>();
  a.tables = in.pointer<const int32_t>();
  a.rows = in.integer();
  a.width = in.integer();
  a.window = in.integer();
  a.heads = in.integer();
  a.kv_heads = in.integer();
  a.head_dim = in.integer();
  a.dtype = static_cast<int>(in.integer());
  a.scale = in.real();
  a.softcap = in.real();
  if (!in.complete()) return nullptr;
  int enough = 0;
  run_unlocked_if(true, [&] { enough = operations->attention(a); });
  if (!enough) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

PyObject *linear(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Linear a;
  a.x = in.pointer<const void>();
  a.packed = in.pointer<const void>();
  a.bias = in.pointer<const void>();
  a.out = in.pointer<void>();
  a.count = in.integer();
  a.inputs = in.integer();
  a.outputs = in.integer();
  a.dtype = static_cast<int>(in.integer());
  if (!in.complete()) return nullptr;
  run_unlocked_if(a.count * a.inputs * a.outputs > LONG_CALL_PRODUCTS, [&] { operations->linear(a); });
  Py_RETURN_NONE;
}

PyObject *quantized_linear(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Quantized a;
  a.x = in.pointer<const void>();
  a.packed = in.pointer<const void>();
  a.scales = in.pointer<const float>();
  a.offsets = in.pointer<const float>();
  a.order = in.pointer<const int64_t>();
  a.bias = in.pointer<const void>();
  a.out = in.pointer<void>();
  a.count = in.integer();
  a.inputs = in.integer();
  a.outputs = in.integer();
  a.group_size = in.integer();
  a.planes = in.integer();
  a.dtype = static_cast<int>(in.integer());
  a.bits = static_cast<int>(in.integer());
  if (!in.complete()) return nullptr;
  int enough = 0;
  run_unlocked_if(a.count * a.inputs * a.outputs > LONG_CALL_PRODUCTS, [&] { enough = operations->quantized_linear(a); });
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
  a.out = in.pointer<void>();
  a.seconds = in.pointer<double>();
  a.bell = in.pointer<const uint8_t>();
  a.taps = in.pointer<void>();
  a.tapped = in.pointer<const int64_t>();
  a.tap_count = in.integer();
  a.embedding = in.pointer<const void>();
  a.layers = in.pointer<const StackLayer>();
  bounds.pages = in.pointer<const int64_t>();
  a.rotations = in.pointer<const StackRotation>();
  a.input_norm = in.pointer<const float>();
  a.layer_count = in.integer();
  a.token_ids = in.pointer<const int32_t>();
  a.query_starts = in.pointer<const int32_t>();
  a.contexts = in.pointer<const int32_t>();
  a.tables = in.pointer<const int32_t>();
  a.positions = in.pointer<const int64_t>();
  a.slots = in.pointer<const int64_t>();
  a.kept_at = in.pointer<const int64_t>();
  a.rows = in.integer();
  a.width = in.integer();
  a.tokens = in.integer();
  a.kept = in.integer();
  bounds.vocab = in.integer();
  bounds.turns = in.integer();
  bounds.num_slots = in.integer();
  a.hidden = in.integer();
  a.element_bytes = in.integer();
  a.heads.heads = in.integer();
  a.heads.kv_heads = in.integer();
  a.heads.head_dim = in.integer();
  a.dtype = static_cast<int>(in.integer());
  a.gelu = static_cast<int>(in.integer());
  a.eps = in.real();
  a.scale = in.real();
  a.softcap = in.real();
  a.embedding_scale = in.real();
}

// Fails with a Python exception where what the arrays hold is out of bounds: kernels/native_stack.py has checked the rest.
bool stack_fits(const Stack &a, const StackBounds &bounds) {
  if (!all_below("slots", a.slots, a.tokens, bounds.num_slots) ||
      !all_below("tokens", a.token_ids, a.tokens, bounds.vocab) ||
      !all_below("positions", a.positions, a.tokens, bounds.turns))
    return false;
  for (int64_t i = 0; i < a.kept; i++)
    if (a.kept_at[i] < 0 || a.kept_at[i] >= a.tokens || (i && a.kept_at[i] <= a.kept_at[i - 1])) {
      PyErr_Format(PyExc_IndexError, "logits_indices must ascend within %lld tokens", (long long)a.tokens);
      return false;
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

// run_stack: whether it was not broken off.
PyObject *run_stack(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  Stack a;
  StackBounds bounds;
  read_stack(in, a, bounds);
  if (!in.complete() || !stack_fits(a, bounds)) return nullptr;
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
  d.logits = in.pointer<void>();
  d.tokens = in.array<int64_t>(tokens);
  d.probabilities = in.array<float>(probabilities);
  d.counts = in.array<int64_t>(counts);
  d.computed = in.array<int64_t>(computed);
  d.longest = in.integer();
  d.block_size = in.integer();
  d.least = in.real();
  if (!in.complete() || !stack_fits(d.first, bounds)) return nullptr;
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

// Bits of bfloat16 as an integer that compares as the number does; both zeros are 0.
inline int16_t ordered(int16_t bits) {
  const int16_t turned = bits ^ ((bits >> 15) & 0x7fff);
  return turned + (turned == -1);
}

// The first place of the largest of a row, or NOT_FINITE or NOTHING_ALLOWED (see sampling/draw.py). Only the part that
// holds the largest is looked through number by number.
int64_t likeliest_of(const int16_t *x, int64_t size) {
  if (size < 1) return NOTHING_ALLOWED;
  const int64_t PART = 512;
  const int16_t infinity = 0x7f80, least = ordered(static_cast<int16_t>(0xff80));
  int16_t largest = INT16_MIN, farthest = 0;
  int64_t part = 0;
  for (int64_t begin = 0; begin < size; begin += PART) {
    const int64_t end = begin + PART < size ? begin + PART : size;
    int16_t top = INT16_MIN;
    for (int64_t i = begin; i < end; i++) {
      const int16_t o = ordered(x[i]), far = x[i] & 0x7fff;
      top = o > top ? o : top;
      farthest = far > farthest ? far : farthest;
    }
    if (top > largest) largest = top, part = begin;
  }
  if (farthest > infinity || largest == infinity) return NOT_FINITE;
  if (largest == least) return NOTHING_ALLOWED;
  while (ordered(x[part]) != largest) part++;
  return part;
}

// likeliest(logits, tokens, rows, size): of each row of bfloat16 `likeliest_of`, int64.
PyObject *likeliest(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const int16_t *logits = in.pointer<const int16_t>();
  int64_t *tokens = in.pointer<int64_t>();
  const int64_t rows = in.integer(), size = in.integer();
  if (!in.complete()) return nullptr;
  run_unlocked_if(rows * size > LONG_CALL_ELEMENTS, [&] {
    share(rows, 1, rows * size > LONG_CALL_ELEMENTS ? team_threads() : 1, [&](int64_t row, int64_t end, int64_t) {
      for (; row < end; row++) tokens[row] = likeliest_of(logits + row * size, size);
    });
  });
  Py_RETURN_NONE;
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
  const int64_t rows = in.integer(), size = in.integer(), itemsize = in.integer(), never = in.integer();
  if (!in.complete()) return nullptr;
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
  a.count = in.integer();
  a.size = in.integer();
  a.dtype = static_cast<int>(in.integer());
  if (!in.complete()) return nullptr;
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
  const int64_t size = in.integer(), threads = in.integer(), lot = 1 << 17;
  if (!in.complete()) return nullptr;
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

// panel(level): columns of a panel of packed weights.
PyObject *panel(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const Operations *operations = in.operations();
  return in.complete() ? PyLong_FromLongLong(operations->panel) : nullptr;
}

// The values of a row of a plan (core/plan.py: Row).
struct PlanRow {
  int64_t slot, start, length, samples;
  PyObject *drafts;
};

bool read_row(PyObject *row, PlanRow &r) {
  PyObject *const *fields = PyTuple_Check(row) ? &PyTuple_GET_ITEM(row, 0) : nullptr;
  if (!fields || PyTuple_GET_SIZE(row) != 6 || !PyTuple_Check(fields[5])) {
    PyErr_SetString(PyExc_TypeError, "a row must be a tuple of 6 fields, and its drafts a tuple");
    return false;
  }
  r = {PyLong_AsLongLong(fields[0]), PyLong_AsLongLong(fields[1]), PyLong_AsLongLong(fields[2]),
       PyLong_AsLongLong(fields[4]), fields[5]};
  return !PyErr_Occurred();
}

// columns(words, rows, vocab): `sampling/lines.py: columns_of`. Words int64 get slot, start, length, samples and drafts of
// all rows, one column after the other, then row, slot, position, offset, draft and packed token of all lines. Returns
// their numbers, and whether any row has drafts; where the words are too few, only how many there must be.
PyObject *columns(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  int64_t size;
  int64_t *words = in.array<int64_t>(size);
  PyObject *rows = in.tuple();
  const int64_t vocab = in.integer();
  if (!in.complete()) return nullptr;
  const int64_t row_count = PyTuple_GET_SIZE(rows);
  int64_t lines = 0;
  bool verifies = false;
  PlanRow r;
  for (int64_t i = 0; i < row_count; i++) {
    if (!read_row(PyTuple_GET_ITEM(rows, i), r)) return nullptr;
    const int64_t drafts = PyTuple_GET_SIZE(r.drafts);
    if (r.samples) lines += 1 + drafts;
    verifies = verifies || drafts;
  }
  if (size < 5 * row_count + 6 * lines) return PyLong_FromLongLong(5 * row_count + 6 * lines);
  int64_t *line = words + 5 * row_count, end = 0;
  for (int64_t i = 0; i < row_count; i++) {
    read_row(PyTuple_GET_ITEM(rows, i), r);
    const int64_t drafts = PyTuple_GET_SIZE(r.drafts), column[] = {r.slot, r.start, r.length, r.samples, drafts};
    for (int64_t j = 0; j < 5; j++) words[j * row_count + i] = column[j];
    end += r.length;
    for (int64_t k = 0; r.samples && k <= drafts; k++, line++) {
      int64_t draft = verifies ? NO_DRAFT : 0;
      if (k < drafts) {
        const int64_t token = PyLong_AsLongLong(PyTuple_GET_ITEM(r.drafts, k));
        if (token == -1 && PyErr_Occurred()) return nullptr;
        if (token >= 0 && token < vocab) draft = token;
      }
      const int64_t cells[] = {i, r.slot, r.start + r.length - drafts + k, k, draft, end - 1 - drafts + k};
      for (int64_t j = 0; j < 6; j++) line[j * lines] = cells[j];
    }
  }
  return Py_BuildValue("(LLN)", (long long)row_count, (long long)lines, PyBool_FromLong(verifies));
}

// pack(words, slots, starts, lengths, wanted, tables, width, blocks, tokens, stride, limit, block_size): rows of one token
// sequence and block table each, packed as in `slots.py: Slots.pack`. Tables [.., width] and blocks are by slot, and so are
// tokens [.., stride]. Without slots each row has its own table, all of it; with stride 0 the tokens are packed already.
// Words int64 get positions, slot mapping, wanted, lengths and contexts, then as int32, each from a whole word on:
// query starts, contexts, tokens and tables. Returns their numbers: tokens, wanted, rows, columns of tables and rows of one
// token at the front; where the words are too few, only how many there must be.
PyObject *pack(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  int64_t size, rows, same, table_words, block_count, token_words, wanted_count, none;
  int64_t *words = in.array<int64_t>(size);
  const int64_t *slots = in.array<const int64_t>(none), *starts = in.array<const int64_t>(rows);
  const int64_t *lengths = in.array<const int64_t>(same), *wanted = in.array<const int64_t>(wanted_count);
  const int32_t *tables = in.array<const int32_t>(table_words);
  const int64_t width = in.integer();
  const int64_t *blocks = in.array<const int64_t>(block_count);
  const int32_t *tokens = in.array<const int32_t>(token_words);
  const int64_t stride = in.integer(), limit = in.integer(), block_size = in.integer();
  if (!in.complete()) return nullptr;
  const int64_t table_count = width > 0 ? table_words / width : 0;
  int64_t total = 0, longest = 0, ones = 0;
  for (int64_t i = 0; i < rows; i++) {
    const int64_t slot = slots ? slots[i] : i, end = starts[i] + lengths[i];
    if (same != rows || slot < 0 || slot >= table_count || starts[i] < 0 || lengths[i] < 1 || end > limit ||
        end > (blocks ? blocks[slot] : width) * block_size || (stride && (slot + 1) * stride > token_words)) {
      PyErr_SetString(PyExc_ValueError, "a row exceeds the blocks of its slot or the context");
      return nullptr;
    }
    if (lengths[i] == 1 && ones == i) ones++;
    total += lengths[i];
    longest = end > longest ? end : longest;
  }
  if (!stride && token_words != total)
    return PyErr_Format(PyExc_ValueError, "%lld tokens for rows of %lld", (long long)token_words, (long long)total);
  const int64_t GROUP = 8;  // columns: not another shape after every block
  int64_t columns = ((longest + block_size - 1) / block_size + GROUP - 1) / GROUP * GROUP;
  if (!slots || columns > width) columns = width;
  const auto halves = [](int64_t n) { return (n + 1) / 2; };
  const int64_t needed = 2 * total + wanted_count + 2 * rows + halves(rows + 1) + halves(rows) + halves(total) +
                         halves(rows * columns);
  if (size < needed) return PyLong_FromLongLong(needed);
  int64_t *positions = words, *mapping = positions + total, *at = mapping + total, *counts = at + wanted_count;
  int64_t *contexts = counts + rows;
  int32_t *firsts = reinterpret_cast<int32_t *>(contexts + rows), *ends = firsts + 2 * halves(rows + 1);
  int32_t *ids = ends + 2 * halves(rows), *pages = ids + 2 * halves(total);
  int64_t done = 0;
  std::copy_n(wanted, wanted_count, at);
  for (int64_t i = 0; i < rows; i++) {
    const int64_t slot = slots ? slots[i] : i;
    const int32_t *table = tables + slot * width, *known = stride ? tokens + slot * stride + starts[i] : tokens + done;
    firsts[i] = static_cast<int32_t>(done);
    counts[i] = lengths[i];
    contexts[i] = starts[i] + lengths[i];
    ends[i] = static_cast<int32_t>(contexts[i]);
    std::copy_n(known, lengths[i], ids + done);
    std::copy_n(table, columns, pages + i * columns);
    for (int64_t position = starts[i]; position < contexts[i]; position++, done++) {
      positions[done] = position;
      mapping[done] = int64_t{table[position / block_size]} * block_size + position % block_size;
    }
  }
  firsts[rows] = static_cast<int32_t>(done);
  return Py_BuildValue("(LLLLL)", (long long)total, (long long)wanted_count, (long long)rows, (long long)columns,
                       (long long)ones);
}

// store(tokens, stride, slots, positions, values): `slots.py: Slots.append` to tokens int32 [.., stride] on the host.
PyObject *store(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  int64_t size, rows, same, given;
  int32_t *tokens = in.array<int32_t>(size);
  const int64_t stride = in.integer();
  const int64_t *slots = in.array<const int64_t>(rows), *positions = in.array<const int64_t>(same);
  const int64_t *drawn = in.array<const int64_t>(given);
  if (!in.complete()) return nullptr;
  if (same != rows || given != rows) return PyErr_Format(PyExc_ValueError, "slots, positions and tokens differ in number");
  for (int64_t i = 0; i < rows; i++) {
    if (slots[i] < 0 || slots[i] >= size / stride || positions[i] < 0 || positions[i] >= stride)
      return PyErr_Format(PyExc_IndexError, "slot %lld has no position %lld", (long long)slots[i], (long long)positions[i]);
    tokens[slots[i] * stride + positions[i]] = static_cast<int32_t>(drawn[i] > 0 ? drawn[i] : 0);
  }
  Py_RETURN_NONE;
}

// accept(drawn, drafts, offsets, counting, size): `sampling/lines.py: counting_of`, one byte for each line.
PyObject *accept(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const int64_t *drawn = in.pointer<const int64_t>(), *drafts = in.pointer<const int64_t>();
  const int64_t *offsets = in.pointer<const int64_t>();
  uint8_t *counting = in.pointer<uint8_t>();
  const int64_t size = in.integer();
  if (!in.complete()) return nullptr;
  bool right = true;
  for (int64_t i = 0; i < size; i++) {
    right = right || !offsets[i];
    counting[i] = right && (drawn[i] >= 0 || !offsets[i]);
    right = right && drawn[i] == drafts[i];
  }
  Py_RETURN_NONE;
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
    FAST(linear),
    FAST(quantized_linear),
    FAST(run_stack),
    FAST(drafts),
    FAST(likeliest),
    FAST(choose),
    FAST(permit),
    FAST(panel),
    FAST(read),
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
