// Calls of ops from Python without PyTorch's dispatcher, from torch 2.14 on.
//
// For a small tensor the dispatcher takes longer than the kernel: it parses the arguments against
// the op's schema, boxes them, and unboxes them for the stable ABI. The functions here take their
// arguments by position, and call the function that the dispatcher would call. Dispatch modes and
// the profiler do not see such a call: `Call` in inplace_ops/_ops.py decides when to use them. For
// arguments that only the dispatcher understands, they return NotImplemented: subclasses of Tensor,
// tensors of tracers and transforms, tensors with a lazy negation, other layouts and dtypes.
#pragma once

#include <Python.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <new>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tensors.h"

// Null before torch 2.14: the library is built for the stable ABI of torch 2.11.
extern "C" {
__attribute__((weak)) AOTITorchError torch_tensor_from_pyobject(void* object,
                                                                AtenTensorHandle* tensor);
__attribute__((weak)) AOTITorchError torch_tensor_to_pyobject(AtenTensorHandle tensor, void* type,
                                                              void** object);
}

namespace inplace_ops {

inline bool has_python_calls() { return &torch_tensor_from_pyobject && &torch_tensor_to_pyobject; }

// Thrown when the dispatcher has to take the arguments, also to raise its error.
struct OnlyDispatcher {};

// Python objects that calls compare with, and a method of tensors.
struct PythonNames {
  PyObject *tensor = nullptr, *parameter = nullptr;  // the types torch.Tensor and nn.Parameter
  PyObject* is_neg = nullptr;

  // Returns false with a Python error set if torch lacks one.
  bool load() {
    PyObject* const torch = PyImport_ImportModule("torch");
    PyObject* const nn = torch ? PyObject_GetAttrString(torch, "nn") : nullptr;
    if (nn == nullptr) return false;
    tensor = PyObject_GetAttrString(torch, "Tensor");
    parameter = PyObject_GetAttrString(nn, "Parameter");
    if (tensor == nullptr) return false;
    is_neg = PyObject_GetAttrString(tensor, "is_neg");
    return tensor && parameter && is_neg;
  }
};

__attribute__((visibility("hidden"))) inline PythonNames names;

// Whether a Python expression, which is a new reference or null, is true. Null, an error, is not.
inline bool is_true(PyObject* value) {
  if (value == Py_False || value == Py_True) {  // the usual case
    Py_DECREF(value);
    return value == Py_True;
  }
  const bool result = value != nullptr && PyObject_IsTrue(value) == 1;
  Py_XDECREF(value);
  PyErr_Clear();
  return result;
}

// Whether an object is a tensor, and not of a subclass.
inline bool is_tensor(PyObject* object) {
  const auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return type == names.tensor || type == names.parameter;
}

// Whether ops take tensors of this layout and dtype; uint8 for packed bits.
inline bool has_kernels(const Tensor& tensor) {
  int32_t layout, dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  const int32_t dtypes[] = {aoti_torch_dtype_float64(), aoti_torch_dtype_float32(),
                            aoti_torch_dtype_float16(), aoti_torch_dtype_bfloat16(),
                            aoti_torch_dtype_uint8()};
  return layout == aoti_torch_layout_strided() &&
         std::find(std::begin(dtypes), std::end(dtypes), dtype) != std::end(dtypes);
}

template <class T>
struct Argument;

inline Tensor tensor_of(PyObject* object) {
  if (!is_tensor(object)) throw OnlyDispatcher{};
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(torch_tensor_from_pyobject(object, &handle));
  Tensor tensor(handle);
  if (!has_kernels(tensor)) throw OnlyDispatcher{};
  return tensor;
}

// Whether a tensor's memory has its values. Its size is 0 if it was freed. Its address is an error
// for the tensors of tracers and transforms, and null for empty ones. The shape is an error for
// nested tensors.
inline bool has_values(PyObject* object, const Tensor& tensor) {
  int64_t bytes, *sizes;
  void* data;
  return aoti_torch_get_storage_size(tensor.get(), &bytes) == AOTI_TORCH_SUCCESS && bytes > 0 &&
         aoti_torch_get_data_ptr(tensor.get(), &data) == AOTI_TORCH_SUCCESS && data != nullptr &&
         aoti_torch_get_sizes(tensor.get(), &sizes) == AOTI_TORCH_SUCCESS &&
         !is_true(PyObject_CallFunctionObjArgs(names.is_neg, object, nullptr));
}

template <>
struct Argument<Tensor> {
  static Tensor of(PyObject* object) {
    Tensor tensor = tensor_of(object);
    if (!has_values(object, tensor)) throw OnlyDispatcher{};
    return tensor;
  }
};

inline void throw_if_error() {
  if (!PyErr_Occurred()) return;
  PyErr_Clear();
  throw OnlyDispatcher{};
}

template <>
struct Argument<int64_t> {
  static int64_t of(PyObject* object) {
    const int64_t value = PyLong_AsLongLong(object);
    if (value == -1) throw_if_error();
    return value;
  }
};

template <>
struct Argument<double> {
  static double of(PyObject* object) {
    const double value = PyFloat_AsDouble(object);
    if (value == -1.0) throw_if_error();
    return value;
  }
};

template <>
struct Argument<bool> {
  static bool of(PyObject* object) {
    if (object != Py_True && object != Py_False) throw OnlyDispatcher{};
    return object == Py_True;
  }
};

template <>
struct Argument<std::vector<int64_t>> {
  static std::vector<int64_t> of(PyObject* object) {
    const Py_ssize_t size = PySequence_Size(object);
    throw_if_error();
    std::vector<int64_t> values(size);
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* const item = PySequence_GetItem(object, i);
      throw_if_error();
      values[i] = PyLong_AsLongLong(item);
      Py_DECREF(item);
      throw_if_error();
    }
    return values;
  }
};

template <>
struct Argument<OptionalDtype> {
  static OptionalDtype of(PyObject* object) {
    if (object != Py_None) throw OnlyDispatcher{};
    return std::nullopt;
  }
};

template <class T>
struct Argument<std::optional<T>> {
  static std::optional<T> of(PyObject* object) {
    if (object == Py_None) return std::nullopt;
    return Argument<T>::of(object);
  }
};

// Returns the offset, shape, strides, dtype and device of a tensor as bytes, to compare them with
// those of another one: a single call, where Python needs one for each. None of a subclass, of a
// tensor whose memory was freed, and of one without kernels.
inline PyObject* layout_of(PyObject* /*self*/, PyObject* const* objects, Py_ssize_t count) {
  try {
    if (count != 1) throw OnlyDispatcher{};
    const Tensor tensor = tensor_of(objects[0]);
    int64_t bytes = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
    const int64_t dims = tensor.dim();
    if (bytes == 0 || dims > kMaxDims) throw OnlyDispatcher{};
    int64_t *sizes, *strides;
    int32_t dtype, device_type;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device_type));
    int64_t values[4 + 2 * kMaxDims];
    values[0] = dtype, values[1] = device_type, values[2] = tensor.get_device_index();
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor.get(), &values[3]));
    std::copy(sizes, sizes + dims, values + 4);
    std::copy(strides, strides + dims, values + 4 + dims);
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(values),
                                     (4 + 2 * dims) * sizeof(int64_t));
  } catch (const std::exception&) {
  } catch (const OnlyDispatcher&) {
  }
  Py_INCREF(Py_None);
  return Py_None;
}

inline PyObject* result_of(const Tensor& tensor) {
  void* object;
  TORCH_ERROR_CODE_CHECK(torch_tensor_to_pyobject(tensor.get(), nullptr, &object));
  return static_cast<PyObject*>(object);
}

template <class... Tensors>
PyObject* result_of(const std::tuple<Tensors...>& tensors) {
  PyObject* const result = PyTuple_New(sizeof...(Tensors));
  if (result == nullptr) throw std::bad_alloc();
  try {
    Py_ssize_t i = 0;
    std::apply(
        [&](const auto&... tensor) { (PyTuple_SetItem(result, i++, result_of(tensor)), ...); },
        tensors);
  } catch (...) {
    Py_DECREF(result);
    throw;
  }
  return result;
}

// Releases Python's lock, as the dispatcher does, unless that takes longer than the op.
struct WithoutLock {
  explicit WithoutLock(bool is_short) : state(is_short ? nullptr : PyEval_SaveThread()) {}
  ~WithoutLock() {
    if (state != nullptr) PyEval_RestoreThread(state);
  }
  PyThreadState* const state;
};

constexpr int64_t kShort = 1 << 14;  // elements

inline bool is_short(const Tensor& tensor) {
  return tensor.numel() <= kShort && tensor.get_device_index() < 0;  // on a CPU
}
inline bool is_short(const std::optional<Tensor>& tensor) { return !tensor || is_short(*tensor); }

// The default of a keyword argument. These come last, and Python may leave them out.
template <class T>
PyObject* default_of() {
  if constexpr (std::is_same_v<T, OptionalDtype>) return Py_None;
  if constexpr (std::is_same_v<T, bool>) return Py_False;
  throw OnlyDispatcher{};  // which raises an error: an argument is missing
}

template <auto op, class Result, class... Arguments, size_t... i>
PyObject* call_op(Result (*)(Arguments...), PyObject* const* objects, Py_ssize_t count,
                  std::index_sequence<i...>) {
  if (count > Py_ssize_t(sizeof...(Arguments))) throw OnlyDispatcher{};
  std::tuple<Arguments...> arguments{
      Argument<Arguments>::of(Py_ssize_t(i) < count ? objects[i] : default_of<Arguments>())...};
  const bool is_short_op = is_short(std::get<0>(arguments));
  if constexpr (std::is_void_v<Result>) {
    const WithoutLock without_lock(is_short_op);
    std::apply(op, std::move(arguments));
  } else {
    const Result result = [&] {
      const WithoutLock without_lock(is_short_op);
      return std::apply(op, std::move(arguments));
    }();
    return result_of(result);
  }
  Py_INCREF(Py_None);
  return Py_None;
}

template <class Result, class... Arguments>
constexpr size_t count_arguments(Result (*)(Arguments...)) {
  return sizeof...(Arguments);
}

// Calls the op with the arguments that Python passes.
template <auto op>
PyObject* python_call(PyObject* /*self*/, PyObject* const* objects, Py_ssize_t count) {
  try {
    return call_op<op>(op, objects, count, std::make_index_sequence<count_arguments(op)>{});
  } catch (const OnlyDispatcher&) {
    Py_INCREF(Py_NotImplemented);
    return Py_NotImplemented;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// The functions of this library, by the names of the ops. Hidden, since otherwise the linker shares
// one list among all libraries that are loaded.
__attribute__((visibility("hidden"))) inline std::vector<std::pair<std::string, PyCFunction>>&
python_calls() {
  static std::vector<std::pair<std::string, PyCFunction>> calls;
  return calls;
}

template <auto op>
void add_python_call(const std::string& name) {
  const auto call = &python_call<op>;
  python_calls().emplace_back(name, reinterpret_cast<PyCFunction>(call));
}

// Returns a new dict of these functions for Python, which is empty before torch 2.14; null with a
// Python error set if torch lacks what they need.
inline PyObject* python_calls_dict() {
  PyObject* const calls = PyDict_New();
  if (calls == nullptr || !has_python_calls()) return calls;
  if (!names.load()) {
    Py_DECREF(calls);
    return nullptr;
  }
  for (const auto& [name, function] : python_calls()) {
    auto* const definition = new PyMethodDef{name.c_str(), function, METH_FASTCALL, nullptr};
    PyObject* const call = PyCFunction_New(definition, nullptr);
    PyDict_SetItemString(calls, name.c_str(), call);
    Py_DECREF(call);
  }
  return calls;
}

}  // namespace inplace_ops
