// The arguments of a call from Python, and the levels of instructions that calls name.

#pragma once
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000 // one build for Python 3.11 and all later ones
#include <Python.h>

#include <initializer_list>
#include <type_traits>

#include "operations.h"

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

  // A number of elements, or one that is multiplied with such a number.
  int64_t size() {
    const int64_t value = integer();
    if (value < 0 || value > MAX_SIZE) fail("a size of %lld is not from 0 to 2^40", value);
    return value;
  }

  // Where elements are: null only if there are none, which `complete` is told.
  template <class P>
  P *pointer() {
    P *address = optional<P>();
    missing_ = missing_ || !address;
    return address;
  }

  template <class P>
  P *optional() {
    const int64_t value = integer();
    if (value && (value < FIRST_PAGE || value > MAX_ADDRESS)) fail("%lld is not an address", value);
    return reinterpret_cast<P *>(value);
  }

  int dtype(DType last = FLOAT16) {
    const int64_t value = integer();
    if (value < 0 || value > last) fail("dtype %lld does not exist", value);
    return static_cast<int>(value);
  }

  void require(bool holds, const char *message) {
    if (failed_ || holds) return;
    PyErr_SetString(PyExc_ValueError, message);
    failed_ = true;
  }

  // The product of sizes.
  int64_t elements(std::initializer_list<int64_t> sizes) {
    int64_t product = 1;
    for (const int64_t size : sizes)
      if (__builtin_mul_overflow(product, size, &product) || product > MAX_SIZE) {
        require(false, "sizes have a product beyond 2^40");
        return 0;
      }
    return product;
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
    for (int i = 0; i < PAGE_WORDS; i++)
      words[i] = i < 4 ? reinterpret_cast<int64_t>(optional<void>()) : integer();
    missing_ = missing_ || !words[0] || !words[1];
    const Pages pages = pages_of(words);
    require(pages.block_size >= 1 && pages.block_size <= MAX_SIZE && pages.stride >= 1 &&
                pages.stride <= MAX_SIZE && pages.scale_stride >= 0 && pages.scale_stride <= MAX_SIZE &&
                words[7] >= FLOAT32 && words[7] <= INT8 && (words[7] != INT8 || (words[2] && words[3])),
            "pages need a block size, a stride, a dtype, and scales if they are int8");
    return pages;
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
      return nullptr;
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

  // Whether all arguments were there and are right, for a call that reads or writes this many elements.
  bool complete(int64_t elements = 0) {
    require(elements == 0 || !missing_, "the address of elements is null");
    if (!failed_ && left_) {
      PyErr_SetString(PyExc_TypeError, "too many arguments");
      failed_ = true;
    }
    return !failed_;
  }

 private:
  static const int64_t MAX_SIZE = int64_t{1} << 40, MAX_ADDRESS = int64_t{1} << 57, FIRST_PAGE = 4096;

  void fail(const char *message, int64_t value) {
    if (!failed_) PyErr_Format(PyExc_ValueError, message, (long long)value);
    failed_ = true;
  }

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
  bool failed_ = false, missing_ = false;
  Py_buffer views_[8];
  int view_count_ = 0;
};

}  // namespace
