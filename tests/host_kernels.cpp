// The bodies of the CUDA kernels, run on the host over a virtual grid: test_host_kernels.py
// compiles this file and calls it with the addresses of NumPy arrays. Needs neither torch nor a
// GPU.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "../csrc/activations.h"
#include "../csrc/cuda/elementwise.cuh"

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
  int64_t elements;
  int64_t first_group;
  bool wide_index;
};

template <class Index, class Kernel>
void run_grid(const Kernel& kernel, const Geometry& geometry, const Operands<Kernel>& operands,
              const Launch& launch) {
  const Index elements = Index(launch.elements);
  const bool dense = geometry.is_dense();
  for (int64_t group = launch.first_group; group * kGroup < launch.elements; ++group) {
    if (dense && is_aligned(operands))
      run_group<true>(kernel, Dense{}, operands, elements, Index(group));
    else if (dense)
      run_group<false>(kernel, Dense{}, operands, elements, Index(group));
    else
      run_group<false>(kernel, geometry, operands, elements, Index(group));
  }
}

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
  if (launch.wide_index)
    run_grid<int64_t>(kernel, geometry, operands, launch);
  else
    run_grid<int32_t>(kernel, geometry, operands, launch);
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
  if (name == "relu") return run_kind<ReLU<T>, T>(kind, ReLU<T>(1), launch);
  if (name == "leaky_relu") return run_kind<LeakyReLU<T>, T>(kind, LeakyReLU<T>(1, slope), launch);
  if (name == "silu" && kind == "backward_from_both")
    return run(BackwardFromBoth<SiLU<T>, T>{SiLU<T>(launch.planes)}, launch);
  if (name == "silu") return run_kind<SiLU<T>, T>(kind, SiLU<T>(launch.planes), launch);
  if (name == "silu_derivative")
    return run_kind<SiLUDerivative<T>, T>(kind, SiLUDerivative<T>(launch.planes), launch);
  throw std::invalid_argument("name: " + name);
}

void run_named(const std::string& name, const std::string& kind, const std::string& dtype,
               double slope, std::vector<uintptr_t> addresses, uintptr_t bits_address,
               int64_t plane_stride, int planes, std::vector<int64_t> sizes,
               std::vector<std::vector<int64_t>> strides, int64_t elements, int64_t first_group,
               bool wide_index) {
  const Launch launch{addresses, bits_address, plane_stride, planes,    sizes,
                      strides,   elements,     first_group,  wide_index};
  if (dtype == "float64") return run_activation<double>(name, kind, slope, launch);
  if (dtype == "float32") return run_activation<float>(name, kind, slope, launch);
  if (dtype == "float16") return run_activation<Half>(name, kind, slope, launch);
  if (dtype == "bfloat16") return run_activation<BFloat16>(name, kind, slope, launch);
  throw std::invalid_argument("dtype: " + dtype);
}

PYBIND11_MODULE(host_kernels, module) { module.def("run", &run_named); }
