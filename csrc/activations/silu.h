#pragma once

#include "../curve.h"
#include "entry.h"

namespace inplace_ops {

template <class T>
HOST_DEVICE opmath_t<T> silu(opmath_t<T> x) {
  using C = opmath_t<T>;
  if constexpr (sizeof(T) == 2) return x * silu_point<T>(x).sigmoid;
  const C value = x / (C(1) + exp_of(-x));
  if constexpr (!std::is_same_v<T, float>) return value;
  // Where silu is flat the inverse needs more: its series is off by half a unit in the last place.
  constexpr float high = float(kMinimumY), low = float(kMinimumY - double(high));
  const float d = float(x) - float(kMinimumX), square = d * d;
  const float series = high + (square * (0.108905906f + 0.0488829f * d) + low);
  return select(square < 0x1p-12f, series, float(value));
}


// x * sigmoid(x).
template <class T>
struct SiLU : WithoutArguments {
  using Scalar = T;
  using C = opmath_t<T>;
  using Point = SiluPoint<C>;
  static constexpr Kind kKind = Kind::kCurve;
  static constexpr const char* kName = "silu";
  static constexpr int kDefaultBits = sizeof(T) == 8                ? 1
                                      : sizeof(T) == 4              ? 6
                                      : std::is_same_v<T, BFloat16> ? 5
                                                                    : 7;
  static constexpr double kLowestDerivative = -0.09983932, kHighestDerivative = 1.09983932;

  HOST_DEVICE static C value(C x) { return silu<T>(x); }
  HOST_DEVICE static Point point(C x) { return silu_point<T>(x); }
  HOST_DEVICE static C derivative(Point at) { return silu_derivative(at); }
  HOST_DEVICE static C second_derivative(Point at) { return silu_second_derivative(at); }
};

}  // namespace inplace_ops
