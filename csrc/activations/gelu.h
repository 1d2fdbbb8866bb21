// gelu(x) = x * Phi(x) with the normal distribution's Phi, and its tanh form, in which
// Phi(x) = (1 + tanh(u)) / 2 = sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks,
// Gimpel, "Gaussian Error Linear Units", 2016). Neither 1 + erf nor 1 + tanh is formed: they cancel
// on the left.
//
// As PyTorch's: NaN at -inf, +inf at +inf (PyTorch's vectorized erf form: NaN), the gradient NaN at
// both; gelu(-0.0) is -0.0. The gradient of the tanh form is 0 or 1 at the largest finite x.
#pragma once

#include "../inverse.h"
#include "entry.h"

namespace inplace_ops {

// What both forms have in common: on the left, where |x| grows with the square root of a logarithm
// of y, a polynomial of signed_root is no good fit; one of v = sqrt(ln(y_min / y)) is.
template <class Activation, class T>
struct GELUBase : SmoothActivation {
  using Scalar = T;
  using C = opmath_t<T>;
  static constexpr int kDefaultBits = kUsualBits<T>;
  // The core is all that is finite, but for what is so large that it might overflow.
  static constexpr float kLeftEnd = 1e6f, kRightEnd = 1e6f;
  static constexpr bool kFitIsExact = false;

  HOST_DEVICE static float estimate(float y, bool left) {
    constexpr float log_minimum = float(Activation::kLogMinimum), end = 90.0f;
    if constexpr (sizeof(T) == 2) {
      // As signed_root on the right, and v on the left.
      constexpr float less = float(-IntervalMidpoint<Activation>::kOffset / Activation::kMinimumY);
      constexpr float smallest =
          float(-IntervalMidpoint<Activation>::kMinRadicand / Activation::kMinimumY);
      const float logarithm = larger(log_minimum - less - rough_log(-y), 0.0f) + smallest;
      const float squared = select(left, smaller(logarithm, end), radicand<Activation>(y));
      const float root = rough_sqrt(squared);
      const float on_right = y * rough_reciprocal(Activation::gate_of(root));
      return select(left, Activation::left_of(root), on_right);
    } else {
      const float root = signed_root<Activation>(y, left);
      const float v = rough_sqrt(smaller(log_minimum - rough_log(-y), end));
      const float inverse = Activation::inverse_of(rough_reciprocal(v + 2.0f) - 0.234375f);
      const bool small = left & (y > -0.0455f);  // of x = -2
      return select(small, -1.0f, y) *
             rough_reciprocal(select(small, inverse, Activation::gate_of(root)));
    }
  }

  HOST_DEVICE static float tail_estimate(float y, bool) { return y; }

  HOST_DEVICE static auto fitted(float y, bool left) {
    return Activation::core_point(estimate(y, left));
  }

  HOST_DEVICE static auto tail_point(C x, C y, bool) {
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

  // Phi(x), and its derivative, the density.
  struct Point {
    C x, gate, density;
  };

  HOST_DEVICE static C derivative(Point at) { return at.gate + at.x * at.density; }
  HOST_DEVICE static C second_derivative(Point at) { return at.density * (C(2) - at.x * at.x); }

  // From e = exp(-x^2 / 2): Phi(-|x|) is e times a fit of Mills' ratio over sqrt(2 pi).
  HOST_DEVICE static Point point_of(float x, float magnitude, float e) {
    const float t = rough_reciprocal(1.0f + 0.325f * magnitude);
    float ratio;
    if constexpr (sizeof(T) == 2) {
      constexpr float c[] = {0.129656151f,  0.129672304f,  0.115501061f,  0.0935324654f,
                             0.0259994678f, 0.0853795484f, -0.113573715f, 0.0338330045f};
      ratio = t * polynomial(c, t);
    } else {
      constexpr float c[] = {0.12965624f,   0.129656941f,    0.115954056f,  0.0884521753f,
                             0.0542171672f, -0.00180616253f, 0.0433624014f, -0.129656389f,
                             0.091301091f,  -0.0211375356f};
      ratio = t * polynomial(c, t);
    }
    const float below = e * ratio;
    return {x, select(x < 0.0f, below, 1.0f - below), 0.398942280f * e};
  }

  HOST_DEVICE static Point core_point(float x) {
    return point_of(x, fabsf(x), rough_exp(-0.5f * x * x));
  }

  HOST_DEVICE static Point point(C x) {
    if constexpr (sizeof(T) == 8) {
      return {x, 0.5 * erfc(x * -0.7071067811865476), 0.3989422804014327 * exp_of(-0.5 * x * x)};
    } else if constexpr (sizeof(T) == 2) {
      return core_point(x);
    } else {
      // x^2 without its rounding error (Cody, "Rational Chebyshev approximations for the error
      // function", 1969): the square of x to 8 binary places is exact, and what it lacks is small.
      const float magnitude = smaller(fabsf(x), 20.0f);
      constexpr float to_places = 49152.0f;
      const float high = (magnitude + to_places) - to_places;
      const float rest = 0.5f * (magnitude - high) * (magnitude + high);
      const float correction = 1.0f - rest * (1.0f - rest * (0.5f - rest * 0.166666667f));
      return point_of(x, magnitude, exp_of(-0.5f * high * high) * correction);
    }
  }

  HOST_DEVICE static C value(C x) {
    const C value = x * point(x).gate;
    if constexpr (sizeof(T) == 2) return value;
    constexpr C c[] = {C(0.21574699615702345), C(0.12942832766351733), C(-0.004549919899667772)};
    return near_minimum<GELU>(x, c, value);
  }

  HOST_DEVICE static Point moved(Point at, C step) {
    const C product = step * at.x, square = product * product - step * step;
    const C gate = at.gate + step * at.density * (C(1) - C(0.5) * product + C(1.0 / 6) * square);
    return {at.x + step, gate, at.density * (C(1) - product + C(0.5) * square)};
  }

  // From x = 3.3 on the gate is nearly 1.
  static constexpr double kScale = sizeof(T) == 2 ? 3.5 : 3.4699712;
  static constexpr double kLowestX = -37.5;

  // Minimax fits, ascending powers: of 16 bits, over or times kPatternScale, within 0.6% of x,
  // within 3e-4 for |x - x_min| < 0.2, and elsewhere within 2e-4 in the derivative, where the
  // errors of inputs from N(0, 1) add up to 0; of float within 0.5% of x, and around the minimum
  // within 4e-7 in the derivative. The gate of signed_root,
  HOST_DEVICE static float gate_of(float root) {
    if constexpr (sizeof(T) == 2) {
      constexpr float scale = 1.0f / kPatternScale<T>;
      constexpr float c[] = {scale * 0.226018429f,  scale * 1.22165871f, scale * 0.17926836f,
                             scale * -0.194086984f, scale * -1.1362431f, scale * 0.699624717f};
      return polynomial(c, root);
    } else {
      constexpr float c[] = {0.595097482f, 1.17982531f,  -0.417321295f, -0.975559056f,
                             -0.66989857f, 0.868455827f, 6.52997017f,   0.0975300968f,
                             -20.1099205f, -5.87435913f, 26.8010864f};
      return polynomial(c, root - 0.3f);
    }
  }

  // x of v on the left,
  HOST_DEVICE static float left_of(float v) {
    constexpr float scale = kPatternScale<T>;
    constexpr float c[] = {scale * -0.751497805f, scale * -0.891546488f,   scale * -0.222721845f,
                           scale * 0.0525299348f, scale * -0.00597023172f, scale * 0.000251983758f};
    return polynomial(c, v);
  }

  // and 1 / |x| of 1 / (v + 2) - 0.234375, from x = -1.9 on.
  HOST_DEVICE static float inverse_of(float w) {
    constexpr float c[] = {0.290630817f, 2.04722548f,  4.94145012f, 7.6779232f,
                           4.10023975f,  -10.3376017f, -18.8686924f};
    return polynomial(c, w);
  }

  HOST_DEVICE static double inverse(double y, bool left) {
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

  // sigmoid(2 u), sigmoid(-2 u), and the derivative of 2 u.
  struct Point {
    C x, gate, complement, rate;
  };

  HOST_DEVICE static C gate_derivative(Point at) { return at.gate * at.complement * at.rate; }
  HOST_DEVICE static C derivative(Point at) { return at.gate + at.x * gate_derivative(at); }
  HOST_DEVICE static C second_derivative(Point at) {
    const C own = gate_derivative(at) * (C(2) + at.x * at.rate * (at.complement - at.gate));
    return own + at.gate * at.complement * at.x * rate_of_rate(at.x);
  }

  HOST_DEVICE static C twice_u(C x) {
    return x * (C(1.5957691216057308) + C(0.0713548162726009) * (x * x));
  }
  HOST_DEVICE static C rate(C x) { return C(1.5957691216057308) + C(0.2140644488178007) * (x * x); }
  HOST_DEVICE static C rate_of_rate(C x) { return C(0.4281288976356015) * x; }

  HOST_DEVICE static Point core_point(float x) {
    const float e = rough_exp(-twice_u(x)), s = rough_reciprocal(1.0f + e);
    return {x, s, smaller(e * s, 1.0f), rate(x)};  // 1 where e is infinite
  }

  HOST_DEVICE static Point point(C x) {
    // So that the rate is finite where the gate is 0 or 1.
    const C limited = larger(smaller(x, C(1e6)), C(-1e6));
#ifdef INPLACE_OPS_HARDWARE
    if constexpr (sizeof(T) == 2) {
      // As in SiLU.
      const float quarter = hardware::exp2(twice_u(x) * -1.44269504f - 2.0f);
      const float reciprocal = rough_reciprocal(quarter + 0.25f);
      return {x, 0.25f * reciprocal, smaller(quarter * reciprocal, 1.0f), rate(limited)};
    }
#endif
    const C e = exp_of(-twice_u(x)), s = rough_reciprocal(C(1) + e);
    return {x, s, smaller(e * s, C(1)), rate(limited)};
  }

  HOST_DEVICE static C value(C x) {
    const C value = x * point(x).gate;
    if constexpr (sizeof(T) == 2) return value;
    constexpr C c[] = {C(0.21520004551242924), C(0.12917281537859632), C(-0.003945713380462007)};
    return near_minimum<GELUTanh>(x, c, value);
  }

  HOST_DEVICE static Point moved(Point at, C step) {
    const C x = at.x + step;
    const C argument = step * (at.rate + C(0.5) * step * rate_of_rate(at.x));
    const C bend = C(1) + C(0.5) * argument * (at.complement - at.gate);
    const C difference = argument * (at.gate * at.complement) * bend;
    return {x, at.gate + difference, at.complement - difference, rate(x)};
  }

  // From x = 3.3 on the gate is nearly 1.
  static constexpr double kScale = sizeof(T) == 2 ? 3.5 : 3.4700408;
  static constexpr double kLowestX = -20.6;

  // Minimax fits, ascending powers: of 16 bits, over or times kPatternScale, within 0.6% of x,
  // within 3e-4 for |x - x_min| < 0.2, and elsewhere within 2e-4 in the derivative, where the
  // errors of inputs from N(0, 1) add up to 0; of float within 0.5% of x, and around the minimum
  // within 4e-7 in the derivative. The gate of signed_root,
  HOST_DEVICE static float gate_of(float root) {
    if constexpr (sizeof(T) == 2) {
      constexpr float scale = 1.0f / kPatternScale<T>;
      constexpr float c[] = {scale * 0.225911707f,  scale * 1.22123349f,  scale * 0.187798828f,
                             scale * -0.226591244f, scale * -1.09238589f, scale * 0.680427074f};
      return polynomial(c, root);
    } else {
      constexpr float c[] = {0.595046103f,  1.17972982f,  -0.419191837f, -0.972491145f,
                             -0.645161152f, 0.850956798f, 6.38530588f,   0.0892590955f,
                             -19.6187763f,  -5.74822807f, 26.1371155f};
      return polynomial(c, root - 0.3f);
    }
  }

  // x of v on the left,
  HOST_DEVICE static float left_of(float v) {
    constexpr float scale = kPatternScale<T>;
    constexpr float c[] = {scale * -0.7522102f,   scale * -0.88961643f,    scale * -0.238936812f,
                           scale * 0.0681210309f, scale * -0.00734747853f, scale * 0.000283151865f};
    return polynomial(c, v);
  }

  // and 1 / |x| of 1 / (v + 2) - 0.234375, from x = -1.9 on.
  HOST_DEVICE static float inverse_of(float w) {
    constexpr float c[] = {0.296372712f, 1.94057369f, 5.4534359f, 8.9122839f,
                           -13.8807611f, -28.137949f, 324.65744f, 1246.45239f};
    return polynomial(c, w);
  }

  HOST_DEVICE static double inverse(double y, bool left) {
    constexpr double series[] = {kMinimumX,           2.155652839847732,  -1.3946216792082275,
                                 2.3474930110650605,  -3.882985943299949, 7.250881506215288,
                                 -14.118830664989263, 28.52769290571453,  -59.09836351828019,
                                 124.81399042300602,  -267.60197827118867};
    return newton_inverse<GELUTanh>(y, left, series);
  }
};

}  // namespace inplace_ops
