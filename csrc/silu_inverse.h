// x from y = silu(x), from the branch (left or right of silu's minimum) and a few bits of x.
//
// x = y + W(y exp(-y)) with Lambert's W: W_0 on the right branch, W_-1 on the left (Corless,
// Gonnet, Hare, Jeffrey, Knuth, "On the Lambert W function", 1996). In the core, where nearly all
// inputs of a network lie, x is y over a polynomial in +-sqrt(y - y_min), in which x is analytic at
// the minimum, the branch point of W. For 16-bit formats that is near enough: the kept bits tell
// the rest. In float it is so around the minimum, and a step of Newton's method follows elsewhere.
#pragma once

#include "elementary_functions.h"

namespace inplace_ops {

// The minimum of silu: silu'(kMinimumX) = 0, kMinimumY = silu(kMinimumX) = kMinimumX + 1.
constexpr double kMinimumX = -1.2784645427610738;
constexpr double kMinimumY = -0.2784645427610738;
constexpr double kMinimumYLow = 1.5523606315812798e-18;  // the rest of it

// The outputs that are not too far left, where the fits end, nor so large that they might overflow.
constexpr float kLeftEnd = -0.0494412412f, kRightEnd = 1e30f;  // the left one of x = -4.5

// What stands for an x on the left whose y has underflowed to -0: silu' is 0 there.
constexpr float kUnderflowed = -1e4f;

template <class C>
HOST_DEVICE C larger(C a, C b) {
  return a > b ? a : b;
}

template <class C>
HOST_DEVICE C smaller(C a, C b) {
  return a < b ? a : b;
}

// x, sigmoid(x), and sigmoid(-x) = 1 - sigmoid(x) without its cancellation.
template <class C>
struct SiluPoint {
  C x, sigmoid, complement;
};

template <class C>
HOST_DEVICE C silu_derivative(SiluPoint<C> at) {
  return at.sigmoid * (C(1) + at.x * at.complement);
}

template <class C>
HOST_DEVICE C silu_second_derivative(SiluPoint<C> at) {
  return at.sigmoid * at.complement * (C(2) + at.x * (at.complement - at.sigmoid));
}

// The point at any x that is stored as T.
template <class T>
HOST_DEVICE SiluPoint<opmath_t<T>> silu_point(opmath_t<T> x) {
  using C = opmath_t<T>;
#ifdef INPLACE_OPS_HARDWARE
  if constexpr (sizeof(T) == 2) {
    // A quarter of the denominator, whose reciprocal is normal as long as exp(-x) is finite.
    const float quarter = hardware::exp2(x * -1.44269504f - 2.0f);
    const float reciprocal = rough_reciprocal(quarter + 0.25f);
    return {x, 0.25f * reciprocal, smaller(quarter * reciprocal, 1.0f)};
  }
#endif
  const C e = exp_of(-x), s = rough_reciprocal(C(1) + e);
  return {x, s, smaller(e * s, C(1))};  // 1 where e is infinite
}

// The same where exp(-x) is far from overflow.
HOST_DEVICE SiluPoint<float> silu_core_point(float x) {
  const float e = rough_exp(-x), s = rough_reciprocal(1.0f + e);
  return {x, s, e * s};
}

// A half's pattern, subnormals too, stands in that of a float that is 2^112 times smaller.
template <class T>
constexpr float kPatternScale = std::is_same_v<T, Half> ? 0x1p-112f : 1.0f;

// Minimax fits, ascending powers, of sigmoid(x) over kPatternScale as a function of silu_root. All
// are within 0.8% of x, which Newton's step or the kept bits make good. That of 16 bits is within
// 5e-4 for |x - x_min| < 0.2 and elsewhere within 3.2e-4 in silu', where the errors of inputs from
// N(0, 1) add up to 0; that of float within 4e-7 in silu' between x = -2.2 and 2.6. ulp is the
// spacing of y in [-1/2, -1/4).
template <class T>
struct SiluFit {  // of 16 bits
  static constexpr double ulp = std::is_same_v<T, Half> ? 0x1p-12 : 0x1p-9;
  HOST_DEVICE static float sigmoid(float root) {
    constexpr float scale = 1.0f / kPatternScale<T>;
    constexpr float c[] = {scale * 0.217878118f, scale * 1.23711264f, scale * 0.47054261f,
                           scale * -1.68373525f, scale * 3.08919191f, scale * -7.54011822f,
                           scale * 8.34901142f,  scale * -3.1479528f};
    return polynomial(c, root);
  }
};
template <>
struct SiluFit<float> {
  static constexpr double ulp = 0x1p-25;
  HOST_DEVICE static float sigmoid(float root) {
    constexpr float c[] = {0.598535478f, 1.19367969f,  -0.56560719f, -0.94592607f,
                           0.305622578f, 0.200449362f, 1.09733295f,  -1.36923337f,
                           -5.85346842f, 15.1729136f,  50.3197861f,  -99.4709473f,
                           -197.188995f, 315.692993f,  313.603668f,  -452.624939f};
    return polynomial(c, root - 0.3f);
  }
};

// +-sqrt((y - y_min) / 5.75) for the middle of the inputs that share a y: near the minimum, where
// silu is flat, that is a wide interval, and a little less than y has its middle. Never 0, so that
// both branches keep their side. From x = 5.5 on, where sigmoid(x) is nearly 1, it is 1.
template <class T>
HOST_DEVICE float silu_root(float y, bool left) {
  constexpr double scale = 1.0 / 5.75, ulp = SiluFit<T>::ulp, smallest = 0.06 * ulp;
  constexpr double lowest = kMinimumY + (sizeof(T) == 2 ? 0.155 : 0.15) * ulp + smallest;
  constexpr float high = sizeof(T) == 2 ? 0.0f : float(kMinimumY);
  constexpr float low = float(lowest - double(high));
  const float above = saturate((y - high) * float(scale) - float(scale * low));
  const float root = rough_sqrt(above + float(scale * smallest));
  return left ? -root : root;
}

// Whether y is none of those for which there are fits. What is not finite is not.
HOST_DEVICE bool is_silu_far(float y, bool left) { return !(y <= (left ? kLeftEnd : kRightEnd)); }

// An estimate of x for such a y.
HOST_DEVICE float silu_far_estimate(float y, bool left) {
  // 1 / |x| of 1 / (v + 2) - 0.234375, v = sqrt(x_min - ln(-y)).
  constexpr float c[] = {.116771802f, 1.27455866f, 4.28501034f,  1.54569292f,  -15.1126881f,
                         45.5967941f, 339.664246f, -1069.11938f, -4170.81738f, 15204.3486f};
  const float depth = larger(float(kMinimumX) - rough_log(-y), 0.0f);
  const float v = rough_sqrt(smaller(depth, 107.0f));
  const float x = -rough_reciprocal(polynomial(c, rough_reciprocal(v + 2.0f) - 0.234375f));
  return select(left, select(y == 0.0f, kUnderflowed, x), y);
}

// In double: a series at the minimum, otherwise Newton's steps from the estimate in float, in log
// coordinates in the left tail.
HOST_DEVICE double silu_inverse(double y, bool left) {
  constexpr double ulp = 0x1p-54;  // the spacing of y at the minimum
  const double root = sqrt(larger(y - kMinimumY - (kMinimumYLow + 0.15 * ulp), 0.06 * ulp));
  const double p = left ? -root : root;
  if (!(y <= 40.0)) return y;  // NaN, or sigmoid(y) rounds to 1
  if (p > -0.02 && p < 0.02) {
    constexpr double series[] = {kMinimumX,
                                 3.0302216013580994,
                                 -2.06074765111241476,
                                 2.90081780557014534,
                                 -3.98644528060386959,
                                 6.03466916846034026,
                                 -9.45983958017323796,
                                 15.2858473906355159,
                                 -25.2291157597082491,
                                 42.3279957510526701,
                                 -71.9389859178529584};
    return polynomial(series, p);
  }
  if (p < -0.25) {
    if (y == 0.0) return kUnderflowed;
    const double log_y = log_of(-y);
    double x = log_y - log_of(-log_y);
    for (int step = 0; step < 4; ++step) {
      const double s = silu_point<double>(x).sigmoid;
      x -= (log_of(-x * s) - log_y) / (1.0 / x + 1.0 - s);
    }
    return x;
  }
  const float seed = float(y);
  double x = seed / SiluFit<float>::sigmoid(silu_root<float>(seed, left));
  for (int step = 0; step < 3; ++step) {
    const SiluPoint<double> at = silu_point<double>(x);
    x -= (x * at.sigmoid - y) / silu_derivative(at);
  }
  return x;
}

template <class C>
HOST_DEVICE bool is_near_minimum(C x, C distance) {
  const C difference = x - C(kMinimumX);
  return (difference < C(0) ? -difference : difference) < distance;
}

// What silu keeps of an input x in `bits` bits: which branch it lies on, and from its pattern the
// bits - 1 bits from bit `shift` up. The highest of these is fixed by how far the inverse can be
// off: half of 2^(shift + bits - 1) patterns.
template <class T>
class SiluCode {
 public:
  using C = opmath_t<T>;

  HOST_DEVICE explicit SiluCode(int bits)
      : shift_(sizeof(T) == 8   ? 29 - bits
               : sizeof(T) == 4 ? 14 - bits
                                : 0),
        kept_((1u << (bits - 1)) - 1u),
        branch_(1u << (bits - 1)) {
    // Of a 16-bit format: in float's pattern. With the branch alone nothing is learned of the
    // estimate: it stays as it is.
    constexpr int widened = std::is_same_v<T, Half> ? 13 : std::is_same_v<T, BFloat16> ? 16 : 0;
    if (bits == 1) return;
    cell_shift_ = shift_ + widened;
    half_cell_ = sizeof(T) == 2 ? 0u : (1u << shift_) / 2u;
    const uint32_t half_window = 1u << (cell_shift_ + bits - 2);
    window_mask_ = 2u * half_window - 1u;
    // Of two that are as near it is the one farther from 0: no step leads past 0.
    farthest_below_ = half_window - 1u;
  }

  HOST_DEVICE uint32_t encode(T x) const {
    const uint32_t pattern = uint32_t(bit_cast<pattern_t<T>>(x) >> shift_);
    // In float no value lies between kMinimumX and its nearest, which is the smaller.
    const bool left = sizeof(T) == 8 ? load(x) < C(kMinimumX) : load(x) <= C(float(kMinimumX));
    return (pattern & kept_) | select(left, branch_, 0u);
  }

  HOST_DEVICE bool is_left(uint32_t code) const { return code & branch_; }

  // Of the values that have the kept bits the one nearest to the estimate of x, which is given
  // times kPatternScale.
  HOST_DEVICE C closest(C estimate, uint32_t code) const {
    using Pattern = pattern_t<C>;
    const Pattern pattern = bit_cast<Pattern>(estimate);
    // The kept bits repeat every window_mask_ + 1 patterns.
    const uint32_t wanted = (code << cell_shift_) + half_cell_;
    const uint32_t ahead = (wanted + farthest_below_ - uint32_t(pattern)) & window_mask_;
    const Pattern middle = pattern + ahead - farthest_below_;
    if constexpr (std::is_same_v<T, C>) {
      // All of the cell's 2 half_cell_ patterns are possible. Next to the minimum the estimate says
      // nothing of them.
      constexpr C flat = sizeof(T) == 8 ? C(1e-5) : C(0.03);
      const Pattern first = middle - half_cell_;
      const Pattern last = middle + larger(half_cell_, 1u) - 1u;
      const Pattern nearest = smaller(larger(pattern, first), last);
      return bit_cast<C>(is_near_minimum(estimate, flat) ? middle : nearest);
    } else {
      return bit_cast<C>(middle) * (1.0f / kPatternScale<T>);
    }
  }

 private:
  int shift_;
  uint32_t kept_, branch_;
  int cell_shift_ = 0;
  uint32_t half_cell_ = 0, window_mask_ = 0, farthest_below_ = 0;
};

// Kernels may work on the core and the tails apart. A warp pays for a tail as soon as one lane has
// one: on a GPU only what is far is one. A CPU collects the tails, and spares the core of float
// Newton's method.
enum class SiluRegion { kAny, kCore, kTail };

#ifdef INPLACE_OPS_HARDWARE
constexpr bool kNewtonInCore = true;
#else
constexpr bool kNewtonInCore = false;
#endif

template <class T>
HOST_DEVICE bool is_silu_tail(float y, bool left) {
  if constexpr (sizeof(T) == 2 || kNewtonInCore) return is_silu_far(y, left);
  return !(y <= (left ? -0.219451076f : 2.42024011f));  // of x = -2.2 and 2.6
}

template <class T, SiluRegion region>
HOST_DEVICE SiluPoint<float> silu_recover_16(float y, bool left, const SiluCode<T>& kept,
                                             uint32_t code) {
  if constexpr (region == SiluRegion::kTail) {
    const float estimate = silu_far_estimate(y, left) * kPatternScale<T>;
    const float nan_if_not_finite = y - y;
    return silu_point<T>(kept.closest(estimate, code) + nan_if_not_finite);
  }
  const float sigmoid = SiluFit<T>::sigmoid(silu_root<T>(y, left));  // over kPatternScale
  return silu_core_point(kept.closest(y * rough_reciprocal(sigmoid), code));
}

template <SiluRegion region>
HOST_DEVICE SiluPoint<float> silu_recover_float(float y, bool left, const SiluCode<float>& kept,
                                                uint32_t code) {
  const float fit = SiluFit<float>::sigmoid(silu_root<float>(y, left));
  SiluPoint<float> at = {y * rough_reciprocal(fit), fit, 1.0f - fit};
  const bool far = region == SiluRegion::kTail && is_silu_far(y, left);
  float change = at.sigmoid * at.complement, newton = 0.0f;  // change: the sigmoid's derivative
  constexpr bool takes_newton = region == SiluRegion::kTail || kNewtonInCore;
  if constexpr (takes_newton) {
    const bool fits = far | is_near_minimum(at.x, 0.25f);  // where Newton's step is the worse one
    if constexpr (region == SiluRegion::kTail) {
      at = silu_point<float>(select(far, silu_far_estimate(y, left), at.x));
    } else {
      at = silu_core_point(at.x);
    }
    change = at.sigmoid * at.complement;
    newton = (at.x * at.sigmoid - y) * rough_reciprocal(at.sigmoid + at.x * change);
    newton = select(fits, 0.0f, newton);
  }
  float x = kept.closest(at.x - newton, code);
  const float step = x - at.x;
  float difference = step * change;
  if constexpr (takes_newton) difference *= 1.0f + 0.5f * step * (at.complement - at.sigmoid);
  float sigmoid = at.sigmoid + difference;
  if constexpr (region == SiluRegion::kTail) {
    sigmoid = select(far & left, y * rough_reciprocal(x), sigmoid);  // exp has multiplied x's error
    x += y - y;                                                      // NaN where y is not finite
  }
  return {x, sigmoid, at.complement - difference};
}

// The point from y = silu(x) and the code of x in `bits` bits.
template <class T, SiluRegion region = SiluRegion::kAny>
HOST_DEVICE SiluPoint<opmath_t<T>> silu_recover(T stored, uint32_t code, int bits) {
  const SiluCode<T> kept(bits);
  const bool left = kept.is_left(code);
  const opmath_t<T> y = load(stored);
  if constexpr (sizeof(T) == 8) {
    const double nan_if_not_finite = y - y;
    return silu_point<T>(kept.closest(silu_inverse(y, left), code) + nan_if_not_finite);
  } else if constexpr (region == SiluRegion::kAny) {
    if (is_silu_tail<T>(y, left)) return silu_recover<T, SiluRegion::kTail>(stored, code, bits);
    return silu_recover<T, SiluRegion::kCore>(stored, code, bits);
  } else if constexpr (sizeof(T) == 2) {
    return silu_recover_16<T, region>(y, left, kept, code);
  } else {
    return silu_recover_float<region>(y, left, kept, code);
  }
}

}  // namespace inplace_ops
