// The list of activations, from which ops, schemas, registrations and default bits are generated.
// activations/entry.h says what an activation must define, and docs/adding_an_activation.md has the
// steps to add one.
#pragma once

#include <tuple>

#include "activations/gelu.h"
#include "activations/hardswish.h"
#include "activations/leaky_relu.h"
#include "activations/mish.h"
#include "activations/relu.h"
#include "activations/relu6.h"
#include "activations/silu.h"

namespace inplace_ops {

template <template <class> class Activation>
struct Entry {
  static constexpr const char* name = Activation<float>::kName;
};

inline constexpr std::tuple kActivations{
    Entry<ReLU>{}, Entry<LeakyReLU>{}, Entry<ReLU6>{},     Entry<SiLU>{},
    Entry<GELU>{}, Entry<GELUTanh>{},  Entry<Hardswish>{}, Entry<Mish>{},
};

// Calls visit(entry) for each activation.
template <class Visit>
void for_each_activation(const Visit& visit) {
  std::apply([&](auto... entries) { (visit(entries), ...); }, kActivations);
}

}  // namespace inplace_ops
