// What an activation is: a struct over its storage format T, made from the op's scalar arguments,
// of which a smooth has none. All of them have
//   Scalar                T;
//   kName                 of their ops: the struct's name in lower case, underscores apart;
//   Arguments, kSchema    the types of the scalar arguments, and what the ops' schemas have for
//                         them behind the others: each a comma, its type and its name;
//   kKind                 what tells the derivative in backward;
//   C                     the type it is computed in: opmath_t<T>, or with a mask selected_t<T>;
//   value(x)
// where one bit tells the derivative (Kind::kPiecewiseLinear)
//   mask(x)               that bit, the same of x and of value(x) where the output may be kept;
//   gradient(grad, mask)
// and where x is recovered from value(x) and a few bits (Kind::kSmooth)
//   point(x)              x with what derivative(point) and second_derivative(point) need of it;
//   kLowestDerivative, kHighestDerivative
//   kDefaultBits          the fewest with which the gradient passes torch.testing's tolerances;
//   is_flat(point)        whether the gradient is 0 there, even an infinite one;
// and what ../inverse.h needs to invert it.
#pragma once

#include "../number_formats.h"

namespace inplace_ops {

enum class Kind { kPiecewiseLinear, kSmooth };

template <class...>
struct Types {};

struct WithoutArguments {
  using Arguments = Types<>;
  static constexpr const char* kSchema = "";
};

// Bits per element beside the output with which the recovered input is exact in the 16-bit formats,
// and its gradient within torch.testing's tolerances in the others, for most smooth activations.
template <class T>
constexpr int kUsualBits = sizeof(T) == 8                ? 1
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
