// Finds the scale and shift of each element of a dense tensor, for accesses of several elements.
//
// Most tensors have one of three layouts. The host determines which, once per launch. A plane below
// has the elements of one channel in one sample, H x W in NCHW. It is not a bit plane.
//
//   kPlanes        Each channel is a plane, as in NCHW, and a plane is a whole number of accesses:
//                  an access has one channel.
//   kSplitPlanes   Planes end inside accesses, as planes of 7 * 7 elements do: an access has up to
//                  two channels.
//   kChannelsLast  Channels are innermost, as in channels_last, and a row of all channels is a
//                  whole number of accesses: an access has consecutive channels. A layer norm has
//                  this layout too: its channels are columns, and its rows also have statistics.
//
// The channel and the row of an element follow from its index divided by the size of a plane or a
// row. Where `is_strided`, StridedLayout computes them instead, by several divisions: for an affine
// with other strides (channels innermost that differ between samples), and for 2^31 elements and
// more.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "../norm_affine.h"
#include "../strided_layout.h"

namespace inplace_ops {

struct AffineLayout {
  enum Kind { kPlanes, kSplitPlanes, kChannelsLast };
  Kind kind;
  bool is_strided;
  IntDivider inner;     // divides by the elements of a plane, or by the channels of a row
  IntDivider channels;  // divides by the planes of a sample, or by all planes if samples differ

  // The functions below take the first element of an access. A channel or row that they return is
  // the offset at which NormAffine has its values.

  HOST_DEVICE uint32_t channel(uint32_t element) const { return channels.mod(inner.div(element)); }

  struct Split {
    uint32_t channel, next;
    uint32_t remaining;  // elements of `channel`, after which those of `next` begin
  };
  template <int count>
  HOST_DEVICE Split split(uint32_t element, const AffineStridedLayout& strided) const {
    if (is_strided) {
      const uint32_t remaining = inner.divisor - element % inner.divisor;
      int64_t offsets[2];
      uint32_t first = 0;
      NO_UNROLL
      for (uint32_t i = 0; i < (remaining < count ? 2 : 1); ++i) {
        strided.get_offsets(element + i * remaining, offsets);
        if (i == 0) first = offsets[0];
      }
      return {first, uint32_t(offsets[0]), remaining};
    }
    const uint32_t plane = inner.div(element), channel = channels.mod(plane);
    const uint32_t next = channel + 1 < channels.divisor ? channel + 1 : 0;
    return {channel, next, (plane + 1) * inner.divisor - element};
  }

  struct Column {
    uint32_t channel, row;
  };
  HOST_DEVICE Column column(uint32_t element, const AffineStridedLayout& strided) const {
    if (is_strided) {
      int64_t offsets[2];
      strided.get_offsets(element, offsets);
      return {uint32_t(offsets[0]), uint32_t(offsets[1])};
    }
    const uint32_t row = inner.div(element);
    return {element - row * inner.divisor, row};
  }
};

// Returns the layout for accesses of `count` elements, or nullopt if
//   - the channels and rows have none of the layouts above, or
//   - channels that one load reads are not aligned to `alignment` bytes.
template <int count, class C>
std::optional<AffineLayout> affine_layout(const NormAffine<C>& affine, uintptr_t alignment) {
  const AffineStridedLayout& strided = affine.strided;
  const auto& [channel_strides, row_strides] = strided.strides;
  const int inner = strided.dims - 1;
  if (inner < 0 || strided.sizes[inner] < count || row_strides[inner] != 0) return std::nullopt;
  int64_t last_channel = 0, last_row = 0;
  for (int d = 0; d <= inner; ++d) {
    last_channel += (strided.sizes[d] - 1) * channel_strides[d];
    last_row += (strided.sizes[d] - 1) * row_strides[d];
  }
  if (std::max({strided.elements, last_channel, last_row}) > UINT32_MAX) return std::nullopt;

  const int64_t size = strided.sizes[inner];
  AffineLayout layout{};
  layout.inner = IntDivider(size);
  layout.is_strided = strided.elements > INT32_MAX;
  if (channel_strides[inner] == 0) {
    if (affine.has_rows()) return std::nullopt;
    if (inner > 0) {  // otherwise the tensor is one plane
      layout.channels = IntDivider(strided.sizes[inner - 1]);
      layout.is_strided |= channel_strides[inner - 1] != 1;
      layout.is_strided |= inner > 2 || (inner == 2 && channel_strides[0] != 0);
    }
    const bool is_split = layout.is_strided || (inner > 0 && size % count != 0);
    layout.kind = is_split ? AffineLayout::kSplitPlanes : AffineLayout::kPlanes;
  } else {
    uintptr_t addresses = reinterpret_cast<uintptr_t>(affine.channel_affine.scale) |
                          reinterpret_cast<uintptr_t>(affine.channel_affine.shift);
    for (int d = 0; d < inner; ++d) addresses |= channel_strides[d] * sizeof(C);
    if (channel_strides[inner] != 1 || size % count != 0 || addresses % alignment != 0)
      return std::nullopt;
    if (inner > 0) {
      layout.is_strided |= inner > 1 || channel_strides[0] != 0;
      layout.is_strided |= affine.has_rows() && row_strides[0] != 1;
    }
    layout.kind = AffineLayout::kChannelsLast;
  }
  return layout;
}

}  // namespace inplace_ops
