// gelu(x) = x * Phi(x), where Phi is the standard normal distribution function, and the tanh form,
// where Phi(x) = (1 + tanh(u)) / 2 = sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3)
// (Hendrycks, Gimpel, "Gaussian Error Linear Units", 2016). The code computes neither 1 + erf nor
// 1 + tanh, which cancel on the left.
//
// Special values match PyTorch's: NaN at -inf, +inf at +inf (PyTorch's vectorized erf form: NaN),
// and a NaN gradient at both; gelu(-0.0) is -0.0. The gradient of the tanh form is 0 or 1 at the
// finite x farthest from 0.
#pragma once

#include "../inverse.h"
#include "entry.h"

namespace inplace_ops {

// The base of both forms. On the left |x| grows as the square root of a logarithm of y. There a
// polynomial in v = sqrt(ln(y_min / y)) fits well, and a polynomial in signed_root does not.
template <class Activation, class T>
struct GELUBase : SmoothActivation {
  using Scalar = T;
  using C = opmath_t<T>;
  static constexpr int kDefaultBits = kTypicalBits<T>;
  // The core region: all finite y, except y so large that the arithmetic might overflow.
  static constexpr float kLeftEnd = 1e6f, kRightEnd = 1e6f;
  static constexpr bool kFitIsExact = false;

  HOST_DEVICE static float core_estimate(float y, bool left) {
    constexpr float log_minimum = float(Activation::kLogMinimum), max_logarithm = 90.0f;
    if constexpr (sizeof(T) == 2) {
      // The root is signed_root on the right branch, and v on the left.
      constexpr float offset =
          float(-IntervalMidpoint<Activation>::kOffset / Activation::kMinimumY);
      constexpr float min_radicand =
          float(-IntervalMidpoint<Activation>::kMinRadicand / Activation::kMinimumY);
      const float logarithm = larger(log_minimum - offset - approx_log(-y), 0.0f) + min_radicand;
      const float squared =
          select(left, smaller(logarithm, max_logarithm), radicand<Activation>(y));
      const float root = approx_sqrt(squared);
      const float on_right = y * approx_reciprocal(Activation::gate_fit(root));
      return select(left, Activation::left_estimate(root), on_right);
    } else {
      const float root = signed_root<Activation>(y, left);
      const float v = approx_sqrt(smaller(log_minimum - approx_log(-y), max_logarithm));
      const float inverse =
          Activation::reciprocal_estimate(approx_reciprocal(v + 2.0f) - 0.234375f);
      const bool small = left & (y > -0.0455f);  // y at x = -2
      return select(small, -1.0f, y) *
             approx_reciprocal(select(small, inverse, Activation::gate_fit(root)));
    }
  }

  HOST_DEVICE static float tail_estimate(float y, bool) { return y; }

  HOST_DEVICE static auto fit_point(float y, bool left) {
    return Activation::core_point(core_estimate(y, left));
  }

  HOST_DEVICE static auto recovered_point(C x, C y, bool) {
    const C nan_if_not_finite = y - y;
    return Activation::point(x + nan_if_not_finite);
  }
};

template <class T>
struct GELU : GELUBase<GELU<T>, T> {
  using C = opmath_t<T>;
  static constexpr const char* kName = "gelu";
  static constexpr double kMinimumX = -0.7517915246935645, kMinimumY = -0.16997120747990366;
  static constexpr double kMinimumYLow = -4.060510732350249e-18;
  static constexpr double kLogMinimum = -1.7721262240414875;
  static constexpr double kLowestDerivative = -0.12890414518515478;
  static constexpr double kHighestDerivative = 1.1289041451851547;

  // x, Phi(x), and Phi's derivative, the density.
  struct Point {
    C x, gate, density;
  };

  HOST_DEVICE static C derivative(Point point) { return point.gate + point.x * point.density; }
  HOST_DEVICE static C second_derivative(Point point) {
    return point.density * (C(2) - point.x * point.x);
  }

  // Returns the point from e = exp(-x^2 / 2). Phi(-|x|) is e times Mills' ratio, divided by
  // sqrt(2 pi): the quotient is a fit for |x| <= 14. Beyond, e is 0.
  HOST_DEVICE static Point point_of(float x, float magnitude, float e) {
    const float t = approx_reciprocal(1.0f + 0.26f * magnitude);
    float ratio;
    if constexpr (sizeof(T) == 2) {
      // tools/fit_inverse.py: gelu.mills.16
      constexpr float c[] = {3.5741195e-05f, 0.102938674f, 0.11097216f, 0.0602119f,
                             0.19221702f,    -0.13547829f, 0.24634457f, -0.07724194f};
      ratio = polynomial(c, t);
    } else {
      // tools/fit_inverse.py: gelu.mills.32
      constexpr float c[] = {-7.167853e-06f, 0.10390664f,  0.101715095f, 0.10948344f,  0.031201355f,
                             0.20013066f,    -0.20082872f, 0.29099652f,  -0.17052528f, 0.03392746f};
      ratio = polynomial(c, t);
    }
    const float below = e * ratio;
    return {x, select(x < 0.0f, below, 1.0f - below), 0.398942280f * e};
  }

  HOST_DEVICE static Point core_point(float x) {
    return point_of(x, fabsf(x), approx_power(-0.5f * kNatural * (x * x)));
  }

  HOST_DEVICE static Point point(C x) {
    if constexpr (sizeof(T) == 8) {
      return {x, 0.5 * erfc(x * -0.7071067811865476), 0.3989422804014327 * exp_of(-0.5 * x * x)};
    } else if constexpr (sizeof(T) == 2) {
      return core_point(x);
    } else {
      // Computes exp(-x^2 / 2) without the rounding error of x^2.
      const float magnitude = smaller(fabsf(x), 20.0f);
#ifdef INPLACE_OPS_HARDWARE
      // With s = -x^2 / 2 and n = s log2(e), both rounded, exp(-x^2 / 2) is 2^n exp(rest), where
      // the rest, s - n ln(2) and the rounding error of s, is small. fmaf() is exact where its
      // terms cancel.
      const float half = -0.5f * magnitude, s = half * magnitude, n = s * kNatural;
      const float rest =
          fmaf(n, 1.90465421e-9f, fmaf(n, -0.693147182f, s)) + fmaf(half, magnitude, -s);
      const float e = approx_power(n);
      return point_of(x, magnitude, fmaf(e, rest, e));
#else
      // Cody, "Rational Chebyshev approximations for the error function", 1969: `high`, x to 8
      // binary places, has an exact square, and the rest of x^2 is small.
      constexpr float to_places = 49152.0f;
      const float high = (magnitude + to_places) - to_places;
      const float rest = 0.5f * (magnitude - high) * (magnitude + high);
      const float correction = 1.0f - rest * (1.0f - rest * (0.5f - rest * 0.166666667f));
      return point_of(x, magnitude, exp_of(-0.5f * high * high) * correction);
#endif
    }
  }

  HOST_DEVICE static C value(C x) {
    const C value = x * point(x).gate;
    if constexpr (sizeof(T) == 2) return value;
    // tools/fit_inverse.py: gelu.value
    constexpr C c[] = {C(0.21574699615702345), C(0.12942832766351733), C(-0.004549919099667772)};
    return value_near_minimum<GELU>(x, c, value);
  }

  HOST_DEVICE static Point nearby_point(Point point, C step) {
    const C product = step * point.x, square = product * product - step * step;
    const C gate =
        point.gate + step * point.density * (C(1) - C(0.5) * product + C(1.0 / 6) * square);
    return {point.x + step, gate, point.density * (C(1) - product + C(0.5) * square)};
  }

  // The root is 1 at x = 3.3, from where on the gate is nearly 1.
  static constexpr double kScale = sizeof(T) == 2 ? 3.5 : 3.4699712;
  static constexpr double kLowestX = -37.5;

  // Minimax fits, in ascending powers. Their errors are, in
  // - 16 bits (divided or multiplied by kPatternScale): at most 0.5% of x, and 3e-4 for
  //   |x - x_min| < 0.2. They change the derivative by at most 1.6e-4, and for inputs from N(0, 1)
  //   by less than 1e-8 on average;
  // - float: at most 0.4% of x. Around the minimum they change the derivative by at most 3e-7.

  // Returns the gate as a polynomial in signed_root.
  HOST_DEVICE static float gate_fit(float root) {
    if constexpr (sizeof(T) == 2) {
      constexpr float scale = 1.0f / kPatternScale<T>;
      // tools/fit_inverse.py: gelu.gate.16
      constexpr float c[] = {scale * 0.22601849f,  scale * 1.2216526f,  scale * 0.17934726f,
                             scale * -0.19435078f, scale * -1.1359546f, scale * 0.6995422f};
      return polynomial(c, root);
    } else {
      // tools/fit_inverse.py: gelu.gate.32
      constexpr float c[] = {0.59488964f, 1.1782671f, -0.41224355f, -0.9076962f,
                             -0.5724514f, 0.3540801f, 5.239841f,    1.3071747f,
                             -15.556183f, -6.542026f, 21.649971f};
      return polynomial(c, root - 0.3f);
    }
  }

  // Returns x on the left as a polynomial in v.
  HOST_DEVICE static float left_estimate(float v) {
    constexpr float scale = kPatternScale<T>;
    // tools/fit_inverse.py: gelu.left.16
    constexpr float c[] = {scale * -0.75149727f, scale * -0.8915832f,   scale * -0.22252864f,
                           scale * 0.052357722f, scale * -0.005928019f, scale * 0.00024904034f};
    return polynomial(c, v);
  }

  // Returns 1 / |x| as a polynomial in w = 1 / (v + 2) - 0.234375, for x < -1.9.
  HOST_DEVICE static float reciprocal_estimate(float w) {
    // tools/fit_inverse.py: gelu.tail
    constexpr float c[] = {0.2906308f, 2.0472255f,  4.9414606f, 7.6779943f,
                           4.0993857f, -10.346663f, -18.889183f};
    return polynomial(c, w);
  }

  HOST_DEVICE static double inverse(double y, bool left) {
    // tools/fit_inverse.py: gelu.inverse
    constexpr double series[] = {kMinimumX,           2.1529186559712192,  -1.390304180188793,
                                 2.349787534087325,   -3.9107846087024516, 7.343514648211575,
                                 -14.369409413840508, 29.154667467586965,  -60.61556930221705,
                                 128.42741125096407,  -276.13744801715416};
    return newton_inverse<GELU>(y, left, series);
  }
};

template <class T>
struct GELUTanh : GELUBase<GELUTanh<T>, T> {
  using C = opmath_t<T>;
  static constexpr const char* kName = "gelu_tanh";
  static constexpr double kMinimumX = -0.7524614220710163, kMinimumY = -0.17004075057125406;
  static constexpr double kMinimumYLow = 1.1700864605877343e-17;
  static constexpr double kLogMinimum = -1.7717171614148745;
  static constexpr double kLowestDerivative = -0.12899306865877178;
  static constexpr double kHighestDerivative = 1.1289930686587717;

  // x, sigmoid(2 u), sigmoid(-2 u), and the derivative of 2 u, the argument.
  struct Point {
    C x, gate, complement, argument_derivative;
  };

  HOST_DEVICE static C gate_derivative(Point point) {
    return point.gate * point.complement * point.argument_derivative;
  }
  HOST_DEVICE static C derivative(Point point) {
    return point.gate + point.x * gate_derivative(point);
  }
  HOST_DEVICE static C second_derivative(Point point) {
    const C first_term = gate_derivative(point) * (C(2) + point.x * point.argument_derivative *
                                                              (point.complement - point.gate));
    return first_term +
           point.gate * point.complement * point.x * argument_second_derivative(point.x);
  }

  // Returns the argument times `scale`, a constant.
  HOST_DEVICE static C argument(C x, C scale = C(1)) {
    return x * (scale * C(1.5957691216057308) + scale * C(0.0713548162726009) * (x * x));
  }
  HOST_DEVICE static C argument_derivative(C x) {
    return C(1.5957691216057308) + C(0.2140644488178007) * (x * x);
  }
  HOST_DEVICE static C argument_second_derivative(C x) { return C(0.4281288976356015) * x; }

  HOST_DEVICE static Point core_point(float x) {
    const float e = approx_power(argument(x, -kNatural)), s = approx_reciprocal(1.0f + e);
    return {x, s, smaller(e * s, 1.0f), argument_derivative(x)};  // 1 where e is infinite
  }

  HOST_DEVICE static Point point(C x) {
    // Limited so that the argument's derivative is finite where the gate is 0 or 1.
    const C limited = larger(smaller(x, C(1e6)), C(-1e6));
#ifdef INPLACE_OPS_HARDWARE
    if constexpr (sizeof(T) == 2) {
      // A quarter of the denominator, as in SiLU.
      const float quarter = approx_power(argument(x, -kNatural) - 2.0f);
      const float reciprocal = approx_reciprocal(quarter + 0.25f);
      return {x, 0.25f * reciprocal, smaller(quarter * reciprocal, 1.0f),
              argument_derivative(limited)};
    }
#endif
    const C e = exp_of(-argument(x)), s = approx_reciprocal(C(1) + e);
    return {x, s, smaller(e * s, C(1)), argument_derivative(limited)};
  }

  HOST_DEVICE static C value(C x) {
    const C value = x * point(x).gate;
    if constexpr (sizeof(T) == 2) return value;
    // tools/fit_inverse.py: gelu_tanh.value
    constexpr C c[] = {C(0.21520004551242924), C(0.12917281537859632), C(-0.003945713380462007)};
    return value_near_minimum<GELUTanh>(x, c, value);
  }

  HOST_DEVICE static Point nearby_point(Point point, C step) {
    const C x = point.x + step;
    const C change =
        step * (point.argument_derivative + C(0.5) * step * argument_second_derivative(point.x));
    const C second_order = C(1) + C(0.5) * change * (point.complement - point.gate);
    const C difference = change * (point.gate * point.complement) * second_order;
    return {x, point.gate + difference, point.complement - difference, argument_derivative(x)};
  }

  // The root is 1 at x = 3.3, from where on the gate is nearly 1.
  static constexpr double kScale = sizeof(T) == 2 ? 3.5 : 3.4700408;
  static constexpr double kLowestX = -20.6;

  // Minimax fits, in ascending powers. Their errors are, in
  // - 16 bits (divided or multiplied by kPatternScale): at most 0.5% of x, and 3e-4 for
  //   |x - x_min| < 0.2. They change the derivative by at most 1.6e-4, and for inputs from N(0, 1)
  //   by less than 1e-8 on average;
  // - float: at most 0.4% of x. Around the minimum they change the derivative by at most 3e-7.

  // Returns the gate as a polynomial in signed_root.
  HOST_DEVICE static float gate_fit(float root) {
    if constexpr (sizeof(T) == 2) {
      constexpr float scale = 1.0f / kPatternScale<T>;
      // tools/fit_inverse.py: gelu_tanh.gate.16
      constexpr float c[] = {scale * 0.22591169f,  scale * 1.2212355f, scale * 0.18775806f,
                             scale * -0.22642505f, scale * -1.092648f, scale * 0.68057144f};
      return polynomial(c, root);
    } else {
      // tools/fit_inverse.py: gelu_tanh.gate.32
      constexpr float c[] = {0.59484094f,  1.1781892f,  -0.4142143f, -0.90560627f,
                             -0.54853684f, 0.34600395f, 5.1140556f,  1.271644f,
                             -15.143311f,  -6.3953123f, 21.081524f};
      return polynomial(c, root - 0.3f);
    }
  }

  // Returns x on the left as a polynomial in v.
  HOST_DEVICE static float left_estimate(float v) {
    constexpr float scale = kPatternScale<T>;
    // tools/fit_inverse.py: gelu_tanh.left.16
    constexpr float c[] = {scale * -0.75224274f, scale * -0.8893085f,  scale * -0.24012245f,
                           scale * 0.06904872f,  scale * -0.00755049f, scale * 0.00029610362f};
    return polynomial(c, v);
  }

  // Returns 1 / |x| as a polynomial in w = 1 / (v + 2) - 0.234375, for x < -1.9.
  HOST_DEVICE static float reciprocal_estimate(float w) {
    // tools/fit_inverse.py: gelu_tanh.tail
    constexpr float c[] = {0.2963727f, 1.9405738f, 5.4534297f, 8.9121275f,
                           -13.8787f,  -28.10819f, 324.50116f, 1244.7853f};
    return polynomial(c, w);
  }

  HOST_DEVICE static double inverse(double y, bool left) {
    // tools/fit_inverse.py: gelu_tanh.inverse
    constexpr double series[] = {kMinimumX,           2.155652839847732,  -1.3946216792082275,
                                 2.3474930110650605,  -3.882985943299949, 7.250881506215288,
                                 -14.118830664989263, 28.52769290571453,  -59.09836351828019,
                                 124.81399042300602,  -267.60197827118867};
    return newton_inverse<GELUTanh>(y, left, series);
  }
};

}  // namespace inplace_ops
