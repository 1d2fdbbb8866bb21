// Backward of an activation of a batch norm's output, in one op: two passes over memory.
//
// A batch norm in training returns z = (x - mean) * rstd * weight + bias, with mean and rstd of the
// batch in each channel. PyTorch runs two operations backward: the activation's, which writes the
// gradient of z, and the batch norm's, which reads it twice. With g the gradient of z, n the number
// of elements of a channel, and sums over these elements (Ioffe and Szegedy 2015, section 3):
//
//   grad_bias   = sum(g)
//   grad_weight = rstd * sum(g * (x - mean))
//   grad_x      = weight * rstd * (g - grad_bias / n - (x - mean) * rstd * grad_weight / n)
//
// The first pass sums, the second computes grad_x. Sums are partial, one for each piece of a
// channel, and are then added in a fixed order. So results are the same in every run.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace inplace_ops {

// The memory of a tensor with channels: `outer` blocks of `channels` planes of `inner` elements. In
// NCHW a block is a sample. In channels_last it is a pixel, and a plane is one element.
struct ChannelLayout {
  int64_t outer, channels, inner;
  // The elements from one block of the gradient to the next: more than a block's own if the
  // gradient is a slice of a larger tensor's channels. All other tensors are dense.
  int64_t grad_stride;

  HOST_DEVICE int64_t elements_of_channel() const { return outer * inner; }
};

// The sums of a channel, or of a piece of it: of g, and of g * (x - mean).
template <class C>
struct ChannelSums {
  C gradient, product;
};

// What the second pass reads of a channel: grad_x = scale * (g + (x - mean) * slope + offset).
template <class C>
struct Correction {
  C slope, offset;

  HOST_DEVICE C gradient(C g, C centered, C scale) const {
    return scale * (g + (centered * slope + offset));
  }
};

// The statistics that a batch norm has saved, and the results for each channel.
template <class C>
struct BatchNormBackward {
  ChannelLayout layout;
  const C *mean, *rstd;
  C *slope, *offset;
  C *grad_weight, *grad_bias;
  // Partial sums: (pieces, channels) of g, and then of g * (x - mean).
  C* partial_sums;
  int64_t pieces;

  HOST_DEVICE C* sums_of_gradient(int64_t piece) const {
    return partial_sums + piece * layout.channels;
  }
  HOST_DEVICE C* sums_of_product(int64_t piece) const { return sums_of_gradient(pieces + piece); }

  HOST_DEVICE void finish_channel(int64_t channel, ChannelSums<C> sums) const {
    const C elements = C(layout.elements_of_channel());
    const C weight_gradient = rstd[channel] * sums.product;
    grad_weight[channel] = weight_gradient;
    grad_bias[channel] = sums.gradient;
    slope[channel] = -rstd[channel] * weight_gradient / elements;
    offset[channel] = -sums.gradient / elements;
  }
};

}  // namespace inplace_ops
