// hardswish(x) = x * clamp(x + 3, 0, 6) / 6 (Howard et al., "Searching for MobileNetV3", 2019).
//
// Between -3 and 3 it is a parabola: the inverse is a square root, and the gate is linear in it.
//
// Special values match PyTorch's: +inf where x * 6 overflows, with gradient 1; NaN at -inf, with
// gradient 0 (the branch distinguishes -inf from NaN); gradient 0 at -3 and 1 at 3. At NaN the
// gradient is NaN, as in PyTorch's vectorized float code. PyTorch's scalar code returns 1 there.
#pragma once

#include "../inverse.h"
#include "entry.h"

namespace inplace_ops {

template <class T>
struct Hardswish : SmoothActivation {
  using Scalar = T;
  using C = opmath_t<T>;
  static constexpr const char* kName = "hardswish";
  static constexpr int kDefaultBits = sizeof(T) == 8 ? 1 : std::is_same_v<T, BFloat16> ? 5 : 6;
  static constexpr double kMinimumX = -1.5, kMinimumY = -0.375, kMinimumYLow = 0.0;
  static constexpr double kLowestDerivative = -0.5, kHighestDerivative = 1.5;

  struct Point {
    C x;
  };

  // Never 0 between -3 and 3, since double backward divides by it. Half is an exception: there the
  // quotient would overflow.
  HOST_DEVICE static C derivative(Point point) {
    constexpr C offset = C(std::is_same_v<T, BFloat16> ? 0x1p-21 : 0.0);
    C interior = (point.x + C(1.5)) * C(1.0 / 3) + offset;  // without offset, 0 at the minimum
    if constexpr (sizeof(T) > 2)
      interior = interior == C(0) ? C(sizeof(T) == 8 ? 0x1p-50 : 0x1p-21) : interior;
    return is_flat(point) ? C(0) : point.x >= C(3) ? C(1) : interior;
  }

  HOST_DEVICE static bool is_flat(Point point) { return point.x <= C(-3); }

  HOST_DEVICE static C second_derivative(Point point) {
    return point.x > C(-3) && point.x < C(3) ? C(1.0 / 3) : C(0);
  }

  HOST_DEVICE static Point point(C x) { return {x}; }

  HOST_DEVICE static C value(C x) {
    const C above = larger(x + C(3), C(0));
    const C value = x * smaller(above, C(6)) * C(1.0 / 6);
    if constexpr (sizeof(T) == 2) return value;
    constexpr C c[] = {C(1.0 / 6), C(0)};  // a parabola, but polynomial() needs two terms
    return value_near_minimum<Hardswish>(x, c, value);
  }

  // The core region: all finite y.
  static constexpr float kLeftEnd = 3e38f, kRightEnd = 3e38f;
  static constexpr double kScale = 3.375;  // from x = 3 on the gate is 1
  static constexpr bool kFitIsExact = true;

  HOST_DEVICE static Point core_point(float x) { return {x}; }
  HOST_DEVICE static Point fit_point(float y, bool left) { return {core_estimate(y, left)}; }
  HOST_DEVICE static Point nearby_point(Point point, C step) { return {point.x + step}; }
  HOST_DEVICE static Point recovered_point(C x, C y, bool left) {
    return {y - y == C(0) ? x : left ? C(-INFINITY) : y};
  }

  // Returns x from the gate, without cancellation at 0 and at -3. The result is on the side of -3
  // and of 3 that y determines, since the derivative jumps there.
  template <class Y>
  HOST_DEVICE static Y from_gate(Y gate, Y y, bool left) {
    constexpr Y interior = sizeof(Y) == 8 ? Y(2.9999999999999996) : Y(2.9999998f);
    const Y on_left = y < Y(0) ? larger(Y(6) * gate - Y(3), -interior) : Y(kUnderflowed);
    const Y on_right = y < Y(3) ? smaller(y * approx_reciprocal(gate), interior) : y;
    return left ? on_left : on_right;
  }

  HOST_DEVICE static float core_estimate(float y, bool left) {
    const float gate = 0.25f + 0.75f * signed_root<Hardswish>(y, left);
    return from_gate(gate, y, left) * kPatternScale<T>;
  }

  HOST_DEVICE static float tail_estimate(float y, bool) { return y; }

  HOST_DEVICE static double inverse(double y, bool left) {
    constexpr double sqrt_6 = 2.449489742783178;
    return from_gate(0.25 + signed_root_in_double<Hardswish>(y, left) / sqrt_6, y, left);
  }
};

}  // namespace inplace_ops
