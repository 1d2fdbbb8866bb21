// SiLU's mathematics as a GPU runs it, on the host, with the hardware's errors emulated:
// test_device_numerics.py compiles this file and calls it with the addresses of NumPy arrays. Needs
// neither torch nor a GPU.
#define INPLACE_OPS_HARDWARE "../tests/emulated_hardware.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../csrc/activations.h"

namespace py = pybind11;
using namespace inplace_ops;

void set_errors(const std::array<double, hardware::kFunctions>& multiples, uint64_t seed) {
  for (int i = 0; i < hardware::kFunctions; ++i) hardware::errors.multiples[i] = multiples[i];
  hardware::errors.seed = seed;
}

// Calls visit with a zero of the format.
template <class Visit>
auto with_format(const std::string& dtype, const Visit& visit) {
  if (dtype == "float32") return visit(float());
  if (dtype == "float16") return visit(Half());
  if (dtype == "bfloat16") return visit(BFloat16());
  throw std::invalid_argument("dtype: " + dtype);
}

// Calls work(i) for each element, on all cores.
template <class Work>
void for_each(int64_t count, const Work& work) {
  const int64_t threads = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> running;
  for (int64_t t = 0; t < threads; ++t) {
    running.emplace_back([=, &work] {
      for (int64_t i = count * t / threads; i < count * (t + 1) / threads; ++i) work(i);
    });
  }
  for (std::thread& thread : running) thread.join();
}

// y = silu(x).
void forward(const std::string& dtype, uintptr_t x, uintptr_t y, int64_t count) {
  with_format(dtype, [=](auto zero) {
    using T = decltype(zero);
    const SiLU<T> silu;
    for_each(count, [=](int64_t i) {
      reinterpret_cast<T*>(y)[i] = store<T>(silu.forward(load(reinterpret_cast<const T*>(x)[i])));
    });
  });
}

// The x that backward recovers from y and the code of x, and silu' there, both in float.
void recover(const std::string& dtype, uintptr_t x, uintptr_t y, int bits, uintptr_t recovered,
             uintptr_t derivative, int64_t count) {
  with_format(dtype, [=](auto zero) {
    using T = decltype(zero);
    const SiluCode<T> code(bits);
    for_each(count, [=](int64_t i) {
      const uint32_t kept = code.encode(reinterpret_cast<const T*>(x)[i]);
      const auto at = silu_recover(reinterpret_cast<const T*>(y)[i], kept, bits);
      reinterpret_cast<float*>(recovered)[i] = at.x;
      reinterpret_cast<float*>(derivative)[i] = silu_derivative(at);
    });
  });
}

// silu' as save="derivative" keeps it.
void keep_derivative(const std::string& dtype, uintptr_t x, int bits, uintptr_t derivative,
                     int64_t count) {
  with_format(dtype, [=](auto zero) {
    using T = decltype(zero);
    const SiLUDerivative<T> silu;
    for_each(count, [=](int64_t i) {
      const uint32_t kept = silu.keep(reinterpret_cast<const T*>(x)[i], bits);
      reinterpret_cast<float*>(derivative)[i] = silu.backward(1.0f, T{}, kept, bits);
    });
  });
}

// What the format makes of a float: a check of the emulated conversions.
uint32_t rounded(const std::string& dtype, float x) {
  return with_format(dtype,
                     [=](auto zero) { return bit_cast<uint32_t>(load(store<decltype(zero)>(x))); });
}

// An emulated function: a check of the emulation.
float approximation(const std::string& name, float x) {
  if (name == "exp2") return hardware::exp2(x);
  if (name == "log2") return hardware::log2(x);
  if (name == "reciprocal") return hardware::reciprocal(x);
  if (name == "sqrt") return hardware::sqrt(x);
  throw std::invalid_argument("name: " + name);
}

PYBIND11_MODULE(device_numerics, module) {
  module.def("set_errors", &set_errors);
  module.def("forward", &forward);
  module.def("recover", &recover);
  module.def("keep_derivative", &keep_derivative);
  module.def("rounded", &rounded);
  module.def("approximation", &approximation);
}
