// The two passes of batch_norm.h over a block on the CPU.
//
// The activation's backward, the ordinary loop over blocks, has just written g, the gradient of the
// norm's output, to the memory of grad_x. While the block is in the cache, the first pass adds it
// to the sums. The second pass turns g into grad_x. As after any norm, the elements of a span have
// one channel in NCHW, and consecutive channels in channels_last.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../batch_norm.h"
#include "../functors.h"
#include "block.h"
#include "strided_io.h"

namespace inplace_ops {

// Returns the values of a block, in `buffer` unless they are stored as values.
template <class Instructions, class T>
HOST_DEVICE const opmath_t<T>* values_of(const T* stored, opmath_t<T> (&buffer)[kBlock],
                                         int count) {
  if constexpr (std::is_same_v<T, opmath_t<T>>) {
    return stored;
  } else if constexpr (kConvertsHalf<T>) {
    Instructions::half_to_float(buffer, stored, count);
  } else {
    for (int i = 0; i < count; ++i) buffer[i] = load(stored[i]);
  }
  return buffer;
}

// The sums of kVector neighboring numbers each: the compiler does not vectorize one sum by itself,
// as it would have to add in another order. The vectors fit the registers, as it moves larger ones
// through memory. The order of the additions depends on kVector alone.
template <class Instructions, class C>
struct VectorSum {
  static constexpr int kLanes = std::min<int>(kVector, Instructions::kRegister / sizeof(C));
  static constexpr int kParts = kVector / kLanes;
  typedef C Part __attribute__((vector_size(kLanes * sizeof(C))));

  Part parts[kParts] = {};

  HOST_DEVICE C total() const {
    C sums[kVector];
    memcpy(sums, parts, sizeof(sums));
    for (int half = kVector / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    return sums[0];
  }
};

// Adds a block to the sums of a piece.
template <class Instructions, class T, class C = opmath_t<T>>
HOST_DEVICE void sum_block(const T* stored_g, const T* stored_x, const NormAffine<C>& affine,
                           const BatchNormBackward<C>& norm, int64_t piece, int64_t first,
                           int count) {
  C g_buffer[kBlock], x_buffer[kBlock];
  const C* const g = values_of<Instructions>(stored_g, g_buffer, count);
  const C* const x = values_of<Instructions>(stored_x, x_buffer, count);
  const auto sum_channel = [&](int64_t position, int64_t length,
                               const auto& offsets) ALWAYS_INLINE {
    const C mean = norm.mean[offsets[0]];
    VectorSum<Instructions, C> gradients, products;
    C gradient = 0, product = 0;  // of what is left after whole vectors
    const int64_t end = position + length;
    int64_t i = position;
    for (; i + kVector <= end; i += kVector) {
      for (int part = 0; part < gradients.kParts; ++part) {
        typename VectorSum<Instructions, C>::Part g_part, x_part;
        memcpy(&g_part, g + i + part * gradients.kLanes, sizeof(g_part));
        memcpy(&x_part, x + i + part * gradients.kLanes, sizeof(x_part));
        gradients.parts[part] += g_part;
        products.parts[part] += g_part * (x_part - mean);
      }
    }
    for (; i < end; ++i) {
      gradient += g[i];
      product += g[i] * (x[i] - mean);
    }
    norm.sums_of_gradient(piece)[offsets[0]] += gradients.total() + gradient;
    norm.sums_of_product(piece)[offsets[0]] += products.total() + product;
  };
  const auto sum_channels = [&](int64_t position, int64_t length,
                                const auto& offsets) ALWAYS_INLINE {
    C* const gradients = norm.sums_of_gradient(piece) + offsets[0];
    C* const products = norm.sums_of_product(piece) + offsets[0];
    const C* const mean = norm.mean + offsets[0];
    const C *const span_g = g + position, *const span_x = x + position;
#pragma GCC ivdep
    for (int64_t i = 0; i < length; ++i) {
      gradients[i] += span_g[i];
      products[i] += span_g[i] * (span_x[i] - mean[i]);
    }
  };
  if (innermost_stride(affine.strided, 0) == 0)
    for_each_span(affine.strided, first, count, sum_channel);
  else
    for_each_span(affine.strided, first, count, sum_channels);
}

// Turns a block of g into grad_x.
template <class Instructions, class T, class C = opmath_t<T>>
HOST_DEVICE void correct_block(T* out, const T* stored_x, const NormAffine<C>& affine,
                               const BatchNormBackward<C>& norm, int64_t first, int count) {
  C g_buffer[kBlock], x_buffer[kBlock];
  const C* const g = values_of<Instructions>(out, g_buffer, count);
  const C* const x = values_of<Instructions>(stored_x, x_buffer, count);
  result_t<T>* results;
  if constexpr (kConvertsHalf<T>)
    results = g_buffer;
  else
    results = out;
  struct Channel {
    Correction<C> correction;
    C mean, scale;
  };
  // channel_of(i) is the channel of element i of a span.
  const auto correct = [&](int64_t position, int64_t length, auto channel_of) ALWAYS_INLINE {
    const C *const span_g = g + position, *const span_x = x + position;
    result_t<T>* const span_results = results + position;
#pragma GCC ivdep
    for (int64_t i = 0; i < length; ++i) {
      const Channel c = channel_of(i);
      span_results[i] = to_result<T>(c.correction.gradient(span_g[i], span_x[i] - c.mean, c.scale));
    }
  };
  const bool has_one_channel = innermost_stride(affine.strided, 0) == 0;
  const auto correct_span = [&](int64_t position, int64_t length,
                                const auto& offsets) ALWAYS_INLINE {
    const C *const scale = affine.channel_affine.scale + offsets[0], *mean = norm.mean + offsets[0];
    const C *const slope = norm.slope + offsets[0], *const offset = norm.offset + offsets[0];
    const Channel first{{*slope, *offset}, *mean, *scale};  // read once
    if (has_one_channel)
      correct(position, length, [&](int64_t) { return first; });
    else
      correct(position, length,
              [&](int64_t i) { return Channel{{slope[i], offset[i]}, mean[i], scale[i]}; });
  };
  for_each_span(affine.strided, first, count, correct_span);
  if constexpr (kConvertsHalf<T>) Instructions::float_to_half(out, results, count);
}

}  // namespace inplace_ops
