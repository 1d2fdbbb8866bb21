// What is done with each element, once for every activation: a functor per direction and way of
// keeping (`save`). cpu/elementwise.h and cuda/elementwise.cuh run them: operand 0 is written, the
// inputs are read, and the packed bits, whose element has `code`, are not used, written or read.
// What a functor returns, in C, is rounded to the format Out by those who run it.
#pragma once

#include <cstdint>
#include <utility>

#include "activations/entry.h"
#include "derivative_grid.h"
#include "inverse.h"
#include "norm_affine.h"
#include "packed_bits.h"

namespace inplace_ops {

enum class PackedBitsUse { kNone, kWritten, kRead };

// Of a functor over formats T. A GPU's fast path is compiled for the numbers of bits in FastBits.
template <class T, int inputs, PackedBitsUse use, int... fast_bits>
struct Elementwise {
  using Scalar = T;
  using Out = T;
  using C = opmath_t<T>;
  using FastBits = std::integer_sequence<int, fast_bits...>;
  static constexpr int kInputs = inputs;
  static constexpr PackedBitsUse kPackedBits = use;
  static constexpr bool kNormalizes = false;
  // A gradient often is some of a larger tensor's channels.
  static constexpr bool kReadsGradient = false;
};

// A functor may split its work: near() and far() for the elements of which is_in_tail() tells them.
template <class Functor, class = void>
struct IsSplit : std::false_type {};
template <class Functor>
struct IsSplit<Functor, std::enable_if_t<Functor::kIsSplit>> : std::true_type {};

struct NoAffine {};

// What a functor works on. The output may be the first input.
template <class Functor>
struct Operands {
  using T = typename Functor::Scalar;
  static constexpr bool kWritesBits = Functor::kPackedBits == PackedBitsUse::kWritten;
  typename Functor::Out* out;
  const T* in[Functor::kInputs];
  PackedBits<std::conditional_t<kWritesBits, uint8_t, const uint8_t>> packed;
  std::conditional_t<Functor::kNormalizes, NormAffine<opmath_t<T>>, NoAffine> affine;
};

// Every forward writes the activation of x. ForwardMask and ForwardOutput keep nothing where they
// are given no planes.

// save="mask": one bit.
template <class Activation, class T = typename Activation::Scalar>
struct ForwardMask : Elementwise<T, 1, PackedBitsUse::kWritten, 0, 1> {
  static constexpr bool accepts_bits(int64_t bits) { return bits == 1; }
  using C = typename Activation::C;
  Activation activation;

  HOST_DEVICE C operator()(const Element<T> (&in)[1], uint32_t& code, int) const {
    const C x = in[0].template as<C>();
    code = activation.mask(x);
    return activation.value(x);
  }
};

template <class Activation, class T = typename Activation::Scalar>
struct BackwardMask : Elementwise<T, 1, PackedBitsUse::kRead, 1> {
  static constexpr bool kReadsGradient = true;
  static constexpr bool accepts_bits(int64_t bits) { return bits == 1; }
  using C = typename Activation::C;
  Activation activation;

  HOST_DEVICE C operator()(const Element<T> (&in)[1], uint32_t& code, int) const {
    return activation.gradient(in[0].template as<C>(), code);
  }
};

// save="output", where the output's mask is the input's.
template <class Activation, class T = typename Activation::Scalar>
struct BackwardMaskOfOutput : Elementwise<T, 2, PackedBitsUse::kNone, 0> {
  static constexpr bool kReadsGradient = true;
  using C = typename Activation::C;
  Activation activation;

  HOST_DEVICE C operator()(const Element<T> (&in)[2], uint32_t&, int) const {
    return activation.gradient(in[0].template as<C>(), activation.mask(in[1].template as<C>()));
  }
};

// save="output": the branch of the smooth and the low bits of x beside the output.
template <class Activation>
constexpr bool accepts_output_bits(int64_t bits) {
  return bits == 1 || bits == Activation::kDefaultBits || bits == 8;
}

template <class Activation, class T = typename Activation::Scalar>
struct ForwardOutput : Elementwise<T, 1, PackedBitsUse::kWritten, 0, 1, Activation::kDefaultBits> {
  static constexpr bool accepts_bits(int64_t bits) { return accepts_output_bits<Activation>(bits); }
  Activation activation;

  HOST_DEVICE auto operator()(const Element<T> (&in)[1], uint32_t& code, int bits) const {
    code = InputCode<Activation>(bits).encode(in[0]);
    return activation.value(in[0].value);
  }
};

template <class Activation, class Point, class C>
HOST_DEVICE C gradient_at(Point at, C grad) {
  const C gradient = grad * Activation::derivative(at);
  return Activation::is_flat(at) ? C(0) : gradient;
}

template <class Activation, class T = typename Activation::Scalar>
struct BackwardOutput : Elementwise<T, 2, PackedBitsUse::kRead, 1, Activation::kDefaultBits> {
  static constexpr bool kReadsGradient = true;
  static constexpr bool accepts_bits(int64_t bits) { return accepts_output_bits<Activation>(bits); }

  HOST_DEVICE auto operator()(const Element<T> (&in)[2], uint32_t& code, int bits) const {
    return gradient<Region::kAny>(in, code, bits);
  }

  // In double all is one part.
  static constexpr bool kIsSplit = !std::is_same_v<T, double>;
  HOST_DEVICE bool is_in_tail(const Element<T> (&in)[2], uint32_t code, int bits) const {
    const bool left = InputCode<Activation>(bits).is_left(code);
    return inplace_ops::is_in_tail<Activation>(in[1].value, left);
  }
  HOST_DEVICE auto core(const Element<T> (&in)[2], uint32_t code, int bits) const {
    return gradient<Region::kCore>(in, code, bits);
  }
  HOST_DEVICE auto tail(const Element<T> (&in)[2], uint32_t code, int bits) const {
    return gradient<Region::kTail>(in, code, bits);
  }

  // near() in two steps, x and then the gradient.
  static constexpr bool kHasSteps = sizeof(T) == 2;
  HOST_DEVICE float core_input(const Element<T> (&in)[2], uint32_t code, int bits) const {
    return recover_core_input<Activation>(in[1].value, code, bits);
  }
  HOST_DEVICE auto core_from_input(const Element<T> (&in)[2], float x) const {
    return gradient_at<Activation>(Activation::core_point(x), in[0].value);
  }

 private:
  template <Region region>
  HOST_DEVICE static auto gradient(const Element<T> (&in)[2], uint32_t code, int bits) {
    return gradient_at<Activation>(recover<Activation, region>(in[1].value, code, bits),
                                   in[0].value);
  }
};

// grad_grad * grad * f''(x) / f'(x), from the gradient's gradient, the gradient and the output.
// Autograd adds this to the output's gradient, and the activation's own backward then multiplies it
// by f'(x). 0 where f'(x) is 0, as there it is lost.
template <class Activation, class T = typename Activation::Scalar>
struct DoubleBackward : Elementwise<T, 3, PackedBitsUse::kRead, Activation::kDefaultBits> {
  static constexpr bool accepts_bits(int64_t bits) { return accepts_output_bits<Activation>(bits); }

  HOST_DEVICE auto operator()(const Element<T> (&in)[3], uint32_t& code, int bits) const {
    using C = opmath_t<T>;
    const auto at = recover<Activation, Region::kAny>(in[2].value, code, bits);
    const C derivative = Activation::derivative(at);
    const C term = in[0].value * in[1].value * Activation::second_derivative(at);
    return derivative == C(0) ? C(0) : term / derivative;
  }
};

// save="derivative": f'(x) rounded to a grid.
constexpr bool accepts_derivative_bits(int64_t bits) {
  return bits == 8 || bits == 16 || bits == 32;
}

template <class Activation, class T = typename Activation::Scalar>
struct ForwardDerivative : Elementwise<T, 1, PackedBitsUse::kWritten, kDerivativeBits<T>> {
  static constexpr bool accepts_bits(int64_t bits) { return accepts_derivative_bits(bits); }
  Activation activation;

  HOST_DEVICE auto operator()(const Element<T> (&in)[1], uint32_t& code, int bits) const {
    const auto at = Activation::point(in[0].value);
    code = DerivativeGrid<opmath_t<T>>::template of<Activation>(bits).encode(
        Activation::derivative(at));
    return activation.value(in[0].value);
  }
};

// One for all activations: their grids differ by two numbers.
template <class T>
struct BackwardDerivative : Elementwise<T, 1, PackedBitsUse::kRead, kDerivativeBits<T>> {
  static constexpr bool kReadsGradient = true;
  static constexpr bool accepts_bits(int64_t bits) { return accepts_derivative_bits(bits); }
  DerivativeGrid<opmath_t<T>> grid;

  HOST_DEVICE auto operator()(const Element<T> (&in)[1], uint32_t& code, int) const {
    return in[0].value * grid.decode(code);
  }
};

// save="recompute": of z, which follows from the norm's input, the last one.

template <class T>
HOST_DEVICE opmath_t<T> apply_affine(opmath_t<T> x, ScaleAndShift<opmath_t<T>> scale_shift) {
  return x * scale_shift.scale + scale_shift.shift;
}

// A functor that is given the scale and shift of z instead of a code, and x less the mean.
template <class Inner, class T = typename Inner::Scalar>
struct Normalizing : Inner {
  static constexpr bool kNormalizes = true;

  HOST_DEVICE const Inner& inner() const { return *this; }

  HOST_DEVICE auto operator()(Element<T> (&in)[Inner::kInputs],
                              ScaleAndShift<opmath_t<T>> scale_shift) const {
    auto& last = in[Inner::kInputs - 1];
    last = rounded_element<T>(
        apply_affine<T>(last.value, scale_shift));  // as the norm rounds its output
    uint32_t no_code = 0;
    return inner()(in, no_code, 1);
  }
};

template <class T>
struct Identity : Elementwise<T, 1, PackedBitsUse::kNone, 0> {
  HOST_DEVICE auto operator()(const Element<T> (&in)[1], uint32_t&, int) const {
    return in[0].value;
  }
};

template <class Activation, class T = typename Activation::Scalar>
struct Value : Elementwise<T, 1, PackedBitsUse::kNone, 0> {
  using C = typename Activation::C;
  Activation activation;

  HOST_DEVICE C operator()(const Element<T> (&in)[1], uint32_t&, int) const {
    return activation.value(in[0].template as<C>());
  }
};

template <class Activation, class T = typename Activation::Scalar>
struct Gradient : Elementwise<T, 2, PackedBitsUse::kNone, 0> {
  using C = typename Activation::C;
  Activation activation;

  HOST_DEVICE C operator()(const Element<T> (&in)[2], uint32_t&, int) const {
    const C grad = in[0].template as<C>(), x = in[1].template as<C>();
    if constexpr (Activation::kKind == Kind::kPiecewiseLinear) {
      return activation.gradient(grad, activation.mask(x));
    } else {
      return gradient_at<Activation>(Activation::point(x), grad);
    }
  }
};

template <class T>
struct Normalize : Normalizing<Identity<T>> {
  HOST_DEVICE auto operator()(const Element<T> (&in)[1],
                              ScaleAndShift<opmath_t<T>> scale_shift) const {
    return apply_affine<T>(in[0].value, scale_shift);  // rounded where it is stored
  }
};

template <class Activation, class T = typename Activation::Scalar>
struct ForwardRecompute : Normalizing<Value<Activation>> {};

template <class Activation, class T = typename Activation::Scalar>
struct BackwardRecompute : Normalizing<Gradient<Activation>> {};

// What a functor of one input makes of the sum of two, rounded as torch.add rounds it.
template <class Inner, class T = typename Inner::Scalar>
struct Add : Elementwise<T, 2, PackedBitsUse::kNone, 0> {
  Inner inner;

  HOST_DEVICE opmath_t<T> operator()(const Element<T> (&in)[2], uint32_t& code, int bits) const {
    const Element<T> sum[1] = {rounded_element<T>(in[0].value + in[1].value)};
    return load(inner(sum, code, bits));
  }
};

// Of an addend and z.
template <class T>
struct NormalizeAdd : Normalizing<Add<Identity<T>>> {};

template <class Activation, class T = typename Activation::Scalar>
struct ForwardRecomputeAdd : Normalizing<Add<Value<Activation>>> {};

// The functor with its results rounded to another format instead, as a cast of them rounds: of
// float's, to 16 bits.
template <class Functor, class Format>
struct Cast : Functor {
  using Out = Format;
  static_assert(std::is_same_v<typename Functor::C, opmath_t<Format>> &&
                std::is_same_v<typename Functor::C, typename Functor::Scalar>);
};

}  // namespace inplace_ops
