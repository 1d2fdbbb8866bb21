#include <Python.h>
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include <cstdint>
#include <limits>

#include "../registration.h"
#include "elementwise.cuh"

// An indexed parameter that stays where it is, without a copy in local memory: from compute
// capability 7.0 on.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#define GRID_CONSTANT
#else
#define GRID_CONSTANT __grid_constant__
#endif

namespace inplace_ops {
namespace {

template <int count, class Functor, class Layout>
__global__ void __launch_bounds__(kThreads)
    run_warps(const Functor functor, GRID_CONSTANT const Layout layout,
              GRID_CONSTANT const Operands<Functor> operands, int64_t elements) {
  constexpr int warps = kThreads / kWarpSize;
  const int64_t tile = int64_t(blockIdx.x) * warps + threadIdx.x / kWarpSize;
  run_warp<count>(functor, layout, operands, elements, tile);
}

template <class C>
__global__ void write_map(const Statistics<C> statistics, C* scale, C* shift, int64_t channels) {
  const int64_t channel = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (channel >= channels) return;
  const auto map = statistics.map(channel);
  scale[channel] = map.scale;
  shift[channel] = map.shift;
}

inline cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

struct Cuda {
  template <class C>
  static void write_maps(const Statistics<C>& statistics, C* scale, C* shift, int64_t channels,
                         int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    const int64_t blocks = (channels + kThreads - 1) / kThreads;
    STD_TORCH_CHECK(blocks <= std::numeric_limits<int32_t>::max(), "tensor too large");
    write_map<<<dim3(blocks), kThreads, 0, current_stream(device)>>>(statistics, scale, shift,
                                                                     channels);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  // One launch on the current stream of the tensors' device; it waits for nothing.
  template <class Functor>
  static void run(const Functor& functor, const Geometry& geometry,
                  const Operands<Functor>& operands, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    const cudaStream_t stream = current_stream(device);

    choose_path(geometry, operands, [&](auto count, const auto& layout) {
      constexpr int warps = kThreads / kWarpSize;
      const int64_t blocks = (tiles_of<count()>(geometry.elements) + warps - 1) / warps;
      STD_TORCH_CHECK(blocks <= std::numeric_limits<int32_t>::max(), "tensor too large");
      run_warps<count()>
          <<<dim3(blocks), kThreads, 0, stream>>>(functor, layout, operands, geometry.elements);
    });
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace
}  // namespace inplace_ops

STABLE_TORCH_LIBRARY_IMPL(inplace_ops, CUDA, m) {
  inplace_ops::register_all_forward<inplace_ops::Cuda>(m);
  inplace_ops::register_all_backward<inplace_ops::Cuda>(m);
  inplace_ops::register_all_recompute<inplace_ops::Cuda>(m);
}

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
