// save="derivative": a uniform grid over the range of an activation's derivative, on which 0 and 1
// are exact. Code c represents (c - zero) / steps, except code 0, which represents NaN.
#pragma once

#include <cmath>

#include "dtypes.h"

namespace inplace_ops {

// The default number of bits of save="derivative".
template <class T>
constexpr int kDerivativeBits = sizeof(T) == 2 ? 8 : 4 * sizeof(T);

struct GridSteps {
  double steps, zero;
};

// Whether steps * (1 / steps) is exactly 1, in float and in double.
constexpr bool has_exact_reciprocal(double steps) {
  return float(steps) * (1.0f / float(steps)) == 1.0f && steps * (1.0 / steps) == 1.0;
}

// Returns the finest grid of `bits` bits from the derivative's lowest to its highest value. Both
// numbers are exact in float.
constexpr GridSteps finest_grid(double lowest, double highest, int bits) {
  if (bits > 16) {
    const GridSteps grid = finest_grid(lowest, highest, 16);
    const double finer = double(1ll << (bits - 16));
    return {grid.steps * finer, grid.zero * finer};
  }
  const double codes = double(1 << bits);
  for (int64_t steps = int64_t(codes / (highest - lowest));; --steps) {
    // The grid exceeds the range by a quarter of a step at both ends, for the derivative's own
    // error: code 0 is reserved for NaN.
    const int64_t zero = int64_t(1.75 - lowest * steps);
    if (highest * steps + zero + 0.75 < codes && has_exact_reciprocal(double(steps)))
      return {double(steps), double(zero)};
  }
}

template <class C>
struct DerivativeGrid {
  C steps, per_step, zero;

  template <class Activation>
  HOST_DEVICE static DerivativeGrid for_activation(int bits) {
    constexpr double lowest = Activation::kLowestDerivative;
    constexpr double highest = Activation::kHighestDerivative;
    constexpr GridSteps of8 = finest_grid(lowest, highest, 8);
    constexpr GridSteps of16 = finest_grid(lowest, highest, 16);
    constexpr GridSteps of32 = finest_grid(lowest, highest, 32);
    const C steps = C(select(bits == 8, float(of8.steps),
                             select(bits == 16, float(of16.steps), float(of32.steps))));
    const C zero = C(
        select(bits == 8, float(of8.zero), select(bits == 16, float(of16.zero), float(of32.zero))));
    return {steps, C(1) / steps, zero};
  }

  HOST_DEVICE uint32_t encode(C derivative) const {
    return derivative == derivative ? uint32_t(derivative * steps + zero + C(0.5)) : 0u;
  }

  HOST_DEVICE C decode(uint32_t code) const {
    return code != 0u ? (C(code) - zero) * per_step : C(NAN);
  }
};

}  // namespace inplace_ops
