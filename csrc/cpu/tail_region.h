// The loops over a block of a functor that splits its work by region (kSplitsRegions).
//
// A smooth activation is inverted by fast code in the core region and by slow code in the tail
// region (../inverse.h). Few elements are in the tail. But a vectorized loop that decides for each
// element runs both codes on all elements. So compute_by_region() collects the elements of the
// tail, runs the fast code on the whole block and the slow code on the collected elements, and then
// overwrites their results.
#pragma once

#include <cstdint>
#include <cstring>

#include "block.h"
#include "instruction_sets.h"

namespace inplace_ops {

// The loop over a block with the functor's code for the core region. A functor with kSplitsCore has
// two loops, one per step: the processor overlaps several iterations of a short loop, and waits
// less for square roots and divisions.
template <class Functor, class T = typename Functor::Scalar>
HOST_DEVICE void compute_core(const Functor functor, result_t<T>* out, BlockInputs<Functor> in,
                              const code_t<Functor>* codes, int bits, int count) {
  Element<T> element[Functor::kInputs];
  if constexpr (Functor::kSplitsCore) {
    float x[kBlock];
#pragma GCC ivdep
    for (int i = 0; i < count; ++i) {
      load_elements(element, in, i);
      x[i] = functor.core_input(element, codes[i], bits);
    }
#pragma GCC ivdep
    for (int i = 0; i < count; ++i) {
      load_elements(element, in, i);
      out[i] = to_result<T>(functor.core_from_input(element, x[i]));
    }
  } else {
#pragma GCC ivdep
    for (int i = 0; i < count; ++i) {
      load_elements(element, in, i);
      out[i] = to_result<T>(functor.core(element, codes[i], bits));
    }
  }
}

// The elements of the tail are collected before out is written, as it may alias an input.
template <class Instructions, class Functor, class T = typename Functor::Scalar>
HOST_DEVICE void compute_by_region(const Functor functor, result_t<T>* out, BlockInputs<Functor> in,
                                   const code_t<Functor>* codes, int bits, int count) {
  uint8_t is_in_tail[kBlock] = {};
  for (int i = 0; i < count; ++i) {
    Element<T> element[Functor::kInputs];
    load_elements(element, in, i);
    is_in_tail[i] = functor.is_in_tail(element, codes[i], bits);
  }

  int num_tail = 0;
  int indices[kBlock];
  for (int first = 0; first < count; first += 8) {
    uint64_t any;
    memcpy(&any, is_in_tail + first, sizeof(any));
    if (any == 0) continue;
    for (int i = first; i < first + 8; ++i) {
      indices[num_tail] = i;  // overwritten unless it is in the tail
      num_tail += is_in_tail[i];
    }
  }
  // Pad the last vector: a part of a vector would cost as much as many whole ones.
  int padded = num_tail;
  while (padded % kVector != 0) indices[padded++] = indices[0];
  T stored[Functor::kInputs][kBlock];
  opmath_t<T> values[Functor::kInputs][kConvertsHalf<T> ? kBlock : 1];
  BlockInput<T> tail_in[Functor::kInputs];
  code_t<Functor> tail_codes[kBlock];
  for (int k = 0; k < Functor::kInputs; ++k) {
    for (int i = 0; i < padded; ++i) stored[k][i] = in[k].stored[indices[i]];
    if constexpr (kConvertsHalf<T>)
      CompiledFor<Instructions>::half_to_float(values[k], stored[k], padded);
    tail_in[k] = {stored[k], values[k]};
  }
  for (int i = 0; i < padded; ++i) tail_codes[i] = codes[indices[i]];

  compute_core(functor, out, in, codes, bits, count);

  result_t<T> results[kBlock];
  for (int first = 0; first < padded; first += kVector) {
    for (int i = first; i < first + kVector; ++i) {
      Element<T> element[Functor::kInputs];
      load_elements(element, tail_in, i);
      results[i] = to_result<T>(functor.tail(element, tail_codes[i], bits));
    }
  }
  for (int i = 0; i < num_tail; ++i) out[indices[i]] = results[i];
}

}  // namespace inplace_ops
