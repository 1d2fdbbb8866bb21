// The functors: the arithmetic of one element. There is one functor for each direction and save
// mode. Most are templates over an activation. Others need only the storage format, as Identity
// does, or wrap another functor, as Normalizing, Add and Cast do. cpu/block_loop.h and
// cuda/elementwise.cuh run a functor over tensors (Operands). For each element they
//
// 1. load the inputs, stored in the format In, and the element's `code` from the packed bits if
//    kPackedBits is kRead;
// 2. call the functor, which computes in the type C;
// 3. round the result to the format Out and store it to `out`, and store `code` to the packed bits
//    if kPackedBits is kWritten.
//
// A functor is called with (in, code, bits):
//
// - in[k] is input k, an Element. in[k].value is its value in opmath_t<T>. in[k].as<C>() is the
//   stored number if C is T, and the value otherwise. Activation::C is T instead of opmath_t<T>
//   where a piecewise-linear activation only compares and selects, on a CPU (comparison_t).
// - `code` is read if kPackedBits is kRead, written if it is kWritten, and otherwise not used.
// - `bits` is the number of bits of a code, and 1 if there are no packed bits.
#pragma once

#include <cstdint>
#include <utility>

#include "activations/entry.h"
#include "bit_planes.h"
#include "derivative_grid.h"
#include "inverse.h"
#include "norm_affine.h"

namespace inplace_ops {

enum class PackedBitsUse { kNone, kWritten, kRead };

// The base of the functors over storage format T. The vectorized path of a GPU is compiled for each
// number of bits in FastBits, where 0 means no packed bits. Other numbers take the path with
// accesses of one element.
template <class T, int inputs, PackedBitsUse use, int... fast_bits>
struct Elementwise {
  using Scalar = T;
  using In = T;
  using Out = T;
  using C = opmath_t<T>;
  using FastBits = std::integer_sequence<int, fast_bits...>;
  static constexpr int kInputs = inputs;
  static constexpr PackedBitsUse kPackedBits = use;
  static constexpr bool kNormalizes = false;
  // Whether the vectorized path of a GPU is compiled for Rows (cuda/elementwise.cuh) as well as for
  // dense tensors. Backward functors set it: a gradient is often a slice of a larger tensor's
  // channels. Functors with kNormalizes support rows in any case.
  static constexpr bool kVectorizesRows = false;
  // Whether the functor splits its work by region: is_in_tail() decides between core() and tail().
  static constexpr bool kSplitsRegions = false;
};

struct NoAffine {};

// The data that a functor runs over. The output may be the first input.
template <class Functor>
struct Operands {
  using T = typename Functor::Scalar;
  static constexpr bool kWritesBits = Functor::kPackedBits == PackedBitsUse::kWritten;
  typename Functor::Out* out;
  const typename Functor::In* in[Functor::kInputs];
  PackedBits<std::conditional_t<kWritesBits, uint8_t, const uint8_t>> packed;
  std::conditional_t<Functor::kNormalizes, NormAffine<opmath_t<T>>, NoAffine> affine;
};

// Every forward functor returns the activation of x. Without packed bits, as in a forward that
// needs no gradient, ForwardMask and ForwardOutput save nothing: this is the 0 in their FastBits.
// accepts_bits(), whether packed bits may have this many bits per element, is asked only if there
// are packed bits, and rejects 0.

// save="mask": one bit per element, from which backward selects the derivative.
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
  static constexpr bool kVectorizesRows = true;
  static constexpr bool accepts_bits(int64_t bits) { return bits == 1; }
  using C = typename Activation::C;
  Activation activation;

  HOST_DEVICE C operator()(const Element<T> (&in)[1], uint32_t& code, int) const {
    return activation.gradient(in[0].template as<C>(), code);
  }
};

// save="output" of a piecewise-linear activation: the output's mask equals the input's.
template <class Activation, class T = typename Activation::Scalar>
struct BackwardMaskOfOutput : Elementwise<T, 2, PackedBitsUse::kNone, 0> {
  static constexpr bool kVectorizesRows = true;
  using C = typename Activation::C;
  Activation activation;

  HOST_DEVICE C operator()(const Element<T> (&in)[2], uint32_t&, int) const {
    return activation.gradient(in[0].template as<C>(), activation.mask(in[1].template as<C>()));
  }
};

// save="output" of a smooth activation: a code of x (inverse.h) in addition to the output. One bit
// is the branch alone; kDefaultBits is the fewest with which the gradient is within torch.testing's
// tolerances; 8 make the errors in float and double smaller. Numbers between 1 and kDefaultBits are
// no more exact than 1.
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

// Returns the gradient of x from that of the output, at a point (activations/entry.h). Where
// is_flat() it is 0 even if grad is infinite, where the product is NaN. The product is computed in
// any case, so that the choice is a selection and not a branch.
template <class Activation, class Point, class C>
HOST_DEVICE C gradient_at(Point point, C grad) {
  const C gradient = grad * Activation::derivative(point);
  return Activation::is_flat(point) ? C(0) : gradient;
}

template <class Activation, class T = typename Activation::Scalar>
struct BackwardOutput : Elementwise<T, 2, PackedBitsUse::kRead, 1, Activation::kDefaultBits> {
  static constexpr bool kVectorizesRows = true;
  static constexpr bool accepts_bits(int64_t bits) { return accepts_output_bits<Activation>(bits); }

  HOST_DEVICE auto operator()(const Element<T> (&in)[2], uint32_t& code, int bits) const {
    return gradient<Region::kAny>(in, code, bits);
  }

  // Double has one code path for both regions.
  static constexpr bool kSplitsRegions = !std::is_same_v<T, double>;
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

  // core() in two steps: x, and then the gradient. The CPU runs each step in a loop of its own,
  // which is faster (compute_core() in cpu/tail_region.h). In the 16-bit formats x is all that the
  // second step needs of the first. In float it also needs the point at the estimate.
  static constexpr bool kSplitsCore = sizeof(T) == 2;
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

// Returns grad_grad * grad * f''(x) / f'(x), from the gradient's gradient, the gradient and the
// output. Autograd adds this to the output's gradient, which the activation's backward multiplies
// by f'(x). Where f'(x) is 0 the term is lost, and the result is 0.
template <class Activation, class T = typename Activation::Scalar>
struct DoubleBackward : Elementwise<T, 3, PackedBitsUse::kRead, Activation::kDefaultBits> {
  static constexpr bool accepts_bits(int64_t bits) { return accepts_output_bits<Activation>(bits); }

  HOST_DEVICE auto operator()(const Element<T> (&in)[3], uint32_t& code, int bits) const {
    using C = opmath_t<T>;
    const auto point = recover<Activation, Region::kAny>(in[2].value, code, bits);
    const C derivative = Activation::derivative(point);
    const C term = in[0].value * in[1].value * Activation::second_derivative(point);
    return derivative == C(0) ? C(0) : term / derivative;
  }
};

// save="derivative": f'(x), rounded to a grid.
constexpr bool accepts_derivative_bits(int64_t bits) {
  return bits == 8 || bits == 16 || bits == 32;
}

template <class Activation, class T = typename Activation::Scalar>
struct ForwardDerivative : Elementwise<T, 1, PackedBitsUse::kWritten, kDerivativeBits<T>> {
  static constexpr bool accepts_bits(int64_t bits) { return accepts_derivative_bits(bits); }
  Activation activation;

  HOST_DEVICE auto operator()(const Element<T> (&in)[1], uint32_t& code, int bits) const {
    const auto point = Activation::point(in[0].value);
    code = DerivativeGrid<opmath_t<T>>::template for_activation<Activation>(bits).encode(
        Activation::derivative(point));
    return activation.value(in[0].value);
  }
};

// One functor for all activations: they differ only in their grid's `steps` and `zero`
// (derivative_grid.h).
template <class T>
struct BackwardDerivative : Elementwise<T, 1, PackedBitsUse::kRead, kDerivativeBits<T>> {
  static constexpr bool kVectorizesRows = true;
  static constexpr bool accepts_bits(int64_t bits) { return accepts_derivative_bits(bits); }
  DerivativeGrid<opmath_t<T>> grid;

  HOST_DEVICE auto operator()(const Element<T> (&in)[1], uint32_t& code, int) const {
    return in[0].value * grid.decode(code);
  }
};

// save="recompute": functors of a norm's output, which they recompute from the norm's input x:
//
//   z = (x - mean) * rstd * scale + shift
//
// The last input is x.

// Returns z from x - mean, and the scale times rstd.
template <class C>
HOST_DEVICE C apply_affine(C centered, ScaleAndShift<C> scale_shift) {
  return centered * scale_shift.scale + scale_shift.shift;
}

// Applies the functor Inner, which has no packed bits, to z. The loop that runs the functor
// computes z, and passes it to inner() as the last input.
template <class Inner, class T = typename Inner::Scalar>
struct Normalizing : Inner {
  static constexpr bool kNormalizes = true;
  // Whether z is rounded to T first, as the norm rounds its output.
  static constexpr bool kRoundsNormalized = true;

  HOST_DEVICE const Inner& inner() const { return *this; }
};

template <class T>
struct Identity : Elementwise<T, 1, PackedBitsUse::kNone, 0> {
  using C = comparison_t<T>;  // a CPU copies what is stored, without rounding it again

  HOST_DEVICE C operator()(const Element<T> (&in)[1], uint32_t&, int) const {
    return in[0].template as<C>();
  }
};

// Returns the activation of x.
template <class Activation, class T = typename Activation::Scalar>
struct Value : Elementwise<T, 1, PackedBitsUse::kNone, 0> {
  using C = typename Activation::C;
  Activation activation;

  HOST_DEVICE C operator()(const Element<T> (&in)[1], uint32_t&, int) const {
    return activation.value(in[0].template as<C>());
  }
};

// Returns the gradient of x, from that of the output and x itself.
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
  static constexpr bool kRoundsNormalized = false;  // rounded when it is stored
};

template <class Activation, class T = typename Activation::Scalar>
struct ForwardRecompute : Normalizing<Value<Activation, T>> {};

template <class Activation, class T = typename Activation::Scalar>
struct BackwardRecompute : Normalizing<Gradient<Activation>> {};

template <class T>
struct Sum : Elementwise<T, 2, PackedBitsUse::kNone, 0> {
  HOST_DEVICE auto operator()(const Element<T> (&in)[2], uint32_t&, int) const {
    return in[0].value + in[1].value;  // rounded when it is stored
  }
};

// Applies a functor of one input to the sum of two inputs, rounded as torch.add rounds it.
template <class Inner, class T = typename Inner::Scalar>
struct Add : Elementwise<T, 2, PackedBitsUse::kNone, 0> {
  Inner inner;

  HOST_DEVICE opmath_t<T> operator()(const Element<T> (&in)[2], uint32_t& code, int bits) const {
    const Element<T> sum[1] = {rounded_element<T>(in[0].value + in[1].value)};
    return load(inner(sum, code, bits));
  }
};

// Returns the sum of an addend and z.
template <class T>
struct NormalizeAdd : Normalizing<Sum<T>> {};

template <class Activation, class T = typename Activation::Scalar>
struct ForwardRecomputeAdd : Normalizing<Add<Value<Activation>>> {};

// Returns a functor that has an activation as its member. The outer braces initialize base classes.
template <class Functor, class Activation>
Functor functor_of(const Activation& activation) {
  if constexpr (Functor::kNormalizes)
    return {{{{}, activation}}};  // derives from Normalizing<Value> or Normalizing<Gradient>
  else
    return {{}, activation};
}

// The activation in a functor over T whose results are rounded to the format Out. The code of a
// smooth activation over a 16-bit format is exact enough, and takes fewer instructions.
template <template <class> class Activation, class T, class Out>
using ActivationFor = Activation<std::conditional_t<Activation<T>::kKind == Kind::kSmooth, Out, T>>;

// A functor over float whose results are rounded to a 16-bit format, as a cast rounds them.
template <class Functor, class Format>
struct Cast : Functor {
  using Out = Format;
  static_assert(std::is_same_v<typename Functor::C, opmath_t<Format>> &&
                std::is_same_v<typename Functor::C, typename Functor::Scalar>);
};

// A functor over float whose inputs are casts of 16-bit numbers, and whose results are rounded to
// their format: a norm that autocast runs in float32, between two operations in 16 bits.
template <class Functor, class Format>
struct InFloat32 : Cast<Functor, Format> {
  using In = Format;
};

}  // namespace inplace_ops
