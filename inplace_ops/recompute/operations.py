"""The table of operations: everything that the recompute engine knows about autograd's nodes.

Each entry maps the name of a node type to an `Operation`, with these fields:

- `output`: The output rule: how to compute the operation's output from its inputs, and the field in
  which the node saves each input (None for an input that it does not save).
- `reads`: The fields of saved inputs that backward may read recomputed, with a rounding: see NOTE
  [Exact specs and roundings] in `specs.py`.
- `reads_exact`: The same, if the spec is exact: backward compares the tensor with another one.
- `result`: The field of the operation's own saved output, if backward may read it recomputed.
- `saved_output`: The field of the operation's own saved output, if backward may not read it
  recomputed.
- `mask`: The activation, if backward reads only one bit per element of the saved tensor.
- `shape_only`: The field of a saved input, if backward reads only its shape, strides and dtype.
- `indices`: The field of saved indices into a pooling's input, which fit into 32 bits.
- `pooled_dims`: The number of dimensions that such an index counts.
- `saved_mask`: The field of a saved mask: booleans, or the noise of a dropout on a CPU.
- `reads_no_values`: Whether backward reads no value of any input.

What an operation without an entry saves stays saved. To add an operation, add an entry. Checked
against torch 2.11, 2.13, 2.14 and 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch_private import TO_COPY
from ..activations import LEAKY_RELU, RELU, Activation
from . import nodes
from .calls import largest, largest_or_one, product, total
from .nodes import Node
from .norms import NORMS

# An argument of an operation: the name of the field in which the node saves the argument, or a
# function that returns the argument for the node and the index of its output.
Argument = str | Callable[[Node, int], Any]
Bound = Callable[[list[Tensor]], Tensor]
Narrow = Callable[[Node, Tensor], Sequence[Tensor] | None]
aten = torch.ops.aten
UNSAVED = None  # an input that the node does not save
ALL_UNSAVED = ()  # any number of inputs, none of which the node saves


@dataclass(frozen=True)
class Output:
    """An output rule: the output is `function(*inputs, *arguments)`.

    Attributes:
        function: The PyTorch operation that ran in forward.
        inputs: The field in which the node saves each input; `UNSAVED` if it does not save it.
        arguments: The arguments after the inputs.
        bound: Returns a bound on the magnitude of the output, given those of the inputs. None if
            there is no bound, for example for a quotient: the inputs must then be exact.
        cost: The passes over memory.
        rounds_by_strides: Whether PyTorch's kernels round differently for inputs of other strides.
        keeps_strides: Returns whether a node's output has the strides that `function` gives it.
        condition: Returns whether the rule holds for a node.
        narrow: Returns the inputs, given a node and its output, as views of the output; a cast's
            input in the dtype of the output. None if they cannot be read off this output. See NOTE
            [Narrow copies] in `narrow.py`.
    """

    function: Callable[..., Tensor]
    inputs: tuple[str | None, ...]
    arguments: tuple[Argument, ...] = ()
    bound: Bound | None = largest
    cost: int = 1
    rounds_by_strides: bool = False
    keeps_strides: Callable[[Node], bool] = lambda node: True
    condition: Callable[[Node], bool] = lambda node: True
    narrow: Narrow | None = None


@dataclass(frozen=True)
class ProductRule:
    """The output rule of a product: `function(first, second, bias, *arguments)`.

    One of the two operands is a weight: see NOTE [Weights are proved] in `weights.py`. The other
    one is the product's input.

    Attributes:
        function: The product.
        operands: The field in which the node saves each operand, and the index of its edge.
        arguments: The arguments after the bias.
        weights: Which operands may be the weight, the usual one first.
        bias: The index of the bias's edge; None if there is no bias.
        has_bias: Returns whether a node has a bias.
        flops: Returns the floating point operations, given the node, the shapes of input and
            weight, and which operand the weight is.
        is_convolution: Whether it is a convolution.
    """

    function: Callable[..., Tensor]
    operands: tuple[tuple[str, int], tuple[str, int]]
    arguments: tuple[Argument, ...]
    flops: Callable[[Node, torch.Size, torch.Size, int], int]
    weights: tuple[int, ...] = (1,)
    bias: int | None = None
    has_bias: Callable[[Node], bool] = lambda node: True
    is_convolution: bool = False


OutputRule = Output | ProductRule | Literal["norm", "activation after a norm"]


@dataclass(frozen=True)
class Operation:
    """An entry of the table of operations: see the top of this file."""

    output: OutputRule | None = None
    reads: tuple[str, ...] = ()
    reads_exact: tuple[str, ...] = ()
    result: str = ""
    saved_output: str = ""
    mask: Activation | None = None
    shape_only: str = ""
    indices: str = ""
    pooled_dims: int = 0
    saved_mask: str = ""
    reads_no_values: bool = False

    @cached_property
    def has_spec(self) -> bool:
        """Whether the operation's output may have a spec."""
        return self.output is not None or bool(self.result or self.saved_output)

    @cached_property
    def is_product(self) -> bool:
        """Whether the operation is a product, of which only those that widen have a spec."""
        return isinstance(self.output, ProductRule)

    @cached_property
    def may_be_narrow(self) -> bool:
        """Whether the operation's inputs can be read off its output."""
        return isinstance(self.output, Output) and self.output.narrow is not None

    @cached_property
    def has_rewrites(self) -> bool:
        """Whether the engine replaces other tensors than inputs that backward reads."""
        return bool(
            self.result
            or self.indices
            or self.shape_only
            or self.saved_mask
            or self.reads_no_values
        )

    @cached_property
    def saves_output(self) -> str:
        """The field of the operation's own saved output; "" if it saves none."""
        return self.result or self.saved_output

    @cached_property
    def saves_first_input(self) -> bool:
        """Whether the node saves its first input; an in-place activation saves a clone of it."""
        return isinstance(self.output, Output) and self.output.inputs[:1] == ("self",)

    @cached_property
    def activation_field(self) -> str:
        """The field in which an activation saves its output or its only input; "" of others."""
        saves_input = isinstance(self.output, Output) and self.output.inputs == ("self",)
        return self.result or ("self" if saves_input else "")


def _from_input(
    function: Callable[..., Tensor],
    *arguments: Argument,
    bound: Bound | None = largest,
    **known: Any,
) -> Operation:
    """Return the entry of an activation that saves its input."""
    output = Output(
        function, ("self",), arguments, bound, rounds_by_strides=function not in _ROUNDED_CORRECTLY
    )
    return Operation(output, reads=("self",), **known)


def _from_result(
    function: Callable[..., Tensor],
    *arguments: Argument,
    bound: Bound | None = largest,
    **known: Any,
) -> Operation:
    """Return the entry of an activation that saves its output."""
    output = Output(
        function, (UNSAVED,), arguments, bound, rounds_by_strides=function not in _ROUNDED_CORRECTLY
    )
    return Operation(output, result="result", **known)


# Functions of one tensor whose values do not depend on the kernel that computes them.
_ROUNDED_CORRECTLY = (F.relu, F.leaky_relu, F.hardtanh, torch.abs, torch.sqrt, torch.reciprocal)


def _reads(*fields: str) -> Operation:
    return Operation(reads=fields)


def _attention() -> Operation:
    return Operation(reads=("query", "key", "value"), saved_output="output")


def _saved(field: str) -> Operation:
    return Operation(saved_output=field)


def _shape(field: str = "self") -> Operation:
    return Operation(shape_only=field, reads_no_values=True)


def _max_pooling(pooled_dims: int) -> Operation:
    return Operation(
        shape_only="self", indices="result1", pooled_dims=pooled_dims, reads_no_values=True
    )


def _sum(function: Callable[..., Tensor]) -> Operation:
    output = Output(function, (UNSAVED, UNSAVED), ("alpha",), bound=total)
    return Operation(output, reads_no_values=True)


def _concatenation(function: Callable[..., Tensor], narrow: Narrow | None = None) -> Operation:
    return Operation(Output(function, ALL_UNSAVED, ("dim",), narrow=narrow), reads_no_values=True)


def _nearest(function: Callable[..., Tensor], *scales: str) -> Operation:
    arguments = "output_size", *scales
    return Operation(
        Output(function, (UNSAVED,), arguments, narrow=partial(_centers, scales)),
        reads_no_values=True,
    )


def _linear(function: Callable[..., Tensor], *scales: str) -> Operation:
    arguments = "output_size", "align_corners", *scales
    return Operation(
        Output(function, (UNSAVED,), arguments, rounds_by_strides=True), reads_no_values=True
    )


_NO_VALUES = Operation(reads_no_values=True)
_COMPARED = Operation(reads_exact=("self",))
_LOSS = Operation(reads_exact=("self", "target"))


def add(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """Return x + alpha * y."""
    return torch.add(x, y, alpha=alpha)


def _subtract(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    return torch.sub(x, y, alpha=alpha)


def _cat(*tensors_and_dim: Any) -> Tensor:
    *tensors, dim = tensors_and_dim
    return torch.cat(tensors, dim)


def _stack(*tensors_and_dim: Any) -> Tensor:
    *tensors, dim = tensors_and_dim
    return torch.stack(tensors, dim)


def _parts(node: Node, output: Tensor) -> Sequence[Tensor] | None:
    """Return the parts of a concatenation; None if their sizes are unknown."""
    dim = nodes.argument(node, "dim") % output.dim()
    shapes = [edge[0] and nodes.output_shape(*edge) for edge in nodes.producers(node)]
    sizes = [shape[dim] if shape and len(shape) == output.dim() else None for shape in shapes]
    rest = output.shape[dim] - sum(size for size in sizes if size is not None)
    if sizes.count(None) > 1 or (rest and None not in sizes):
        return None
    return output.split([rest if size is None else size for size in sizes], dim)


def first_block(node: Node, output: Tensor) -> Sequence[Tensor]:
    """Return the input of `expand` or `repeat`."""
    shape = nodes.output_shape(*nodes.producer(node, 0))
    block = output[(0,) * (output.dim() - len(shape))]
    return [block[tuple([slice(size) for size in shape])]]


def _centers(scales: Sequence[str], node: Node, output: Tensor) -> Sequence[Tensor] | None:
    """Return the input of an upsampling to the nearest pixel, if its scales are whole numbers.

    The middle one of the pixels that repeat an input's pixel does so however indices are rounded.

    Args:
        scales: The fields of the scales by which the node has computed indices. None: the ratio.
        node: The node.
        output: Its output.
    """
    sizes = nodes.output_shape(*nodes.producer(node, 0))[2:]
    pixels = output
    for dim, (size, field) in enumerate(zip(sizes, scales, strict=True), start=2):
        scale, rest = divmod(output.shape[dim], size)
        if rest or nodes.argument(node, field) not in (None, scale):
            return None
        pixels = slice_of(pixels, dim, scale // 2, None, scale)
    return [pixels]


def _before_cast(node: Node, output: Tensor) -> Sequence[Tensor] | None:
    """Return the input of a cast, rounded if the cast rounds: see 2 of NOTE [Narrow copies]."""
    producer, index = nodes.producer(node, 0)
    operation = None if producer is None else OPERATION_OF[type(producer)]
    is_widened = operation is not None and operation.may_be_narrow
    if is_widened or is_lossless(nodes.output_dtype(producer, index), output.dtype):
        return [output]
    return None


def is_lossless(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast from `source` to a larger dtype `target` is lossless."""
    wider = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
    return wider.get(source) is target or (source is torch.float32 and target is torch.float64)


def slice_of(x: Tensor, dim: int, start: int | None, end: int | None, step: int) -> Tensor:
    """Return a slice along one dimension."""
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, end, step),)]


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


def same(x: Tensor) -> Tensor:
    """Return x: a copy has its values."""
    return x


def _addmm(x: Tensor, y: Tensor, bias: Tensor, beta: float, alpha: float) -> Tensor:
    return torch.addmm(bias, x, y, beta=beta, alpha=alpha)


def _mm(x: Tensor, y: Tensor, bias: None) -> Tensor:
    return torch.mm(x, y)


def _bmm(x: Tensor, y: Tensor, bias: None) -> Tensor:
    return torch.bmm(x, y)


def _flops_of_convolution(node: Node, x: torch.Size, weight: torch.Size, position: int) -> int:
    is_transposed = nodes.argument(node, "transposed")
    read_by = x if is_transposed else nodes.output_shape(node, 0)
    return 2 * read_by.numel() * weight[1:].numel()


def _flops_of_matrices(node: Node, x: torch.Size, weight: torch.Size, position: int) -> int:
    return 2 * nodes.output_shape(node, 0).numel() * x[position - 2]


def _has_bias(node: Node) -> bool:
    return nodes.argument(node, "bias_sym_sizes_opt") not in (None, (), (0,))


def _pads_of(node: Node) -> tuple[int, ...]:
    return nodes.argument(node, "pad")


def _keeps_memory_format(node: Node) -> bool:
    """Whether the shape has no channels_last format, to which a cast may change it unseen."""
    return len(nodes.output_shape(node, 0) or ()) not in (4, 5)


def _is_cast(node: Node) -> bool:
    """Whether a copy has another dtype, and is on the same device."""
    producer, index = nodes.producer(node, 0)
    has_other_dtype = nodes.output_dtype(node, 0) is not nodes.output_dtype(producer, index)
    return has_other_dtype and nodes.output_device(node, 0) == nodes.output_device(producer, index)


_CONVOLUTION = ProductRule(
    aten.convolution.default,
    operands=(("input", 0), ("weight", 1)),
    arguments=("stride", "padding", "dilation", "transposed", "output_padding", "groups"),
    flops=_flops_of_convolution,
    bias=2,
    has_bias=_has_bias,
    is_convolution=True,
)
_SCALES = "scales_h", "scales_w"
_ADDMM = ProductRule(
    _addmm,
    operands=(("mat1", 1), ("mat2", 2)),
    arguments=("beta", "alpha"),
    flops=_flops_of_matrices,
    weights=(1, 0),
    bias=0,
)


def _matrix_product(function: Callable[..., Tensor]) -> ProductRule:
    operands = ("self", 0), ("mat2", 1)
    return ProductRule(function, operands, (), flops=_flops_of_matrices, weights=(1, 0))


OPERATIONS: Mapping[str, Operation] = {
    # Norms, and this package's activations after a norm.
    **{name: Operation("norm", reads=("input",)) for name in NORMS},
    "RecomputeFunctionBackward": Operation("activation after a norm"),
    # Activations that save their input. If they run in place, they save a clone of the input.
    "SiluBackward0": _from_input(F.silu),
    "GeluBackward0": _from_input(_gelu, "approximate"),
    "HardswishBackward0": _from_input(F.hardswish),
    "MishBackward0": _from_input(F.mish),
    "LeakyReluBackward0": _from_input(F.leaky_relu, "negative_slope", mask=LEAKY_RELU),
    "HardtanhBackward0": _from_input(F.hardtanh, "min_val", "max_val"),  # ReLU6
    "HardsigmoidBackward0": _from_input(F.hardsigmoid, bound=largest_or_one),
    "SoftplusBackward0": _from_input(F.softplus, "beta", "threshold", bound=largest_or_one),
    "EluBackward0": _from_input(aten.elu, "alpha", "scale", "input_scale"),
    "CeluBackward0": _from_input(F.celu, "alpha"),
    "GluBackward0": _from_input(F.glu, "dim"),
    "PreluKernelBackward0": _reads("self"),
    # Activations that save their output.
    "ReluBackward0": _from_result(F.relu, mask=RELU),
    "LeakyReluBackward1": _from_result(F.leaky_relu, "negative_slope", mask=LEAKY_RELU),
    "EluBackward1": _from_result(aten.elu, "alpha", "scale", "input_scale"),
    "CeluBackward1": _from_result(F.celu, "alpha"),
    "SigmoidBackward0": _from_result(torch.sigmoid, bound=largest_or_one),
    "TanhBackward0": _from_result(torch.tanh),
    "ExpBackward0": _from_result(torch.exp, bound=None),
    "SoftmaxBackward0": _saved("result"),
    "SafeSoftmaxBackward0": _saved("result"),
    "LogSoftmaxBackward0": _saved("result"),
    # Arithmetic.
    "MulBackward0": Operation(
        Output(torch.mul, ("self", "other"), bound=product),
        reads=("self", "other"),
        saved_mask="other",
    ),
    # Whether it scales its output depends on an argument that the node does not show.
    "NativeDropoutBackward0": Operation(saved_mask="result1"),
    "AddBackward0": _sum(add),
    "SubBackward0": _sum(_subtract),
    "NegBackward0": Operation(Output(torch.neg, (UNSAVED,)), reads_no_values=True),
    "DivBackward0": Operation(
        Output(torch.div, ("self", "other"), bound=None), reads=("self", "other")
    ),
    "PowBackward0": _from_input(torch.pow, "exponent", bound=None),
    "RsqrtBackward0": _from_result(torch.rsqrt, bound=None),
    "SqrtBackward0": _from_result(torch.sqrt, bound=None),
    "ReciprocalBackward0": _from_result(torch.reciprocal, bound=None),
    "SinBackward0": _from_input(torch.sin),
    "CosBackward0": _from_input(torch.cos, bound=largest_or_one),
    "ErfBackward0": _from_input(torch.erf),
    "AbsBackward0": _from_input(torch.abs),
    "AddcmulBackward0": _reads("tensor1", "tensor2"),
    # Comparisons: with bounds, with the operation's own saved output, with a loss's target.
    "ClampBackward0": _COMPARED,
    "ClampBackward1": _COMPARED,
    "ClampMinBackward0": _COMPARED,
    "ClampMaxBackward0": _COMPARED,
    "AmaxBackward0": _COMPARED,
    "AminBackward0": _COMPARED,
    "LinalgVectorNormBackward0": _COMPARED,
    "MseLossBackward0": _LOSS,
    "HuberLossBackward0": _LOSS,
    "SmoothL1LossBackward0": _LOSS,
    "BinaryCrossEntropyWithLogitsBackward0": _LOSS,
    # Selections.
    "MaskedFillBackward0": Operation(saved_mask="mask"),
    "WhereBackward0": Operation(saved_mask="condition"),
    # Copies.
    "CatBackward0": _concatenation(_cat, narrow=_parts),
    "StackBackward0": _concatenation(_stack),
    "ToCopyBackward0": Operation(
        Output(
            Tensor.to,
            (UNSAVED,),
            (nodes.output_dtype,),
            keeps_strides=_keeps_memory_format,
            condition=_is_cast,
            narrow=_before_cast,
        )
    ),
    "CloneBackward0": Operation(
        Output(same, (UNSAVED,), cost=0, narrow=lambda node, output: [output])
    ),
    "RepeatBackward0": Operation(
        Output(Tensor.repeat, (UNSAVED,), ("repeats",), narrow=first_block)
    ),
    "RollBackward0": Operation(Output(torch.roll, (UNSAVED,), ("shifts", "dims"))),
    # What it pads with is not saved.
    "ConstantPadNdBackward0": Operation(
        Output(F.pad, (UNSAVED,), ("pad",), condition=lambda node: not any(_pads_of(node)))
    ),
    # Convolutions, matrix products, attention.
    "ConvolutionBackward0": Operation(_CONVOLUTION, reads=("input",)),
    "AddmmBackward0": Operation(_ADDMM, reads=("mat1", "mat2")),
    "MmBackward0": Operation(_matrix_product(_mm), reads=("self", "mat2")),
    "BmmBackward0": Operation(_matrix_product(_bmm), reads=("self", "mat2")),
    "GroupedMmBackward0": _reads("self", "mat2"),  # of experts
    "BaddbmmBackward0": _reads("batch1", "batch2"),
    "AddbmmBackward0": _reads("batch1", "batch2"),
    "AddmvBackward0": _reads("mat", "vec"),
    "MvBackward0": _reads("self", "vec"),
    "DotBackward0": _reads("self", "tensor"),
    "LinearBackward0": _reads("input"),
    "TrilinearBackward0": _reads("i1", "i2", "i3"),
    "ScaledDotProductFlashAttentionForCpuBackward0": _attention(),
    "ScaledDotProductFlashAttentionBackward0": _attention(),
    "ScaledDotProductEfficientAttentionBackward0": _attention(),
    "ScaledDotProductCudnnAttentionBackward0": _attention(),
    "ScaledDotProductFusedAttentionOverrideableBackward0": _attention(),
    "GridSampler2DBackward0": _reads("input", "grid"),
    "GridSampler3DBackward0": _reads("input", "grid"),
    "CudnnGridSamplerBackward0": _reads("self", "grid"),
    # Pooling, padding, sums at indices.
    "AvgPool2DBackward0": _shape(),
    "AvgPool3DBackward0": _shape(),
    "AdaptiveAvgPool2DBackward0": _shape(),
    "AdaptiveAvgPool3DBackward0": _shape(),
    "MaxPool2DWithIndicesBackward0": _max_pooling(2),
    "MaxPool3DWithIndicesBackward0": _max_pooling(3),
    "AdaptiveMaxPool2DBackward0": _max_pooling(2),
    "AdaptiveMaxPool3DBackward0": _max_pooling(3),
    "ReflectionPad1DBackward0": _shape(),
    "ReflectionPad2DBackward0": _shape(),
    "ReflectionPad3DBackward0": _shape(),
    "ReplicationPad1DBackward0": _shape(),
    "ReplicationPad2DBackward0": _shape(),
    "ReplicationPad3DBackward0": _shape(),
    "IndexAddBackward0": _shape("source"),
    # Reductions and interpolations, which save no input.
    "MeanBackward0": _NO_VALUES,
    "MeanBackward1": _NO_VALUES,
    "SumBackward0": _NO_VALUES,
    "SumBackward1": _NO_VALUES,
    "UpsampleNearest1DBackward0": _nearest(aten.upsample_nearest1d, "scales"),
    "UpsampleNearest2DBackward0": _nearest(aten.upsample_nearest2d, *_SCALES),
    "UpsampleNearest3DBackward0": _nearest(aten.upsample_nearest3d, "scales_d", *_SCALES),
    "UpsampleBilinear2DBackward0": _linear(aten.upsample_bilinear2d, *_SCALES),
    "UpsampleTrilinear3DBackward0": _linear(aten.upsample_trilinear3d, "scales_d", *_SCALES),
}


OPERATION_OF = nodes.ByType(OPERATIONS)  # by node type
CAST = OPERATIONS[TO_COPY]


def arguments_of(node: Node, index: int, arguments: tuple[Argument, ...]) -> list[Any]:
    """Return the arguments of a rule for output `index` of a node."""
    return [nodes.argument(node, a) if isinstance(a, str) else a(node, index) for a in arguments]
