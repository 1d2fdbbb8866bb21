// A block: the elements that the CPU's loops process together, and their types in these loops.
//
// The loop that calls the functor converts what it loads and stores, except halves in float
// arithmetic: the compiler does not generate the instructions that convert halves. So a block of
// halves is converted to float before the loop (BlockInput), and results are converted back after
// it (result_t), by functions of simd.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../functors.h"

namespace inplace_ops {

constexpr int kBlock = 512;  // elements; the block's buffers stay in the L1 cache
constexpr int kVector = 16;  // elements of the widest vector

// Whether values are converted before and after the loop.
template <class T, class C = opmath_t<T>>
constexpr bool kConvertsHalf = std::is_same_v<T, Half> && !std::is_same_v<C, Half>;

// The elements of a block of an input.
template <class T, class C = opmath_t<T>>
struct BlockInput {
  const T* stored;
  const opmath_t<T>* values;  // if kConvertsHalf

  HOST_DEVICE Element<T> operator[](int64_t i) const {
    if constexpr (kConvertsHalf<T, C>) return {stored[i], values[i]};
    return element_of(stored[i]);
  }

  HOST_DEVICE BlockInput from(int64_t i) const {
    return {stored + i, kConvertsHalf<T, C> ? values + i : nullptr};
  }
};

template <class Functor>
using BlockInputOf = BlockInput<typename Functor::Scalar, typename Functor::C>;

template <class Functor>
using BlockInputs = const BlockInputOf<Functor> (&)[Functor::kInputs];

template <class T, class C, int inputs>
HOST_DEVICE void load_elements(Element<T> (&element)[inputs], const BlockInput<T, C> (&in)[inputs],
                               int64_t i) {
  for (int k = 0; k < inputs; ++k) element[k] = in[k][i];
}

// The type of results of format T in the loop: float if they are converted to half after the loop.
template <class T, class C = opmath_t<T>>
using result_t = std::conditional_t<kConvertsHalf<T, C>, opmath_t<T>, T>;

template <class Functor>
using functor_result_t = result_t<typename Functor::Out, typename Functor::C>;

template <class T, class C>
HOST_DEVICE result_t<T, C> to_result(C value) {
  if constexpr (kConvertsHalf<T, C>)
    return value;
  else
    return store<T>(value);
}

// The type of codes in the loop. It is as wide as the arithmetic: with a narrower type the compiler
// works on several vectors at once and runs out of registers. The codes of masks are narrow, since
// their loop does little more than store them.
template <class Functor>
using code_t = std::conditional_t<Functor::accepts_bits(8), uint32_t, uint8_t>;

}  // namespace inplace_ops
