// The mathematics of every activation, once, for host and device, in no other place.
//
// An activation is a struct over its storage format T with
//   forward(x)              the value, in the compute type;
//   keep(x)                 what backward needs to know of the input x, a code of at most 32 bits;
//   backward(grad, y, code) the gradient, from the output y (where it is kept) and the code.
// It is constructed from the number of bits kept an element and the op's scalar arguments.
// To add one: a struct here, its entry in the list at the end of ops.h.
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
  static constexpr bool accepts_bits(int64_t bits) { return bits == 1; }

  explicit ReLU(int) {}

  HOST_DEVICE C forward(C x) const {
    if constexpr (std::is_unsigned_v<C>) {
      return x;
    } else {
      return x < C(0) ? C(0) : x;
    }
  }
  HOST_DEVICE uint32_t keep(T x) const { return !(load(x) <= C(0)); }
  HOST_DEVICE C backward(C grad, T, uint32_t code) const { return code ? grad : C(0); }
};

// x where x > 0, otherwise negative_slope * x.
template <class T>
struct LeakyReLU {
  using C = compute_t<T>;
  static constexpr const char* kName = "leaky_relu_";
  static constexpr bool kTakesIntegers = false;
  static constexpr bool accepts_bits(int64_t bits) { return bits == 1; }
  C negative_slope;

  LeakyReLU(int, double slope) : negative_slope(C(slope)) {}

  HOST_DEVICE C forward(C x) const { return x > C(0) ? x : x * negative_slope; }
  HOST_DEVICE uint32_t keep(T x) const { return load(x) > C(0); }
  HOST_DEVICE C backward(C grad, T, uint32_t code) const {
    return code ? grad : grad * negative_slope;
  }
};

template <class C>
HOST_DEVICE C silu_derivative(SiluPoint<C> at) {
  return at.sigmoid * (C(1) + at.x * (C(1) - at.sigmoid));
}

template <class C>
HOST_DEVICE C silu_second_derivative(SiluPoint<C> at) {
  const C s = at.sigmoid;
  return s * (C(1) - s) * (C(2) + at.x * (C(1) - C(2) * s));
}

template <class C>
HOST_DEVICE C silu(C x) {
  return x / (C(1) + exp_of(-x));
}

// x * sigmoid(x). Keeps its output, the branch and bits - 1 bits of the input: silu_inverse.h.
template <class T>
struct SiLU {
  using C = compute_t<T>;
  static constexpr const char* kName = "silu_";
  static constexpr bool kTakesIntegers = false;
  static constexpr bool accepts_bits(int64_t bits) { return bits >= 1 && bits <= 8; }
  int bits;

  explicit SiLU(int kept_bits) : bits(kept_bits) {}

  HOST_DEVICE C forward(C x) const { return silu(x); }
  HOST_DEVICE uint32_t keep(T x) const { return silu_code(x, bits); }
  template <SiluRegion region = SiluRegion::kAny>
  HOST_DEVICE C backward(C grad, T y, uint32_t code) const {
    return grad * silu_derivative(silu_recover<T, region>(y, code, bits));
  }

  // Backward in two parts, for a CPU, where a vector would evaluate both for every element.
  static constexpr bool kHasTail = !std::is_same_v<T, double>;
  HOST_DEVICE bool is_tail(T y, uint32_t code) const { return is_silu_tail<T>(load(y), code & 1u); }
  HOST_DEVICE C backward_core(C grad, T y, uint32_t code) const {
    return backward<SiluRegion::kCore>(grad, y, code);
  }
  HOST_DEVICE C backward_tail(C grad, T y, uint32_t code) const {
    return backward<SiluRegion::kTail>(grad, y, code);
  }

  // grad_grad * grad * silu''(x) / silu'(x): what a second differentiation sends to the output,
  // whose own backward multiplies by silu'(x) again. Where that is 0 the term is lost, and is no
  // NaN.
  HOST_DEVICE C double_backward(C grad_grad, C grad, T y, uint32_t code) const {
    const SiluPoint<C> at = silu_recover(y, code, bits);
    const C slope = silu_derivative(at);
    const C term = grad_grad * grad * silu_second_derivative(at);
    return slope == C(0) ? C(0) : term / slope;
  }
};

// SiLU that keeps its derivative instead of its output, on a uniform grid over the derivative's
// range
// [-0.0999, 1.0999]: code c stands for (c - zero) / steps, so that 0 and 1 are exact, and 0 for
// NaN.
template <class T>
struct SiLUDerivative {
  using C = compute_t<T>;
  static constexpr const char* kName = "silu_";
  static constexpr bool kTakesIntegers = false;
  static constexpr bool accepts_bits(int64_t bits) { return bits == 8 || bits == 16 || bits == 32; }
  C steps, per_step, zero;

  // The grid's constants are exact in float.
  explicit SiLUDerivative(int bits)
      : steps(bits == 8    ? C(212)
              : bits == 16 ? C(54610)
                           : C(48 * 0x1p26)),
        per_step(C(1) / steps),
        zero(bits == 8    ? C(22)
             : bits == 16 ? C(5460)
                          : C(5 * 0x1p26)) {}

  HOST_DEVICE C forward(C x) const { return silu(x); }
  HOST_DEVICE uint32_t keep(T x) const {
    const C value = load(x);
    const C derivative = silu_derivative(SiluPoint<C>{value, sigmoid(value)});
    return derivative == derivative ? uint32_t(derivative * steps + zero + C(0.5)) : 0u;
  }
  HOST_DEVICE C backward(C grad, T, uint32_t code) const {
    return grad * (code != 0u ? (C(code) - zero) * per_step : C(NAN));
  }
};

}  // namespace inplace_ops
