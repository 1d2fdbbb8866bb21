#pragma once
#include "silu_inverse.h"
namespace inplace_ops {
enum class Region { kAny, kCore, kFar };
template <class A> using InputCode = SiluCode<typename A::Scalar>;
template <class A, Region region> HOST_DEVICE auto recover(typename A::Scalar y, uint32_t code, int bits) {
  return silu_recover<typename A::Scalar, static_cast<SiluRegion>(static_cast<int>(region))>(y, code, bits);
}
template <class A> HOST_DEVICE bool is_far(opmath_t<typename A::Scalar> y, bool left) { return is_silu_tail<typename A::Scalar>(y, left); }
}
