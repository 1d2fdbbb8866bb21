// The activation of a name, over the format of a name, for what tests compile.
#pragma once

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "../csrc/activations.h"

namespace inplace_ops {

// Calls visit with a zero of the format.
template <class Visit>
void with_format(const std::string& dtype, const Visit& visit) {
  if (dtype == "float64") return visit(double());
  if (dtype == "float32") return visit(float());
  if (dtype == "float16") return visit(Half());
  if (dtype == "bfloat16") return visit(BFloat16());
  throw std::invalid_argument("dtype: " + dtype);
}

template <class A, class... Arguments>
A make(Types<Arguments...>, const std::vector<double>& scalars) {
  if (scalars.size() != sizeof...(Arguments)) throw std::invalid_argument("number of scalars");
  [[maybe_unused]] auto scalar = scalars.begin();
  return A{Arguments(*scalar++)...};
}

template <template <class> class Activation, class Visit>
void visit_entry(Entry<Activation>, const std::string& dtype, const std::vector<double>& scalars,
                 const Visit& visit) {
  with_format(dtype, [&](auto zero) {
    using A = Activation<decltype(zero)>;
    visit(make<A>(typename A::Arguments{}, scalars));
  });
}

#ifdef __SANITIZE_ADDRESS__  // whose code takes minutes to compile: test_host_kernels.py's SOME
inline constexpr std::tuple kNamed{Entry<LeakyReLU>{}, Entry<SiLU>{}};
#else
inline constexpr auto kNamed = kActivations;
#endif

// Calls visit with the activation of that name, over the format.
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
  if (!found) throw std::invalid_argument("activation: " + name);
}

}  // namespace inplace_ops
