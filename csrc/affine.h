// The map of a norm, z = x * scale + shift, with a scale and a shift that many elements share: for
// an activation that is formed again from the norm's input.
//
// Batch, group and instance norms have one of each channel, the same for all samples or not. A
// layer norm has two maps, of its statistics, one of each row, and then of its weight and bias.
#pragma once

#include <cstdint>

#include "geometry.h"

namespace inplace_ops {

constexpr int kMaxAffineDims = 4;  // after merging; the norms have at most three

template <class C>
struct ScaleAndShift {
  C scale, shift;
};

// A row's map, and then a channel's.
template <class C>
HOST_DEVICE ScaleAndShift<C> composed(ScaleAndShift<C> row, ScaleAndShift<C> channel) {
  return {row.scale * channel.scale, row.shift * channel.scale + channel.shift};
}

// How the map of each channel follows from a norm's statistics and parameters, of which there may
// be none: the reciprocal deviation and the mean of `share` neighbouring channels, and weights and
// biases, which begin again after the last for the next sample.
template <class C>
struct Statistics {
  const C *deviation, *mean, *weight, *bias;
  int64_t share, weights, biases;

  HOST_DEVICE ScaleAndShift<C> map(int64_t channel) const {
    const int64_t group = channel / share;
    const C factor = weight ? weight[channel % weights] : C(1);
    const C scale = deviation ? deviation[group] * factor : factor;
    const C offset = mean ? mean[group] * scale : C(0);
    return {scale, (bias ? bias[channel % biases] : C(0)) - offset};
  }
};

template <class C>
struct Affine {
  using Map = ScaleAndShift<const C*>;
  Map channels, rows;                      // rows come first where there are any
  GeometryOf<2, kMaxAffineDims> geometry;  // of channels and of rows, walked as the tensors are

  HOST_DEVICE bool has_rows() const { return rows.scale != nullptr; }

  template <class Index>
  HOST_DEVICE ScaleAndShift<C> at(Index element) const {
    int64_t offsets[2];
    geometry.locate(element, offsets);
    return after_row(offsets[1], {channels.scale[offsets[0]], channels.shift[offsets[0]]});
  }

  // A channel's map after that of the row at an offset.
  HOST_DEVICE ScaleAndShift<C> after_row(int64_t row, ScaleAndShift<C> channel) const {
    return has_rows() ? composed({rows.scale[row], rows.shift[row]}, channel) : channel;
  }
};

}  // namespace inplace_ops
