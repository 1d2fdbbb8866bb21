"""PyTorch's private APIs that this package uses, and why no public API suffices.

No other module uses a private name of PyTorch, with three exceptions:

- What every call reads, where a function would cost time: `_version`, `_base` and `_is_view` of
  tensors, and `_current_level` of `torch.autograd.forward_ad`.
- `_saved_*` and `_raw_saved_*` of autograd's nodes, in `recompute/nodes.py`. PyTorch documents them
  in its notes on autograd.
- The names of node types in the tables of rules, in `recompute/operations.py`, `recompute/views.py`
  and `recompute/norms.py`: there a name is next to what the engine knows of the operation.

Checked on torch 2.11 to 2.15. `tests/project/test_torch_private.py` has a check for
each name of this module, so that its failures list what a new version of torch has changed.
"""

from __future__ import annotations

import operator
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

# Autograd's handle of a saved tensor: that of `_raw_saved_*`.
from torch._C._autograd import SavedTensor as SavedTensor

# Tensors inside of torch.func's transforms, and gradients under `is_grads_batched=True`.
from torch._C._functorch import (
    is_functorch_wrapped_tensor as is_functorch_wrapped_tensor,
    is_legacy_batchedtensor as is_legacy_batchedtensor,
    unwrap_if_dead as unwrap_if_dead,
)

# The type of an op: `torch.ops` offers only the instances.
from torch._ops import OpOverload as OpOverload

# The function mode of a default device.
from torch.utils._device import DeviceContext

# A mode that sees every op, and whether a tensor subclass has `__tensor_flatten__`, which names the
# tensors it consists of.
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)

# These support the containers that libraries register, for example for the outputs of models.
from torch.utils._pytree import tree_leaves as tree_leaves, tree_map as tree_map

# What sees an operation in addition to autograd: no public function tells. torch.jit.trace's state
# is None unless it runs.
are_functorch_transforms_active = torch._C._are_functorch_transforms_active
jit_tracing_state = torch._C._get_tracing_state

# `torch.no_grad` takes twice as long as these two.
set_grad_enabled = torch._C._set_grad_enabled
DisableTorchFunction = torch._C.DisableTorchFunction

# Raises in a fake kernel; with a symbolic condition it adds a guard.
check = torch._check

# The set of a tensor's dispatch keys, of which `raw_repr()` is a number.
dispatch_keys = torch._C._dispatch_keys

# The numbers of function modes and of dispatch modes that see this thread's operations.
len_torch_function_stack: Callable[[], int] = torch._C._len_torch_function_stack
len_torch_dispatch_stack: Callable[[], int] = torch._C._len_torch_dispatch_stack

# The base classes of batch and instance norms of all dimensions.
BatchNorm = nn.modules.batchnorm._BatchNorm
InstanceNorm = nn.modules.instancenorm._InstanceNorm

Node = Any  # torch.autograd.graph.Node lacks the attributes of its subclasses

# Names of node types without a rule of their own. Autograd makes a CopySlices node for the base of
# a view that an operation modifies.
ACCUMULATE_GRAD = "AccumulateGrad"
ADD = "AddBackward0"
BACKWARD_HOOK = "BackwardHookFunctionBackward"
CAT = "CatBackward0"
CLONE = "CloneBackward0"
COPY_SLICES = "CopySlices"
REPEAT = "RepeatBackward0"
SUB = "SubBackward0"
SYNC_BATCH_NORM = "SyncBatchNormBackward"
TO_COPY = "ToCopyBackward0"
# Their outputs share the input's memory, and are not views of it.
UNSAFE_SPLITS = frozenset({"UnsafeSplitBackward0", "UnsafeSplitWithSizesBackward0"})
# The grad_fn of a traced graph's input that requires grad; "NoneType" is that of another input.
GRAPH_INPUTS = frozenset({"NoneType", ACCUMULATE_GRAD, "Error"})
# Operations whose outputs torch.compile does not recompute, and views of them.
NOT_RECOMPUTED = frozenset(
    f"{name}Backward0" for name in ("Addbmm", "Addmm", "Baddbmm", "Bmm", "Convolution", "Mm")
)
TRACED_VIEWS = frozenset(
    f"{name}Backward0"
    for name in ("Alias", "Permute", "ReshapeAlias", "Transpose", "UnsafeView", "View")
)


# Autograd's nodes.


def is_named(node: Node, name: str) -> bool:
    """Whether a node has the type of this name. The types themselves have no public names."""
    return type(node).__name__ == name


def function_of(node_type: type) -> type | None:
    """Return the `torch.autograd.Function` of a node type; None of PyTorch's own node types."""
    return getattr(node_type, "_forward_cls", None)


def output_shape(node: Node, index: int) -> torch.Size:
    """Return the shape of one of the operation's outputs."""
    return torch.Size(node._input_metadata[index].shape)


def output_dtype(node: Node, index: int) -> torch.dtype:
    """Return the dtype of one of the operation's outputs."""
    return node._input_metadata[index].dtype


def output_device(node: Node, index: int) -> torch.device:
    """Return the device of one of the operation's outputs."""
    return node._input_metadata[index].device


# Return autograd's sequence number of a node. Each thread numbers its nodes in the order of their
# creation.
sequence_number: Callable[[Node], int] = operator.methodcaller("_sequence_nr")

LEAF_SEQUENCE_NUMBER = 2**64 - 1  # that of every AccumulateGrad node


# Return the sequence number of the next node that this thread creates.
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


def running_node() -> Node:
    """Return the autograd node whose backward is running; None outside of backward."""
    return torch._C._current_autograd_node()


# Return the id of the backward pass that is running; `NO_PASS` outside of backward. Every pass has
# another id.
running_pass: Callable[[], int] = torch._C._current_graph_task_id
NO_PASS = -1


def call_after_pass(callback: Callable[[], None]) -> None:
    """Call a function when the running backward pass ends without an error.

    Not under compiled autograd.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# The flags that decide how a device computes products, as pairs of functions that return and set
# one. The public properties take five times as long to read.
def _fp32_precision(backend: str, op: str) -> tuple[Callable[[], Any], Callable[..., Any]]:
    get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    return partial(get, backend, op), partial(put, backend, op)


def _deterministic_algorithms() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _use_deterministic_algorithms(mode: bool, warn_only: bool) -> None:
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)


_DETERMINISTIC = _deterministic_algorithms, _use_deterministic_algorithms
_PRODUCT_FLAGS: dict[str, tuple[tuple[Callable[[], Any], Callable[..., Any]], ...]] = {
    "cpu": (
        _fp32_precision("mkldnn", "matmul"),
        _fp32_precision("mkldnn", "conv"),
        (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
        _DETERMINISTIC,
    ),
    "cuda": (
        _fp32_precision("cuda", "matmul"),
        _fp32_precision("cuda", "conv"),
        *(
            (getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}"))
            for name in (
                "cublas_allow_fp16_reduced_precision_reduction",
                "cublas_allow_bf16_reduced_precision_reduction",
                "cublas_allow_fp16_accumulation",
                "cudnn_enabled",
                "cudnn_deterministic",
            )
        ),
        _DETERMINISTIC,
    ),
}
ProductFlags = tuple[Any, ...]


def product_flags(device_type: str) -> ProductFlags:
    """Return the flags that decide how a device computes products; none of an unknown device."""
    return tuple([get() for get, _ in _PRODUCT_FLAGS.get(device_type, ())])


def in_tf32(flags: ProductFlags, device_type: str, is_convolution: bool) -> bool:
    """Whether float32 products of a device run in TF32 under these flags."""
    return device_type == "cuda" and flags[1 if is_convolution else 0] == "tf32"


@contextmanager
def under_product_flags(device_type: str, flags: ProductFlags) -> Iterator[None]:
    """Set the flags within a `with` block."""
    current = product_flags(device_type)
    try:
        _set_product_flags(device_type, flags)
        yield
    finally:
        _set_product_flags(device_type, current)


def _set_product_flags(device_type: str, flags: ProductFlags) -> None:
    for (_, put), value in zip(_PRODUCT_FLAGS.get(device_type, ()), flags, strict=True):
        put(*value) if isinstance(value, tuple) else put(value)


def default_saved_tensor_hooks() -> Any:
    """Return the pack and unpack hooks for all tensors that are saved now, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def saved_tensor_hooks_are_disabled() -> bool:
    """Whether code has disabled default saved-tensor hooks; entering them then raises."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None


_DISABLE: Any = torch.autograd.graph.disable_saved_tensors_hooks


def is_raised_by_disabling_hooks(error: BaseException) -> bool:
    """Whether an error comes from `disable_saved_tensors_hooks`, or was raised while handling it.

    It raises if default hooks are active. `torch.func.grad`, `vjp` and the like use it. Its message
    is the caller's.
    """
    cause: BaseException | None = error
    while cause is not None:
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            last = frame
        if cause.__traceback__ is not None and last.f_code is _DISABLE.__wrapped__.__code__:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


@contextmanager
def unnoticed_saved_tensor_hooks(
    pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> Iterator[None]:
    """Enter default saved-tensor hooks within a `with` block, which checkpoints look through.

    From torch 2.14 on a selective checkpoint warns if it sees hooks, because they do not see the
    tensors that it caches. Checkpoints mark their own hooks like this.
    """
    hook: Any = pack
    hook._checkpoint_internal, hook._user_hooks = True, default_saved_tensor_hooks()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        hook._user_hooks = None  # the graph refers to the hook


class SavedByCheckpoint(NamedTuple):
    """A tensor that a checkpoint keeps alive until backward.

    Attributes:
        handle: Autograd's handle of the tensor, or the tensor itself.
        op: The op that computed the tensor, if a selective checkpoint has cached it.
        is_input: Whether it is an argument of the checkpointed function.
    """

    handle: Any
    op: OpOverload | None = None
    is_input: bool = False


def checkpoint_of(unpack_hook: Any) -> Any:
    """Return the checkpoint, not a reentrant one, whose unpack hook this is; None of others."""
    pending = [unpack_hook]
    while pending:
        value = pending.pop()
        if isinstance(value, torch.utils.checkpoint._CheckpointFrame):
            return value
        # With `debug=True` the hook calls another one.
        if isinstance(value, FunctionType) and value.__module__ == "torch.utils.checkpoint":
            pending += cell_contents(value)
    return None


def saved_by_checkpoint(checkpoint: Any) -> Iterator[SavedByCheckpoint]:
    """Yield the tensors that `checkpoint_of` keeps: inputs, cached outputs, random states.

    Also tensors that the checkpointed function refers to by its closure. Modules have their own.
    """
    if hasattr(checkpoint, "saved_args"):
        handles = [arg for arg in checkpoint.saved_args if isinstance(arg, SavedTensor)]
    else:  # before torch 2.13
        handles = checkpoint.input_saver.grad_fn._raw_saved_tensors
    for handle in handles:
        yield SavedByCheckpoint(handle, is_input=True)
    seen: set[int] = set()
    pending: list[tuple[Any, OpOverload | None]] = [(checkpoint.recompute_fn, None)]
    while pending:
        value, op = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        inner: Iterable[Any] = ()
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter):
                yield SavedByCheckpoint(value, op)
        elif isinstance(value, FunctionType):
            inner = cell_contents(value)
        elif isinstance(value, partial):
            inner = [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, dict):
            pending += [(v, k if isinstance(k, OpOverload) else op) for k, v in value.items()]
        elif isinstance(value, (list, tuple, set)):
            inner = value
        elif isinstance(value, torch.utils.checkpoint._CachedTorchDispatchMode):
            inner = [value.storage]
        elif isinstance(value, torch.utils.checkpoint._VersionWrapper):
            inner = [value.val]
        pending += [(each, op) for each in inner]


def unpacked(handle: Any) -> Tensor | None:
    """Return what autograd's handle has saved, with its `grad_fn`.

    In torch 2.11 only a node unpacks what has hooks: return None.
    """
    if hasattr(handle, "unpack"):
        return handle.unpack()
    return handle.data if handle.unpack_hook is None else None


def cell_contents(function: FunctionType) -> list[Any]:
    """Return the values of a function's closure. A cell is empty until its variable is assigned."""
    contents = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            contents.append(cell.cell_contents)
    return contents


def creation_meta(view: Tensor) -> str:
    """Return how a view was made; "DEFAULT" if autograd allows it to be modified.

    No public function returns this: an in-place operation only raises.
    """
    return torch._C._autograd._get_creation_meta(view).name


# Tensors and memory.


def has_torch_dispatch(tensor: Tensor) -> bool:
    """Whether the tensor's type has a `__torch_dispatch__`, which sees every operation."""
    return type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def is_functional_or_zero(tensor: Tensor) -> bool:
    """Whether the tensor is wrapped by functionalization, or is a ZeroTensor."""
    return torch._is_functional_tensor(tensor) or tensor._is_zerotensor()


class WeakTensor(weakref.ref[Tensor]):
    """A weak reference to a tensor, like `torch.utils.weak.TensorWeakRef`, which takes longer.

    A tensor that outlives its Python object gets another one, for which the reference still holds.
    """

    __slots__ = ()

    def __call__(self) -> Tensor | None:
        tensor = super().__call__()
        if tensor is not None:
            tensor._fix_weakref()  # type: ignore[attr-defined]
        return tensor


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return an id that all Python objects of one storage share.

    `data_ptr` is not an id: it is 0 for every empty storage.
    """
    return storage._cdata


def storage_of_weak_reference(cdata: int) -> torch.UntypedStorage:
    """Return the storage that a StorageWeakRef refers to, which must not have been freed."""
    return torch.UntypedStorage._new_with_weak_ptr(cdata)


def coo_tensors(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a sparse tensor's indices and values. The public methods raise if not coalesced."""
    return tensor._indices(), tensor._values()


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the current stream of a GPU, always the same object for a stream.

    `torch.cuda.current_stream` makes a new object at each call.
    """
    if torch.compiler.is_dynamo_compiling():  # Dynamo supports only the public function
        return torch.cuda.current_stream(device)
    key = torch._C._cuda_getCurrentStream(device.index)
    stream = _streams.get(key)
    if stream is None:
        number, index, kind = key
        stream = torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)
        stream = _streams.setdefault(key, stream)  # another thread may have been first
    return stream


_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def function_modes() -> list[torch.overrides.TorchFunctionMode]:
    """Return the modes that see this thread's calls, except that of a default device."""
    if len_torch_function_stack() == 0:
        return []
    modes = torch.overrides._get_current_function_mode_stack()
    return [mode for mode in modes if not isinstance(mode, DeviceContext)]


def remove_function_mode(mode: torch.overrides.TorchFunctionMode) -> None:
    """Remove a function mode that is active in this thread, even if others were entered after it.

    Leaving a mode removes the one that was entered last, whichever it is.
    """
    if mode not in torch.overrides._get_current_function_mode_stack():
        return
    later = []
    while (last := torch.overrides._pop_mode()) is not mode:
        later.append(last)
    for each in reversed(later):
        torch.overrides._push_mode(each)


# Compilers, tracers, profilers.


def is_exporting() -> bool:
    """Whether torch.export traces.

    Before torch 2.13 the public function returns True for everything that Dynamo traces.
    """
    return torch.compiler._is_exporting_flag


def is_transformed() -> bool:
    """Whether operations run under a tracer, a compiler or a `torch.func` transform."""
    return (
        are_functorch_transforms_active()
        or torch.compiler._is_compiling_flag
        or jit_tracing_state() is not None
    )


def is_undisturbed() -> bool:
    """Whether nothing else sees the operations of this thread: no mode, tracer or transform.

    A compiler traces under a dispatch mode.
    """
    return not (
        len_torch_function_stack()
        or len_torch_dispatch_stack()
        or are_functorch_transforms_active()
        or jit_tracing_state() is not None
    )


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was compiled, by `torch.compile(module)` or `module.compile()`."""
    return is_optimized_module(module) or module._compiled_call_impl is not None


def is_optimized_module(module: nn.Module) -> bool:
    """Whether a module is the result of `torch.compile(module)`."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def has_activation_memory_budget() -> bool:
    """Whether the compiler must save less than its default, which recomputes only what is free."""
    return torch._functorch.config.activation_memory_budget < 1


# Whether PyTorch's profiler is running: another one cannot be started.
profiler_is_running: Callable[[], bool] = torch._C._autograd._profiler_enabled


def op_name(op: OpOverload) -> str:
    """Return an op's name without namespace and overload."""
    return op._opname


# Modules: the public methods return copies, or run a module's own `__getattr__`.


CALL = "_call_impl"  # the method that `nn.Module.__call__` runs


def own_parameters(module: nn.Module) -> Mapping[str, Tensor | None]:
    """Return a module's own parameters, without running parametrizations.

    Those of a replica of `nn.DataParallel` are tensors that were copied from the parameters.
    """
    if is_replica(module):
        return {**module._parameters, **vars(module)["_former_parameters"]}
    return module._parameters


def is_replica(module: nn.Module) -> bool:
    """Whether `nn.DataParallel` has made the module, for one of its devices."""
    return "_former_parameters" in vars(module)


def has_children(module: nn.Module) -> bool:
    """Whether a module has modules inside."""
    return bool(module._modules)


def forward_hooks(module: nn.Module) -> MutableMapping[int, Any]:
    """Return a module's forward hooks, in the order in which they run."""
    return module._forward_hooks


def forward_pre_hooks(module: nn.Module) -> MutableMapping[int, Any]:
    """Return a module's forward pre-hooks, in the order in which they run."""
    return module._forward_pre_hooks


def has_global_forward_hooks() -> bool:
    """Whether forward hooks of all modules are registered; they run before a module's own."""
    return bool(torch.nn.modules.module._global_forward_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has backward hooks, also deprecated ones on the node of its output."""
    return bool(module._backward_hooks or nn.modules.module._global_backward_hooks)


# Hooks on the gradient of a tensor that is not a leaf.


def gradient_hooks(tensor: Tensor) -> MutableMapping[int, Any] | None:
    """Return a tensor's hooks; None if none was ever registered."""
    return tensor._backward_hooks


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether something asks for the gradient of a tensor."""
    return bool(tensor._backward_hooks) or tensor.retains_grad


def accumulation_hooks(tensor: Tensor) -> MutableMapping[int, Any] | None:
    """Return an autograd leaf's hooks that run after its gradient is accumulated, or None."""
    return tensor._post_accumulate_grad_hooks


class _FirstHook(OrderedDict[int, Any]):
    """The hooks of a tensor, which does not have any yet.

    When `Tensor.register_hook` makes a tensor's dictionary of hooks, it passes the dictionary to
    the tensor's node. This one is made before, and is passed on when the first hook is added.
    """

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor: weakref.ref[Tensor] | None = weakref.ref(tensor)

    def __setitem__(self, key: int, hook: Any) -> None:
        tensor = None if self._tensor is None else self._tensor()
        self._tensor = None
        if tensor is not None and tensor.grad_fn is not None:
            tensor.grad_fn._register_hook_dict(tensor)
        super().__setitem__(key, hook)


def future_gradient_hooks(tensor: Tensor) -> MutableMapping[int, Any]:
    """Return the dictionary of all hooks of a tensor, also of those that are registered later.

    The dictionary may outlive the tensor, and then tells whether hooks were registered. A tensor
    has one such dictionary, which all callers share: another one would hide later hooks from them.
    """
    hooks = gradient_hooks(tensor)
    if hooks is None:
        tensor._backward_hooks = hooks = _FirstHook(tensor)
    return hooks


def node_class(function: type[torch.autograd.Function]) -> Any:
    """Return the class of the autograd nodes of a Function."""
    return function._backward_cls
