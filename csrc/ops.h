// The implementations of the ops, as templates over device and activation: check the arguments,
// find the strided layout, dispatch on the dtype, run a functor.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "activations.h"
#include "checks.h"
#include "dispatch.h"
#include "functors.h"
#include "tensors.h"

namespace inplace_ops {

// Calls body(strided, operands) with a functor's operands, which are tensors of its formats; not if
// they are empty.
template <class Functor, size_t inputs, class Body>
void with_operands(const char* op, const Tensor& out, const Tensor* const (&in)[inputs],
                   const Tensor* packed, const DimOrder& dim_order, const AffineTensors* affine,
                   const Body& body) {
  using T = typename Functor::Scalar;
  const Tensor* tensors[inputs + 1] = {&out};
  std::copy(in, in + inputs, tensors + 1);
  const StridedLayout strided = strided_layout_of(dim_order, tensors);
  Operands<Functor> operands{};
  if constexpr (Functor::kPackedBits != PackedBitsUse::kNone) {
    if (packed) {
      check_count(op, packed->size(0), Functor::accepts_bits(packed->size(0)));
      operands.packed = packed_bits_of<Operands<Functor>::kWritesBits>(*packed);
    }
  }
  if constexpr (Functor::kNormalizes)
    operands.affine = affine_of<opmath_t<T>>(op, *affine, out, dim_order);
  if (strided.elements == 0) return;
  operands.out = static_cast<typename Functor::Out*>(out.mutable_data_ptr());
  for (int k = 0; k < Functor::kInputs; ++k)
    operands.in[k] = static_cast<const typename Functor::In*>(in[k]->const_data_ptr());
  body(strided, operands);
}

// Runs a functor over tensors of its formats.
template <class Device, size_t inputs, class Functor>
void run_functor(const char* op, const Functor& functor, const Tensor& out,
                 const Tensor* const (&in)[inputs], const Tensor* packed, const DimOrder& dim_order,
                 const AffineTensors* affine) {
  with_operands<Functor>(op, out, in, packed, dim_order, affine,
                         [&](const StridedLayout& strided, const Operands<Functor>& operands) {
                           Device::run(functor, strided, operands, out.get_device_index());
                         });
}

// Runs the functor make(T{}), where T is the storage format of the tensors' dtype.
template <class Device, size_t inputs, class MakeFunctor>
void run_for_dtype(const char* op, const Tensor& out, const Tensor* const (&in)[inputs],
                   const Tensor* packed, const DimOrder& dim_order, const MakeFunctor& make,
                   const AffineTensors* affine = nullptr) {
  dispatch(out.scalar_type(), op, [&](auto scalar) {
    run_functor<Device>(op, make(scalar), out, in, packed, dim_order, affine);
  });
}

// Returns a norm's channel affine, as affine_of() takes it: scales and shifts, in a tensor of
// `shape`, which is (2, ...).
template <class Device>
Tensor norm_affine(std::optional<Tensor> rstd, std::optional<Tensor> mean,
                   std::optional<Tensor> weight, std::optional<Tensor> bias,
                   std::vector<int64_t> shape, int64_t channels_per_group) {
  const Tensor* const vectors[] = {rstd ? &*rstd : nullptr, mean ? &*mean : nullptr,
                                   weight ? &*weight : nullptr, bias ? &*bias : nullptr};
  const Tensor& like = rstd ? *rstd : weight.value();
  int64_t channels = 1;
  for (size_t d = 1; d < shape.size(); ++d) channels *= shape[d];
  const int64_t num_weights = weight ? weight->numel() : 1, num_biases = bias ? bias->numel() : 1;
  const auto divides = [&](int64_t count) {
    return count > 0 ? channels % count == 0 : channels == 0;
  };
  bool fits = !shape.empty() && shape[0] == 2 && channels_per_group > 0 &&
              divides(channels_per_group) && divides(num_weights) && divides(num_biases);
  for (const Tensor* vector : {vectors[0], vectors[1]})
    fits = fits && (!vector || vector->numel() == channels / channels_per_group);
  for (const Tensor* vector : vectors)
    fits = fits && (!vector || (vector->scalar_type() == like.scalar_type() &&
                                vector->device() == like.device() && vector->is_contiguous()));
  check(fits,
        "norm_affine: rstd, mean, weight and bias must be contiguous, have the same dtype "
        "and device, and as many elements as `shape` and channels_per_group require");
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size() - 1; d-- > 0;) strides[d] = strides[d + 1] * shape[d + 1];
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  const Tensor affine =
      empty_strided(int64_t(shape.size()), shape.data(), strides.data(), dtype, like);
  dispatch(like.scalar_type(), "norm_affine", [&](auto scalar) {
    using C = decltype(scalar);
    if constexpr (std::is_same_v<C, opmath_t<C>>) {
      const auto data = [](const Tensor* vector) {
        return vector ? static_cast<const C*>(vector->const_data_ptr()) : nullptr;
      };
      const Statistics<C> statistics{data(vectors[0]), data(vectors[1]),   data(vectors[2]),
                                     data(vectors[3]), channels_per_group, num_weights,
                                     num_biases};
      C* const scale = static_cast<C*>(affine.mutable_data_ptr());
      if (channels > 0)
        Device::write_affine(statistics, scale, scale + channels, channels,
                             like.get_device_index());
    } else {
      check(false, "norm_affine: rstd, mean, weight and bias must be float32 or float64");
    }
  });
  return affine;
}

// Applies the functor make(T{}, Out{}), which computes in T and returns Out, to a norm's input x.
// Returns a new tensor of x's dtype, or of `dtype`: float16 or bfloat16 if x is float32. If
// in_float32, x is a 16-bit tensor, and the functor computes from x cast to float32.
template <class Device, class MakeFunctor>
Tensor transform_normalized(const char* op, const Tensor& x, const AffineTensors& affine,
                            const DimOrder& dim_order, OptionalDtype dtype, bool in_float32,
                            const MakeFunctor& make) {
  check_order(op, dim_order, x.dim());
  const auto result = dtype.value_or(x.scalar_type());
  check_result_dtype(op, x, result, in_float32);
  if (result == x.scalar_type() && !in_float32) {
    const Tensor out = empty_in_order(x, dim_order);
    const auto make_plain = [&](auto scalar) { return make(scalar, scalar); };
    run_for_dtype<Device>(op, out, {&x}, nullptr, dim_order, make_plain, &affine);
    return out;
  }
  const auto run = [&](auto format, int32_t format_dtype) {
    using Format = decltype(format);
    const Tensor out = empty_in_order(x, dim_order, format_dtype);
    const auto functor = make(float{}, format);
    using Functor = std::remove_const_t<decltype(functor)>;
    const auto run_as = [&](const auto& casting) {
      run_functor<Device>(op, casting, out, {&x}, nullptr, dim_order, &affine);
    };
    if (in_float32)
      run_as(InFloat32<Functor, Format>{{functor}});
    else
      run_as(Cast<Functor, Format>{functor});
    return out;
  };
  if (result == torch::headeronly::ScalarType::Half) return run(Half{}, aoti_torch_dtype_float16());
  return run(BFloat16{}, aoti_torch_dtype_bfloat16());
}

// Returns x, or a copy of it, so that it is dense in dim_order.
template <class Device>
Tensor dense_in_order(const Tensor& x, const DimOrder& dim_order) {
  const Tensor* const operands[] = {&x};
  if (strided_layout_of(dim_order, operands).is_dense()) return x;
  const Tensor dense = empty_in_order(x, dim_order);
  run_for_dtype<Device>("copy", dense, {&x}, nullptr, dim_order,
                        [](auto scalar) { return Identity<decltype(scalar)>{}; });
  return dense;
}

// Returns a norm's output, recomputed from the norm's input.
template <class Device>
Tensor normalize(Tensor x, Tensor channel_affine, std::optional<Tensor> row_statistics,
                 DimOrder dim_order, OptionalDtype dtype, bool in_float32) {
  const AffineTensors affine{&channel_affine, row_statistics ? &*row_statistics : nullptr};
  const auto make = [](auto scalar, auto) { return Normalize<decltype(scalar)>{}; };
  return transform_normalized<Device>("normalize", x, affine, dim_order, dtype, in_float32, make);
}

// Applies the functor to an addend and a norm's input x. Returns a new tensor.
template <class Device, template <class> class Functor>
Tensor transform_normalized_sum(const char* op, const Tensor& x, const Tensor& channel_affine,
                                const std::optional<Tensor>& row_statistics, const Tensor& addend,
                                const DimOrder& dim_order) {
  const AffineTensors affine{&channel_affine, row_statistics ? &*row_statistics : nullptr};
  check_order(op, dim_order, x.dim());
  check_same(op, addend, x);
  const Tensor out = empty_in_order(x, dim_order);
  const auto make = [](auto scalar) { return Functor<decltype(scalar)>{}; };
  run_for_dtype<Device>(op, out, {&addend, &x}, nullptr, dim_order, make, &affine);
  return out;
}

// Returns the sum of a norm's output and an addend.
template <class Device>
Tensor normalize_add(Tensor x, Tensor channel_affine, std::optional<Tensor> row_statistics,
                     Tensor addend, DimOrder dim_order) {
  return transform_normalized_sum<Device, NormalizeAdd>("normalize_add", x, channel_affine,
                                                        row_statistics, addend, dim_order);
}

template <class T>
using NormalizeAddReLU = ForwardRecomputeAdd<ReLU<T>>;

// Returns the ReLU of that sum.
template <class Device>
Tensor normalize_add_relu(Tensor x, Tensor channel_affine, std::optional<Tensor> row_statistics,
                          Tensor addend, DimOrder dim_order) {
  return transform_normalized_sum<Device, NormalizeAddReLU>("normalize_add_relu", x, channel_affine,
                                                            row_statistics, addend, dim_order);
}

// Returns the gradients of the input x, the weight and the bias of a batch norm in training, from
// the gradient of an activation of its output: see batch_norm.h. The functor make(T{}) is the
// activation's backward after a norm. The gradient of x is dense in dim_order.
template <class Device, class MakeFunctor>
std::tuple<Tensor, Tensor, Tensor> differentiate_batch_norm(const char* op, Tensor grad, Tensor x,
                                                            const Tensor& channel_affine,
                                                            const Tensor& mean, const Tensor& rstd,
                                                            const DimOrder& dim_order,
                                                            const MakeFunctor& make) {
  check_order(op, dim_order, grad.dim());
  check_same(op, x, grad);
  check_batch_norm(op, x, channel_affine, mean, rstd);
  x = dense_in_order<Device>(x, dim_order);
  auto layout = channel_layout_of(grad, dim_order);
  if (!layout) {
    grad = dense_in_order<Device>(grad, dim_order);
    layout = channel_layout_of(grad, dim_order);
  }
  const int64_t channels = layout->channels, pieces = Device::pieces_of(*layout, x);
  const Tensor grad_x = empty_in_order(x, dim_order);
  // The corrections and the partial sums of the two gradients.
  const Tensor workspace = empty_contiguous(mean, 2 * (1 + pieces), channels);
  const Tensor grad_weight = empty_contiguous(mean, channels);
  const Tensor grad_bias = empty_contiguous(mean, channels);
  const AffineTensors affine{&channel_affine, nullptr};
  dispatch(x.scalar_type(), op, [&](auto scalar) {
    using C = opmath_t<decltype(scalar)>;
    const auto functor = make(scalar);
    const auto read = [](const Tensor& t) { return static_cast<const C*>(t.const_data_ptr()); };
    const auto write = [](const Tensor& t) { return static_cast<C*>(t.mutable_data_ptr()); };
    const BatchNormBackward<C> norm{*layout,
                                    read(mean),
                                    read(rstd),
                                    write(workspace),
                                    write(workspace) + channels,
                                    write(grad_weight),
                                    write(grad_bias),
                                    write(workspace) + 2 * channels,
                                    pieces};
    using Functor = std::remove_const_t<decltype(functor)>;
    with_operands<Functor>(op, grad_x, {&grad, &x}, nullptr, dim_order, &affine,
                           [&](const StridedLayout& strided, const Operands<Functor>& operands) {
                             Device::backward_batch_norm(functor, strided, operands, norm,
                                                         x.get_device_index());
                           });
  });
  return {grad_x, grad_weight, grad_bias};
}

template <class Device, template <class> class Activation, class Arguments>
struct Ops;

template <class Device, template <class> class Activation, class... Arguments>
struct Ops<Device, Activation, Types<Arguments...>> {
  static constexpr const char* kName = Activation<float>::kName;

  // Returns a function that makes the functor over a storage format, as run_for_dtype() takes it.
  template <template <class, class> class Functor>
  static auto maker_of(Arguments... arguments) {
    return [=](auto scalar) {
      using T = decltype(scalar);
      using A = Activation<T>;
      return functor_of<Functor<A, T>>(A{arguments...});
    };
  }

  // In the functions below, Forward is the forward functor of a save mode. Without packed bits it
  // saves nothing.

  template <template <class, class> class Forward>
  static void forward(const Tensor& out, const Tensor& x, const Tensor* packed,
                      const DimOrder& dim_order, Arguments... arguments) {
    run_for_dtype<Device>(kName, out, {&x}, packed, dim_order, maker_of<Forward>(arguments...));
  }

  template <template <class, class> class Forward>
  static void in_place(Tensor x, DimOrder dim_order, Arguments... arguments) {
    check_order(kName, dim_order, x.dim());
    check_writable(kName, x);
    forward<Forward>(x, x, nullptr, dim_order, arguments...);
  }

  // Overwrites x with the result, and returns the packed bits.
  template <template <class, class> class Forward>
  static Tensor save_in_place(Tensor x, int64_t bits, DimOrder dim_order, Arguments... arguments) {
    check_order(kName, dim_order, x.dim());
    check_writable(kName, x);
    check_count(kName, bits, bits >= 1 && bits <= 32);
    const Tensor packed = empty_bits(x, bits);
    forward<Forward>(x, x, &packed, dim_order, arguments...);
    return packed;
  }

  // Returns the result and the packed bits.
  template <template <class, class> class Forward>
  static std::tuple<Tensor, Tensor> save_out_of_place(Tensor x, int64_t bits, DimOrder dim_order,
                                                      Arguments... arguments) {
    check_order(kName, dim_order, x.dim());
    check_count(kName, bits, bits >= 1 && bits <= 32);
    const Tensor out = empty_in_order(x, dim_order), packed = empty_bits(x, bits);
    forward<Forward>(out, x, &packed, dim_order, arguments...);
    return {out, packed};
  }

  // Applies the functor make(T{}) to the inputs, the first of which is a gradient. Returns a new
  // tensor.
  template <size_t inputs, class MakeFunctor>
  static Tensor differentiate(const Tensor* const (&in)[inputs], const Tensor* packed,
                              const DimOrder& dim_order, const MakeFunctor& make,
                              const AffineTensors* affine = nullptr) {
    const Tensor& grad = *in[0];
    check_order(kName, dim_order, grad.dim());
    for (const Tensor* input : in) check_same(kName, *input, grad);
    if (packed) check_packed(kName, *packed, grad);
    const Tensor result = empty_in_order(grad, dim_order);
    run_for_dtype<Device>(kName, result, in, packed, dim_order, make, affine);
    return result;
  }

  static Tensor recompute(Tensor x, Tensor channel_affine, std::optional<Tensor> row_statistics,
                          DimOrder dim_order, Arguments... arguments, OptionalDtype dtype,
                          bool in_float32) {
    const AffineTensors affine{&channel_affine, row_statistics ? &*row_statistics : nullptr};
    const auto make = [=](auto scalar, auto out) {
      using T = decltype(scalar);
      using A = ActivationFor<Activation, T, decltype(out)>;
      return functor_of<ForwardRecompute<A, T>>(A{arguments...});
    };
    return transform_normalized<Device>(kName, x, affine, dim_order, dtype, in_float32, make);
  }

  static Tensor backward_recompute(Tensor grad, Tensor x, Tensor channel_affine,
                                   std::optional<Tensor> row_statistics, DimOrder dim_order,
                                   Arguments... arguments) {
    const AffineTensors affine{&channel_affine, row_statistics ? &*row_statistics : nullptr};
    return differentiate({&grad, &x}, nullptr, dim_order, maker_of<BackwardRecompute>(arguments...),
                         &affine);
  }

  static std::tuple<Tensor, Tensor, Tensor> backward_batch_norm(Tensor grad, Tensor x,
                                                                Tensor channel_affine, Tensor mean,
                                                                Tensor rstd, DimOrder dim_order,
                                                                Arguments... arguments) {
    return differentiate_batch_norm<Device>(kName, grad, x, channel_affine, mean, rstd, dim_order,
                                            maker_of<BackwardRecompute>(arguments...));
  }

  static Tensor backward_mask(Tensor grad, Tensor packed, DimOrder dim_order,
                              Arguments... arguments) {
    return differentiate({&grad}, &packed, dim_order, maker_of<BackwardMask>(arguments...));
  }

  static Tensor backward_mask_of_output(Tensor grad, Tensor output, DimOrder dim_order,
                                        Arguments... arguments) {
    return differentiate({&grad, &output}, nullptr, dim_order,
                         maker_of<BackwardMaskOfOutput>(arguments...));
  }

  static Tensor backward_output(Tensor grad, Tensor output, Tensor packed, DimOrder dim_order) {
    return differentiate({&grad, &output}, &packed, dim_order, [](auto scalar) {
      return BackwardOutput<Activation<decltype(scalar)>>{};
    });
  }

  static Tensor double_backward(Tensor grad_grad, Tensor grad, Tensor output, Tensor packed,
                                DimOrder dim_order) {
    return differentiate({&grad_grad, &grad, &output}, &packed, dim_order, [](auto scalar) {
      return DoubleBackward<Activation<decltype(scalar)>>{};
    });
  }

  static Tensor backward_derivative(Tensor grad, Tensor packed, DimOrder dim_order) {
    check_packed(kName, packed, grad);
    const int bits = int(packed.size(0));
    return differentiate({&grad}, &packed, dim_order, [bits](auto scalar) {
      using T = decltype(scalar);
      const auto grid = DerivativeGrid<opmath_t<T>>::template for_activation<Activation<T>>(bits);
      return BackwardDerivative<T>{{}, grid};
    });
  }
};

}  // namespace inplace_ops
