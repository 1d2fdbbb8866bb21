// The affine of a norm: its output z as a function of its input x, from which kernels recompute z:
//
//   z = (x - mean) * rstd * scale + shift
//
// Batch, group and instance norms have a scale and a shift per channel, which may differ between
// samples. Mean and rstd are folded into them (Statistics), so that in the formula mean is 0 and
// rstd is 1. A layer norm has a mean and an rstd per row, and its weight and bias are scale and
// shift. It subtracts the mean first, as PyTorch's kernel does: a row whose elements are all equal
// gives exactly the bias, and ReLU decides as in PyTorch.
#pragma once

#include <cmath>
#include <cstdint>

#include "strided_layout.h"

namespace inplace_ops {

constexpr int kMaxAffineDims = 4;  // after coalescing; norms have at most three
using AffineStridedLayout = StridedLayoutOf<2, kMaxAffineDims>;

template <class C>
struct ScaleAndShift {
  C scale, shift;
};

template <class C>
struct RowStatistics {
  C rstd, mean;
};

// Computes the scale and shift of each channel from a norm's statistics and parameters, each of
// which may be null. Each rstd and mean is for `channels_per_group` neighboring channels. Channels
// are counted through all samples, and the weights and biases repeat for each sample.
template <class C>
struct Statistics {
  const C *rstd, *mean, *weight, *bias;
  int64_t channels_per_group, num_weights, num_biases;

  HOST_DEVICE ScaleAndShift<C> affine(int64_t channel) const {
    const int64_t group = channel / channels_per_group;
    const C factor = weight ? weight[channel % num_weights] : C(1);
    const C scale = rstd ? rstd[group] * factor : factor;
    const C added = bias ? bias[channel % num_biases] : C(0);
    // Rounded once, as in PyTorch's kernels. In a channel whose elements are all equal and whose
    // bias is nearly 0, this rounding decides what ReLU returns.
    return {scale, mean ? std::fma(-mean[group], scale, added) : added};
  }
};

template <class C>
struct NormAffine {
  ScaleAndShift<const C*> channel_affine;
  RowStatistics<const C*> row_statistics;  // null if there are none
  AffineStridedLayout strided;  // of channels and of rows, iterated over as the tensors are

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
