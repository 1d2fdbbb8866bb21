// Recomputes a block of a norm's output from the norm's input.
//
// Each element has a scale and a shift, and after a layer norm a mean and an rstd (norm_affine.h).
// A loop that looked them up by offset would not vectorize. The loops below look them up once for
// each span of neighboring elements, in the cheapest way that the layout allows:
//
// - In NCHW the elements of a span have one scale.
// - In channels_last the scales of a span are neighbors in the affine itself. After a layer norm a
//   span is part of a row, and has the row's mean and rstd.
// - Otherwise the loop reads numbers that were gathered for each element.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../functors.h"
#include "../norm_affine.h"
#include "block.h"
#include "strided_io.h"

namespace inplace_ops {

// Recomputes a block of a norm's output z from its input x, or from a cast of x to T. For halves,
// `values` receives z in float, not yet rounded. For other formats `values` is z itself.
template <class Instructions, class T, class In>
HOST_DEVICE void normalize(T* z, result_t<T>* values, const BlockInput<In>& x,
                           const NormAffine<opmath_t<T>>& affine, int64_t first, int count) {
  using C = opmath_t<T>;
  const auto& strided = affine.strided;
  const bool has_rows = affine.has_rows();
  const int64_t stride = innermost_stride(strided, 0);
  const bool has_long_spans = strided.dims > 0 && strided.sizes[strided.dims - 1] >= kVector &&
                              innermost_stride(strided, 1) == 0;
  const auto normalize_span = [&](int64_t position, int64_t length,
                                  const auto& offsets) ALWAYS_INLINE {
    const C* const scale = affine.channel_affine.scale + offsets[0];
    const C* const shift = affine.channel_affine.shift + offsets[0];
    const RowStatistics<C> row = affine.row(offsets[1]);
    const BlockInput<In> in = x.from(position);
    result_t<T>* const out = values + position;
    if (stride == 0) {
      const ScaleAndShift<C> scale_shift{*scale * row.rstd, *shift};
#pragma GCC ivdep
      for (int64_t i = 0; i < length; ++i)
        out[i] = to_result<T>(apply_affine(in[i].value - row.mean, scale_shift));
    } else if (has_rows) {
#pragma GCC ivdep
      for (int64_t i = 0; i < length; ++i)
        out[i] =
            to_result<T>(apply_affine(in[i].value - row.mean, {scale[i] * row.rstd, shift[i]}));
    } else {
#pragma GCC ivdep
      for (int64_t i = 0; i < length; ++i)
        out[i] = to_result<T>(apply_affine(in[i].value, {scale[i], shift[i]}));
    }
  };
  if (has_long_spans && (stride == 0 || stride == 1)) {
    for_each_span(strided, first, count, normalize_span);
  } else {
    C scale[kBlock], shift[kBlock], rstd[kBlock], mean[kBlock];
    gather(scale, affine.channel_affine.scale, strided, 0, first, count);
    gather(shift, affine.channel_affine.shift, strided, 0, first, count);
    if (has_rows) {
      gather(rstd, affine.row_statistics.rstd, strided, 1, first, count);
      gather(mean, affine.row_statistics.mean, strided, 1, first, count);
    } else {
      std::fill(rstd, rstd + count, C(1));
      std::fill(mean, mean + count, C(0));
    }
#pragma GCC ivdep
    for (int i = 0; i < count; ++i)
      values[i] = to_result<T>(apply_affine(x[i].value - mean[i], {scale[i] * rstd[i], shift[i]}));
  }
  if constexpr (kConvertsHalf<T>) Instructions::float_to_half(z, values, count);
}

}  // namespace inplace_ops
