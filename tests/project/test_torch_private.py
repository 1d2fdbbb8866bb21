"""PyTorch's private names: each still means what the package assumes, and one module has them.

After an update of torch, the ids of the failing cases list what changed.
"""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

import inplace_ops
from inplace_ops import _torch_private as private
from inplace_ops.recompute.norms import NORMS
from inplace_ops.recompute.operations import OPERATIONS
from inplace_ops.recompute.views import VIEWS

PACKAGE = Path(inplace_ops.__file__).parent
TESTS = Path(__file__).parents[1]
ATEN = torch.ops.aten


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


X = torch.randn(2)
MODULE = nn.Linear(2, 2)


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


class Identity(torch.autograd.Function):
    """Passes incoming gradients to a function."""

    receive: Callable[[Tensor], Any] = print

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Identity.receive(grad)
        return grad


def in_backward(read: Callable[[], Any]) -> Any:
    """Return what `read` returns inside of a backward."""
    found = []
    y = leaf(2).sin()
    y.register_hook(lambda grad: found.append(read()))
    y.sum().backward()
    return found[0]


def of_batched_gradient(read: Callable[[Tensor], Any]) -> Any:
    found = []
    Identity.receive = lambda grad: found.append(read(grad))
    x = leaf(2)
    torch.autograd.grad(Identity.apply(x), x, torch.eye(2), is_grads_batched=True)
    return found[0]


def inside(transform: Callable[..., Any], read: Callable[[Tensor], Any]) -> tuple[Tensor, Any]:
    """Return the tensor that a transform passes to its function, and what `read` returns there."""
    found = []

    def inner(x: Tensor) -> Tensor:
        found.append((x, read(x)))
        return x.sin().sum()

    transform(inner)(torch.randn(3, 2))
    return found[0]


def traced(read: Callable[[], Any]) -> Any:
    found = []

    def program(x: Tensor) -> Tensor:
        found.append(read())
        return x.sin()

    torch.jit.trace(program, X, check_trace=False)
    return found[0]


def exported(read: Callable[[], Any]) -> Any:
    found = []

    class Program(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found.append(read())
            return x.sin()

    torch.export.export(Program(), (X,), strict=False)
    return found[0]


def after_backward_hook(x: Tensor) -> Tensor:
    """Return the output of a module that has a full backward hook."""
    module = nn.Identity()
    module.register_full_backward_hook(lambda *_: None)
    return module(x)


def written_in_part() -> Tensor:
    base = leaf(4).clone()
    base[1:].mul_(2)
    return base


def module_with(register: Callable[[nn.Module], Any], kind: type[nn.Module] = nn.Linear) -> Any:
    module = kind(2, 2)
    register(module)
    return module


def disabled_hooks() -> Any:
    return torch.autograd.graph.disable_saved_tensors_hooks("not here")


# By name: a context manager, under which the function is true; outside of it is not.
WHILE: dict[str, Callable[[], Any]] = {
    "default_saved_tensor_hooks": save_on_cpu,
    "has_activation_memory_budget": lambda: functorch_config.patch(activation_memory_budget=0.5),
    "has_global_forward_hooks": lambda: nn.modules.module.register_module_forward_hook(
        lambda *_: None
    ),
    "len_torch_dispatch_stack": lambda: FlopCounterMode(display=False),
    "len_torch_function_stack": lambda: torch.device("cpu"),
    "profiler_is_running": torch.autograd.profiler.profile,
    "saved_tensor_hooks_are_disabled": disabled_hooks,
}

# By name: arguments for which a function is true, and arguments for which it is false.
HOLDS: dict[str, Callable[[], tuple[list[Any], list[Any]]]] = {
    "has_children": lambda: ([nn.Sequential(MODULE)], [MODULE]),
    "has_torch_dispatch": lambda: ([Wrapper(X)], [X, nn.Parameter(X)]),
    "is_compiled": lambda: (
        [
            torch.compile(nn.Linear(2, 2), backend="eager"),
            module_with(lambda m: m.compile(backend="eager")),
        ],
        [MODULE],
    ),
    "is_functional_or_zero": lambda: (
        [torch._efficientzerotensor(2), torch._to_functional_tensor(X)],
        [X],
    ),
    "is_functorch_wrapped_tensor": lambda: ([inside(torch.func.grad, id)[0]], [X]),
    "is_optimized_module": lambda: (
        [torch.compile(nn.Linear(2, 2), backend="eager")],
        [module_with(lambda m: m.compile(backend="eager"))],
    ),
    "is_traceable_wrapper_subclass": lambda: ([Wrapper(X)], [X]),
}

# By name: nodes of this type.
NODES: dict[str, Callable[[], Any]] = {
    "ACCUMULATE_GRAD": lambda: leaf(4).clone().grad_fn.next_functions[0][0],
    "ADD": lambda: (leaf(4) + 1).grad_fn,
    "BACKWARD_HOOK": lambda: after_backward_hook(leaf(4)).grad_fn,
    "CAT": lambda: torch.cat([leaf(4), leaf(4)]).grad_fn,
    "CLONE": lambda: leaf(4).clone().grad_fn,
    "COPY_SLICES": lambda: written_in_part().grad_fn,
    "REPEAT": lambda: leaf(4).repeat(2).grad_fn,
    "SUB": lambda: (leaf(4) - 1).grad_fn,
    "TO_COPY": lambda: leaf(4).double().grad_fn,
}

SPLIT = leaf(4, 3).double().split([1, 3])
TREE = {"a": [1, (2,)], "b": 3}

# By name: pairs of equal values.
EQUAL: dict[str, Callable[[], list[tuple[Any, Any]]]] = {
    "BatchNorm": lambda: [
        ([isinstance(m(2), private.BatchNorm) for m in NORM_MODULES], [True, True, False])
    ],
    "InstanceNorm": lambda: [
        ([isinstance(m(2), private.InstanceNorm) for m in NORM_MODULES], [False, False, True])
    ],
    "NOT_RECOMPUTED": lambda: [(missing(private.NOT_RECOMPUTED), [])],
    "TRACED_VIEWS": lambda: [(missing(private.TRACED_VIEWS), [])],
    "OpOverload": lambda: [(isinstance(ATEN.sin.default, private.OpOverload), True)],
    "are_functorch_transforms_active": lambda: [
        (inside(torch.func.grad, lambda _: private.are_functorch_transforms_active())[1], True),
        (private.are_functorch_transforms_active(), False),
    ],
    "creation_meta": lambda: [
        (private.creation_meta(leaf(4).clone()[1:]), "DEFAULT"),
        (private.creation_meta(leaf(4).clone().unbind()[0]) == "DEFAULT", False),
    ],
    "forward_hooks": lambda: [
        (len(private.forward_hooks(hooked())), 1),
        (len(private.forward_hooks(MODULE)), 0),
    ],
    "forward_pre_hooks": lambda: [
        (len(private.forward_pre_hooks(hooked())), 2),
        (len(private.forward_pre_hooks(MODULE)), 0),
    ],
    "function_of": lambda: [
        (private.function_of(type(Identity.apply(leaf(2)).grad_fn)), Identity),
        (private.function_of(type(leaf(2).sin().grad_fn)), None),
    ],
    "is_exporting": lambda: [
        (exported(private.is_exporting), True),
        (private.is_exporting(), False),
    ],
    "is_legacy_batchedtensor": lambda: [
        (of_batched_gradient(private.is_legacy_batchedtensor), True),
        (private.is_legacy_batchedtensor(X), False),
    ],
    "is_named": lambda: [
        (private.is_named(leaf(2).sin().grad_fn, "SinBackward0"), True),
        (private.is_named(leaf(2).cos().grad_fn, "SinBackward0"), False),
    ],
    "is_transformed": lambda: [
        (private.is_transformed(), False),
        (inside(torch.vmap, lambda _: private.is_transformed())[1], True),
        (traced(private.is_transformed), True),
    ],
    "jit_tracing_state": lambda: [
        (traced(private.jit_tracing_state) is None, False),
        (private.jit_tracing_state(), None),
    ],
    "op_name": lambda: [(private.op_name(ATEN.sin.default), "sin")],
    "output_device": lambda: [
        (private.output_device(y.grad_fn, i), y.device) for i, y in enumerate(SPLIT)
    ],
    "output_dtype": lambda: [
        (private.output_dtype(y.grad_fn, i), torch.float64) for i, y in enumerate(SPLIT)
    ],
    "output_shape": lambda: [
        (private.output_shape(y.grad_fn, i), y.shape) for i, y in enumerate(SPLIT)
    ],
    "running_node": lambda: [
        (type(in_backward(private.running_node)).__name__, "SinBackward0"),
        (private.running_node(), None),
    ],
    "tree_leaves": lambda: [(private.tree_leaves(TREE), [1, 2, 3])],
    "tree_map": lambda: [(private.tree_map(lambda n: -n, TREE), {"a": [-1, (-2,)], "b": -3})],
}
NORM_MODULES = (nn.BatchNorm2d, nn.SyncBatchNorm, nn.InstanceNorm3d)


def missing(names: Iterable[str]) -> list[str]:
    return [name for name in names if not hasattr(torch._C._functions, name)]


def hooked() -> nn.Module:
    """Return a module with one forward hook, and two hooks before."""
    module = module_with(lambda m: m.register_forward_hook(lambda *_: None))
    for _ in range(2):
        module.register_forward_pre_hook(lambda *_: None)
    return module


CHECKS: dict[str, Callable[[], None]] = {}  # the other names


def checks(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a check of these names."""

    def register(check: Callable[[], None]) -> Callable[[], None]:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return register


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


@checks("sequence_number", "next_sequence_number", "LEAF_SEQUENCE_NUMBER")
def check_sequence_numbers() -> None:
    number = private.next_sequence_number()
    y = leaf(2).sin()
    assert private.sequence_number(y.grad_fn) == number
    assert private.next_sequence_number() == number + 1
    parameter, _ = y.grad_fn.next_functions[0]
    assert private.sequence_number(parameter) == private.LEAF_SEQUENCE_NUMBER


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


@checks("dispatch_keys")
def check_dispatch_keys() -> None:
    x = torch.randn(2)
    others = [torch.empty(2, device="meta"), inside(torch.vmap, id)[0]]
    number = private.dispatch_keys(x).raw_repr()
    assert private.dispatch_keys(torch.randn(3)).raw_repr() == number
    assert all(private.dispatch_keys(other).raw_repr() != number for other in others)


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


@checks("storage_id", "storage_of_weak_reference")
def check_storages() -> None:
    x = torch.randn(2)
    same, other = x[1:].untyped_storage(), torch.randn(2).untyped_storage()
    storage = x.untyped_storage()
    assert private.storage_id(storage) == private.storage_id(same) != private.storage_id(other)
    again = private.storage_of_weak_reference(StorageWeakRef(storage).cdata)
    assert again.data_ptr() == storage.data_ptr()


@checks("in_tf32")
def check_in_tf32() -> None:
    for device_type in ("cpu", "cuda"):
        flags = private.product_flags(device_type)
        assert not private.in_tf32(flags, device_type, is_convolution=False)
    assert private.in_tf32(("none", "tf32"), "cuda", is_convolution=True)
    assert not private.in_tf32(("none", "tf32"), "cuda", is_convolution=False)
    assert not private.in_tf32(("tf32", "tf32"), "cpu", is_convolution=False)


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


@checks("has_backward_hooks")
def check_backward_hooks() -> None:
    module = nn.Linear(2, 2)
    assert not private.has_backward_hooks(module)
    with nn.modules.module.register_module_full_backward_hook(lambda *_: None):
        assert private.has_backward_hooks(module)
    nn.modules.module._global_is_full_backward_hook = None  # allows the other kind again
    module.register_backward_hook(lambda *_: None)
    assert private.has_backward_hooks(module)


@checks("is_undisturbed")
def check_undisturbed() -> None:
    assert private.is_undisturbed()
    for surroundings in (FlopCounterMode(display=False), torch.device("cpu")):
        with surroundings:
            assert not private.is_undisturbed()
    seen: list[bool] = []

    def see(x: Tensor) -> Tensor:
        seen.append(private.is_undisturbed())
        return x + 1

    torch.func.vmap(see)(torch.ones(2))
    torch.jit.trace(see, torch.ones(2), check_trace=False)
    assert seen == [False, False]


@checks("has_gradient_hooks")
def check_gradient_hooks() -> None:
    first, second = leaf(4) * 1, leaf(4) * 1
    assert not private.has_gradient_hooks(first)
    first.register_hook(print)
    second.retain_grad()
    assert private.has_gradient_hooks(first)
    assert private.has_gradient_hooks(second)


@checks("node_class")
def check_node_class() -> None:
    class Double(Identity):
        pass

    node = Double.apply(leaf(4)).grad_fn
    assert type(node) is private.node_class(Double)
    private.node_class(Double).register_hook = lambda self, hook: "replaced"
    assert node.register_hook(print) == "replaced"


# By name: a test that fails if the name means something else.
ELSEWHERE = {
    **dict.fromkeys(
        ("ProductFlags", "product_flags", "under_product_flags"),
        "recompute/test_engine_products.py::test_product_runs_under_the_flags_of_forward",
    ),
    **dict.fromkeys(
        ("NO_PASS", "running_pass"),
        "recompute/test_engine_products.py::test_each_product_runs_at_most_once_more",
    ),
    "call_after_pass": "recompute/test_engine_products.py::test_kept_value_dies_with_the_pass",
    "future_gradient_hooks": (
        "recompute/test_engine_hooks.py::test_hook_sees_the_gradient_of_every_consumer"
    ),
    "gradient_hooks": "recompute/test_engine_hooks.py::test_hooks_around_an_in_place_activation",
    "accumulation_hooks": (
        "conversion/test_state.py::test_state_is_as_before_whatever_forward_writes"
    ),
    **dict.fromkeys(
        (
            *("SavedByCheckpoint", "SavedTensor", "cell_contents", "checkpoint_of"),
            *("saved_by_checkpoint", "unnoticed_saved_tensor_hooks", "unpacked"),
        ),
        "conversion/test_saved_bytes.py::test_checkpoints_count_the_memory_that_they_keep",
    ),
    "GRAPH_INPUTS": "torch_features/test_compile.py::test_full_graph_matches_reference",
    "is_raised_by_disabling_hooks": (
        "conversion/test_state.py::test_models_that_disable_saved_tensor_hooks_are_measured"
    ),
    "check": "ops/test_direct_calls.py::test_unsupported_casts_are_rejected",
    "unwrap_if_dead": (
        "autograd/test_functorch.py::test_tensor_that_outlives_its_transform_matches_pytorch"
    ),
}


def test_tests_elsewhere_exist() -> None:
    for test in ELSEWHERE.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (TESTS / file).read_text()


TABLES = (WHILE, HOLDS, NODES, EQUAL, CHECKS)


@pytest.mark.parametrize("name", [name for table in TABLES for name in table])
@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_private_name_means_what_the_package_assumes(name: str) -> None:
    meant = getattr(private, name)
    if name in WHILE:
        assert not meant()
        with WHILE[name]():
            assert meant()
        assert not meant()
    elif name in HOLDS:
        for values, expected in zip(HOLDS[name](), (True, False), strict=True):
            assert [bool(meant(value)) for value in values] == [expected] * len(values)
    elif name in NODES:
        assert private.is_named(NODES[name](), meant)
    elif name in EQUAL:
        for actual, wanted in EQUAL[name]():
            assert actual == wanted
    else:
        CHECKS[name]()


def test_every_private_name_has_a_check() -> None:
    imported = {"Any", "Callable", "Mapping", "MutableMapping", "Node", "OrderedDict", "Tensor"}
    imported |= {"annotations", "nn", "operator", "torch", "traceback", "partial", "suppress"}
    imported |= {"FunctionType", "Iterable", "Iterator", "NamedTuple", "contextmanager", "weakref"}
    names = {name for name in vars(private) if not name.startswith("_")} - imported
    assert names == {name for table in (*TABLES, ELSEWHERE) for name in table}


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
RULES = {f"recompute/{name}.py" for name in ("operations", "views", "norms")}
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
            is_rule = used in NODE_TYPES and name in RULES
            if not (used in own or used in READ_IN_PLACE or is_saved or is_rule):
                found.append(f"{name}: {used}")
    assert found == []
