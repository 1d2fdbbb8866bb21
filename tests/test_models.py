"""Networks, most of other libraries: converted they save less and train the same.

With random weights. A few by default, all with INPLACE_OPS_MODELS=all (`make models`). Those whose
library is not installed are skipped.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from memory import largest_allocation
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from twins import random_like

import inplace_ops
from inplace_ops import saved_bytes
from inplace_ops.conversion.library import load
from inplace_ops.conversion.wiring import conversion_of

os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.gettempdir())

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own

ALL = os.environ.get("INPLACE_OPS_MODELS") == "all"
IMAGES, SMALL_IMAGES, PHOTOS = (2, 3, 128, 128), (2, 3, 64, 64), (4, 3, 224, 224)
TOKENS = (2, 16)
VOCABULARY = 100
MARGIN = 0.01  # over the limits

Gradients = list[Tensor | None]


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")  # unets.py


@dataclass(frozen=True)
class Network:
    """A network, and the shape of its input: images, or tokens.

    Attributes:
        name: LIBRARY:NAME, as `load` takes it.
        shape: Of the input.
        arguments: What the library's function takes, of transformers the configuration.
        in_ci: Whether it is tested by default.
    """

    name: str
    shape: tuple[int, ...] = SMALL_IMAGES
    arguments: Mapping[str, Any] = field(default_factory=dict)
    in_ci: bool = False

    def build(self) -> nn.Module:
        pytest.importorskip(self.name.partition(":")[0])
        return load(self.name, self.arguments).train()

    def inputs(self, dtype: torch.dtype = torch.float32) -> Tensor:
        if len(self.shape) == 2:
            return torch.randint(VOCABULARY, self.shape)
        return torch.randn(self.shape, dtype=dtype)


@dataclass(frozen=True)
class Limits:
    """The most that a converted network saves and allocates, over what the network as it is does.

    Attributes:
        network: The network.
        saved: Bytes that are saved for backward, in float32.
        saved_bfloat16: The same in bfloat16.
        peak: Most bytes allocated at one time during a step, in float32.
        bfloat16_in_ci: Whether bfloat16 is tested by default.
    """

    network: Network
    saved: float
    saved_bfloat16: float
    peak: float
    bfloat16_in_ci: bool = False

    def saved_of(self, dtype: torch.dtype) -> float:
        return {torch.float32: self.saved, torch.bfloat16: self.saved_bfloat16}[dtype]


LLAMA_BLOCKS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}

VIT_BLOCKS = {"depth": 4}

LIMITED = [  # saved, saved in bfloat16, peak
    Limits(Network("timm:efficientnet_b0", IMAGES, in_ci=True), 0.33, 0.33, 0.56, True),
    Limits(Network("torchvision:mobilenet_v2", IMAGES, in_ci=True), 0.36, 0.36, 0.53),
    Limits(Network("torchvision:resnet50", IMAGES), 0.73, 0.73, 0.92),
    Limits(Network("ultralytics:yolov8n.yaml", (2, 3, 160, 160), in_ci=True), 0.45, 0.45, 0.70),
    Limits(Network("torchvision:densenet121", IMAGES), 0.50, 0.50, 0.64),
    Limits(Network("unets:DiffusionUNet", IMAGES, in_ci=True), 0.40, 0.40, 0.50),
    Limits(Network("unets:SegmentationUNet", IMAGES), 0.60, 0.60, 0.68),
    Limits(Network("timm:vit_small_patch16_224", PHOTOS, VIT_BLOCKS, in_ci=True), 0.64, 0.64, 0.74),
    Limits(Network("timm:convnext_tiny", IMAGES), 0.58, 0.58, 0.90),
    Limits(Network("timm:swin_tiny_patch4_window7_224", (2, 3, 224, 224)), 0.71, 0.71, 0.81),
    Limits(Network("torchvision:squeezenet1_1", IMAGES), 0.37, 0.40, 0.72),
    Limits(
        Network("transformers:LlamaModel", (4, 256), LLAMA_BLOCKS, in_ci=True),
        0.52,
        0.57,
        0.72,
        True,
    ),
]

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
TINY |= {"num_attention_heads": 4, "vocab_size": VOCABULARY}
GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": VOCABULARY}
VIT = {**TINY, "hidden_act": "relu", "image_size": 64, "patch_size": 16}
EFFICIENTNET_B0 = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}

NETWORKS = [row.network for row in LIMITED] + [
    Network("timm:cspdarknet53"),
    Network("timm:darknet53"),
    Network("timm:densenet121"),
    Network("timm:ghostnet_100"),
    Network("timm:hrnet_w18_small"),
    Network("timm:inception_v3", (2, 3, 96, 96)),
    Network("timm:mobilenetv3_small_100"),
    Network("timm:mobilevit_xxs"),
    Network("timm:mobilenetv2_100"),
    Network("timm:mobilenetv3_large_100"),
    Network("timm:nfnet_l0"),
    Network("timm:regnety_002"),
    Network("timm:resnet18", in_ci=True),
    Network("timm:resnet50"),
    Network("timm:tf_efficientnetv2_b0"),
    Network("timm:xception41"),
    Network("torchvision:efficientnet_b0"),
    Network("torchvision:googlenet", arguments={"init_weights": False}),
    Network("torchvision:mobilenet_v3_large", in_ci=True),
    Network("torchvision:regnet_y_400mf"),
    Network("torchvision:shufflenet_v2_x1_0", in_ci=True),
    Network("torchvision:vgg11_bn"),
    Network("ultralytics:yolo11n.yaml"),
    Network("transformers:ResNetModel", arguments={"depths": [2, 2, 2, 2]}),
    Network("transformers:EfficientNetModel", arguments=EFFICIENTNET_B0),
    Network("transformers:MobileViTModel"),
    Network("transformers:LlamaForCausalLM", TOKENS, TINY, in_ci=True),
    Network("transformers:BertForMaskedLM", TOKENS, TINY, in_ci=True),
    Network("transformers:GPT2LMHeadModel", TOKENS, GPT2, in_ci=True),
    Network("transformers:ViTModel", arguments=VIT),
]

limited = pytest.mark.parametrize(
    "row", [row for row in LIMITED if row.network.in_ci or ALL], ids=lambda row: row.network.name
)
limited_in_each_dtype = pytest.mark.parametrize(
    ("row", "dtype"),
    [
        pytest.param(row, dtype, id=f"{row.network.name}-{dtype}".replace("torch.", ""))
        for row in LIMITED
        for dtype, in_ci in (
            (torch.float32, row.network.in_ci),
            (torch.bfloat16, row.bfloat16_in_ci),
        )
        if in_ci or ALL
    ],
)


def converted_copy(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    inplace_ops.convert(twin)
    return twin


def loss_of(model: nn.Module, x: Tensor, seed: int = 0) -> Tensor:
    """A distance from random targets, with the dropout of `seed`."""
    torch.manual_seed(seed)
    outputs = [t for t in tree_leaves(model(x)) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([(t.double() - random_like(t)).square().mean() for t in outputs]).sum()


def gradients_of(model: nn.Module, x: Tensor) -> Gradients:
    model.zero_grad()
    loss_of(model, x).backward()
    return [parameter.grad for parameter in model.parameters()]


def distance(actual: Gradients, expected: Gradients) -> float:
    """The norm of the difference over the norm, of all gradients together."""
    difference = total = 0.0
    for mine, reference in zip(actual, expected, strict=True):
        assert (mine is None) == (reference is None)
        if mine is not None and reference is not None:
            difference += float((mine.double() - reference.double()).norm()) ** 2
            total += float(reference.double().norm()) ** 2
    return (difference / total) ** 0.5


@limited_in_each_dtype
def test_saved_bytes(row: Limits, dtype: torch.dtype) -> None:
    model, x = row.network.build().to(dtype), row.network.inputs(dtype)
    before, after = (saved_bytes(m, x) for m in (model, converted_copy(model)))
    print(f"{row.network.name}: {after / before:.3f}")
    assert after <= (row.saved_of(dtype) + MARGIN) * before


@limited
def test_peak_of_a_step(row: Limits) -> None:
    model, x = row.network.build(), row.network.inputs()
    peaks = []
    for m in (model, converted_copy(model)):
        loss_of(m, x).backward()  # the first step compares what it recomputes
        m.zero_grad()
        with largest_allocation() as peak:
            loss_of(m, x).backward()
        peaks += peak
    before, after = peaks
    print(f"{row.network.name}: {after / before:.3f}")
    assert after <= (row.peak + MARGIN) * before


@limited_in_each_dtype
def test_gradients(row: Limits, dtype: torch.dtype) -> None:
    """In bfloat16 well within the error that PyTorch's own gradients have."""
    original, x = row.network.build(), row.network.inputs()
    model = copy.deepcopy(original).to(dtype)
    own = x.to(dtype) if x.is_floating_point() else x
    expected = gradients_of(model, own)
    actual = gradients_of(converted_copy(model), own)
    allowed = 1e-5
    if dtype is torch.bfloat16:
        allowed = distance(expected, gradients_of(original, x)) / 2
    assert distance(actual, expected) <= allowed


@pytest.mark.parametrize(
    "network", [n for n in NETWORKS if n.in_ci or ALL], ids=lambda network: network.name
)
def test_training(network: Network) -> None:
    """The same steps, and all but the model's class stays as it is."""
    original, x = network.build(), network.inputs()
    types = [type(m) for m in original.modules()]
    model = converted_copy(original)
    assert list(model.state_dict()) == list(original.state_dict())
    assert [type(m) for m in model.modules()][1:] == types[1:]
    torch.testing.assert_close(losses(model, x), losses(original, x), rtol=1e-3, atol=0)
    inplace_ops.revert(model)
    assert [type(m) for m in model.modules()] == types


def losses(model: nn.Module, x: Tensor) -> list[float]:
    """Of three steps."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    found = []
    for step in range(3):
        loss = loss_of(model, x, seed=step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("name", ["timm:efficientnet_b0", "transformers:LlamaModel"])
def test_an_example(name: str) -> None:
    """It finds the same gradients and reports what is measured."""
    (network,) = [row.network for row in LIMITED if row.network.name == name]
    model, x = network.build(), network.inputs()
    original = copy.deepcopy(model)
    report = inplace_ops.convert(model, x)
    saved = [saved_bytes(m, x) for m in (original, model)]
    assert [report.saved_bytes_before, report.saved_bytes_after] == saved
    assert report.peak_bytes_after < report.peak_bytes_before
    torch.testing.assert_close(model.state_dict(), original.state_dict(), rtol=0, atol=0)


def test_ultralytics_own_training(tmp_path: Path) -> None:
    """`train` builds the model anew, and a callback converts that one, as documented."""
    pytest.importorskip("ultralytics")
    # A process of its own: `train` sets flags of the whole of PyTorch.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(train_with_ultralytics, (tmp_path,))


def train_with_ultralytics(tmp_path: Path) -> None:
    import ultralytics
    from PIL import Image

    for i in range(4):
        for folder in ("images", "labels"):
            (tmp_path / folder).mkdir(exist_ok=True)
        noise = torch.randint(256, (64, 64, 3), dtype=torch.uint8).numpy()
        Image.fromarray(noise).save(tmp_path / "images" / f"{i}.png")
        (tmp_path / "labels" / f"{i}.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    data = tmp_path / "data.yaml"
    data.write_text(f"path: {tmp_path}\ntrain: images\nval: images\nnames: [thing]\n")

    def is_converted(model: nn.Module) -> bool:
        return conversion_of(model) is not None

    def average_of(trainer: Any) -> float:
        return sum(p.double().abs().sum().item() for p in trainer.ema.ema.parameters())

    def trained(name: str, *callbacks: Callable[[Any], Any]) -> tuple[list[float], list[bool]]:
        """The steps' losses and a sum over the average model; which models were converted."""
        found: list[float] = []
        conversions: list[bool] = []
        torch.manual_seed(0)
        yolo = ultralytics.YOLO("yolov8n.yaml")
        for callback in callbacks:
            yolo.add_callback("on_pretrain_routine_end", callback)
        yolo.add_callback("on_train_batch_end", lambda t: found.append(t.loss.item()))
        yolo.add_callback("on_train_end", lambda t: found.append(average_of(t)))
        yolo.add_callback(
            "on_train_end", lambda t: conversions.extend(map(is_converted, (t.model, t.ema.ema)))
        )
        settings = {"imgsz": 64, "batch": 2, "epochs": 2, "device": "cpu", "workers": 0}
        quiet = {"plots": False, "val": False, "verbose": False, "project": str(tmp_path)}
        yolo.train(data=str(data), name=name, mosaic=0.0, amp=False, **settings, **quiet)
        return found, conversions

    expected, conversions = trained("original")
    assert conversions == [False, False]
    actual, conversions = trained("converted", lambda t: inplace_ops.convert(t.model.train()))
    assert conversions == [True, False]
    assert len(actual) == 5
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=0)
    # The average is what is saved: it was copied before, and is loaded without this package.
    checkpoint = tmp_path / "converted" / "weights" / "last.pt"
    assert b"inplace_ops" not in checkpoint.read_bytes()
    assert not is_converted(ultralytics.YOLO(checkpoint).model)
