// What an activation's entry must define. An entry is a struct over the storage format T. It is
// constructed from the op's scalar arguments, of which a smooth activation has none.
//
// Every entry defines
//   Scalar                T;
//   kName                 the prefix of its ops' names: the struct's name in lower case, apart from
//                         underscores;
//   Arguments, kSchema    the types of the scalar arguments, and the end of the ops' schemas: for
//                         each scalar argument a comma, its type and its name;
//   kKind                 kPiecewiseLinear or kSmooth: how backward gets the derivative;
//   C                     the type of the arithmetic: opmath_t<T>, or comparison_t<T> for a
//                         piecewise-linear activation that compares and selects;
//   value(x)              the activation of x.
//
// Kind::kPiecewiseLinear: one bit, the mask, determines the derivative. The entry also defines
//   mask(x)               that bit. Where save="output" is allowed, mask(x) == mask(value(x));
//   gradient(grad, mask)  the gradient of x from that of value(x).
//
// Kind::kSmooth: backward recovers x from value(x) and a few bits. The entry also defines
//   point(x)              x and what derivative(point) and second_derivative(point) need;
//   derivative(point), second_derivative(point);
//   kLowestDerivative, kHighestDerivative   the range of the derivative;
//   kDefaultBits          the fewest bits per element with which the gradient is within
//                         torch.testing's tolerances;
//   is_flat(point)        whether the gradient is 0 there, even if the incoming one is infinite;
//   what ../inverse.h needs to invert value().
#pragma once

#include "../dtypes.h"

namespace inplace_ops {

enum class Kind { kPiecewiseLinear, kSmooth };

template <class...>
struct Types {};

struct WithoutArguments {
  using Arguments = Types<>;
  static constexpr const char* kSchema = "";
};

// kDefaultBits of most smooth activations. With so many bits per element, next to the output, the
// recovered input is exact in the 16-bit formats, and the gradient is within torch.testing's
// tolerances in the other formats.
template <class T>
constexpr int kTypicalBits = sizeof(T) == 8                ? 1
                             : sizeof(T) == 4              ? 6
                             : std::is_same_v<T, BFloat16> ? 5
                                                           : 7;

struct SmoothActivation : WithoutArguments {
  static constexpr Kind kKind = Kind::kSmooth;
  template <class Point>
  HOST_DEVICE static bool is_flat(Point) {
    return false;
  }
};

}  // namespace inplace_ops
