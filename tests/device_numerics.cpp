// The mathematics of the smooth activations as a GPU runs it, on the host, with the hardware's
// errors emulated, and, with HOST_NUMERICS defined, as the host runs it: conftest.py compiles this
// file, and tests call it with tensors' addresses. Needs neither torch nor a GPU. MODULE_NAME is
// another for each build: Python takes two extensions of one name for the same.
#ifndef HOST_NUMERICS
#define INPLACE_OPS_HARDWARE "../tests/emulated_hardware.h"
#endif

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../csrc/derivative_grid.h"
#include "named_activation.h"

namespace py = pybind11;
using namespace inplace_ops;

// Calls visit with the activation of this name, one with a smooth, over the format.
template <class Visit>
void with_smooth(const std::string& name, const std::string& dtype, const Visit& visit) {
  with_activation(name, dtype, {}, [&](const auto& activation) {
    using A = std::decay_t<decltype(activation)>;
    if constexpr (A::kKind == Kind::kSmooth) {
      visit(activation);
    } else {
      throw std::invalid_argument("has no smooth: " + name);
    }
  });
}

// Calls work(i) for each element, on all cores.
template <class Work>
void for_each(int64_t count, const Work& work) {
  const int64_t threads = count < 1000 ? 1 : std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> running;
  for (int64_t t = 0; t < threads; ++t) {
    running.emplace_back([=, &work] {
      for (int64_t i = count * t / threads; i < count * (t + 1) / threads; ++i) work(i);
    });
  }
  for (std::thread& thread : running) thread.join();
}

// The output of each input.
void forward(const std::string& name, const std::string& dtype, uintptr_t x, uintptr_t y,
             int64_t count) {
  with_smooth(name, dtype, [=](auto smooth) {
    using A = decltype(smooth);
    using T = typename A::Scalar;
    for_each(count, [=](int64_t i) {
      reinterpret_cast<T*>(y)[i] = store<T>(A::value(load(reinterpret_cast<const T*>(x)[i])));
    });
  });
}

// The x that backward recovers from y and the code of x, and both derivatives there, in the compute
// type; with 0 bits those of x itself.
void points(const std::string& name, const std::string& dtype, uintptr_t x, uintptr_t y, int bits,
            uintptr_t recovered, uintptr_t first, uintptr_t second, int64_t count) {
  with_smooth(name, dtype, [=](auto smooth) {
    using A = decltype(smooth);
    using T = typename A::Scalar;
    using C = opmath_t<T>;
    const InputCode<A> code(std::max(bits, 1));
    for_each(count, [=](int64_t i) {
      const T input = reinterpret_cast<const T*>(x)[i];
      const auto at = bits == 0 ? A::point(load(input))
                                : recover<A>(load(reinterpret_cast<const T*>(y)[i]),
                                             code.encode(element_of(input)), bits);
      reinterpret_cast<C*>(recovered)[i] = at.x;
      reinterpret_cast<C*>(first)[i] = A::derivative(at);
      reinterpret_cast<C*>(second)[i] = A::second_derivative(at);
    });
  });
}

// The range of the derivative, and the minimum.
py::tuple properties(const std::string& name) {
  py::tuple result;
  with_smooth(name, "float64", [&](auto smooth) {
    using A = decltype(smooth);
    result =
        py::make_tuple(+A::kLowestDerivative, +A::kHighestDerivative, +A::kMinimumX, +A::kMinimumY);
  });
  return result;
}

// The derivative as save="derivative" keeps it.
void keep_derivative(const std::string& name, const std::string& dtype, uintptr_t x, int bits,
                     uintptr_t derivative, int64_t count) {
  with_smooth(name, dtype, [=](auto smooth) {
    using A = decltype(smooth);
    using T = typename A::Scalar;
    using C = opmath_t<T>;
    const auto grid = DerivativeGrid<C>::template of<A>(bits);
    for_each(count, [=](int64_t i) {
      const auto at = A::point(load(reinterpret_cast<const T*>(x)[i]));
      reinterpret_cast<C*>(derivative)[i] = grid.decode(grid.encode(A::derivative(at)));
    });
  });
}

#ifndef HOST_NUMERICS
void set_errors(const std::array<double, hardware::kFunctions>& multiples, uint64_t seed) {
  for (int i = 0; i < hardware::kFunctions; ++i) hardware::errors.multiples[i] = multiples[i];
  hardware::errors.seed = seed;
}

// What the format makes of a float: a check of the emulated conversions.
uint32_t rounded(const std::string& dtype, float x) {
  if (dtype == "float16") return bit_cast<uint32_t>(load(store<Half>(x)));
  if (dtype == "bfloat16") return bit_cast<uint32_t>(load(store<BFloat16>(x)));
  throw std::invalid_argument("dtype: " + dtype);
}

// An emulated function: a check of the emulation.
float approximation(const std::string& name, float x) {
  if (name == "exp2") return hardware::exp2(x);
  if (name == "log2") return hardware::log2(x);
  if (name == "reciprocal") return hardware::reciprocal(x);
  if (name == "sqrt") return hardware::sqrt(x);
  throw std::invalid_argument("name: " + name);
}
#endif

PYBIND11_MODULE(MODULE_NAME, module) {
  module.def("forward", &forward);
  module.def("points", &points);
  module.def("properties", &properties);
  module.def("keep_derivative", &keep_derivative);
#ifndef HOST_NUMERICS
  module.def("set_errors", &set_errors);
  module.def("rounded", &rounded);
  module.def("approximation", &approximation);
#endif
}
