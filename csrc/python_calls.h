// Calls of ops from Python without PyTorch's dispatcher, from torch 2.14 on.
//
// For a small tensor the dispatcher takes longer than the kernel: it parses the arguments against
// the op's schema, boxes them, and unboxes them for the stable ABI. The functions here take their
// arguments by position, and call the function that the dispatcher would call. Neither dispatch
// modes nor the profiler see such a call, and a tensor of a tracer or a transform has no memory:
// `Call` in inplace_ops/_ops.py decides when to use them. They return NotImplemented for a subclass
// of Tensor, which may have no memory either, and for a dtype.
#pragma once

#include <Python.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <exception>
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

// Thrown when a Python error is set, and when only the dispatcher takes the arguments.
struct PythonError {};
struct OnlyDispatcher {};

// torch.Tensor and torch.nn.Parameter.
inline PyTypeObject* tensor_type = nullptr;
inline PyTypeObject* parameter_type = nullptr;

template <class T>
struct Argument;

template <>
struct Argument<Tensor> {
  static Tensor of(PyObject* object) {
    if (Py_TYPE(object) != tensor_type && Py_TYPE(object) != parameter_type) throw OnlyDispatcher{};
    AtenTensorHandle tensor;
    TORCH_ERROR_CODE_CHECK(torch_tensor_from_pyobject(object, &tensor));
    return Tensor(tensor);
  }
};

template <>
struct Argument<int64_t> {
  static int64_t of(PyObject* object) {
    const int64_t value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) throw PythonError{};
    return value;
  }
};

template <>
struct Argument<double> {
  static double of(PyObject* object) {
    const double value = PyFloat_AsDouble(object);
    if (value == -1.0 && PyErr_Occurred()) throw PythonError{};
    return value;
  }
};

template <>
struct Argument<bool> {
  static bool of(PyObject* object) { return object == Py_True; }
};

template <>
struct Argument<std::vector<int64_t>> {
  static std::vector<int64_t> of(PyObject* object) {
    const Py_ssize_t size = PySequence_Size(object);
    if (size < 0) throw PythonError{};
    std::vector<int64_t> values(size);
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* const item = PySequence_GetItem(object, i);
      if (item == nullptr) throw PythonError{};
      values[i] = PyLong_AsLongLong(item);
      Py_DECREF(item);
    }
    if (PyErr_Occurred()) throw PythonError{};
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

inline PyObject* result_of(const Tensor& tensor) {
  void* object;
  TORCH_ERROR_CODE_CHECK(torch_tensor_to_pyobject(tensor.get(), nullptr, &object));
  return static_cast<PyObject*>(object);
}

template <class... Tensors>
PyObject* result_of(const std::tuple<Tensors...>& tensors) {
  PyObject* const result = PyTuple_New(sizeof...(Tensors));
  if (result == nullptr) throw PythonError{};
  Py_ssize_t i = 0;
  std::apply([&](const auto&... tensor) { (PyTuple_SetItem(result, i++, result_of(tensor)), ...); },
             tensors);
  return result;
}

// Releases Python's lock, as the dispatcher does.
struct WithoutLock {
  PyThreadState* const state = PyEval_SaveThread();
  ~WithoutLock() { PyEval_RestoreThread(state); }
};

template <auto op, class Result, class... Arguments, size_t... i>
PyObject* call_op(Result (*)(Arguments...), PyObject* const* objects, Py_ssize_t count,
                  std::index_sequence<i...>) {
  if (count != sizeof...(Arguments)) throw OnlyDispatcher{};  // which raises an error
  std::tuple<Arguments...> arguments{Argument<Arguments>::of(objects[i])...};
  if constexpr (std::is_void_v<Result>) {
    const WithoutLock without_lock;
    std::apply(op, std::move(arguments));
  } else {
    const Result result = [&] {
      const WithoutLock without_lock;
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
  } catch (const PythonError&) {
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// The functions of this library, by the names of the ops.
inline std::vector<std::pair<std::string, PyCFunction>>& python_calls() {
  static std::vector<std::pair<std::string, PyCFunction>> calls;
  return calls;
}

template <auto op>
void add_python_call(const std::string& name) {
  const auto call = &python_call<op>;
  python_calls().emplace_back(name, reinterpret_cast<PyCFunction>(call));
}

// Returns a new dict of these functions for Python, which is empty before torch 2.14.
inline PyObject* python_calls_dict() {
  PyObject* const calls = PyDict_New();
  if (!has_python_calls()) return calls;
  PyObject* const nn = PyImport_ImportModule("torch.nn");
  PyObject* const torch = PyImport_ImportModule("torch");
  if (torch == nullptr || nn == nullptr) return calls;
  tensor_type = reinterpret_cast<PyTypeObject*>(PyObject_GetAttrString(torch, "Tensor"));
  parameter_type = reinterpret_cast<PyTypeObject*>(PyObject_GetAttrString(nn, "Parameter"));
  for (const auto& [name, function] : python_calls()) {
    auto* const definition = new PyMethodDef{name.c_str(), function, METH_FASTCALL, nullptr};
    PyObject* const call = PyCFunction_New(definition, nullptr);
    PyDict_SetItemString(calls, name.c_str(), call);
    Py_DECREF(call);
  }
  return calls;
}

}  // namespace inplace_ops
