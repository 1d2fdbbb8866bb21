// What an activation is: a struct over its storage format T, made from the op's scalar arguments.
// All of them have
//   Scalar                T;
//   kName                 of their ops;
//   Arguments, kSchema    the types of the scalar arguments, and how the ops' schemas name them;
//   kKind                 what tells the derivative in backward;
//   value(x)              in the type that T is computed in;
// where one bit tells the derivative (Kind::kMask)
//   mask(x)               that bit, the same of x and of value(x) where the output may be kept;
//   gradient(grad, mask)
// and where x is recovered from value(x) and a few bits (Kind::kCurve)
//   point(x)              x with what derivative(point) and second_derivative(point) need of it;
//   kLowestDerivative, kHighestDerivative
//   kDefaultBits          the fewest with which the gradient passes torch.testing's tolerances;
//   is_flat(point)        whether the gradient is 0 there, even an infinite one;
// and what ../curve.h needs to invert it.
#pragma once

#include "../number_formats.h"

namespace inplace_ops {

enum class Kind { kMask, kCurve };

template <class...>
struct Types {};

struct WithoutArguments {
  using Arguments = Types<>;
  static constexpr const char* kSchema = "";
};

struct CurveEntry : WithoutArguments {
  static constexpr Kind kKind = Kind::kCurve;
  template <class Point>
  HOST_DEVICE static bool is_flat(Point) {
    return false;
  }
};

}  // namespace inplace_ops
