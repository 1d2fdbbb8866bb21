// Tensors of LibTorch's stable ABI: their strided layouts, allocation, and packed bits.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "batch_norm.h"
#include "bit_planes.h"
#include "errors.h"
#include "norm_affine.h"
#include "strided_layout.h"

namespace inplace_ops {

using torch::stable::Tensor;

// The order in which kernels iterate over a tensor's dimensions, and in which its packed bits are
// stored: a permutation as Tensor.dim_order() returns it, or none for the order of the dimensions.
// Any permutation is correct. One that makes the permuted tensor contiguous is fastest.
using DimOrder = std::optional<std::vector<int64_t>>;

// The dtype that results are cast to, if any.
using OptionalDtype = std::optional<torch::headeronly::ScalarType>;

inline int64_t dimension(const DimOrder& dim_order, int64_t i) {
  return dim_order ? (*dim_order)[i] : i;
}

template <size_t count>
StridedLayout strided_layout_of(const DimOrder& dim_order, const Tensor* const (&operands)[count]) {
  const Tensor& first = *operands[0];
  StridedLayout strided(count);
  if (first.numel() == 0) {  // an empty tensor may have any number of dimensions
    strided.elements = 0;
    return strided;
  }
  for (int64_t i = 0; i < first.dim(); ++i) {
    const int64_t d = dimension(dim_order, i);
    int64_t strides[count];
    for (size_t k = 0; k < count; ++k) strides[k] = operands[k]->stride(d);
    strided.add_inner_dim(first.size(d), strides);
  }
  return strided;
}

// The channel affine (scale, shift) and the row statistics (rstd, mean), or nullptr. Both have
// shape (2, ...), where each other dimension is that of x or 1.
using AffineTensors = std::array<const Tensor*, 2>;

template <class C>
NormAffine<C> affine_of(const char* op, const AffineTensors& tensors, const Tensor& x,
                        const DimOrder& dim_order) {
  constexpr auto dtype =
      sizeof(C) == 8 ? torch::headeronly::ScalarType::Double : torch::headeronly::ScalarType::Float;
  for (const Tensor* tensor : tensors) {
    if (!tensor) continue;
    bool fits = tensor->dim() == x.dim() + 1 && tensor->size(0) == 2;
    for (int64_t d = 0; fits && d < x.dim(); ++d)
      fits = tensor->size(d + 1) == 1 || tensor->size(d + 1) == x.size(d);
    check(fits && tensor->scalar_type() == dtype && tensor->device() == x.device(), op,
          "_: channel_affine and row_statistics must have shape (2, ...), where each "
          "other size is that of x or 1, dtype float64 if x is float64 and float32 "
          "otherwise, and the device of x");
  }
  StridedLayout strided(2);
  for (int64_t i = 0; i < x.dim(); ++i) {
    const int64_t d = dimension(dim_order, i);
    int64_t strides[2] = {};
    for (int k = 0; k < 2; ++k)
      if (tensors[k] && tensors[k]->size(d + 1) > 1) strides[k] = tensors[k]->stride(d + 1);
    strided.add_inner_dim(x.size(d), strides);
  }
  check(strided.dims <= kMaxAffineDims, op,
        "_: channel_affine and row_statistics that vary in more than ", kMaxAffineDims,
        " dimensions are not supported");
  NormAffine<C> affine{};
  affine.strided.dims = strided.dims;
  affine.strided.operands = 2;
  affine.strided.elements = strided.elements;
  for (int d = 0; d < strided.dims; ++d) affine.strided.sizes[d] = strided.sizes[d];
  for (int k = 0; k < 2; ++k) {
    for (int d = 0; d < strided.dims; ++d) affine.strided.strides[k][d] = strided.strides[k][d];
    if (!tensors[k]) continue;
    const C* first = static_cast<const C*>(tensors[k]->const_data_ptr());
    const C* second = first + tensors[k]->stride(0);
    if (k == 0)
      affine.channel_affine = {first, second};
    else
      affine.row_statistics = {first, second};
  }
  return affine;
}

inline Tensor empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides,
                            int32_t dtype, const Tensor& like) {
  int32_t device_type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle;
  const auto error = aoti_torch_empty_strided(dims, sizes, strides, dtype, device_type,
                                              like.get_device_index(), &handle);
  // The stable ABI loses the type of an error. Training loops recognize it by these words.
  check(error == AOTI_TORCH_SUCCESS,
        device_type == aoti_torch_device_type_cuda() ? "CUDA out of memory" : "out of memory",
        ": inplace_ops could not allocate a result for a tensor of ", like.numel(), " elements");
  return Tensor(handle);
}

// Returns an uninitialized tensor of the shape, device and, unless given, dtype of `like`. Permuted
// by `dim_order`, it is contiguous.
inline Tensor empty_in_order(const Tensor& like, const DimOrder& dim_order,
                             std::optional<int32_t> dtype = std::nullopt) {
  const int64_t dims = like.dim();
  int64_t sizes[kMaxDims], strides[kMaxDims];
  check(dims <= kMaxDims, "inplace_ops: tensors of more than ", kMaxDims,
        " dimensions are not supported");
  int64_t stride = 1;
  for (int64_t i = dims - 1; i >= 0; --i) {
    const int64_t d = dimension(dim_order, i);
    sizes[d] = like.size(d);
    strides[d] = stride;
    stride *= std::max<int64_t>(like.size(d), 1);
  }
  int32_t like_dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &like_dtype));
  return empty_strided(dims, sizes, strides, dtype.value_or(like_dtype), like);
}

// Returns an uninitialized contiguous tensor with the dtype and device of `like`.
template <class... Size>
Tensor empty_contiguous(const Tensor& like, Size... size) {
  constexpr int64_t dims = sizeof...(Size);
  const int64_t sizes[] = {size...};
  int64_t strides[dims];
  for (int64_t d = dims, stride = 1; d-- > 0; stride *= sizes[d]) strides[d] = stride;
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  return empty_strided(dims, sizes, strides, dtype, like);
}

// Returns the memory of a tensor with channels in dimension 1, whose dimensions have the given
// order in memory; nullopt if a block of it is not dense, or its blocks do not follow each other
// evenly.
inline std::optional<ChannelLayout> channel_layout_of(const Tensor& tensor,
                                                      const DimOrder& dim_order) {
  ChannelLayout layout{1, tensor.size(1), 1, 0};
  int64_t block = 1, i = tensor.dim() - 1;
  for (bool is_inner = true; is_inner; --i) {
    const int64_t d = dimension(dim_order, i);
    if (tensor.size(d) > 1 && tensor.stride(d) != block) return std::nullopt;
    block *= tensor.size(d);
    is_inner = d != 1;
    if (is_inner) layout.inner *= tensor.size(d);
  }
  layout.grad_stride = block;
  for (; i >= 0; --i) {
    const int64_t d = dimension(dim_order, i), size = tensor.size(d), stride = tensor.stride(d);
    if (size == 1) continue;
    if (layout.outer == 1)
      layout.grad_stride = stride;
    else if (stride != layout.outer * layout.grad_stride)
      return std::nullopt;
    layout.outer *= size;
  }
  return layout;
}

// Returns an uninitialized tensor for `bits` packed bits per element of x.
inline Tensor empty_bits(const Tensor& x, int64_t bits) {
  const int64_t bytes = plane_bytes(x.numel());
  const int64_t sizes[] = {bits, bytes}, strides[] = {std::max<int64_t>(bytes, 1), 1};
  return empty_strided(2, sizes, strides, aoti_torch_dtype_uint8(), x);
}

template <bool is_written>
auto packed_bits_of(const Tensor& packed) {
  const int64_t stride = packed.size(1);
  const int planes = int(packed.size(0));
  if constexpr (is_written) {
    return PackedBits<uint8_t>{static_cast<uint8_t*>(packed.mutable_data_ptr()), stride, planes};
  } else {
    return PackedBits<const uint8_t>{static_cast<const uint8_t*>(packed.const_data_ptr()), stride,
                                     planes};
  }
}

}  // namespace inplace_ops
