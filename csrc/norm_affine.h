// A norm's output z as a function of its input x, for an activation that is recomputed from x:
//
//   z = (x - mean) * rstd * scale + shift
//
// Batch, group and instance norms have a scale and a shift of each channel, the same for all
// samples or not, which include their statistics: mean is 0, rstd is 1. A layer norm has a mean and
// an rstd of each row; its weight and bias are scale and shift. It subtracts the mean first, as
// PyTorch's does: a row that is one number gives exactly the bias, and ReLU decides alike.
#pragma once

#include <cmath>
#include <cstdint>

#include "strided_layout.h"

namespace inplace_ops {

constexpr int kMaxAffineDims = 4;  // after merging; the norms have at most three
using AffineStridedLayout = StridedLayoutOf<2, kMaxAffineDims>;

template <class C>
struct ScaleAndShift {
  C scale, shift;
};

template <class C>
struct RowStatistics {
  C rstd, mean;
};

// How the scale and shift of each channel follow from a norm's statistics and parameters, of which
// there may be none: rstd and the mean of `channels_per_group` neighbouring channels, and weights
// and biases, which begin again after the last for the next sample.
template <class C>
struct Statistics {
  const C *rstd, *mean, *weight, *bias;
  int64_t channels_per_group, num_weights, num_biases;

  HOST_DEVICE ScaleAndShift<C> affine(int64_t channel) const {
    const int64_t group = channel / channels_per_group;
    const C factor = weight ? weight[channel % num_weights] : C(1);
    const C scale = rstd ? rstd[group] * factor : factor;
    const C added = bias ? bias[channel % num_biases] : C(0);
    // Rounded once, as in PyTorch's kernels: where a channel is one number and its bias nearly 0,
    // ReLU decides by this rounding.
    return {scale, mean ? std::fma(-mean[group], scale, added) : added};
  }
};

template <class C>
struct NormAffine {
  ScaleAndShift<const C*> channel_affine;
  RowStatistics<const C*> row_statistics;  // or null
  AffineStridedLayout strided;             // of channels and of rows, walked as the tensors are

  HOST_DEVICE bool has_rows() const { return row_statistics.rstd != nullptr; }

  HOST_DEVICE ScaleAndShift<C> channel(int64_t offset) const {
    return {channel_affine.scale[offset], channel_affine.shift[offset]};
  }

  HOST_DEVICE RowStatistics<C> row(int64_t offset) const {
    if (!has_rows()) return {C(1), C(0)};
    return {row_statistics.rstd[offset], row_statistics.mean[offset]};
  }
};

}  // namespace inplace_ops
