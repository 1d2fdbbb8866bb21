// Selects an activation and a format by their names, for the modules that tests compile.
#pragma once

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "../../csrc/activations.h"

namespace inplace_ops {

// Calls visit with a value of the format's type.
template <class Visit>
void with_format(const std::string& dtype, const Visit& visit) {
  if (dtype == "float64") return visit(double());
  if (dtype == "float32") return visit(float());
  if (dtype == "float16") return visit(Half());
#ifndef __SANITIZE_ADDRESS__  // float16 makes the same accesses, and compiling takes a minute
  if (dtype == "bfloat16") return visit(BFloat16());
#endif
  throw std::invalid_argument("unknown dtype: " + dtype);
}

template <class A, class... Arguments>
A make(Types<Arguments...>, const std::vector<double>& scalars) {
  if (scalars.size() != sizeof...(Arguments))
    throw std::invalid_argument("wrong number of scalars");
  [[maybe_unused]] auto scalar = scalars.begin();
  return A{Arguments(*scalar++)...};
}

template <template <class> class Activation, class Visit>
void visit_entry(Entry<Activation>, const std::string& dtype, const std::vector<double>& scalars,
                 const Visit& visit) {
  with_format(dtype, [&](auto value) {
    using A = Activation<decltype(value)>;
    visit(make<A>(typename A::Arguments{}, scalars));
  });
}

#ifdef INPLACE_OPS_SOME_ACTIVATIONS  // SOME of test_host_kernels.py: all take long to compile
inline constexpr std::tuple kNamed{Entry<LeakyReLU>{}, Entry<SiLU>{}};
#else
inline constexpr auto kNamed = kActivations;
#endif

// Calls visit with the activation of this name, over the format.
template <class Visit>
void with_activation(const std::string& name, const std::string& dtype,
                     const std::vector<double>& scalars, const Visit& visit) {
  bool found = false;
  const auto visit_if_named = [&](auto entry) {
    if (name != entry.name) return;
    found = true;
    visit_entry(entry, dtype, scalars, visit);
  };
  std::apply([&](auto... entries) { (visit_if_named(entries), ...); }, kNamed);
  if (!found) throw std::invalid_argument("unknown activation: " + name);
}

}  // namespace inplace_ops
