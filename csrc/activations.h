// The mathematics of every activation, once, for host and device, in no other place.
//
// An activation is a struct over its storage format T, made from the op's scalar arguments, with
//   forward(x)                       the value, in the compute type;
//   keep(x, bits)                    a code of the input x, of `bits` bits, for backward;
//   backward(grad, y, code, bits)    the gradient, from the code and, where it is kept, the output;
// and for BackwardFromBoth and DoubleBackward alone
//   is_tail(y, code, bits)           whether backward_tail or backward_core is to be called;
//   double_backward(gg, grad, y, ..) the second derivative's term.
// kMaxBits and kUsualBits let a kernel be compiled for the usual number of bits.
// To add one: a struct here, its ops in the list at the end of ops.h, their schemas in library.cpp.
#pragma once

#include "number_formats.h"
#include "silu_inverse.h"

namespace inplace_ops {

// max(x, 0). NaN passes, with gradient 1; -0.0 stays; the gradient is selected, not multiplied, so
// that an infinite one gives 0 where the input is negative. As PyTorch's.
template <class T>
struct ReLU {
  using C = compute_t<T>;
  static constexpr const char* kName = "relu_";
  static constexpr bool kTakesIntegers = true;
  static constexpr int kMaxBits = 1, kUsualBits = 1;
  static constexpr bool accepts_bits(int64_t bits) { return bits == 1; }

  HOST_DEVICE C forward(C x) const {
    if constexpr (std::is_unsigned_v<C>) {
      return x;
    } else {
      return x < C(0) ? C(0) : x;
    }
  }
  HOST_DEVICE uint32_t keep(T x, int) const { return !(load(x) <= C(0)); }
  HOST_DEVICE C backward(C grad, T, uint32_t code, int) const { return code ? grad : C(0); }
};

// x where x > 0, otherwise negative_slope * x.
template <class T>
struct LeakyReLU {
  using C = compute_t<T>;
  static constexpr const char* kName = "leaky_relu_";
  static constexpr bool kTakesIntegers = false;
  static constexpr int kMaxBits = 1, kUsualBits = 1;
  static constexpr bool accepts_bits(int64_t bits) { return bits == 1; }
  C negative_slope;

  explicit LeakyReLU(double slope) : negative_slope(C(slope)) {}

  HOST_DEVICE C forward(C x) const { return x > C(0) ? x : x * negative_slope; }
  HOST_DEVICE uint32_t keep(T x, int) const { return load(x) > C(0); }
  HOST_DEVICE C backward(C grad, T, uint32_t code, int) const {
    return code ? grad : grad * negative_slope;
  }
};

template <class T>
HOST_DEVICE compute_t<T> silu(compute_t<T> x) {
  using C = compute_t<T>;
  if constexpr (sizeof(T) == 2) return x * silu_point<T>(x).sigmoid;
  const C value = x / (C(1) + exp_of(-x));
  if constexpr (!std::is_same_v<T, float>) return value;
  // Where silu is flat the inverse needs more: its series is off by half a unit in the last place.
  constexpr float high = float(kMinimumY), low = float(kMinimumY - double(high));
  const float d = float(x) - float(kMinimumX), square = d * d;
  const float series = high + (square * (0.108905906f + 0.0488829f * d) + low);
  return select(square < 0x1p-12f, series, float(value));
}

// x * sigmoid(x). Keeps its output, the branch and bits - 1 bits of the input: silu_inverse.h.
template <class T>
struct SiLU {
  using C = compute_t<T>;
  static constexpr const char* kName = "silu_";
  static constexpr bool kTakesIntegers = false;
  static constexpr int kMaxBits = 8;
  // Those that inplace_ops.silu_ takes where it is asked for none.
  static constexpr int kUsualBits = sizeof(T) == 8                ? 1
                                    : sizeof(T) == 4              ? 6
                                    : std::is_same_v<T, BFloat16> ? 5
                                                                  : 7;
  static constexpr bool accepts_bits(int64_t bits) { return bits >= 1 && bits <= 8; }

  HOST_DEVICE C forward(C x) const { return silu<T>(x); }
  HOST_DEVICE uint32_t keep(T x, int bits) const { return SiluCode<T>(bits).encode(x); }
  template <SiluRegion region = SiluRegion::kAny>
  HOST_DEVICE C backward(C grad, T y, uint32_t code, int bits) const {
    return grad * silu_derivative(silu_recover<T, region>(y, code, bits));
  }

  // In two parts: on a CPU a vector would evaluate both for every element.
  static constexpr bool kHasTail = !std::is_same_v<T, double>;
  HOST_DEVICE bool is_tail(T y, uint32_t code, int bits) const {
    return is_silu_tail<T>(load(y), SiluCode<T>(bits).is_left(code));
  }
  HOST_DEVICE C backward_core(C grad, T y, uint32_t code, int bits) const {
    return backward<SiluRegion::kCore>(grad, y, code, bits);
  }
  HOST_DEVICE C backward_tail(C grad, T y, uint32_t code, int bits) const {
    return backward<SiluRegion::kTail>(grad, y, code, bits);
  }

  // grad_grad * grad * silu''(x) / silu'(x): what a second differentiation sends to the output,
  // whose own backward multiplies by silu'(x) again. Where that is 0 the term is lost, and is no
  // NaN.
  HOST_DEVICE C double_backward(C grad_grad, C grad, T y, uint32_t code, int bits) const {
    const SiluPoint<C> at = silu_recover(y, code, bits);
    const C slope = silu_derivative(at);
    const C term = grad_grad * grad * silu_second_derivative(at);
    return slope == C(0) ? C(0) : term / slope;
  }
};

// A uniform grid over the range [-0.0999, 1.0999] of silu': code c stands for (c - zero) / steps,
// so that 0 and 1 are exact, and 0 for NaN. The constants are exact in float.
template <class C>
struct DerivativeGrid {
  C steps, per_step, zero;

  HOST_DEVICE explicit DerivativeGrid(int bits)
      : steps(C(select(bits == 8, 212.0f, select(bits == 16, 54610.0f, 48 * 0x1p26f)))),
        per_step(C(1) / steps),
        zero(C(select(bits == 8, 22.0f, select(bits == 16, 5460.0f, 5 * 0x1p26f)))) {}
};

// SiLU that keeps its derivative instead of its output.
template <class T>
struct SiLUDerivative {
  using C = compute_t<T>;
  static constexpr const char* kName = "silu_";
  static constexpr bool kTakesIntegers = false;
  static constexpr int kMaxBits = 32, kUsualBits = sizeof(T) == 2 ? 8 : 4 * sizeof(T);
  static constexpr bool accepts_bits(int64_t bits) { return bits == 8 || bits == 16 || bits == 32; }

  HOST_DEVICE C forward(C x) const { return silu<T>(x); }
  HOST_DEVICE uint32_t keep(T x, int bits) const {
    const DerivativeGrid<C> grid(bits);
    const C derivative = silu_derivative(silu_point<T>(load(x)));
    return derivative == derivative ? uint32_t(derivative * grid.steps + grid.zero + C(0.5)) : 0u;
  }
  HOST_DEVICE C backward(C grad, T, uint32_t code, int bits) const {
    const DerivativeGrid<C> grid(bits);
    return grad * (code != 0u ? (C(code) - grid.zero) * grid.per_step : C(NAN));
  }
};

}  // namespace inplace_ops
