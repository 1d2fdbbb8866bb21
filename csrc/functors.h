// The kernels, as functors over one element, its code and the code's bits, without an activation's
// name in them.
// cpu/elementwise.h and cuda/elementwise.cuh run them: operand 0 is written, the inputs are read,
// and the packed bits are not used, written or read.
#pragma once

#include <cstdint>

#include <type_traits>

#include "number_formats.h"
#include "packed_bits.h"

namespace inplace_ops {

enum class Bits { kNone, kWritten, kRead };

// A functor may also split its work: is_tail(), and core() and tail() for one kind of element each.
template <class Kernel, class = void>
struct HasTail : std::false_type {};
template <class Kernel>
struct HasTail<Kernel, std::enable_if_t<Kernel::kHasTail>> : std::true_type {};

// What a kernel works on. The output may be the first input.
template <class Kernel>
struct Operands {
  using T = typename Kernel::Scalar;
  T* out;
  const T* in[Kernel::kInputs];
  PackedBits<std::conditional_t<Kernel::kBits == Bits::kWritten, uint8_t, const uint8_t>> bits;
};

// x = forward(x), without a trace.
template <class Activation, class T>
struct Forward {
  using Scalar = T;
  static constexpr int kInputs = 1;
  static constexpr Bits kBits = Bits::kNone;
  static constexpr int kMaxBits = 0, kUsualBits = 0;
  static constexpr bool kTakesOneBit = false;
  Activation activation;

  HOST_DEVICE T operator()(const T (&in)[1], uint32_t&, int) const {
    return store<T>(activation.forward(load(in[0])));
  }
};

// x = forward(x), keeping what backward needs.
template <class Activation, class T>
struct ForwardKeeping {
  using Scalar = T;
  static constexpr int kInputs = 1;
  static constexpr Bits kBits = Bits::kWritten;
  static constexpr int kMaxBits = Activation::kMaxBits, kUsualBits = Activation::kUsualBits;
  static constexpr bool kTakesOneBit = Activation::accepts_bits(1);
  Activation activation;

  HOST_DEVICE T operator()(const T (&in)[1], uint32_t& code, int bits) const {
    code = activation.keep(in[0], bits);
    return store<T>(activation.forward(load(in[0])));
  }
};

// The gradient from the incoming one and the kept bits.
template <class Activation, class T>
struct BackwardFromBits {
  using Scalar = T;
  static constexpr int kInputs = 1;
  static constexpr Bits kBits = Bits::kRead;
  static constexpr int kMaxBits = Activation::kMaxBits, kUsualBits = Activation::kUsualBits;
  static constexpr bool kTakesOneBit = Activation::accepts_bits(1);
  Activation activation;

  HOST_DEVICE T operator()(const T (&in)[1], uint32_t& code, int bits) const {
    return store<T>(activation.backward(load(in[0]), T{}, code, bits));
  }
};

// From the incoming gradient and the output, where the output tells as much as the input.
template <class Activation, class T>
struct BackwardFromOutput {
  using Scalar = T;
  static constexpr int kInputs = 2;
  static constexpr Bits kBits = Bits::kNone;
  static constexpr int kMaxBits = 0, kUsualBits = 0;
  static constexpr bool kTakesOneBit = false;
  Activation activation;

  HOST_DEVICE T operator()(const T (&in)[2], uint32_t&, int) const {
    return store<T>(activation.backward(load(in[0]), in[1], activation.keep(in[1], 1), 1));
  }
};

// From the incoming gradient, the output and the kept bits.
template <class Activation, class T>
struct BackwardFromBoth {
  using Scalar = T;
  static constexpr int kInputs = 2;
  static constexpr Bits kBits = Bits::kRead;
  static constexpr int kMaxBits = Activation::kMaxBits, kUsualBits = Activation::kUsualBits;
  static constexpr bool kTakesOneBit = Activation::accepts_bits(1);
  Activation activation;

  HOST_DEVICE T operator()(const T (&in)[2], uint32_t& code, int bits) const {
    return store<T>(activation.backward(load(in[0]), in[1], code, bits));
  }

  static constexpr bool kHasTail = Activation::kHasTail;
  HOST_DEVICE bool is_tail(const T (&in)[2], uint32_t code, int bits) const {
    return activation.is_tail(in[1], code, bits);
  }
  HOST_DEVICE T core(const T (&in)[2], uint32_t code, int bits) const {
    return store<T>(activation.backward_core(load(in[0]), in[1], code, bits));
  }
  HOST_DEVICE T tail(const T (&in)[2], uint32_t code, int bits) const {
    return store<T>(activation.backward_tail(load(in[0]), in[1], code, bits));
  }
};

// The second derivative's term, from the gradient's gradient, the gradient, the output and the
// bits.
template <class Activation, class T>
struct DoubleBackward {
  using Scalar = T;
  static constexpr int kInputs = 3;
  static constexpr Bits kBits = Bits::kRead;
  static constexpr int kMaxBits = Activation::kMaxBits, kUsualBits = Activation::kUsualBits;
  static constexpr bool kTakesOneBit = Activation::accepts_bits(1);
  Activation activation;

  HOST_DEVICE T operator()(const T (&in)[3], uint32_t& code, int bits) const {
    return store<T>(activation.double_backward(load(in[0]), load(in[1]), in[2], code, bits));
  }
};

}  // namespace inplace_ops
