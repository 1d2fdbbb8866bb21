// The schemas, and the Python module whose import registers them. The ops are private: called
// directly on a tensor that needs a gradient they would be silently wrong.
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/version.h>

STABLE_TORCH_LIBRARY(inplace_ops, m) {
  m.def("relu(Tensor x, int bits, int[] order) -> (Tensor, Tensor)");
  m.def("relu_(Tensor(a!) x, int[] order) -> ()");
  m.def("relu_with_mask_(Tensor(a!) x, Tensor(b!) bits, int[] order) -> ()");
  m.def("relu_backward_mask(Tensor grad, Tensor bits, int[] order) -> Tensor");
  m.def("relu_backward_output(Tensor grad, Tensor output, int[] order) -> Tensor");

  m.def("leaky_relu(Tensor x, int bits, int[] order, float negative_slope) -> (Tensor, Tensor)");
  m.def("leaky_relu_(Tensor(a!) x, int[] order, float negative_slope) -> ()");
  m.def(
      "leaky_relu_with_mask_(Tensor(a!) x, Tensor(b!) bits, int[] order, float negative_slope)"
      " -> ()");
  m.def(
      "leaky_relu_backward_mask(Tensor grad, Tensor bits, int[] order, float negative_slope)"
      " -> Tensor");
  m.def(
      "leaky_relu_backward_output(Tensor grad, Tensor output, int[] order, float negative_slope)"
      " -> Tensor");

  m.def("silu(Tensor x, int bits, int[] order) -> (Tensor, Tensor)");
  m.def("silu_(Tensor(a!) x, int[] order) -> ()");
  m.def("silu_with_bits_(Tensor(a!) x, Tensor(b!) bits, int[] order) -> ()");
  m.def("silu_backward_output(Tensor grad, Tensor output, Tensor bits, int[] order) -> Tensor");
  m.def(
      "silu_double_backward(Tensor grad_grad, Tensor grad, Tensor output, Tensor bits, int[] order)"
      " -> Tensor");
  m.def("silu_derivative(Tensor x, int bits, int[] order) -> (Tensor, Tensor)");
  m.def("silu_with_derivative_(Tensor(a!) x, Tensor(b!) bits, int[] order) -> ()");
  m.def("silu_backward_derivative(Tensor grad, Tensor bits, int[] order) -> Tensor");
}

static PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};

PyMODINIT_FUNC PyInit__C() {
  PyObject* module = PyModule_Create(&module_definition);
  if (module != nullptr) PyModule_AddStringConstant(module, "built_with_torch", TORCH_VERSION);
  return module;
}
