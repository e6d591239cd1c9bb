// The arrays of a step in memory that Python keeps: what step_sampling.py and slots.py define by numpy.

#pragma once
#include <algorithm>

#include "arguments.h"

namespace {

// The values of a row of a plan (core/plan.py: Row).
struct PlanRow {
  int64_t slot, start, length, samples;
  PyObject *drafts;
};

bool read_row(PyObject *row, PlanRow &r) {
  PyObject *drafts = PyTuple_Check(row) && PyTuple_Size(row) == 6 ? PyTuple_GetItem(row, 5) : nullptr;
  if (!drafts || !PyTuple_Check(drafts)) {
    PyErr_SetString(PyExc_TypeError, "a row must be a tuple of 6 fields, and its drafts a tuple");
    return false;
  }
  const auto field = [row](Py_ssize_t i) { return PyLong_AsLongLong(PyTuple_GetItem(row, i)); };
  r = {field(0), field(1), field(2), field(4), drafts};
  return !PyErr_Occurred();
}

// columns(words, rows, vocab): `step_sampling.py: columns_of`. Words int64 get slot, start, length, samples and drafts of
// all rows, one column after the other, then row, slot, position, offset, draft and packed token of all lines. Returns
// their numbers, and whether any row has drafts; where the words are too few, only how many there must be.
PyObject *columns(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  int64_t size;
  int64_t *words = in.array<int64_t>(size);
  PyObject *rows = in.tuple();
  const int64_t vocab = in.integer();
  if (!in.complete()) return nullptr;
  const int64_t row_count = PyTuple_Size(rows);
  int64_t lines = 0;
  bool verifies = false;
  PlanRow r;
  for (int64_t i = 0; i < row_count; i++) {
    if (!read_row(PyTuple_GetItem(rows, i), r)) return nullptr;
    const int64_t drafts = PyTuple_Size(r.drafts);
    if (r.samples) lines += 1 + drafts;
    verifies = verifies || drafts;
  }
  if (size < 5 * row_count + 6 * lines) return PyLong_FromLongLong(5 * row_count + 6 * lines);
  int64_t *line = words + 5 * row_count, end = 0;
  for (int64_t i = 0; i < row_count; i++) {
    read_row(PyTuple_GetItem(rows, i), r);
    const int64_t drafts = PyTuple_Size(r.drafts), column[] = {r.slot, r.start, r.length, r.samples, drafts};
    for (int64_t j = 0; j < 5; j++) words[j * row_count + i] = column[j];
    end += r.length;
    for (int64_t k = 0; r.samples && k <= drafts; k++, line++) {
      int64_t draft = verifies ? NO_DRAFT : 0;
      if (k < drafts) {
        const int64_t token = PyLong_AsLongLong(PyTuple_GetItem(r.drafts, k));
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
  int64_t size, rows, same, table_words, block_count, token_words, wanted_count, slot_count;
  int64_t *words = in.array<int64_t>(size);
  const int64_t *slots = in.array<const int64_t>(slot_count), *starts = in.array<const int64_t>(rows);
  const int64_t *lengths = in.array<const int64_t>(same), *wanted = in.array<const int64_t>(wanted_count);
  const int32_t *tables = in.array<const int32_t>(table_words);
  const int64_t width = in.size();
  const int64_t *blocks = in.array<const int64_t>(block_count);
  const int32_t *tokens = in.array<const int32_t>(token_words);
  const int64_t stride = in.size(), limit = in.size(), block_size = in.size();
  in.require(block_size >= 1 && same == rows && (!slots || slot_count == rows),
             "rows need a block size, and a slot, a start and a length each");
  in.elements({width, block_size});
  if (!in.complete()) return nullptr;
  const int64_t table_count = width > 0 ? table_words / width : 0;
  int64_t total = 0, longest = 0, ones = 0;
  for (int64_t i = 0; i < rows; i++) {
    const int64_t slot = slots ? slots[i] : i;
    const bool placed = slot >= 0 && slot < table_count && (!blocks || slot < block_count) && starts[i] >= 0 &&
                        starts[i] <= limit && lengths[i] >= 1 && lengths[i] <= limit - starts[i];
    const int64_t end = placed ? starts[i] + lengths[i] : 0;
    if (!placed || end > (blocks && blocks[slot] < width ? blocks[slot] : width) * block_size ||
        (stride && (end > stride || slot >= token_words / stride))) {
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
  const int64_t stride = in.size();
  const int64_t *slots = in.array<const int64_t>(rows), *positions = in.array<const int64_t>(same);
  const int64_t *drawn = in.array<const int64_t>(given);
  if (!in.complete()) return nullptr;
  if (same != rows || given != rows) return PyErr_Format(PyExc_ValueError, "slots, positions and tokens differ in number");
  for (int64_t i = 0; i < rows; i++) {
    if (slots[i] < 0 || !stride || slots[i] >= size / stride || positions[i] < 0 || positions[i] >= stride)
      return PyErr_Format(PyExc_IndexError, "slot %lld has no position %lld", (long long)slots[i], (long long)positions[i]);
    tokens[slots[i] * stride + positions[i]] = static_cast<int32_t>(drawn[i] > 0 ? drawn[i] : 0);
  }
  Py_RETURN_NONE;
}

// accept(drawn, drafts, offsets, counting, size): `sampling/choice.py: counting_of`, one byte for each line.
PyObject *accept(PyObject *, PyObject *const *values, Py_ssize_t count) {
  Arguments in(values, count);
  const int64_t *drawn = in.pointer<const int64_t>(), *drafts = in.pointer<const int64_t>();
  const int64_t *offsets = in.pointer<const int64_t>();
  uint8_t *counting = in.pointer<uint8_t>();
  const int64_t size = in.size();
  if (!in.complete(size)) return nullptr;
  bool right = true;
  for (int64_t i = 0; i < size; i++) {
    right = right || !offsets[i];
    counting[i] = right && (drawn[i] >= 0 || !offsets[i]);
    right = right && drawn[i] == drafts[i];
  }
  Py_RETURN_NONE;
}

}  // namespace
