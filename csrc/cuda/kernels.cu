#include <Python.h>
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include <cstdint>
#include <limits>

#include "../ops.h"
#include "elementwise.cuh"

namespace inplace_ops {
namespace {

template <bool vectors, class Index, class Kernel, class Layout>
__global__ void __launch_bounds__(kThreads)
    run_groups(const Kernel kernel, __grid_constant__ const Layout layout,
               const Operands<Kernel> operands, int64_t elements) {
  const Index group = Index(blockIdx.x) * kThreads + threadIdx.x;
  if (group * kGroup < elements)
    run_group<vectors>(kernel, layout, operands, Index(elements), group);
}

struct Cuda {
  // One launch on the current stream of the tensors' device; it waits for nothing.
  template <class Kernel>
  static void run(const Kernel& kernel, const Geometry& geometry, const Operands<Kernel>& operands,
                  int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    void* stream_pointer = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream_pointer));
    const auto stream = static_cast<cudaStream_t>(stream_pointer);

    const int64_t blocks = (plane_bytes(geometry.elements) + kThreads - 1) / kThreads;
    STD_TORCH_CHECK(blocks <= std::numeric_limits<int32_t>::max(), "tensor too large");
    const dim3 grid(blocks);
    const int64_t elements = geometry.elements;
    // In 32 bits no index of the last block overflows, those past the end included.
    const bool is_small = elements <= std::numeric_limits<int32_t>::max() - kThreads * kGroup;
    if (geometry.is_dense() && is_aligned(operands)) {
      run_groups<true, int64_t><<<grid, kThreads, 0, stream>>>(kernel, Dense{}, operands, elements);
    } else if (geometry.is_dense()) {
      run_groups<false, int64_t>
          <<<grid, kThreads, 0, stream>>>(kernel, Dense{}, operands, elements);
    } else if (is_small) {
      run_groups<false, int32_t>
          <<<grid, kThreads, 0, stream>>>(kernel, geometry, operands, elements);
    } else {
      run_groups<false, int64_t>
          <<<grid, kThreads, 0, stream>>>(kernel, geometry, operands, elements);
    }
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace
}  // namespace inplace_ops

STABLE_TORCH_LIBRARY_IMPL(inplace_ops, CUDA, m) { inplace_ops::register_ops<inplace_ops::Cuda>(m); }

#define INPLACE_OPS_STRING_(...) #__VA_ARGS__
#define INPLACE_OPS_STRING(...) INPLACE_OPS_STRING_(__VA_ARGS__)

static PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr};

PyMODINIT_FUNC PyInit__C_cuda() {
  PyObject* module = PyModule_Create(&module_definition);
  if (module == nullptr) return nullptr;
  PyModule_AddIntConstant(module, "cuda_version", CUDART_VERSION);
  PyModule_AddStringConstant(module, "cuda_architectures", INPLACE_OPS_STRING(__CUDA_ARCH_LIST__));
  return module;
}
