// Registers the ops' schemas, and defines the Python module whose import does so. The ops are
// private: called directly on a tensor that requires grad, they would give wrong gradients
// silently.
#include <Python.h>
#include <torch/headeronly/version.h>

#include "registration.h"

STABLE_TORCH_LIBRARY(inplace_ops, m) { inplace_ops::define_all_ops(m); }

namespace {

using namespace inplace_ops;

PyObject* by_dtype(int float64, int float32, int float16, int bfloat16) {
  return Py_BuildValue("{s:i,s:i,s:i,s:i}", "float64", float64, "float32", float32, "float16",
                       float16, "bfloat16", bfloat16);
}

// Returns an activation's numbers for Python: the default bits per element by save mode and dtype,
// and the steps per unit of the derivative's grid by number of bits.
template <template <class> class Activation>
PyObject* numbers_of(Entry<Activation>) {
  if constexpr (Activation<float>::kKind == Kind::kPiecewiseLinear) {
    return Py_BuildValue("{s:{s:N,s:N},s:{}}", "default_bits", "mask", by_dtype(1, 1, 1, 1),
                         "output", by_dtype(0, 0, 0, 0), "derivative_steps");
  } else {
    constexpr double lowest = Activation<double>::kLowestDerivative;
    constexpr double highest = Activation<double>::kHighestDerivative;
    return Py_BuildValue(
        "{s:{s:N,s:N},s:{i:d,i:d,i:d}}", "default_bits", "output",
        by_dtype(Activation<double>::kDefaultBits, Activation<float>::kDefaultBits,
                 Activation<Half>::kDefaultBits, Activation<BFloat16>::kDefaultBits),
        "derivative",
        by_dtype(kDerivativeBits<double>, kDerivativeBits<float>, kDerivativeBits<Half>,
                 kDerivativeBits<BFloat16>),
        "derivative_steps", 8, finest_grid(lowest, highest, 8).steps, 16,
        finest_grid(lowest, highest, 16).steps, 32, finest_grid(lowest, highest, 32).steps);
  }
}

PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  PyObject* module = PyModule_Create(&module_definition);
  if (module == nullptr) return nullptr;
  PyModule_AddStringConstant(module, "built_with_torch", TORCH_VERSION);
  PyObject* activations = PyDict_New();
  for_each_activation([&](auto entry) {
    PyObject* numbers = numbers_of(entry);
    PyDict_SetItemString(activations, entry.name, numbers);
    Py_DECREF(numbers);
  });
  PyModule_AddObject(module, "activations", activations);
  PyObject* const calls = python_calls_dict();
  if (calls == nullptr) return nullptr;
  PyModule_AddObject(module, "calls", calls);
  static PyMethodDef layout_method{"layout", reinterpret_cast<PyCFunction>(&layout_of),
                                   METH_FASTCALL, nullptr};
  PyObject* const layout =
      has_python_calls() ? PyCFunction_New(&layout_method, nullptr) : Py_BuildValue("");
  if (layout == nullptr) return nullptr;
  PyModule_AddObject(module, "layout", layout);
  return module;
}
