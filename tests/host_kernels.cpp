// The bodies of the CUDA kernels, run on the host over a virtual grid, for tests: conftest.py
// compiles this file, and test_host_kernels.py calls it with the addresses of NumPy arrays. Needs
// neither torch nor a GPU.
#define INPLACE_OPS_HARDWARE "../tests/emulated_hardware.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "../csrc/activations.h"
#include "../csrc/cuda/elementwise.cuh"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) (void(address), void(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) (void(address), void(size))
#endif

namespace py = pybind11;
using namespace inplace_ops;

// One launch: the operands' addresses, output first, and their strides in elements.
struct Launch {
  std::vector<uintptr_t> addresses;
  uintptr_t bits_address;
  int64_t plane_stride;
  int planes;
  std::vector<int64_t> sizes;
  std::vector<std::vector<int64_t>> strides;
  int64_t first_element;  // where the grid begins: a tensor's part past 2^31 needs no memory before
};

template <class Kernel>
void run(const Kernel& kernel, const Launch& launch) {
  using T = typename Kernel::Scalar;
  Geometry geometry(Kernel::kInputs + 1);
  for (size_t d = 0; d < launch.sizes.size(); ++d) {
    int64_t strides[kMaxOperands] = {};
    for (int k = 0; k <= Kernel::kInputs; ++k) strides[k] = launch.strides[k][d];
    geometry.push_inner(launch.sizes[d], strides);
  }
  Operands<Kernel> operands{};
  operands.out = reinterpret_cast<T*>(launch.addresses[0]);
  for (int k = 0; k < Kernel::kInputs; ++k)
    operands.in[k] = reinterpret_cast<const T*>(launch.addresses[k + 1]);
  operands.bits.data = reinterpret_cast<decltype(operands.bits.data)>(launch.bits_address);
  operands.bits.plane_stride = launch.plane_stride;
  operands.bits.planes = launch.planes;

  choose_path(geometry, operands, [&](auto count, auto index, const auto& layout) {
    using Index = decltype(index);
    constexpr int warps = kThreads / kLanes;
    const int64_t first = launch.first_element / kTileElements<count()>;
    const int64_t tiles = tiles_of<count()>(geometry.elements);
    for (int64_t tile = first; tile < (tiles + warps - 1) / warps * warps; ++tile)
      run_warp<count()>(kernel, layout, operands, Index(geometry.elements), Index(tile));
  });
}

template <class Activation, class T>
void run_kind(const std::string& kind, const Activation& activation, const Launch& launch) {
  if (kind == "forward")
    run(Forward<Activation, T>{activation}, launch);
  else if (kind == "forward_keeping")
    run(ForwardKeeping<Activation, T>{activation}, launch);
  else if (kind == "backward_from_bits")
    run(BackwardFromBits<Activation, T>{activation}, launch);
  else if (kind == "backward_from_output")
    run(BackwardFromOutput<Activation, T>{activation}, launch);
  else
    throw std::invalid_argument("kind: " + kind);
}

template <class T>
void run_activation(const std::string& name, const std::string& kind, double slope,
                    const Launch& launch) {
  if (name == "relu") return run_kind<ReLU<T>, T>(kind, ReLU<T>(), launch);
  if (name == "leaky_relu") return run_kind<LeakyReLU<T>, T>(kind, LeakyReLU<T>(slope), launch);
  if (name == "silu" && kind == "backward_from_both")
    return run(BackwardFromBoth<SiLU<T>, T>{SiLU<T>()}, launch);
  if (name == "silu" && kind == "double_backward")
    return run(DoubleBackward<SiLU<T>, T>{SiLU<T>()}, launch);
  if (name == "silu") return run_kind<SiLU<T>, T>(kind, SiLU<T>(), launch);
  if (name == "silu_derivative")
    return run_kind<SiLUDerivative<T>, T>(kind, SiLUDerivative<T>(), launch);
  throw std::invalid_argument("name: " + name);
}

void run_named(const std::string& name, const std::string& kind, const std::string& dtype,
               double slope, std::vector<uintptr_t> addresses, uintptr_t bits_address,
               int64_t plane_stride, int planes, std::vector<int64_t> sizes,
               std::vector<std::vector<int64_t>> strides, int64_t first_element) {
  const Launch launch{addresses, bits_address, plane_stride, planes, sizes, strides, first_element};
  if (dtype == "float64") return run_activation<double>(name, kind, slope, launch);
  if (dtype == "float32") return run_activation<float>(name, kind, slope, launch);
  if (dtype == "float16") return run_activation<Half>(name, kind, slope, launch);
  if (dtype == "bfloat16") return run_activation<BFloat16>(name, kind, slope, launch);
  throw std::invalid_argument("dtype: " + dtype);
}

// The share of the inputs that lie in the tails of SiLU's inverse.
template <class T>
double tail_share_of(int bits, const std::vector<double>& inputs) {
  const SiLU<T> silu;
  int64_t tails = 0;
  for (const double input : inputs) {
    const T x = store<T>(compute_t<T>(input));
    tails += silu.is_tail(store<T>(silu.forward(load(x))), silu.keep(x, bits), bits);
  }
  return double(tails) / inputs.size();
}

double tail_share(const std::string& dtype, int bits, const std::vector<double>& inputs) {
  if (dtype == "float32") return tail_share_of<float>(bits, inputs);
  if (dtype == "float16") return tail_share_of<Half>(bits, inputs);
  if (dtype == "bfloat16") return tail_share_of<BFloat16>(bits, inputs);
  throw std::invalid_argument("dtype: " + dtype);
}

void poison(uintptr_t address, size_t size) {
  ASAN_POISON_MEMORY_REGION(reinterpret_cast<void*>(address), size);
}

void unpoison(uintptr_t address, size_t size) {
  ASAN_UNPOISON_MEMORY_REGION(reinterpret_cast<void*>(address), size);
}

PYBIND11_MODULE(host_kernels, module) {
  module.def("run", &run_named);
  module.def("tail_share", &tail_share);
  module.def("poison", &poison);
  module.def("unpoison", &unpoison);
}
