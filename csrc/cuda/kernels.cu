#include <Python.h>
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include <cstdint>
#include <limits>

#include "../registration.h"
#include "batch_norm.cuh"
#include "elementwise.cuh"
#include "path_choice.cuh"
#include "warp.cuh"

// Lets a kernel index a parameter without a copy in local memory. Requires compute capability 7.0.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#define GRID_CONSTANT
#else
#define GRID_CONSTANT __grid_constant__
#endif

namespace inplace_ops {
namespace {

// The number of a warp in a grid with blocks of kThreads.
__device__ __forceinline__ int64_t warp_in_grid() {
  return int64_t(blockIdx.x) * (kThreads / kWarpSize) + threadIdx.x / kWarpSize;
}

// With launch bounds of kThreads, nvcc compiles some kernels to up to 3% more instructions.
template <int count, class Functor, class Layout>
__global__ void __launch_bounds__(2 * kThreads)
    run_warps(const Functor functor, GRID_CONSTANT const Layout layout,
              GRID_CONSTANT const Operands<Functor> operands, int64_t begin, int64_t end) {
  run_warp<count>(functor, layout, operands, begin, end, warp_in_grid());
}

// The passes of batch_norm.cuh, and what is between them.
template <int count, class Functor>
__global__ void __launch_bounds__(kThreads, kResidentLanes / kThreads)
    sum_warps(const Functor functor, GRID_CONSTANT const ChannelLoop loop,
              GRID_CONSTANT const Operands<Functor> operands,
              GRID_CONSTANT const BatchNormBackward<opmath_t<typename Functor::Scalar>> norm) {
  sum_warp<count>(functor, loop, operands, norm, warp_in_grid());
}

template <int count, class Functor>
__global__ void __launch_bounds__(kThreads, kResidentLanes / kThreads)
    correct_warps(const Functor functor, GRID_CONSTANT const ChannelLoop loop,
                  GRID_CONSTANT const Operands<Functor> operands,
                  GRID_CONSTANT const BatchNormBackward<opmath_t<typename Functor::Scalar>> norm) {
  correct_warp<count>(functor, loop, operands, norm, warp_in_grid());
}

// A block has one warp, so that few channels have many multiprocessors.
template <class C>
__global__ void __launch_bounds__(kWarpSize)
    finish_warps(GRID_CONSTANT const BatchNormBackward<C> norm) {
  finish_warp(norm, blockIdx.x);
}

template <class C>
__global__ void write_affine_kernel(const Statistics<C> statistics, C* scale, C* shift,
                                    int64_t channels) {
  const int64_t channel = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (channel >= channels) return;
  const auto scale_shift = statistics.affine(channel);
  scale[channel] = scale_shift.scale;
  shift[channel] = scale_shift.shift;
}

inline cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

// Launches a kernel on the current stream of the tensors' device, without synchronizing. It takes
// the kernel's address, and is not a template, as there are hundreds of kernels.
void launch(const void* kernel, int64_t threads, void** arguments, int device,
            int threads_of_block = kThreads) {
  const torch::stable::accelerator::DeviceGuard guard(device);
  const int64_t blocks = (threads + threads_of_block - 1) / threads_of_block;
  check(blocks <= std::numeric_limits<int32_t>::max(),
        "inplace_ops: tensor too large for a CUDA grid of 2^31 - 1 blocks");
  STD_CUDA_CHECK(cudaLaunchKernel(kernel, dim3(blocks), dim3(threads_of_block), arguments, 0,
                                  current_stream(device)));
}

struct Cuda {
  template <class C>
  static void write_affine(Statistics<C> statistics, C* scale, C* shift, int64_t channels,
                           int device) {
    void* arguments[] = {&statistics, &scale, &shift, &channels};
    launch(reinterpret_cast<const void*>(&write_affine_kernel<C>), channels, arguments, device);
  }

  template <class Functor>
  static void run(Functor functor, const StridedLayout& strided, Operands<Functor> operands,
                  int device) {
    choose_path(strided, operands, [&](auto count, auto layout, int64_t begin, int64_t end) {
      void* arguments[] = {&functor, &layout, &operands, &begin, &end};
      launch(reinterpret_cast<const void*>(&run_warps<count(), Functor, decltype(layout)>),
             tiles_of<count()>(end - begin) * kWarpSize, arguments, device);
    });
  }

  static int64_t pieces_of(const ChannelLayout& layout, const Tensor& x) {
    return pieces_of_layout(layout, x.element_size());
  }

  template <class Functor, class C>
  static void backward_batch_norm(Functor functor, const StridedLayout& /*strided*/,
                                  Operands<Functor> operands, BatchNormBackward<C> norm,
                                  int device) {
    choose_access(norm.layout, operands, [&](auto count) {
      const auto launch_pass = [&](const void* kernel, ChannelLoop loop) {
        void* arguments[] = {&functor, &loop, &operands, &norm};
        launch(kernel, loop.warps() * kWarpSize, arguments, device);
      };
      launch_pass(reinterpret_cast<const void*>(&sum_warps<count(), Functor>),
                  summing_loop(norm.layout, count(), norm.pieces));
      void* arguments[] = {&norm};
      launch(reinterpret_cast<const void*>(&finish_warps<C>), norm.layout.channels * kWarpSize,
             arguments, device, kWarpSize);
      launch_pass(reinterpret_cast<const void*>(&correct_warps<count(), Functor>),
                  correcting_loop(norm.layout, count()));
    });
  }
};

}  // namespace
}  // namespace inplace_ops

STABLE_TORCH_LIBRARY_IMPL(inplace_ops, CUDA, m) {
  inplace_ops::register_all_forward<inplace_ops::Cuda>(m);
  inplace_ops::register_all_backward<inplace_ops::Cuda>(m);
  inplace_ops::register_all_double_backward<inplace_ops::Cuda>(m);
  inplace_ops::register_all_recompute<inplace_ops::Cuda>(m);
}

// setup.py defines it: it compiles for more architectures than it generates PTX for.
#ifndef INPLACE_OPS_ARCHITECTURES
#define INPLACE_OPS_ARCHITECTURES __CUDA_ARCH_LIST__
#endif
#define INPLACE_OPS_STRING_(...) #__VA_ARGS__
#define INPLACE_OPS_STRING(...) INPLACE_OPS_STRING_(__VA_ARGS__)

static PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr};

PyMODINIT_FUNC PyInit__C_cuda() {
  PyObject* module = PyModule_Create(&module_definition);
  if (module == nullptr) return nullptr;
  PyModule_AddIntConstant(module, "cuda_version", CUDART_VERSION);
  PyModule_AddStringConstant(module, "cuda_architectures",
                             INPLACE_OPS_STRING(INPLACE_OPS_ARCHITECTURES));
  PyObject* const calls = inplace_ops::python_calls_dict();
  if (calls == nullptr) return nullptr;
  PyModule_AddObject(module, "calls", calls);
  return module;
}
