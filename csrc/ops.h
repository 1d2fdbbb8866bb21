// The ops, once for every device: check, walk, dispatch, run. A Device has run(kernel, ...).
//
// All take `order`, the permutation of the dimensions in which the elements are walked and the
// packed bits lie (empty: as they are). Any order is right; the one that makes the permuted tensor
// contiguous is fast.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <initializer_list>
#include <optional>
#include <vector>

#include "activations.h"
#include "checks.h"
#include "dispatch.h"
#include "functors.h"
#include "geometry.h"

namespace inplace_ops {

using Order = std::vector<int64_t>;

inline Geometry walk(const Order& order, std::initializer_list<const Tensor*> operands) {
  const Tensor& first = **operands.begin();
  Geometry geometry(int(operands.size()));
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

template <class T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <class Device, template <class> class Activation, class... Arguments>
void forward(Tensor x, std::optional<Tensor> bits, Order order, Arguments... arguments) {
  using Properties = Activation<float>;
  check_writable(Properties::kName, x);
  check_order(Properties::kName, order, x.dim());
  if (bits) check_bits<Properties>(*bits, x);
  const Geometry geometry = walk(order, {&x, &x});
  const int device = x.get_device_index();

  const auto run = [&](auto kernel, auto packed) {
    using Kernel = decltype(kernel);
    using T = typename Kernel::Scalar;
    if (geometry.elements == 0) return;
    T* values = static_cast<T*>(x.mutable_data_ptr());
    Device::run(kernel, geometry, Operands<Kernel>{values, {values}, packed}, device);
  };
  if (bits) {
    dispatch<false>(x.scalar_type(), Properties::kName, [&](auto zero) {
      using T = decltype(zero);
      const Activation<T> activation(int(bits->size(0)), arguments...);
      run(ForwardKeeping<Activation<T>, T>{activation}, written_bits(*bits));
    });
  } else {
    dispatch<Properties::kTakesIntegers>(x.scalar_type(), Properties::kName, [&](auto zero) {
      using T = decltype(zero);
      const Activation<T> activation(1, arguments...);
      run(Forward<Activation<T>, T>{activation}, PackedBits<const uint8_t>{});
    });
  }
}

template <class Device, template <class> class Activation, class... Arguments>
Tensor backward_from_bits(Tensor grad, Tensor bits, Order order, Arguments... arguments) {
  using Properties = Activation<float>;
  check_order(Properties::kName, order, grad.dim());
  check_bits<Properties>(bits, grad);
  Tensor result = empty_in_order(grad, order);
  const Geometry geometry = walk(order, {&result, &grad});
  dispatch<false>(grad.scalar_type(), Properties::kName, [&](auto zero) {
    using T = decltype(zero);
    using Kernel = BackwardFromBits<Activation<T>, T>;
    if (geometry.elements == 0) return;
    Device::run(Kernel{Activation<T>(int(bits.size(0)), arguments...)}, geometry,
                Operands<Kernel>{
                    static_cast<T*>(result.mutable_data_ptr()), {data<T>(grad)}, read_bits(bits)},
                grad.get_device_index());
  });
  return result;
}

template <class Device, template <class> class Activation, class... Arguments>
Tensor backward_from_output(Tensor grad, Tensor output, Order order, Arguments... arguments) {
  using Properties = Activation<float>;
  check_order(Properties::kName, order, grad.dim());
  check_same(Properties::kName, "the output", output, grad);
  Tensor result = empty_in_order(grad, order);
  const Geometry geometry = walk(order, {&result, &grad, &output});
  dispatch<false>(grad.scalar_type(), Properties::kName, [&](auto zero) {
    using T = decltype(zero);
    using Kernel = BackwardFromOutput<Activation<T>, T>;
    if (geometry.elements == 0) return;
    Device::run(
        Kernel{Activation<T>(1, arguments...)}, geometry,
        Operands<Kernel>{
            static_cast<T*>(result.mutable_data_ptr()), {data<T>(grad), data<T>(output)}, {}},
        grad.get_device_index());
  });
  return result;
}

template <class Device, template <class> class Activation>
Tensor backward_from_both(Tensor grad, Tensor output, Tensor bits, Order order) {
  using Properties = Activation<float>;
  check_order(Properties::kName, order, grad.dim());
  check_same(Properties::kName, "the output", output, grad);
  check_bits<Properties>(bits, grad);
  Tensor result = empty_in_order(grad, order);
  const Geometry geometry = walk(order, {&result, &grad, &output});
  dispatch<false>(grad.scalar_type(), Properties::kName, [&](auto zero) {
    using T = decltype(zero);
    using Kernel = BackwardFromBoth<Activation<T>, T>;
    if (geometry.elements == 0) return;
    Device::run(Kernel{Activation<T>(int(bits.size(0)))}, geometry,
                Operands<Kernel>{static_cast<T*>(result.mutable_data_ptr()),
                                 {data<T>(grad), data<T>(output)},
                                 read_bits(bits)},
                grad.get_device_index());
  });
  return result;
}

template <class Device, template <class> class Activation>
Tensor double_backward(Tensor grad_grad, Tensor grad, Tensor output, Tensor bits, Order order,
                       bool to_output) {
  using Properties = Activation<float>;
  check_order(Properties::kName, order, grad.dim());
  check_same(Properties::kName, "the gradient's gradient", grad_grad, grad);
  check_same(Properties::kName, "the output", output, grad);
  check_bits<Properties>(bits, grad);
  Tensor result = empty_in_order(grad, order);
  const Geometry geometry = walk(order, {&result, &grad_grad, &grad, &output});
  dispatch<false>(grad.scalar_type(), Properties::kName, [&](auto zero) {
    using T = decltype(zero);
    using Kernel = DoubleBackward<Activation<T>, T>;
    if (geometry.elements == 0) return;
    Device::run(Kernel{Activation<T>(int(bits.size(0))), to_output}, geometry,
                Operands<Kernel>{static_cast<T*>(result.mutable_data_ptr()),
                                 {data<T>(grad_grad), data<T>(grad), data<T>(output)},
                                 read_bits(bits)},
                grad.get_device_index());
  });
  return result;
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
