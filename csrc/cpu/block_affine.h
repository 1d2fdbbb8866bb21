// Recomputes a block of a norm's output from the norm's input.
//
// Each element has a scale and a shift, and after a layer norm a mean and an rstd (norm_affine.h).
// A loop that looked them up by offset would not vectorize. BlockAffine looks up those of a block
// before the loop, in the cheapest way that the layout allows:
//
// - In NCHW neighboring elements have the same scale: a number for each span.
// - In channels_last they have the scales of neighboring channels: pointers into the affine itself.
// - Otherwise it gathers a number for each element.
#pragma once

#include <cstdint>

#include "../functors.h"
#include "../norm_affine.h"
#include "block.h"
#include "strided_io.h"

namespace inplace_ops {

// The affine of a block's elements, as a list of spans. If is_uniform, all elements of a span have
// the same mean, scale and shift, and the pointers point to one number. Otherwise they point to one
// number for each element.
template <class C>
class BlockAffine {
 public:
  struct Span {
    int64_t position, length;
    const C *mean, *scale, *shift;  // mean is null without row statistics
  };
  Span spans[kBlock / kVector + 2];
  int count = 0;
  bool is_uniform = false;

  HOST_DEVICE BlockAffine(const NormAffine<C>& affine, int64_t first, int elements) {
    const auto& strided = affine.strided;
    const int64_t stride = innermost_stride(strided, 0);
    const bool is_long = strided.dims > 0 && strided.sizes[strided.dims - 1] >= kVector &&
                         innermost_stride(strided, 1) == 0;
    is_uniform = is_long && stride == 0;
    if (is_long && stride == 1 && !affine.has_rows()) {
      for_each_span(strided, first, elements, [&](int64_t position, int64_t length, auto& offsets) {
        spans[count++] = {position, length, nullptr, affine.channel_affine.scale + offsets[0],
                          affine.channel_affine.shift + offsets[0]};
      });
      return;
    }
    const C* const mean = affine.has_rows() ? mean_ : nullptr;
    C rstd[kBlock];
    int num_scales = elements;
    if (is_uniform) {
      for_each_span(strided, first, elements, [&](int64_t position, int64_t length, auto& offsets) {
        spans[count] = {position, length, mean ? mean + count : nullptr, scale_ + count,
                        shift_ + count};
        scale_[count] = affine.channel_affine.scale[offsets[0]];
        shift_[count] = affine.channel_affine.shift[offsets[0]];
        if (affine.has_rows()) {
          rstd[count] = affine.row_statistics.rstd[offsets[1]];
          mean_[count] = affine.row_statistics.mean[offsets[1]];
        }
        ++count;
      });
      num_scales = count;
    } else {
      gather(scale_, affine.channel_affine.scale, strided, 0, first, elements);
      gather(shift_, affine.channel_affine.shift, strided, 0, first, elements);
      if (affine.has_rows()) {
        gather(rstd, affine.row_statistics.rstd, strided, 1, first, elements);
        gather(mean_, affine.row_statistics.mean, strided, 1, first, elements);
      }
      spans[count++] = {0, elements, mean, scale_, shift_};
    }
    if (!affine.has_rows()) return;
    for (int i = 0; i < num_scales; ++i) scale_[i] *= rstd[i];
  }

 private:
  C mean_[kBlock], scale_[kBlock], shift_[kBlock];
};

// Recomputes a block of a norm's output z from its input x. z may overwrite x. For halves, `values`
// receives z in float, not yet rounded. For other formats `values` is z itself.
template <class Instructions, class T>
HOST_DEVICE void normalize(T* z, result_t<T>* values, const BlockInput<T>& x,
                           const NormAffine<opmath_t<T>>& affine, int64_t first, int count) {
  using C = opmath_t<T>;
  const BlockAffine<C> block(affine, first, count);
  for (int r = 0; r < block.count; ++r) {
    const auto [begin, length, mean, scale, shift] = block.spans[r];
    if (block.is_uniform) {
      const ScaleAndShift<C> scale_shift{*scale, *shift};
      const C center = mean ? *mean : C(0);
#pragma GCC ivdep
      for (int64_t i = begin; i < begin + length; ++i)
        values[i] = to_result<T>(apply_affine<T>(x[i].value - center, scale_shift));
    } else if (mean) {
#pragma GCC ivdep
      for (int64_t i = begin; i < begin + length; ++i) {
        const ScaleAndShift<C> scale_shift{scale[i - begin], shift[i - begin]};
        values[i] = to_result<T>(apply_affine<T>(x[i].value - mean[i - begin], scale_shift));
      }
    } else {
#pragma GCC ivdep
      for (int64_t i = begin; i < begin + length; ++i) {
        const ScaleAndShift<C> scale_shift{scale[i - begin], shift[i - begin]};
        values[i] = to_result<T>(apply_affine<T>(x[i].value, scale_shift));
      }
    }
  }
  if constexpr (kConvertsHalf<T>) Instructions::float_to_half(z, values, count);
}

}  // namespace inplace_ops
