// Where the scales and shifts of dense tensors' elements are, for accesses of several elements.
//
// Most tensors lie in one of three ways. The host tells which, once per launch:
//
//   kPlanes        Channels are planes, as in NCHW, and planes are whole accesses: an access has
//                  one channel.
//   kSplitPlanes   Planes end inside accesses, as those of 7 * 7 elements do: an access has up to
//                  two channels.
//   kChannelsLast  Channels are innermost, as in channels_last, and all of them are whole accesses:
//                  an access has neighbouring channels. So are a layer norm's columns, whose rows
//                  have statistics as well.
//
// An element's number divided by the size of a plane or a row then tells its channel and its row.
// Where `is_strided`, StridedLayout tells them, by several divisions: for affine that lie in any
// other way (channels innermost that differ between samples), and for 2^31 elements and more.
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
  IntDivider inner;     // by the elements of a plane, or by the channels of a row
  IntDivider channels;  // by the planes of a sample, or by all planes if samples differ

  // Of the access that begins at an element; channels and rows by where their affine are.

  HOST_DEVICE uint32_t channel(uint32_t element) const { return channels.mod(inner.div(element)); }

  struct Split {
    uint32_t channel, next;
    uint32_t left;  // elements before those of the next channel
  };
  template <int count>
  HOST_DEVICE Split split(uint32_t element, const AffineStridedLayout& strided) const {
    if (is_strided) {
      const uint32_t left = inner.divisor - element % inner.divisor;
      int64_t offsets[2];
      uint32_t first = 0;
      NO_UNROLL
      for (uint32_t i = 0; i < (left < count ? 2 : 1); ++i) {
        strided.get_offsets(element + i * left, offsets);
        if (i == 0) first = offsets[0];
      }
      return {first, uint32_t(offsets[0]), left};
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

// For accesses of `count` elements. None if their channels and rows are not as above, or those that
// are loaded together are not aligned.
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
    if (inner > 0) {  // or all is one plane
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
