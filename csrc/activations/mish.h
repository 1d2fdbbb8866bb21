// mish(x) = x * tanh(ln(1 + e^x)) (Misra, "Mish: A Self Regularized Non-Monotonic Activation
// Function", 2019). The gate is computed without cancellation, as n / (n + 2) with
// n = e^x (e^x + 2).
//
// Special values match PyTorch's: NaN at -inf, +inf at +inf, and a NaN gradient at both.
#pragma once

#include "../inverse.h"
#include "entry.h"

namespace inplace_ops {

template <class T>
struct Mish : SmoothActivation {
  using Scalar = T;
  using C = opmath_t<T>;
  static constexpr const char* kName = "mish";
  static constexpr int kDefaultBits = kTypicalBits<T>;
  static constexpr double kMinimumX = -1.1924312145154952, kMinimumY = -0.30884341301725043;
  static constexpr double kMinimumYLow = 2.7753772146779074e-17;
  static constexpr double kLowestDerivative = -0.11252612238946255;
  static constexpr double kHighestDerivative = 1.088498161251728;

  // x, e^x, the gate and its two derivatives.
  struct Point {
    C x, e, gate, gate_derivative, gate_second_derivative;
  };

  HOST_DEVICE static C derivative(Point point) {
    return point.gate + point.x * point.gate_derivative;
  }
  HOST_DEVICE static C second_derivative(Point point) {
    return C(2) * point.gate_derivative + point.x * point.gate_second_derivative;
  }

  // Returns the point from x and e = e^x. e^4 must not overflow.
  HOST_DEVICE static Point point_of(C x, C e) {
    const C n = e * (e + C(2)), reciprocal = approx_reciprocal(n + C(2)),
            complement = reciprocal + reciprocal;  // 1 - gate
    const C product = (n - e) * complement;        // e (e + 1)
    const C gate_derivative = product * complement, e_complement = e * complement;
    return {x, e, n * reciprocal, gate_derivative,
            gate_derivative * (C(1) - (product + product)) + e_complement * e_complement};
  }

  // From x = 20 on, or 40 in double, the gate is 1, and x * gate_derivative is negligible next to
  // it: the point at 20 or 40 serves for all larger x. At infinity and NaN, x - x makes it NaN.
  HOST_DEVICE static Point point(C x) {
    constexpr C end = sizeof(T) == 8 ? C(40) : C(20);
    const C limited = smaller(x, end);
    Point point = sizeof(T) == 2 ? core_point(limited) : point_of(limited, exp_of(limited));
    point.x += x - x;
    return point;
  }

  HOST_DEVICE static C value(C x) {
    const C value = x * point(x).gate;
    if constexpr (sizeof(T) == 2) return value;
    // tools/fit_inverse.py: mish.value
    constexpr C c[] = {C(0.13347395702476725), C(0.06824375469336862)};
    return value_near_minimum<Mish>(x, c, value);
  }

  // The core region: x > -4.5, as long as e^x is far from overflow.
  static constexpr float kLeftEnd = -0.0497128293f, kRightEnd = 20.0f;
  static constexpr double kScale = 5.0;  // from x = 4.7 on the gate is nearly 1
  static constexpr double kLowestX = -700.0;
  static constexpr bool kFitIsExact = false;

  HOST_DEVICE static Point core_point(float x) { return point_of(x, approx_exp(x)); }
  HOST_DEVICE static Point fit_point(float y, bool left) {
    return core_point(core_estimate(y, left));
  }

  HOST_DEVICE static Point nearby_point(Point point, C step) {
    return point_of(point.x + step, point.e * (C(1) + step * (C(1) + C(0.5) * step)));
  }

  // Minimax fits, in ascending powers of signed_root, of the gate divided by kPatternScale. Their
  // errors are, in
  // - 16 bits: at most 0.9% of x, and 7e-4 for |x - x_min| < 0.2. They change the derivative by at
  //   most 3.2e-4, and for inputs from N(0, 1) by less than 1e-8 on average;
  // - float: at most 0.4% of x. Around the minimum they change the derivative by at most 3e-7.
  HOST_DEVICE static float core_estimate(float y, bool left) {
    const float root = signed_root<Mish>(y, left);
    if constexpr (sizeof(T) == 2) {
      constexpr float scale = 1.0f / kPatternScale<T>;
      // tools/fit_inverse.py: mish.gate.16
      constexpr float c[] = {scale * 0.25908217f, scale * 1.3281392f, scale * 0.53299934f,
                             scale * -1.4969811f, scale * 1.4645422f, scale * -6.135212f,
                             scale * 8.672666f,   scale * -3.6338089f};
      return y * approx_reciprocal(polynomial(c, root));
    } else {
      // tools/fit_inverse.py: mish.gate.32
      constexpr float c[] = {0.66750693f, 1.2600541f, -0.821507f,  -1.6272941f,
                             1.0256983f,  5.1371484f, -1.1780365f, -26.998814f,
                             -2.0649486f, 73.17436f,  13.175171f,  -78.18288f};
      return y * approx_reciprocal(polynomial(c, root - 0.3f));
    }
  }

  HOST_DEVICE static float tail_estimate(float y, bool left) {
    // 1 / |x| as a polynomial in 1 / (v + 2) - 0.234375, with v = sqrt(x_min - ln(-y)).
    // tools/fit_inverse.py: mish.tail
    constexpr float c[] = {0.11811696f, 1.3057457f, 4.594136f, 3.1970637f,  -14.059588f,
                           -8.841986f,  218.18695f, 625.371f,  -1295.6644f, -6453.6606f};
    const float depth = larger(float(kMinimumX) - approx_log(-y), 0.0f);
    const float v = approx_sqrt(smaller(depth, 87.0f));
    const float x = -approx_reciprocal(polynomial(c, approx_reciprocal(v + 2.0f) - 0.234375f));
    return select(left, select(y == 0.0f, kUnderflowed, x), y);
  }

  HOST_DEVICE static Point recovered_point(C x, C y, bool) {
    const C nan_if_not_finite = y - y;
    return point(x + nan_if_not_finite);
  }

  HOST_DEVICE static double inverse(double y, bool left) {
    // tools/fit_inverse.py: mish.inverse
    constexpr double series[] = {kMinimumX,           2.737169751980141,  -1.9153133936666222,
                                 2.545716599890605,   -3.270867548811557, 4.70503230445804,
                                 -6.9797363451619585, 10.704969594301705, -16.765564651694902,
                                 26.698410645072233,  -43.07206492707911};
    return newton_inverse<Mish>(y, left, series);
  }
};

}  // namespace inplace_ops
