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
#include <optional>
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

// An uninitialized tensor like `like`, contiguous once its dimensions are permuted by `order`.
inline Tensor empty_in_order(const Tensor& like, const Order& order) {
  const int64_t dims = like.dim();
  std::vector<int64_t> strides(dims);
  int64_t stride = 1;
  for (int64_t i = dims - 1; i >= 0; --i) {
    const int64_t d = order.empty() ? i : order[i];
    strides[d] = stride;
    stride *= std::max<int64_t>(like.size(d), 1);
  }
  int32_t dtype, device_type;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, like.sizes().data(), strides.data(),
                                                         dtype, device_type,
                                                         like.get_device_index(), &handle));
  return Tensor(handle);
}

inline PackedBits<uint8_t> written_bits(const Tensor& bits) {
  return {static_cast<uint8_t*>(bits.mutable_data_ptr()), bits.size(1), int(bits.size(0))};
}

inline PackedBits<const uint8_t> read_bits(const Tensor& bits) {
  return {static_cast<const uint8_t*>(bits.const_data_ptr()), bits.size(1), int(bits.size(0))};
}

template <class Device, template <class> class Activation, class... Arguments>
void forward(Tensor x, std::optional<Tensor> bits, Order order, Arguments... arguments) {
  using Properties = Activation<float>;
  check_writable(Properties::kName, x);
  check_order(Properties::kName, order, x.dim());
  if (bits) {
    check_bits<Properties>(*bits, x);
    check_apart(Properties::kName, *bits, x);
  }
  const Geometry geometry = walk(order, {&x, &x});

  const auto run = [&](auto kernel, auto packed) {
    using Kernel = decltype(kernel);
    using T = typename Kernel::Scalar;
    if (geometry.elements == 0) return;
    T* values = static_cast<T*>(x.mutable_data_ptr());
    Device::run(kernel, geometry, Operands<Kernel>{values, {values}, packed}, x.get_device_index());
  };
  if (bits) {
    dispatch<false>(x.scalar_type(), Properties::kName, [&](auto zero) {
      using T = decltype(zero);
      const Activation<T> activation{arguments...};
      run(ForwardKeeping<Activation<T>, T>{activation}, written_bits(*bits));
    });
  } else {
    dispatch<Properties::kTakesIntegers>(x.scalar_type(), Properties::kName, [&](auto zero) {
      using T = decltype(zero);
      const Activation<T> activation{arguments...};
      run(Forward<Activation<T>, T>{activation}, PackedBits<const uint8_t>{});
    });
  }
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
  m.impl("relu_", TORCH_BOX((&forward<Device, ReLU>)));
  m.impl("relu_backward_mask", TORCH_BOX((&backward_from_bits<Device, ReLU>)));
  m.impl("relu_backward_output", TORCH_BOX((&backward_from_output<Device, ReLU>)));

  m.impl("leaky_relu_", TORCH_BOX((&forward<Device, LeakyReLU, double>)));
  m.impl("leaky_relu_backward_mask", TORCH_BOX((&backward_from_bits<Device, LeakyReLU, double>)));
  m.impl("leaky_relu_backward_output",
         TORCH_BOX((&backward_from_output<Device, LeakyReLU, double>)));

  m.impl("silu_", TORCH_BOX((&forward<Device, SiLU>)));
  m.impl("silu_backward_output", TORCH_BOX((&backward_from_both<Device, SiLU>)));
  m.impl("silu_double_backward", TORCH_BOX((&double_backward<Device, SiLU>)));
  m.impl("silu_derivative_", TORCH_BOX((&forward<Device, SiLUDerivative>)));
  m.impl("silu_backward_derivative", TORCH_BOX((&backward_from_bits<Device, SiLUDerivative>)));
}

}  // namespace inplace_ops
