// The mathematics of the smooth activations as a GPU computes it, on the host, with the hardware's
// errors emulated. Tests compile this file, and call it with the addresses of tensors.
// Needs neither torch nor a GPU.
#define INPLACE_OPS_HARDWARE "../tests/cuda/emulated_hardware.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/derivative_grid.h"
#include "named_activation.h"

namespace py = pybind11;
using namespace inplace_ops;

// Calls visit with the smooth activation of this name, over the format.
template <class Visit>
void with_smooth_activation(const std::string& name, const std::string& dtype, const Visit& visit) {
  with_activation(name, dtype, {}, [&](const auto& activation) {
    using A = std::decay_t<decltype(activation)>;
    if constexpr (A::kKind == Kind::kSmooth) {
      visit(activation);
    } else {
      throw std::invalid_argument("not a smooth activation: " + name);
    }
  });
}

// Calls work(i) for each i below count, on all cores.
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

// Writes the activation of each x to y.
void forward(const std::string& name, const std::string& dtype, uintptr_t x, uintptr_t y,
             int64_t count) {
  with_smooth_activation(name, dtype, [=](auto activation) {
    using A = decltype(activation);
    using T = typename A::Scalar;
    for_each(count, [=](int64_t i) {
      reinterpret_cast<T*>(y)[i] = store<T>(A::value(load(reinterpret_cast<const T*>(x)[i])));
    });
  });
}

// Writes the x that backward recovers from y and from the code of x, and the first and second
// derivative at this point, in the compute type. With 0 bits the point is x itself.
void points(const std::string& name, const std::string& dtype, uintptr_t x, uintptr_t y, int bits,
            uintptr_t recovered, uintptr_t first, uintptr_t second, int64_t count) {
  with_smooth_activation(name, dtype, [=](auto activation) {
    using A = decltype(activation);
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

// Writes the derivative at each x, rounded as save="derivative" saves it.
void quantized_derivative(const std::string& name, const std::string& dtype, uintptr_t x, int bits,
                          uintptr_t derivative, int64_t count) {
  with_smooth_activation(name, dtype, [=](auto activation) {
    using A = decltype(activation);
    using T = typename A::Scalar;
    using C = opmath_t<T>;
    const auto grid = DerivativeGrid<C>::template for_activation<A>(bits);
    for_each(count, [=](int64_t i) {
      const auto at = A::point(load(reinterpret_cast<const T*>(x)[i]));
      reinterpret_cast<C*>(derivative)[i] = grid.decode(grid.encode(A::derivative(at)));
    });
  });
}

void set_errors(const std::array<double, hardware::kFunctions>& multiples, uint64_t seed) {
  for (int i = 0; i < hardware::kFunctions; ++i) hardware::errors.multiples[i] = multiples[i];
  hardware::errors.seed = seed;
}

// Returns the pattern of the float that results from rounding x to the format, to check the
// emulated conversions.
uint32_t rounded(const std::string& dtype, float x) {
  if (dtype == "float16") return bit_cast<uint32_t>(load(store<Half>(x)));
  if (dtype == "bfloat16") return bit_cast<uint32_t>(load(store<BFloat16>(x)));
  throw std::invalid_argument("not a 16-bit dtype: " + dtype);
}

// Returns the value of an emulated function, to check its error.
float approximation(const std::string& name, float x) {
  if (name == "exp2") return hardware::exp2(x);
  if (name == "log2") return hardware::log2(x);
  if (name == "reciprocal") return hardware::reciprocal(x);
  if (name == "sqrt") return hardware::sqrt(x);
  throw std::invalid_argument("unknown function: " + name);
}

PYBIND11_MODULE(MODULE_NAME, module) {
  module.def("forward", &forward);
  module.def("points", &points);
  module.def("quantized_derivative", &quantized_derivative);
  module.def("set_errors", &set_errors);
  module.def("rounded", &rounded);
  module.def("approximation", &approximation);
}
