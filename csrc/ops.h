// The ops, once for every device: check, walk, dispatch, run. A Device has run(kernel, ...).
//
// All take `order`, the permutation of the dimensions in which the elements are walked and the
// packed bits lie (empty: as they are). Any order is right; the one that makes the permuted tensor
// contiguous is fast.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <array>
#include <tuple>
#include <vector>

#include "activations.h"
#include "checks.h"
#include "dispatch.h"
#include "functors.h"
#include "geometry.h"

namespace inplace_ops {

using Order = std::vector<int64_t>;

inline Geometry walk(const Order& order, const std::vector<const Tensor*>& operands) {
  const Tensor& first = *operands[0];
  Geometry geometry(int(operands.size()));
  if (first.numel() == 0) {  // it may have any number of dimensions
    geometry.elements = 0;
    return geometry;
  }
  for (int64_t i = 0; i < first.dim(); ++i) {
    const int64_t d = order.empty() ? i : order[i];
    int64_t strides[kMaxOperands] = {};
    int k = 0;
    for (const Tensor* tensor : operands) strides[k++] = tensor->stride(d);
    geometry.push_inner(first.size(d), strides);
  }
  return geometry;
}

inline Tensor empty_strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                            int32_t dtype, const Tensor& like) {
  int32_t device_type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle;
  const auto error = aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(),
                                              dtype, device_type, like.get_device_index(), &handle);
  // The stable ABI does not tell the kind of an error: training loops look for these words.
  STD_TORCH_CHECK(
      error == AOTI_TORCH_SUCCESS,
      device_type == aoti_torch_device_type_cuda() ? "CUDA out of memory" : "out of memory",
      ": inplace_ops could not allocate a tensor like one of ", like.numel(), " elements");
  return Tensor(handle);
}

// An uninitialized tensor like `like`, contiguous once its dimensions are permuted by `order`.
inline Tensor empty_in_order(const Tensor& like, const Order& order) {
  const int64_t dims = like.dim();
  std::vector<int64_t> sizes(dims), strides(dims);
  int64_t stride = 1;
  for (int64_t i = dims - 1; i >= 0; --i) {
    const int64_t d = order.empty() ? i : order[i];
    sizes[d] = like.size(d);
    strides[d] = stride;
    stride *= std::max<int64_t>(like.size(d), 1);
  }
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  return empty_strided(sizes, strides, dtype, like);
}

// Room for packed bits of the elements of x.
inline Tensor empty_bits(const Tensor& x, int64_t bits) {
  const int64_t bytes = plane_bytes(x.numel());
  return empty_strided({bits, bytes}, {std::max<int64_t>(bytes, 1), 1}, aoti_torch_dtype_uint8(),
                       x);
}

inline PackedBits<uint8_t> written_bits(const Tensor& bits) {
  return {static_cast<uint8_t*>(bits.mutable_data_ptr()), bits.size(1), int(bits.size(0))};
}

inline PackedBits<const uint8_t> read_bits(const Tensor& bits) {
  return {static_cast<const uint8_t*>(bits.const_data_ptr()), bits.size(1), int(bits.size(0))};
}

// Writes the functor of x to out, which may be x, and the bits.
template <class Device, template <class> class Activation, template <class, class> class Functor,
          class... Arguments>
void activate(const Tensor& out, const Tensor& x, const Tensor* bits, const Order& order,
              Arguments... arguments) {
  using Properties = Activation<float>;
  check_writable(Properties::kName, x);  // compiled code copies out to x
  if (bits) {
    check_bits<Properties>(*bits, x);
    check_apart(Properties::kName, *bits, x);
  }
  const Geometry geometry = walk(order, {&out, &x});

  constexpr bool keeps = Functor<Properties, float>::kBits == Bits::kWritten;
  dispatch<Properties::kTakesIntegers && !keeps>(
      x.scalar_type(), Properties::kName, [&](auto zero) {
        using T = decltype(zero);
        using Kernel = Functor<Activation<T>, T>;
        if (geometry.elements == 0) return;
        Operands<Kernel> data{static_cast<T*>(out.mutable_data_ptr()),
                              {static_cast<const T*>(x.const_data_ptr())},
                              {}};
        if constexpr (keeps) data.bits = written_bits(*bits);
        Device::run(Kernel{Activation<T>{arguments...}}, geometry, data, x.get_device_index());
      });
}

template <class Device, template <class> class Activation, class... Arguments>
void in_place(Tensor x, Order order, Arguments... arguments) {
  check_order(Activation<float>::kName, order, x.dim());
  activate<Device, Activation, Forward>(x, x, nullptr, order, arguments...);
}

template <class Device, template <class> class Activation, class... Arguments>
void in_place_keeping(Tensor x, Tensor bits, Order order, Arguments... arguments) {
  check_order(Activation<float>::kName, order, x.dim());
  activate<Device, Activation, ForwardKeeping>(x, x, &bits, order, arguments...);
}

// The result, and as many packed bits an element as asked for.
template <class Device, template <class> class Activation, class... Arguments>
std::tuple<Tensor, Tensor> out_of_place(Tensor x, int64_t bits, Order order,
                                        Arguments... arguments) {
  check_order(Activation<float>::kName, order, x.dim());
  if (bits != 0) check_count<Activation<float>>(bits);
  const Tensor out = empty_in_order(x, order), packed = empty_bits(x, bits);
  if (bits == 0)
    activate<Device, Activation, Forward>(out, x, nullptr, order, arguments...);
  else
    activate<Device, Activation, ForwardKeeping>(out, x, &packed, order, arguments...);
  return {out, packed};
}

// A new tensor from the functor of the inputs, the first of which is a gradient, and of the bits.
template <class Device, template <class> class Activation, template <class, class> class Functor,
          size_t count, class... Arguments>
Tensor differentiate(const std::array<Tensor, count>& inputs, const Tensor* bits,
                     const Order& order, Arguments... arguments) {
  using Properties = Activation<float>;
  const Tensor& grad = inputs[0];
  check_order(Properties::kName, order, grad.dim());
  for (size_t k = 1; k < count; ++k) check_same(Properties::kName, inputs[k], grad);
  if (bits) check_bits<Properties>(*bits, grad);

  const Tensor result = empty_in_order(grad, order);
  std::vector<const Tensor*> operands{&result};
  for (const Tensor& input : inputs) operands.push_back(&input);
  const Geometry geometry = walk(order, operands);
  if (geometry.elements == 0) return result;
  dispatch<false>(grad.scalar_type(), Properties::kName, [&](auto zero) {
    using T = decltype(zero);
    using Kernel = Functor<Activation<T>, T>;
    Operands<Kernel> data{};
    data.out = static_cast<T*>(result.mutable_data_ptr());
    for (size_t k = 0; k < count; ++k)
      data.in[k] = static_cast<const T*>(inputs[k].const_data_ptr());
    if (bits) data.bits = read_bits(*bits);
    Device::run(Kernel{Activation<T>{arguments...}}, geometry, data, grad.get_device_index());
  });
  return result;
}

template <class Device, template <class> class Activation, class... Arguments>
Tensor backward_from_bits(Tensor grad, Tensor bits, Order order, Arguments... arguments) {
  return differentiate<Device, Activation, BackwardFromBits>(std::array{grad}, &bits, order,
                                                             arguments...);
}

template <class Device, template <class> class Activation, class... Arguments>
Tensor backward_from_output(Tensor grad, Tensor output, Order order, Arguments... arguments) {
  return differentiate<Device, Activation, BackwardFromOutput>(std::array{grad, output}, nullptr,
                                                               order, arguments...);
}

template <class Device, template <class> class Activation>
Tensor backward_from_both(Tensor grad, Tensor output, Tensor bits, Order order) {
  return differentiate<Device, Activation, BackwardFromBoth>(std::array{grad, output}, &bits,
                                                             order);
}

template <class Device, template <class> class Activation>
Tensor double_backward(Tensor grad_grad, Tensor grad, Tensor output, Tensor bits, Order order) {
  return differentiate<Device, Activation, DoubleBackward>(std::array{grad_grad, grad, output},
                                                           &bits, order);
}

// The list: every op of every activation. The schemas are in library.cpp.
template <class Device>
void register_ops(torch::stable::detail::StableLibrary& m) {
  m.impl("relu", TORCH_BOX((&out_of_place<Device, ReLU>)));
  m.impl("relu_", TORCH_BOX((&in_place<Device, ReLU>)));
  m.impl("relu_with_mask_", TORCH_BOX((&in_place_keeping<Device, ReLU>)));
  m.impl("relu_backward_mask", TORCH_BOX((&backward_from_bits<Device, ReLU>)));
  m.impl("relu_backward_output", TORCH_BOX((&backward_from_output<Device, ReLU>)));

  m.impl("leaky_relu", TORCH_BOX((&out_of_place<Device, LeakyReLU, double>)));
  m.impl("leaky_relu_", TORCH_BOX((&in_place<Device, LeakyReLU, double>)));
  m.impl("leaky_relu_with_mask_", TORCH_BOX((&in_place_keeping<Device, LeakyReLU, double>)));
  m.impl("leaky_relu_backward_mask", TORCH_BOX((&backward_from_bits<Device, LeakyReLU, double>)));
  m.impl("leaky_relu_backward_output",
         TORCH_BOX((&backward_from_output<Device, LeakyReLU, double>)));

  m.impl("silu", TORCH_BOX((&out_of_place<Device, SiLU>)));
  m.impl("silu_", TORCH_BOX((&in_place<Device, SiLU>)));
  m.impl("silu_with_bits_", TORCH_BOX((&in_place_keeping<Device, SiLU>)));
  m.impl("silu_backward_output", TORCH_BOX((&backward_from_both<Device, SiLU>)));
  m.impl("silu_double_backward", TORCH_BOX((&double_backward<Device, SiLU>)));
  m.impl("silu_derivative", TORCH_BOX((&out_of_place<Device, SiLUDerivative>)));
  m.impl("silu_with_derivative_", TORCH_BOX((&in_place_keeping<Device, SiLUDerivative>)));
  m.impl("silu_backward_derivative", TORCH_BOX((&backward_from_bits<Device, SiLUDerivative>)));
}

}  // namespace inplace_ops
