// Strided layouts: sizes, strides and offsets for iterating over up to four tensors of the same
// shape together.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace inplace_ops {

constexpr int kMaxDims = 64;     // a tensor with elements has fewer dimensions larger than one
constexpr int kMaxOperands = 4;  // the output and three inputs

// A shape, outermost dimension first, and each operand's strides in elements. Neighboring
// dimensions are coalesced where the strides of every operand allow it: tensors that share a dense
// memory layout have one dimension of stride 1.
template <int max_operands, int max_dims>
struct StridedLayoutOf {
  int dims = 0;
  int operands = 0;
  int64_t elements = 1;
  int64_t sizes[max_dims];
  int64_t strides[max_operands][max_dims];

  StridedLayoutOf() = default;
  explicit StridedLayoutOf(int operand_count) : operands(operand_count) {}

  // Adds a dimension inside the existing ones.
  void add_inner_dim(int64_t size, const int64_t* stride) {
    elements *= size;
    if (size == 1) return;
    bool merges = dims > 0;
    for (int k = 0; merges && k < operands; ++k) merges = strides[k][dims - 1] == size * stride[k];
    if (!merges) sizes[dims++] = 1;
    sizes[dims - 1] *= size;
    for (int k = 0; k < operands; ++k) strides[k][dims - 1] = stride[k];
  }

  bool is_dense() const {
    if (dims > 1) return false;
    for (int k = 0; k < operands; ++k)
      if (!is_dense(k)) return false;
    return true;
  }

  // Whether an operand's elements are neighbors in memory, in iteration order.
  bool is_dense(int operand) const {
    int64_t stride = 1;
    for (int d = dims - 1; d >= 0; --d) {
      if (strides[operand][d] != stride) return false;
      stride *= sizes[d];
    }
    return true;
  }

  // Computes the offset in each operand of an element, which is given by its index in iteration
  // order. With a 64-bit Index a GPU divides in 32 bits where both numbers fit, but it has to test
  // that first.
  template <class Index, int count>
  HOST_DEVICE void get_offsets(Index element, int64_t (&offsets)[count]) const {
    for (int k = 0; k < count; ++k) offsets[k] = 0;
    NO_UNROLL
    for (int d = dims - 1; d >= 0; --d) {
      const Index outer = d > 0 ? element / Index(sizes[d]) : 0;
      const int64_t index = element - outer * Index(sizes[d]);
      for (int k = 0; k < count; ++k) offsets[k] += index * strides[k][d];
      element = outer;
    }
  }
};

using StridedLayout = StridedLayoutOf<kMaxOperands, kMaxDims>;

// Divides n < 2^31 by a number from 2 to 2^31 with a multiplication and a shift. A GPU's division
// takes some twenty instructions. With divisor <= 2^s the multiplier is 2^(31 + s) / divisor,
// rounded up by less than 1. This adds less than 2^31 / 2^(31 + s) <= 1 / divisor to the quotient,
// too little to reach the next integer.
struct IntDivider {
  uint32_t divisor = 0, multiplier = 0, shift = 0;

  IntDivider() = default;
  explicit IntDivider(int64_t divisor) : divisor(uint32_t(divisor)) {
    while ((divisor - 1) >> (shift + 1) != 0) ++shift;
    multiplier = uint32_t(((uint64_t(1) << (32 + shift)) + divisor - 1) / divisor);
  }

  HOST_DEVICE uint32_t div(uint32_t n) const {
    return uint32_t(uint64_t(n) * multiplier >> 32) >> shift;
  }

  HOST_DEVICE uint32_t mod(uint32_t n) const { return n - div(n) * divisor; }
};

}  // namespace inplace_ops
