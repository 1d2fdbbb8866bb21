// The list of activations, from which ops, schemas, registrations and default bits are generated.
//
// To add an activation, add
//
// 1. its entry, a file in csrc/activations/: activations/entry.h says what an entry must define;
// 2. its line in kActivations below;
// 3. in inplace_ops/: its row in activations.py, its Functions in autograd.py, its function, its
//    module and their export in __init__.py;
// 4. for a smooth activation: its reference in tests/_support/smooth_references.py.
//
// tests/ops/test_activations.py says what is missing. `make tables` writes the table of errors in
// docs/accuracy.md.
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
