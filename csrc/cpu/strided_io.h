// Copies elements of a strided tensor to and from a contiguous buffer.
//
// A loop vectorizes only over neighboring elements, so functors run over buffers. To find the
// offset of each element by itself would take a division for each dimension. Instead,
// for_each_span() divides once, for the first element, and then steps through the dimensions like
// an odometer: along the innermost dimension offsets are a stride apart.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../strided_layout.h"

namespace inplace_ops {

// Splits the elements first to first + count - 1 into spans along the innermost dimension. Calls
// visit(position, length, offsets) for each span: its position relative to `first`, and the offsets
// of its first element in each operand.
template <int max_operands, int max_dims, class Visit>
HOST_DEVICE void for_each_span(const StridedLayoutOf<max_operands, max_dims>& strided,
                               int64_t first, int64_t count, const Visit& visit) {
  const int inner = strided.dims - 1;
  const auto& sizes = strided.sizes;
  const auto& strides = strided.strides;
  int64_t offsets[max_operands] = {};
  if (inner < 0) return visit(int64_t(0), count, offsets);
  int64_t index[max_dims], remaining = first;
  for (int d = inner; d >= 0; --d) {
    index[d] = d > 0 ? remaining % sizes[d] : remaining;
    remaining /= sizes[d];
    for (int k = 0; k < strided.operands; ++k) offsets[k] += index[d] * strides[k][d];
  }
  for (int64_t position = 0; position < count;) {
    const int64_t length = std::min(count - position, sizes[inner] - index[inner]);
    visit(position, length, offsets);
    position += length;
    index[inner] += length;
    for (int k = 0; k < strided.operands; ++k) offsets[k] += length * strides[k][inner];
    for (int d = inner; d > 0 && index[d] == sizes[d]; --d) {
      index[d] = 0;
      ++index[d - 1];
      for (int k = 0; k < strided.operands; ++k)
        offsets[k] += strides[k][d - 1] - sizes[d] * strides[k][d];
    }
  }
}

template <int max_operands, int max_dims>
int64_t innermost_stride(const StridedLayoutOf<max_operands, max_dims>& strided, int operand) {
  return strided.dims > 0 ? strided.strides[operand][strided.dims - 1] : 1;
}

template <class T, int max_operands, int max_dims>
NO_INLINE void gather(T* buffer, const T* data,
                      const StridedLayoutOf<max_operands, max_dims>& strided, int operand,
                      int64_t first, int64_t count) {
  const int64_t stride = innermost_stride(strided, operand);
  for_each_span(strided, first, count, [&](int64_t position, int64_t length, auto& offsets) {
    const T* const from = data + offsets[operand];
    T* const to = buffer + position;
    if (stride == 1) {
      std::copy(from, from + length, to);
    } else {
      for (int64_t i = 0; i < length; ++i) to[i] = from[i * stride];
    }
  });
}

template <class T>
NO_INLINE void scatter(T* data, const T* buffer, const StridedLayout& strided, int64_t first,
                       int64_t count) {
  const int64_t stride = innermost_stride(strided, 0);
  for_each_span(strided, first, count, [&](int64_t position, int64_t length, auto& offsets) {
    const T* const from = buffer + position;
    T* const to = data + offsets[0];
    if (stride == 1) {
      std::copy(from, from + length, to);
    } else {
      for (int64_t i = 0; i < length; ++i) to[i * stride] = from[i];
    }
  });
}

}  // namespace inplace_ops
