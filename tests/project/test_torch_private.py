"""PyTorch's private names: each still means what the package assumes, and one module has them.

After an update of torch, the ids of the failing cases list what changed.
"""

from __future__ import annotations

import ast
import copy
import gc
import importlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import inplace_ops
from inplace_ops import _torch_private as private
from inplace_ops.recompute import nodes
from inplace_ops.recompute.norms import NORMS
from inplace_ops.recompute.operations import OPERATIONS
from inplace_ops.recompute.views import VIEWS

PACKAGE = Path(inplace_ops.__file__).parent
CHECKS: dict[str, Callable[[], None]] = {}  # by the names of `_torch_private.py`


def checks(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a check of these names of `_torch_private.py`."""

    def register(check: Callable[[], None]) -> Callable[[], None]:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return register


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


class Wrapper(Tensor):
    """A tensor that consists of another one, and sees every operation."""

    @staticmethod
    def __new__(cls, part: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, part.shape, dtype=part.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["part"], None

    @classmethod
    def __torch_dispatch__(cls, *arguments: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def __tensor_unflatten__(*arguments: Any) -> Tensor:
        raise NotImplementedError


def recorded_by_hook(read: Callable[[], Any]) -> Any:
    """Return what `read` returns inside of a backward."""
    found = []
    y = leaf(2).sin()
    y.register_hook(lambda grad: found.append(read()))
    y.sum().backward()
    return found[0]


def both_states(active: Any, is_active: Callable[[], bool]) -> None:
    """Check that `is_active` is true under the context manager `active`, and only there."""
    assert not is_active()
    with active:
        assert is_active()
    assert not is_active()


def during_vmap(read: Callable[[Tensor], Any]) -> Any:
    found = []

    def inner(x: Tensor) -> Tensor:
        found.append((x, read(x)))
        return x.sin()

    torch.vmap(inner)(torch.randn(3, 2))
    return found[0]


def traced(read: Callable[[], Any]) -> Any:
    found = []

    def program(x: Tensor) -> Tensor:
        found.append(read())
        return x.sin()

    torch.jit.trace(program, torch.randn(2), check_trace=False)
    return found[0]


@checks("are_functorch_transforms_active", "is_functorch_wrapped_tensor", "unwrap_if_dead")
def check_functorch() -> None:
    found = []

    def inner(x: Tensor) -> Tensor:
        found.append(x)
        assert private.are_functorch_transforms_active()
        return x.sin().sum()

    x = torch.randn(2)
    torch.func.grad(inner)(x)
    assert not private.are_functorch_transforms_active()
    assert private.is_functorch_wrapped_tensor(found[0])
    unwrapped = private.unwrap_if_dead(found[0])
    assert not private.is_functorch_wrapped_tensor(unwrapped)
    assert torch.equal(unwrapped, x)


@checks("is_legacy_batchedtensor")
def check_legacy_batched() -> None:
    found = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            found.append(private.is_legacy_batchedtensor(grad))
            return grad

    x = leaf(2)
    torch.autograd.grad(Identity.apply(x), x, torch.eye(2), is_grads_batched=True)
    assert found == [True]
    assert not private.is_legacy_batchedtensor(x)


@checks("set_grad_enabled")
def check_set_grad_enabled() -> None:
    private.set_grad_enabled(False)
    try:
        assert not torch.is_grad_enabled()
    finally:
        private.set_grad_enabled(True)


@checks("DisableTorchFunction")
def check_disable_torch_function() -> None:
    class Subclass(Tensor):
        pass

    x = torch.randn(2).as_subclass(Subclass)
    with private.DisableTorchFunction(), torch.device("meta"):
        assert type(x + 1) is Tensor
        assert torch.ones(1).device.type == "cpu"  # a mode has no effect either


@checks("OpOverload", "op_name")
def check_op_overload() -> None:
    assert isinstance(torch.ops.aten.sin.default, private.OpOverload)
    assert private.op_name(torch.ops.aten.sin.default) == "sin"


@checks("check")
def check_check() -> None:
    private.check(True, lambda: "unused")
    with pytest.raises(RuntimeError, match="the message"):
        private.check(False, lambda: "the message")


@checks("tree_leaves", "tree_map")
def check_trees() -> None:
    tree = {"a": [1, (2,)], "b": 3}
    assert private.tree_leaves(tree) == [1, 2, 3]
    assert private.tree_map(lambda leaf: -leaf, tree) == {"a": [-1, (-2,)], "b": -3}


def after_backward_hook(x: Tensor) -> Tensor:
    """Return the output of a module that has a full backward hook."""
    module = nn.Identity()
    module.register_full_backward_hook(lambda *_: None)
    return module(x)


@checks("is_named", "ACCUMULATE_GRAD", "COPY_SLICES")
@checks("ADD", "BACKWARD_HOOK", "CAT", "CLONE", "REPEAT", "SUB", "TO_COPY")
def check_node_names() -> None:
    x = leaf(4)
    base = leaf(4).clone()
    base[1:].mul_(2)
    cases = {
        private.ADD: x + 1,
        private.BACKWARD_HOOK: after_backward_hook(x),
        private.CAT: torch.cat([x, x]),
        private.CLONE: x.clone(),
        private.COPY_SLICES: base,
        private.REPEAT: x.repeat(2),
        private.SUB: x - 1,
        private.TO_COPY: x.double(),
    }
    for name, y in cases.items():
        assert private.is_named(y.grad_fn, name)
    assert private.is_named(x.clone().grad_fn.next_functions[0][0], private.ACCUMULATE_GRAD)


@checks("UNSAFE_SPLITS")
def check_unsafe_splits() -> None:
    x = leaf(4)
    outputs = torch.unsafe_chunk(x, 2)[0], torch.unsafe_split_with_sizes(x, [1, 3])[0]
    assert {type(y.grad_fn).__name__ for y in outputs} == private.UNSAFE_SPLITS
    for y in outputs:
        assert y._base is None
        assert y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@checks("SYNC_BATCH_NORM")
def check_sync_batch_norm() -> None:
    """`recompute/nodes.py` knows in which order this Function saves its tensors."""
    function = torch.nn.modules._functions.SyncBatchNorm
    assert function._backward_cls.__name__ == private.SYNC_BATCH_NORM
    assert "save_for_backward(input, weight, mean, invstd, count" in inspect.getsource(function)


@checks("GRAPH_INPUTS")
def check_graph_inputs() -> None:
    """An input of a traced graph has one of these grad_fns, and another tensor has not."""
    names = []

    def backend(module: Any, inputs: Any) -> Any:
        return module.forward

    from functorch.compile import aot_function, nop

    def program(x: Tensor, y: Tensor) -> Tensor:
        names.append([type(t.grad_fn).__name__ for t in (x, y, x.sin())])
        return x.sin() + y

    aot_function(program, nop)(leaf(2), torch.randn(2))
    for of_leaf, of_constant, of_result in names:
        assert {of_leaf, of_constant} <= private.GRAPH_INPUTS
        assert of_result not in private.GRAPH_INPUTS
    assert names


@checks("function_of")
def check_function_of() -> None:
    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

    assert private.function_of(type(Identity.apply(leaf(2)).grad_fn)) is Identity
    assert private.function_of(type(leaf(2).sin().grad_fn)) is None


@checks("output_shape", "output_dtype", "output_device")
def check_output_metadata() -> None:
    first, second = leaf(4, 3).double().split([1, 3])
    for index, y in enumerate((first, second)):
        assert private.output_shape(y.grad_fn, index) == y.shape
        assert private.output_dtype(y.grad_fn, index) == torch.float64
        assert private.output_device(y.grad_fn, index) == torch.device("cpu")


@checks("sequence_number", "next_sequence_number", "LEAF_SEQUENCE_NUMBER")
def check_sequence_numbers() -> None:
    number = private.next_sequence_number()
    y = leaf(2).sin()
    assert private.sequence_number(y.grad_fn) == number
    assert private.next_sequence_number() == number + 1
    parameter, _ = y.grad_fn.next_functions[0]
    assert private.sequence_number(parameter) == private.LEAF_SEQUENCE_NUMBER


@checks("running_node")
def check_running_node() -> None:
    assert private.running_node() is None
    node = recorded_by_hook(private.running_node)
    assert type(node).__name__ == "SinBackward0"


@checks("running_pass", "NO_PASS")
def check_running_pass() -> None:
    passes = [recorded_by_hook(private.running_pass) for _ in range(2)]
    assert passes[0] != passes[1]
    assert private.NO_PASS not in passes
    assert private.running_pass() == private.NO_PASS


@checks("call_after_pass")
def check_call_after_pass() -> None:
    called: list[int] = []
    x = leaf(2)
    y = x.sin()
    y.register_hook(lambda grad: private.call_after_pass(lambda: called.append(len(called))))
    y.register_hook(lambda grad: called.append(-1))
    y.sum().backward()
    assert called == [-1, 1]


@checks("ProductFlags", "product_flags", "under_product_flags", "in_tf32")
def check_product_flags() -> None:
    """Each flag can be set to another value, and is restored."""
    for device_type in ("cpu", "cuda"):
        before = private.product_flags(device_type)
        assert before == private.product_flags(device_type)
        assert not private.in_tf32(before, device_type, is_convolution=False)
        for index, value in enumerate(before):
            other = OTHER_FLAGS.get(value, value) if isinstance(value, str) else None
            if isinstance(value, bool):
                other = not value
            elif isinstance(value, tuple):
                other = (not value[0], *value[1:])
            changed = (*before[:index], other, *before[index + 1 :])
            with private.under_product_flags(device_type, changed):
                assert private.product_flags(device_type) == changed, (device_type, index)
            assert private.product_flags(device_type) == before
    assert private.product_flags("meta") == ()
    assert private.in_tf32(("none", "tf32"), "cuda", is_convolution=True)
    assert not private.in_tf32(("none", "tf32"), "cuda", is_convolution=False)
    assert not private.in_tf32(("tf32", "tf32"), "cpu", is_convolution=False)


OTHER_FLAGS = {"none": "ieee", "ieee": "none", "tf32": "ieee"}


@checks("TorchDispatchMode")
def check_dispatch_mode() -> None:
    seen = []

    class Mode(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        leaf(2).sin()
    assert torch.ops.aten.sin.default in seen


@checks("creation_meta")
def check_creation_meta() -> None:
    x = leaf(4).clone()
    assert private.creation_meta(x[1:]) == "DEFAULT"
    assert private.creation_meta(x.unbind()[0]) != "DEFAULT"


@checks("dispatch_keys")
def check_dispatch_keys() -> None:
    x = torch.randn(2)
    others = [torch.empty(2, device="meta"), during_vmap(lambda x: x)[0]]
    number = private.dispatch_keys(x).raw_repr()
    assert private.dispatch_keys(torch.randn(3)).raw_repr() == number
    assert all(private.dispatch_keys(other).raw_repr() != number for other in others)


@checks("len_torch_dispatch_stack")
def check_dispatch_modes() -> None:
    both_states(FlopCounterMode(display=False), lambda: private.len_torch_dispatch_stack() == 1)


@checks("keyword_defaults")
def check_keyword_defaults() -> None:
    assert private.keyword_defaults(torch.ops.aten.add.Tensor) == (1,)
    assert private.keyword_defaults(torch.ops.aten.mul.Tensor) == ()


@checks("WeakTensor")
def check_weak_tensor() -> None:
    saved = torch.ones(2)
    product = leaf(2) * saved
    reference = private.WeakTensor(saved)
    assert reference() is saved
    del saved
    gc.collect()
    revived = product.grad_fn._saved_other  # autograd has kept the tensor alive
    found = reference()
    assert found is None or found is revived
    del product, revived, found
    gc.collect()
    assert reference() is None


@checks("has_torch_dispatch")
def check_torch_dispatch() -> None:
    x = torch.randn(2)
    assert private.has_torch_dispatch(Wrapper(x))
    assert not private.has_torch_dispatch(x)
    assert not private.has_torch_dispatch(nn.Parameter(x))


@checks("is_traceable_wrapper_subclass")
def check_flattened_subclass() -> None:
    x = torch.randn(2)
    assert private.is_traceable_wrapper_subclass(Wrapper(x))
    assert not private.is_traceable_wrapper_subclass(x)


@checks("is_functional_or_zero")
def check_functional_or_zero() -> None:
    x = torch.randn(2)
    assert not private.is_functional_or_zero(x)
    assert private.is_functional_or_zero(torch._efficientzerotensor(2))
    assert private.is_functional_or_zero(torch._to_functional_tensor(x))


@checks("storage_id", "storage_of_weak_reference")
def check_storages() -> None:
    x = torch.randn(2)
    same, other = x[1:].untyped_storage(), torch.randn(2).untyped_storage()
    storage = x.untyped_storage()
    assert private.storage_id(storage) == private.storage_id(same) != private.storage_id(other)
    again = private.storage_of_weak_reference(StorageWeakRef(storage).cdata)
    assert again.data_ptr() == storage.data_ptr()


@checks("coo_tensors")
def check_coo_tensors() -> None:
    with torch.sparse.check_sparse_tensor_invariants():
        sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,))
    indices, values = private.coo_tensors(sparse)
    assert indices.tolist() == [[0, 0]]
    assert values.tolist() == [1.0, 2.0]


@checks("function_modes", "remove_function_mode", "DeviceContext")
def check_function_modes() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        pass

    first, second, device = Mode(), Mode(), torch.device("cpu")
    assert private.function_modes() == []
    with device, first, second:
        assert private.function_modes() == [first, second]
    with first, second:
        private.remove_function_mode(first)
        assert torch.overrides._get_current_function_mode_stack() == [second]
        private.remove_function_mode(first)
        assert torch.overrides._get_current_function_mode_stack() == [second]
        torch.overrides._push_mode(first)  # for the `with` statement to leave
    assert torch.overrides._get_current_function_mode_stack() == []


@checks("current_stream")
def check_current_stream() -> None:
    if not torch.cuda.is_available():
        assert hasattr(torch._C, "_cuda_getCurrentStream") or torch.version.cuda is None
        return
    device = torch.device("cuda", torch.cuda.current_device())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert private.current_stream(device) == stream
        assert private.current_stream(device) is private.current_stream(device)


@checks("is_exporting")
def check_exporting() -> None:
    found = []

    class Program(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found.append(private.is_exporting())
            return x.sin()

    torch.export.export(Program(), (torch.randn(2),), strict=False)
    assert found
    assert all(found)
    assert not private.is_exporting()


@checks("is_transformed")
def check_transformed() -> None:
    assert not private.is_transformed()
    assert during_vmap(lambda x: private.is_transformed())[1]
    assert traced(private.is_transformed)


@checks("is_compiled", "is_optimized_module")
def check_compiled_modules() -> None:
    plain, optimized = nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager")
    compiled = copy.deepcopy(plain)
    compiled.compile(backend="eager")
    assert [private.is_compiled(m) for m in (plain, optimized, compiled)] == [False, True, True]
    assert private.is_optimized_module(optimized)
    assert not private.is_optimized_module(compiled)


@checks("has_activation_memory_budget")
def check_activation_memory_budget() -> None:
    import torch._functorch.config as config

    both_states(config.patch(activation_memory_budget=0.5), private.has_activation_memory_budget)


@checks("forward_hooks", "forward_pre_hooks", "has_children", "own_parameters")
def check_module_state() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    hook = module.register_forward_hook(lambda *_: None)
    pre_hook = module.register_forward_pre_hook(lambda *_: None)
    assert list(private.forward_hooks(module)) == [hook.id]
    assert list(private.forward_pre_hooks(module)) == [pre_hook.id]
    assert private.has_children(module)
    assert not private.has_children(module[0])
    assert private.own_parameters(module[0])["bias"] is module[0].bias


@checks("is_replica", "own_parameters")
def check_replicas() -> None:
    module = nn.Linear(2, 2)
    assert not private.is_replica(module)
    replica = module._replicate_for_data_parallel()
    copied = module.weight.clone()
    # As `nn.parallel.replicate`, which needs several GPUs.
    replicate = importlib.import_module("torch.nn.parallel.replicate")
    assert "replica._former_parameters[key] = param_copy" in inspect.getsource(replicate)
    replica.weight, replica._former_parameters = copied, {"weight": copied}
    assert private.is_replica(replica)
    assert private.own_parameters(replica)["weight"] is copied


@checks("CALL")
def check_call() -> None:
    class Counted(nn.Linear):
        pass

    calls = []
    setattr(Counted, private.CALL, lambda self, *args: calls.append(args))
    Counted(2, 2)(1, 2)
    assert calls == [(1, 2)]


@checks("has_global_forward_hooks")
def check_global_hooks() -> None:
    assert not private.has_global_forward_hooks()
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert private.has_global_forward_hooks()


@checks("has_backward_hooks")
def check_backward_hooks() -> None:
    module = nn.Linear(2, 2)
    assert not private.has_backward_hooks(module)
    with nn.modules.module.register_module_full_backward_hook(lambda *_: None):
        assert private.has_backward_hooks(module)
    nn.modules.module._global_is_full_backward_hook = None  # allows the other kind again
    module.register_backward_hook(lambda *_: None)
    assert private.has_backward_hooks(module)


@checks("gradient_hooks", "future_gradient_hooks")
def check_gradient_hooks() -> None:
    seen: list[Tensor] = []
    y = leaf(4).exp()
    assert private.gradient_hooks(y) is None
    future = private.future_gradient_hooks(y)
    assert future == {}
    first = y.register_hook(seen.append)
    second = y.register_hook(lambda grad: 2 * grad)
    assert [*future] == [first.id, second.id]
    assert private.gradient_hooks(y) is future
    z = y * 3
    del y  # the hooks stay on its node
    z.sum().backward()
    assert torch.equal(*seen, torch.full((4,), 3.0))
    second.remove()
    assert [*future] == [first.id]


@checks("future_gradient_hooks")
def check_hooks_of_a_detached_tensor() -> None:
    x = leaf(4)
    y = x.exp()
    total = y.sum()
    private.future_gradient_hooks(y)
    y.detach_().requires_grad_()
    y.register_hook(lambda grad: 3 * grad)
    total.backward()
    assert torch.equal(x.grad, x.exp())  # y is a leaf now: its hook is not that of its old node
    y.sum().backward()
    assert torch.equal(y.grad, torch.full((4,), 3.0))


@checks("node_class")
def check_node_class() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

    node = Double.apply(leaf(4)).grad_fn
    assert type(node) is private.node_class(Double)
    private.node_class(Double).register_hook = lambda self, hook: "replaced"
    assert node.register_hook(print) == "replaced"


@checks("BatchNorm", "InstanceNorm")
def check_norm_modules() -> None:
    assert isinstance(nn.BatchNorm2d(2), private.BatchNorm)
    assert isinstance(nn.SyncBatchNorm(2), private.BatchNorm)
    assert isinstance(nn.InstanceNorm3d(2), private.InstanceNorm)
    assert not isinstance(nn.InstanceNorm3d(2), private.BatchNorm)


@checks("NOT_RECOMPUTED", "TRACED_VIEWS")
def check_names_exist() -> None:
    for name in private.NOT_RECOMPUTED | private.TRACED_VIEWS:
        assert hasattr(torch._C._functions, name), name


@checks("jit_tracing_state")
def check_jit_tracing_state() -> None:
    assert traced(private.jit_tracing_state) is not None
    assert private.jit_tracing_state() is None


@checks("default_saved_tensor_hooks")
def check_saved_tensor_hooks() -> None:
    both_states(save_on_cpu(), lambda: private.default_saved_tensor_hooks() is not None)


@checks("saved_tensor_hooks_are_disabled", "is_raised_by_disabling_hooks")
def check_disabled_hooks() -> None:
    disabled = torch.autograd.graph.disable_saved_tensors_hooks("not here")
    both_states(disabled, private.saved_tensor_hooks_are_disabled)

    def disable() -> None:
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            pass

    transforms = (torch.func.grad(torch.sum), partial(torch.func.vjp, torch.sin))
    for call in (disable, *[partial(each, torch.ones(2)) for each in transforms]):
        with save_on_cpu(), pytest.raises(RuntimeError) as error:
            call()
        assert private.is_raised_by_disabling_hooks(error.value)
    for text in ("not here", "torch.func.grad don't yet support saved tensor hooks"):
        with pytest.raises(RuntimeError) as error:
            raise RuntimeError(text)
        assert not private.is_raised_by_disabling_hooks(error.value)


def cached_by_policy(*, is_cached: bool) -> Any:
    choice = CheckpointPolicy.MUST_SAVE if is_cached else CheckpointPolicy.PREFER_RECOMPUTE
    return partial(create_selective_checkpoint_contexts, lambda ctx, op, *a, **k: choice)


@checks("unnoticed_saved_tensor_hooks")
def check_unnoticed_hooks() -> None:
    packed = []
    with (
        warnings.catch_warnings(),
        private.unnoticed_saved_tensor_hooks(lambda t: packed.append(t) or t, lambda t: t),
    ):
        warnings.simplefilter("error")
        contexts = cached_by_policy(is_cached=True)
        checkpoint(torch.sin, leaf(4), use_reentrant=False, context_fn=contexts)
        assert not [tensor for tensor in packed if tensor.shape == (8,)]
        leaf(8).sin()
    assert [tensor for tensor in packed if tensor.shape == (8,)]


@checks("checkpoint_of", "saved_by_checkpoint", "SavedTensor", "SavedByCheckpoint", "cell_contents")
def check_checkpoints() -> None:
    """A checkpoint keeps its input, what its function refers to, cached outputs, random states."""
    mask, x, linear = torch.ones(4, 4), leaf(4, 4) * 1, nn.Linear(4, 4)
    logging.disable()  # with `debug=True` PyTorch logs each operation
    for arguments in ({"context_fn": cached_by_policy(is_cached=True)}, {"debug": True}):
        y = checkpoint(lambda v: (linear(v) * mask).sin(), x, use_reentrant=False, **arguments)
        assert private.checkpoint_of(x.grad_fn._raw_saved_other.unpack_hook) is None
        found = private.checkpoint_of(y.grad_fn._raw_saved_self.unpack_hook)
        kept = [*private.saved_by_checkpoint(found)]
        (saved,) = [each.handle for each in kept if each.is_input]
        assert isinstance(saved, private.SavedTensor)
        assert saved.data.data_ptr() == x.data_ptr()
        others = [each for each in kept if not each.is_input]
        assert mask in {each.handle for each in others}
        assert torch.get_rng_state().shape in {each.handle.shape for each in others}
        ops = {each.op for each in others if each.op is not None}
        cached = {
            torch.ops.aten.addmm.default,
            torch.ops.aten.mul.Tensor,
            torch.ops.aten.sin.default,
        }
        assert ops >= cached if "context_fn" in arguments else not ops
        assert not {*linear.parameters()} & {each.handle for each in others}
    logging.disable(logging.NOTSET)


@checks("accumulation_hooks")
def check_accumulation_hooks() -> None:
    x = leaf(2)
    assert not private.accumulation_hooks(x)
    handle = x.register_post_accumulate_grad_hook(lambda each: None)
    assert len(private.accumulation_hooks(x)) == 1
    handle.remove()
    assert not private.accumulation_hooks(x)


@checks("profiler_is_running")
def check_profiler() -> None:
    both_states(torch.autograd.profiler.profile(), private.profiler_is_running)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_private_name_means_what_the_package_assumes(name: str) -> None:
    CHECKS[name]()


def test_every_private_name_has_a_check() -> None:
    imported = {"Any", "Callable", "Mapping", "MutableMapping", "Node", "OrderedDict", "Tensor"}
    imported |= {"annotations", "nn", "operator", "torch", "traceback", "partial", "suppress"}
    imported |= {"FunctionType", "Iterable", "Iterator", "NamedTuple", "contextmanager", "weakref"}
    names = {name for name in vars(private) if not name.startswith("_")} - imported
    assert names == set(CHECKS)


def test_tensor_attributes_that_are_read_in_place() -> None:
    x = leaf(4).clone()
    view = x[1:]
    assert (x._version, x._is_view(), x._base) == (0, False, None)
    assert view._is_view()
    assert view._base is x
    view.mul_(2)
    assert x._version == 1
    assert forward_ad._current_level == -1
    with forward_ad.dual_level():
        assert forward_ad._current_level == 0


def test_saved_tensors_can_be_read_and_replaced() -> None:
    x = leaf(4)
    y = x.sin()
    assert y.grad_fn._saved_self is x
    raw = y.grad_fn._raw_saved_self
    assert raw.unpack_hook is None
    raw.register_hooks(lambda saved: 2, lambda two: x.detach() * 0 + two)
    assert raw.data == 2
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, torch.full_like(x, 2).cos())


# Node types that older versions of torch do not have, and the first version that has them.
ADDED: dict[str, str] = {}


@pytest.mark.parametrize("table", [OPERATIONS, VIEWS, NORMS], ids=["OPERATIONS", "VIEWS", "NORMS"])
def test_names_of_node_types_exist(table: dict[str, object]) -> None:
    """The message lists the names that this torch does not have."""
    functions = {"RecomputeFunctionBackward", private.BACKWARD_HOOK, private.SYNC_BATCH_NORM}
    missing = [n for n in table if n not in functions and not hasattr(torch._C._functions, n)]
    assert [name for name in missing if torch.__version__ >= ADDED.get(name, "")] == []


def private_names(path: Path) -> Iterator[str]:
    """Yield the private names of other code that a file uses, and the node types that it names."""
    tree = ast.parse(path.read_text())
    own = {"self", "cls"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            of_own = isinstance(node.value, ast.Name) and node.value.id in own
            if not node.attr.endswith("__") and not of_own:
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and not node.level and "torch" in str(node.module):
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            yield from (name for name in names if name.startswith("_") and name != "__future__")
        elif isinstance(node, ast.Constant) and node.value in NODE_TYPES:
            yield node.value


NODE_TYPES = {
    *dir(torch._C._functions),
    *(private.ACCUMULATE_GRAD, private.BACKWARD_HOOK, private.COPY_SLICES),
}
TABLES = {"_torch_private.py", "recompute/operations.py", "recompute/norms.py"}
READ_IN_PLACE = {"_version", "_base", "_is_view", "_current_level"}


def test_one_module_has_the_private_names() -> None:
    """Also the names of node types, except those of the tables of rules."""
    own = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
    found = []
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if name == "_torch_private.py":
            continue
        for used in private_names(path):
            is_saved = used.startswith(("_saved_", "_raw_saved_")) and name == "recompute/nodes.py"
            is_rule = used in NODE_TYPES and name in TABLES
            if not (used in own or used in READ_IN_PLACE or is_saved or is_rule):
                found.append(f"{name}: {used}")
    assert found == []


def test_engine_reads_saved_tensors_of_every_kind() -> None:
    """The accessors of nodes.py agree with PyTorch's own on a few nodes."""
    x, weight = leaf(2, 3, 4, 4), leaf(5, 3, 1, 1)
    node = F.conv2d(x, weight, padding=(1, 2)).grad_fn
    assert nodes.saved_tensor(node, "input") is x
    assert nodes.argument(node, "padding") == (1, 2)
    assert nodes.operation_name(node) == "Convolution"
    assert nodes.argument(x[..., -1].grad_fn, "index") == -1
