// Checks of the arguments. All of them run before the first element is written.
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "errors.h"
#include "tensors.h"

namespace inplace_ops {

// Whether two elements of a tensor share an address. PyTorch's own check finds only strides of 0,
// as after expand(). It accepts other overlaps, which as_strided() and unfold() make, and then
// applies an in-place op to some elements more than once.
inline bool elements_overlap(const Tensor& x) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // strides and sizes, smallest stride first
  for (int64_t d = 0; d < x.dim(); ++d)
    if (x.size(d) > 1) dims.emplace_back(x.stride(d), x.size(d));
  std::sort(dims.begin(), dims.end());
  if (dims.front().first == 0) return true;
  // Elements cannot overlap if every stride exceeds the largest offset in the dimensions of smaller
  // strides. All slices and permutations of a contiguous tensor meet this.
  int64_t largest_offset = 0;
  bool may_overlap = false;
  for (const auto& [stride, size] : dims) {
    may_overlap |= stride <= largest_offset;
    largest_offset += stride * (size - 1);
  }
  if (!may_overlap) return false;
  if (x.numel() > largest_offset + 1) return true;  // more elements than addresses
  // Elsewhere, look for an offset that occurs twice.
  const StridedLayout strided = strided_layout_of(std::nullopt, {&x});
  std::vector<bool> is_taken(largest_offset + 1);
  for (int64_t i = 0; i < strided.elements; ++i) {
    int64_t offset[1];
    strided.get_offsets(i, offset);
    if (is_taken[offset[0]]) return true;
    is_taken[offset[0]] = true;
  }
  return false;
}

inline void check_writable(const char* op, const Tensor& x) {
  if (x.numel() < 2 || x.is_contiguous()) return;
  check(!elements_overlap(x), op,
        "_: unsupported operation: more than one element of the written-to tensor refers "
        "to a single memory location. Please clone() the tensor before performing the "
        "operation.");
}

inline void check_same(const char* op, const Tensor& tensor, const Tensor& other) {
  const auto sizes = tensor.sizes(), expected = other.sizes();
  check(tensor.scalar_type() == other.scalar_type() && tensor.device() == other.device() &&
            sizes.size() == expected.size() &&
            std::equal(sizes.begin(), sizes.end(), expected.begin()),
        op, "_: the tensors must have the same shape, dtype and device");
}

// Checks the channel affine, mean and rstd of a batch norm with input x.
inline void check_batch_norm(const char* op, const Tensor& x, const Tensor& channel_affine,
                             const Tensor& mean, const Tensor& rstd) {
  bool fits = x.dim() >= 2 && x.numel() > 0 && channel_affine.is_contiguous() &&
              channel_affine.dim() > 2 && channel_affine.size(2) == x.size(1) &&
              channel_affine.numel() == 2 * x.size(1);
  for (const Tensor* statistic : {&mean, &rstd})
    fits = fits && statistic->is_contiguous() && statistic->numel() == x.size(1) &&
           statistic->scalar_type() == channel_affine.scalar_type() &&
           statistic->device() == x.device();
  check(fits, op,
        "_: x must have elements, and channels in dimension 1; mean, rstd, scale and shift "
        "must be contiguous, with a number for each channel");
}

inline void check_result_dtype(const char* op, const Tensor& x, torch::headeronly::ScalarType dtype,
                               bool in_float32) {
  using torch::headeronly::ScalarType;
  const bool has_16_bits = dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
  const bool is_cast = x.scalar_type() == ScalarType::Float && has_16_bits;
  check(dtype == x.scalar_type() || (is_cast && !in_float32), op,
        "_: dtype must be the dtype of x, or float16 or bfloat16 if x is float32");
  check(has_16_bits || !in_float32, op, "_: in_float32 requires float16 or bfloat16");
}

inline void check_order(const char* op, const DimOrder& dim_order, int64_t dims) {
  if (!dim_order) return;
  std::vector<int64_t> sorted(*dim_order), expected(dims);
  std::sort(sorted.begin(), sorted.end());
  std::iota(expected.begin(), expected.end(), 0);
  check(sorted == expected, op, "_: dim_order must be a permutation of the ", dims,
        " dimensions, or None");
}

inline void check_count(const char* op, int64_t bits, bool is_accepted) {
  check(is_accepted, op, "_: cannot save ", bits, " bits per element");
}

inline void check_packed(const char* op, const Tensor& packed, const Tensor& x) {
  check(packed.scalar_type() == torch::headeronly::ScalarType::Byte, op,
        "_: packed bits must be uint8");
  check(packed.device() == x.device(), op, "_: packed bits must be on the device of the tensor");
  check(packed.dim() == 2 && packed.size(1) == plane_bytes(x.numel()), op,
        "_: packed bits must have shape (bits, ceil(elements / 8)) = (bits, ",
        plane_bytes(x.numel()), ")");
  check(packed.is_contiguous(), op, "_: packed bits must be contiguous");
}

}  // namespace inplace_ops
