// The schemas of all ops, and their registration for a device. Both are generated from the list of
// activations.
//
// The ops of a piecewise-linear activation, such as ReLU:
//   relu_(x!)                                    in place, saves nothing
//   relu_save_mask_(x!, bits) -> packed          in place, saves the mask
//   relu_save_mask(x, bits) -> (result, packed)  out of place, saves the mask
//   relu_backward_mask(grad, packed)
//   relu_backward_output(grad, output)
//
// The ops of a smooth activation, such as SiLU:
//   silu_(x!)                                    in place, saves nothing
//   silu_save_output_(x!, bits), silu_save_output(x, bits)
//                                                save bits of x next to the output
//   silu_save_derivative_(x!, bits), silu_save_derivative(x, bits)
//                                                save the rounded derivative
//   silu_backward_output(grad, output, packed)
//   silu_backward_derivative(grad, packed)
//   silu_double_backward(grad_grad, grad, output, packed)
//
// The ops of every activation after a norm, where affine is (channel_affine, row_statistics) and x
// is the norm's input:
//   relu_recompute(x, affine, dtype)             the activation of the norm's output
//   relu_backward_recompute(grad, x, affine)
//   relu_backward_batch_norm(grad, x, channel_affine, mean, rstd)
//                                                the gradients of x, weight and bias
//
// The op of every activation under torch.compile (inplace_ops/torch_compile.py):
//   relu_traced_(x!, save, bits)
//
// The ops of norms:
//   norm_affine(rstd, mean, weight, bias, shape, channels_per_group)
//                                                the norm's channel affine
//   normalize(x, affine, dtype, in_float32)      the norm's output
//   normalize_add(x, affine, addend)             the sum of the norm's output and an addend
//   normalize_add_relu(x, affine, addend)        the ReLU of that sum
//
// `dtype` casts the result, from float32. With `in_float32` x and the result have 16 bits, and what
// is between them is computed in float32. After the arguments above, all ops except norm_affine and
// the traced ones take dim_order. The ops of an activation take its scalar arguments last, before a
// dtype.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>

#include "ops.h"
#include "python_calls.h"

namespace inplace_ops {

using Library = torch::stable::detail::StableLibrary;

constexpr const char* kNormalizedSchema = "Tensor x, Tensor channel_affine, Tensor? row_statistics";
constexpr const char* kCastSchema = ", *, ScalarType? dtype=None, bool in_float32=False) -> Tensor";

// Defines the in-place and the out-of-place op of a save mode.
inline void define_save_ops(Library& m, const std::string& op, const std::string& op_args) {
  m.def((op + "_(Tensor(a!) x, int bits" + op_args + ") -> Tensor").c_str());
  m.def((op + "(Tensor x, int bits" + op_args + ") -> (Tensor, Tensor)").c_str());
}

template <template <class> class Activation>
void define_ops(Library& m, Entry<Activation> entry) {
  static_assert(Activation<float>::kKind == Kind::kPiecewiseLinear ||
                    std::is_base_of_v<WithoutArguments, Activation<float>>,
                "the ops of a smooth activation, and its Functions, take no scalar arguments");
  const std::string name = entry.name;
  const std::string op_args = std::string(", int[]? dim_order") + Activation<float>::kSchema;
  m.def((name + "_(Tensor(a!) x" + op_args + ") -> ()").c_str());
  m.def(
      (name + "_traced_(Tensor(a!) x, str save, int? bits" + Activation<float>::kSchema + ") -> ()")
          .c_str());
  const std::string normalized = std::string(kNormalizedSchema) + op_args + ") -> Tensor";
  m.def((name + "_recompute(" + kNormalizedSchema + op_args + kCastSchema).c_str());
  m.def((name + "_backward_recompute(Tensor grad, " + normalized).c_str());
  m.def((name +
         "_backward_batch_norm(Tensor grad, Tensor x, Tensor channel_affine, Tensor mean, "
         "Tensor rstd" +
         op_args + ") -> (Tensor, Tensor, Tensor)")
            .c_str());
  if constexpr (Activation<float>::kKind == Kind::kPiecewiseLinear) {
    define_save_ops(m, name + "_save_mask", op_args);
    m.def((name + "_backward_mask(Tensor grad, Tensor packed" + op_args + ") -> Tensor").c_str());
    m.def((name + "_backward_output(Tensor grad, Tensor output" + op_args + ") -> Tensor").c_str());
  } else {
    define_save_ops(m, name + "_save_output", op_args);
    define_save_ops(m, name + "_save_derivative", op_args);
    const std::string saved = "Tensor grad, Tensor output, Tensor packed" + op_args + ") -> Tensor";
    m.def((name + "_backward_output(" + saved).c_str());
    m.def((name + "_double_backward(Tensor grad_grad, " + saved).c_str());
    m.def((name + "_backward_derivative(Tensor grad, Tensor packed" + op_args + ") -> Tensor")
              .c_str());
  }
}

// Registers a function for an op.
template <auto function>
void implement(Library& m, const std::string& op) {
  m.impl(op.c_str(), TORCH_BOX(function));
  add_python_call<function>(op);
}

template <class OpSet, template <class, class> class Forward>
void register_save_ops(Library& m, const std::string& op) {
  implement<&OpSet::template save_in_place<Forward>>(m, op + "_");
  implement<&OpSet::template save_out_of_place<Forward>>(m, op);
}

template <class Device, template <class> class Activation>
using OpsOf = Ops<Device, Activation, typename Activation<float>::Arguments>;

template <class Device, template <class> class Activation>
void register_forward(Library& m, Entry<Activation> entry) {
  using OpSet = OpsOf<Device, Activation>;
  const std::string name = entry.name;
  if constexpr (Activation<float>::kKind == Kind::kPiecewiseLinear) {
    implement<&OpSet::template in_place<ForwardMask>>(m, name + "_");
    register_save_ops<OpSet, ForwardMask>(m, name + "_save_mask");
  } else {
    implement<&OpSet::template in_place<ForwardOutput>>(m, name + "_");
    register_save_ops<OpSet, ForwardOutput>(m, name + "_save_output");
    register_save_ops<OpSet, ForwardDerivative>(m, name + "_save_derivative");
  }
}

template <class Device, template <class> class Activation>
void register_backward(Library& m, Entry<Activation> entry) {
  using OpSet = OpsOf<Device, Activation>;
  const std::string name = entry.name;
  if constexpr (Activation<float>::kKind == Kind::kPiecewiseLinear) {
    implement<&OpSet::backward_mask>(m, name + "_backward_mask");
    implement<&OpSet::backward_mask_of_output>(m, name + "_backward_output");
  } else {
    implement<&OpSet::backward_output>(m, name + "_backward_output");
    implement<&OpSet::backward_derivative>(m, name + "_backward_derivative");
  }
}

template <class Device, template <class> class Activation>
void register_double_backward(Library& m, Entry<Activation> entry) {
  if constexpr (Activation<float>::kKind == Kind::kSmooth) {
    using OpSet = OpsOf<Device, Activation>;
    const std::string name = entry.name;
    implement<&OpSet::double_backward>(m, name + "_double_backward");
  }
}

template <class Device, template <class> class Activation>
void register_recompute(Library& m, Entry<Activation> entry) {
  using OpSet = OpsOf<Device, Activation>;
  const std::string name = entry.name;
  implement<&OpSet::recompute>(m, name + "_recompute");
  implement<&OpSet::backward_recompute>(m, name + "_backward_recompute");
  implement<&OpSet::backward_batch_norm>(m, name + "_backward_batch_norm");
}

inline void define_all_ops(Library& m) {
  m.def(
      "norm_affine(Tensor? rstd, Tensor? mean, Tensor? weight, Tensor? bias, int[] shape, "
      "int channels_per_group) -> Tensor");
  m.def(
      (std::string("normalize(") + kNormalizedSchema + ", int[]? dim_order" + kCastSchema).c_str());
  for (const char* op : {"normalize_add(", "normalize_add_relu("})
    m.def((std::string(op) + kNormalizedSchema + ", Tensor addend, int[]? dim_order) -> Tensor")
              .c_str());
  for_each_activation([&](auto entry) { define_ops(m, entry); });
}

template <class Device>
void register_all_forward(Library& m) {
  for_each_activation([&](auto entry) { register_forward<Device>(m, entry); });
}

template <class Device>
void register_all_backward(Library& m) {
  for_each_activation([&](auto entry) { register_backward<Device>(m, entry); });
}

template <class Device>
void register_all_double_backward(Library& m) {
  for_each_activation([&](auto entry) { register_double_backward<Device>(m, entry); });
}

template <class Device>
void register_all_recompute(Library& m) {
  implement<&norm_affine<Device>>(m, "norm_affine");
  implement<&normalize<Device>>(m, "normalize");
  implement<&normalize_add<Device>>(m, "normalize_add");
  implement<&normalize_add_relu<Device>>(m, "normalize_add_relu");
  for_each_activation([&](auto entry) { register_recompute<Device>(m, entry); });
}

}  // namespace inplace_ops
