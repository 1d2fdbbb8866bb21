// Checks of the arguments. All of them run before the first element is written.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "tensors.h"

namespace inplace_ops {

// Searches for two elements of a tensor that share an address: for a nonzero d with |d_i| < size_i
// and sum d_i stride_i = 0. It goes from the largest stride to the smallest, and skips sums that
// the smaller strides cannot cancel. A layout that takes more than a million steps counts as free
// of overlap.
class OverlapSearch {
 public:
  explicit OverlapSearch(const Tensor& tensor) {
    for (int64_t d = 0; d < tensor.dim(); ++d)
      if (tensor.size(d) > 1) dims_.push_back({tensor.stride(d), tensor.size(d) - 1});
    std::sort(dims_.rbegin(), dims_.rend());
    reach_.resize(dims_.size() + 1);
    for (size_t i = dims_.size(); i-- > 0;)
      reach_[i] = reach_[i + 1] + dims_[i].stride * dims_[i].largest;
  }

  bool found() { return search(0, 0, false); }

 private:
  struct Dim {
    int64_t stride, largest;  // the largest difference of two indices
    bool operator<(const Dim& other) const { return stride < other.stride; }
  };

  bool search(size_t i, int64_t sum, bool is_nonzero) {
    if (--steps_left_ < 0) return false;
    if (i == dims_.size()) return is_nonzero && sum == 0;
    const auto [stride, largest] = dims_[i];
    if (stride == 0) return true;
    // |sum + d stride| must not exceed what the remaining dimensions reach. By symmetry the first
    // nonzero difference can be positive.
    const int64_t low = std::max(is_nonzero ? -largest : 0, ceil_div(-reach_[i + 1] - sum, stride));
    const int64_t high = std::min(largest, floor_div(reach_[i + 1] - sum, stride));
    for (int64_t d = low; d <= high && steps_left_ > 0; ++d)
      if (search(i + 1, sum + d * stride, is_nonzero || d != 0)) return true;
    return false;
  }

  static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }
  static int64_t ceil_div(int64_t a, int64_t b) { return -floor_div(-a, b); }

  std::vector<Dim> dims_;
  std::vector<int64_t> reach_;  // largest sum of the dimensions from i on
  int64_t steps_left_ = 1'000'000;
};

inline void check_writable(const char* op, const Tensor& x) {
  if (x.numel() < 2 || x.is_contiguous()) return;
  STD_TORCH_CHECK(!OverlapSearch(x).found(), op,
                  "_: unsupported operation: more than one element of the written-to tensor refers "
                  "to a single memory location. Please clone() the tensor before performing the "
                  "operation.");
}

inline void check_same(const char* op, const Tensor& tensor, const Tensor& other) {
  const auto sizes = tensor.sizes(), expected = other.sizes();
  STD_TORCH_CHECK(tensor.scalar_type() == other.scalar_type() &&
                      tensor.device() == other.device() && sizes.size() == expected.size() &&
                      std::equal(sizes.begin(), sizes.end(), expected.begin()),
                  op, "_: the tensors must have the same shape, dtype and device");
}

inline void check_cast(const char* op, const Tensor& x, torch::headeronly::ScalarType dtype) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float &&
                      (dtype == ScalarType::Half || dtype == ScalarType::BFloat16),
                  op, "_: dtype must be the dtype of x, or float16 or bfloat16 if x is float32");
}

inline void check_order(const char* op, const DimOrder& dim_order, int64_t dims) {
  if (!dim_order) return;
  std::vector<int64_t> sorted(*dim_order), expected(dims);
  std::sort(sorted.begin(), sorted.end());
  std::iota(expected.begin(), expected.end(), 0);
  STD_TORCH_CHECK(sorted == expected, op, "_: dim_order must be a permutation of the ", dims,
                  " dimensions, or None");
}

inline void check_count(const char* op, int64_t bits, bool is_accepted) {
  STD_TORCH_CHECK(is_accepted, op, "_: cannot save ", bits, " bits per element");
}

inline void check_packed(const char* op, const Tensor& packed, const Tensor& x) {
  STD_TORCH_CHECK(packed.scalar_type() == torch::headeronly::ScalarType::Byte, op,
                  "_: packed bits must be uint8");
  STD_TORCH_CHECK(packed.device() == x.device(), op,
                  "_: packed bits must be on the device of the tensor");
  STD_TORCH_CHECK(packed.dim() == 2 && packed.size(1) == plane_bytes(x.numel()), op,
                  "_: packed bits must have shape (bits, ceil(elements / 8)) = (bits, ",
                  plane_bytes(x.numel()), ")");
  STD_TORCH_CHECK(packed.is_contiguous(), op, "_: packed bits must be contiguous");
}

}  // namespace inplace_ops
