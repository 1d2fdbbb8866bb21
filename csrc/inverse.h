// x from y = x * gate(x), from a code of a few bits of x, for smooth activations with one minimum.
//
// A smooth's entry (activations/*.h) holds its formulas and fits. Near the minimum x is analytic in
// +-sqrt(y - y_min), so that in the core, where nearly all inputs of a network lie, x is y over a
// polynomial of that root. For 16-bit formats that is near enough: the kept bits tell the rest. In
// float it is so around the minimum, and a step of Newton's method follows elsewhere.
//
// An entry A has, with T the storage format and C = opmath_t<T>,
//   kMinimumX, kMinimumY, kMinimumYLow  the minimum, kMinimumYLow what kMinimumY lacks;
//   kScale                              y - y_min where the root is 1;
//   kLeftEnd, kRightEnd                 the largest outputs of the core, left of the minimum and
//                                       right of it;
//   Point                               x, and what the derivatives need; gate, where Newton's step
//                                       or newton_inverse() is taken;
//   point(x), core_point(x)             at any x, and between the two ends;
//   estimate(y, left)                   x in the core, in float, times kPatternScale;
//   fitted(y, left), kFitIsExact        its point, and whether Newton's step may be left out;
//   tail_estimate(y, left)               x elsewhere, in float;
//   tail_point(x, y, left)               its point;
//   moved(point, step)                  a point close to another;
//   derivative(point), second_derivative(point);
//   inverse(y, left)                    x in double, mostly by newton_inverse(), which needs
//   kLowestX                            where it stays above on the left: the gate is not 0 there.
#pragma once

#include "elementary_functions.h"

namespace inplace_ops {

// Kernels may work on the core and on the rest apart: a warp pays for what is far as soon as one
// lane is, and a CPU collects it.
enum class Region { kAny, kCore, kTail };

// What stands for an x on the left whose y has underflowed to -0: the derivative is 0 there.
constexpr float kUnderflowed = -1e4f;

template <class C>
HOST_DEVICE C larger(C a, C b) {
  return a > b ? a : b;
}

template <class C>
HOST_DEVICE C smaller(C a, C b) {
  return a < b ? a : b;
}

// A half's pattern, subnormals too, stands in that of a float that is 2^112 times smaller.
template <class T>
constexpr float kPatternScale = std::is_same_v<T, Half> ? 0x1p-112f : 1.0f;

// The spacing of outputs next to the minimum.
template <class A, class T = typename A::Scalar>
constexpr double kSpacing =
    (A::kMinimumY < -0.25 ? 1.0 : 0.5) * (sizeof(T) == 8            ? 0x1p-54
                                          : sizeof(T) == 4          ? 0x1p-25
                                          : std::is_same_v<T, Half> ? 0x1p-12
                                                                    : 0x1p-9);

constexpr double constexpr_sqrt(double x) {
  double root = 1.0;
  for (int step = 0; step < 30; ++step) root = 0.5 * (root + x / root);
  return root;
}

// What to take of y - y_min in a fit: where a smooth is flat, the inputs that share a y are a wide
// interval, and the root of a little less than y is its middle. In units of the outputs' spacing,
// and from y_min, a 16-bit output w comes of w - 1/2 to w + 1/2, and the square of the middle is,
// from the roots of these, (w + 1/2) / 4 at the lowest output and second_lowest() at the next.
// Those of a float or double have errors of their own.
template <class A>
struct IntervalMidpoint {
  static_assert(-0.5 < A::kMinimumY && A::kMinimumY < -0.125, "kSpacing knows no others");
  static constexpr bool kIs16Bit = sizeof(typename A::Scalar) == 2;
  static constexpr double kInUnits = -A::kMinimumY / kSpacing<A>;
  static constexpr double kLowest = kIs16Bit ? kInUnits - double(int64_t(kInUnits + 0.5)) : 0.0;
  static constexpr double second_lowest() {
    return 0.5 * (1.0 + kLowest) + 0.5 * constexpr_sqrt((1.5 + kLowest) * (0.5 + kLowest));
  }
  // Of y - y_min: never less than kMinRadicand, so that both branches keep their side, after
  // kOffset has been taken away. A little less than the middle, as the derivative changes faster on
  // the right.
  static constexpr double kMinRadicand =
      (kIs16Bit ? 0.01 + 0.25 * (kLowest + 0.5) : 0.06) * kSpacing<A>;
  static constexpr double kOffset =
      (kIs16Bit ? 1.0 + kLowest - 0.98 * second_lowest() : 0.15) * kSpacing<A> + kMinRadicand;
};

// (y - y_min) / kScale, at most 1, for the middle of the inputs that share a y,
template <class A>
HOST_DEVICE float radicand(float y) {
  constexpr double scale = 1.0 / A::kScale, lowest = A::kMinimumY + IntervalMidpoint<A>::kOffset;
  constexpr float high = sizeof(typename A::Scalar) == 2 ? 0.0f : float(A::kMinimumY);
  constexpr float low = float(lowest - double(high));
  const float above = saturate((y - high) * float(scale) - float(scale * low));
  return above + float(scale * IntervalMidpoint<A>::kMinRadicand);
}

// and +- its square root.
template <class A>
HOST_DEVICE float signed_root(float y, bool left) {
  return negate_if(left, rough_sqrt(radicand<A>(y)));
}

// Whether the core has the left tail too, down to where y underflows, and so all that is finite.
template <class A>
constexpr bool kCoreCoversLeft = A::kLeftEnd > 0.0f;

// Whether y is none of those that the core is for. What is not finite is not.
template <class A>
HOST_DEVICE bool is_in_tail(float y, bool left) {
  return !(y <= (left ? A::kLeftEnd : A::kRightEnd));
}

// Where a smooth is flat its inverse needs more of y than the formula gives: this series is off by
// half a unit in the last place.
template <class A, class C, int terms>
HOST_DEVICE C near_minimum(C x, const C (&c)[terms], C elsewhere) {
  constexpr C high = C(A::kMinimumY);
  constexpr C low = C(A::kMinimumY - double(high) + A::kMinimumYLow);
  const C d = x - C(A::kMinimumX), square = d * d;
  const C series = high + (square * polynomial(c, d) + low);
  if constexpr (sizeof(C) == 8) return square < 0x1p-30 ? series : elsewhere;
  return select(square < C(0x1p-12), float(series), float(elsewhere));
}

template <class A, class C>
HOST_DEVICE bool is_near_minimum(C x, C distance) {
  const C difference = x - C(A::kMinimumX);
  return (difference < C(0) ? -difference : difference) < distance;
}

// What is kept of an input x in `bits` bits: which branch it lies on, and from its pattern the
// bits - 1 bits from bit `shift` up. The highest of these is fixed by how far the inverse can be
// off: half of 2^(shift + bits - 1) patterns.
template <class A>
class InputCode {
 public:
  using T = typename A::Scalar;
  using C = opmath_t<T>;

  HOST_DEVICE explicit InputCode(int bits)
      : shift_(sizeof(T) == 8   ? 29 - bits
               : sizeof(T) == 4 ? 14 - bits
                                : 0),
        low_bits_mask_((1u << (bits - 1)) - 1u),
        branch_bit_(1u << (bits - 1)) {
    // Of a 16-bit format: in float's pattern. With the branch alone nothing is learned of the
    // estimate: it stays as it is.
    constexpr int float_shift = std::is_same_v<T, Half> ? 13 : std::is_same_v<T, BFloat16> ? 16 : 0;
    if (bits == 1) return;
    cell_shift_ = shift_ + float_shift;
    half_cell_ = sizeof(T) == 2 ? 0u : (1u << shift_) / 2u;
    const uint32_t half_window = 1u << (cell_shift_ + bits - 2);
    window_mask_ = 2u * half_window - 1u;
    // Of two that are as near it is the one farther from 0: no step leads past 0.
    max_step_down_ = half_window - 1u;
  }

  HOST_DEVICE uint32_t encode(Element<T> x) const {
    const uint32_t pattern = uint32_t(bit_cast<pattern_t<T>>(x.stored) >> shift_);
    // In float no value lies between kMinimumX and the nearest one.
    constexpr C nearest = C(A::kMinimumX);
    constexpr bool nearest_is_left = double(nearest) < A::kMinimumX;
    const bool left = nearest_is_left ? x.value <= nearest : x.value < nearest;
    return (pattern & low_bits_mask_) | select(left, branch_bit_, 0u);
  }

  HOST_DEVICE bool is_left(uint32_t code) const { return code & branch_bit_; }

  // Of the values that have the kept bits the one nearest to the estimate of x, which is given
  // times kPatternScale.
  HOST_DEVICE C closest(C estimate, uint32_t code) const {
    using Pattern = pattern_t<C>;
    const Pattern pattern = bit_cast<Pattern>(estimate);
    // The kept bits repeat every window_mask_ + 1 patterns.
    const uint32_t wanted = (code << cell_shift_) + half_cell_;
    const uint32_t ahead = (wanted + max_step_down_ - uint32_t(pattern)) & window_mask_;
    const Pattern middle = pattern + ahead - max_step_down_;
    if constexpr (std::is_same_v<T, C>) {
      // All of the cell's 2 half_cell_ patterns are possible. Next to the minimum the estimate says
      // nothing of them.
      constexpr C flat = sizeof(T) == 8 ? C(1e-5) : C(0.03);
      const Pattern first = middle - half_cell_;
      const Pattern last = middle + larger(half_cell_, 1u) - 1u;
      const Pattern nearest = smaller(larger(pattern, first), last);
      return bit_cast<C>(is_near_minimum<A>(estimate, flat) ? middle : nearest);
    } else {
      return bit_cast<C>(middle) * (1.0f / kPatternScale<T>);
    }
  }

 private:
  int shift_;
  uint32_t low_bits_mask_, branch_bit_;
  int cell_shift_ = 0;
  uint32_t half_cell_ = 0, window_mask_ = 0, max_step_down_ = 0;
};

// +-sqrt(y - y_min), as signed_root.
template <class A>
HOST_DEVICE double signed_root_in_double(double y, bool left) {
  const double above = y - A::kMinimumY - (A::kMinimumYLow + IntervalMidpoint<A>::kOffset);
  const double root = sqrt(larger(above, 0.0) + IntervalMidpoint<A>::kMinRadicand);
  return left ? -root : root;
}

// In double: a series in signed_root_in_double at the minimum, otherwise Newton's steps from the
// estimate in float, of the logarithms where y is small on the left.
template <class A, int terms>
HOST_DEVICE double newton_inverse(double y, bool left, const double (&series)[terms]) {
  const double p = signed_root_in_double<A>(y, left);
  if (!(y <= 40.0)) return y;  // NaN, or the gate rounds to 1
  if (p > -0.02 && p < 0.02) return polynomial(series, p);
  const float seed = float(y);
  double x = is_in_tail<A>(seed, left) ? A::tail_estimate(seed, left) : A::estimate(seed, left);
  if (p < -0.25) {
    if (y == 0.0) return kUnderflowed;
    const double log_y = log_of(-y);
    NO_UNROLL
    for (int step = 0; step < 6; ++step) {
      x = larger(x, A::kLowestX);
      const auto at = A::point(x);
      const double value = x * at.gate;
      x -= (log_of(-value) - log_y) * (value / A::derivative(at));
    }
  } else {
    NO_UNROLL
    for (int step = 0; step < 3; ++step) {
      const auto at = A::point(x);
      x -= (x * at.gate - y) / A::derivative(at);
    }
  }
  return x;
}

// x in the core, from which alone its point follows in the 16-bit formats.
template <class A>
HOST_DEVICE float recover_core_input(float y, uint32_t code, int bits) {
  const InputCode<A> input_code(bits);
  return input_code.closest(A::estimate(y, input_code.is_left(code)), code);
}

template <class A>
HOST_DEVICE auto recover_core(float y, uint32_t code, int bits) {
  if constexpr (sizeof(typename A::Scalar) == 2) {
    return A::core_point(recover_core_input<A>(y, code, bits));
  } else {
    const InputCode<A> input_code(bits);
    const auto at = A::fitted(y, input_code.is_left(code));
    float x = at.x;
    if constexpr (!A::kFitIsExact) {
      const float newton = (at.x * at.gate - y) * rough_reciprocal(A::derivative(at));
      // Around the minimum the step is worse than the fit; in the tail, where the derivative comes
      // to 0, it may be NaN.
      const float limited = kCoreCoversLeft<A> ? smaller(larger(newton, -0.1f), 0.1f) : newton;
      x -= select(is_near_minimum<A>(at.x, 0.25f), 0.0f, limited);
    }
    x = input_code.closest(x, code);
    auto result = A::moved(at, x - at.x);
    result.x = x;
    return result;
  }
}

template <class A>
HOST_DEVICE auto recover_tail(float y, bool left, const InputCode<A>& input_code, uint32_t code) {
  using T = typename A::Scalar;
  const float estimate = A::tail_estimate(y, left) * kPatternScale<T>;
  const auto at = A::tail_point(input_code.closest(estimate, code), y, left);
  if constexpr (sizeof(T) == 2 || kCoreCoversLeft<A>) {
    return at;
  } else {
    // What the function of x has made of its rounding, y tells better.
    const float newton = (at.x * at.gate - y) * rough_reciprocal(A::derivative(at));
    return A::moved(at, select(left & (y < -0x1p-118f), -newton, 0.0f));
  }
}

// The point from y and the code of x in `bits` bits.
template <class A, Region region = Region::kAny>
HOST_DEVICE auto recover(opmath_t<typename A::Scalar> y, uint32_t code, int bits) {
  const InputCode<A> input_code(bits);
  const bool left = input_code.is_left(code);
  if constexpr (std::is_same_v<decltype(y), double>) {
    return A::tail_point(input_code.closest(A::inverse(y, left), code), y, left);
  } else if constexpr (region == Region::kCore) {
    return recover_core<A>(y, code, bits);
  } else if constexpr (region == Region::kTail) {
    return recover_tail<A>(y, left, input_code, code);
  } else {
    return is_in_tail<A>(y, left) ? recover_tail<A>(y, left, input_code, code)
                                  : recover_core<A>(y, code, bits);
  }
}

}  // namespace inplace_ops
