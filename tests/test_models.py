"""Models of other libraries, with random weights: what is converted, and that they train the same.

A few of them by default, all with INPLACE_OPS_MODELS=all (`make models`); those whose library is
not installed are skipped.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from memory import held_allocation, largest_allocation
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import inplace_ops
from inplace_ops import saved_bytes
from inplace_ops.conversion.library import load

os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.gettempdir())

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own


@dataclass(frozen=True)
class Model:
    """A model, its input, and how many of its activations are put in place."""

    name: str
    converted: int
    sites: int
    input: Any = field(default_factory=lambda: (2, 3, 64, 64))
    configuration: dict[str, Any] | None = None
    in_ci: bool = False
    is_convolutional: bool = True

    def build(self) -> nn.Module:
        library, _, name = self.name.partition(":")
        module = pytest.importorskip(library)
        if name == "googlenet":
            return module.models.googlenet(init_weights=False)
        if self.configuration is None:
            return load(self.name)
        cls = getattr(module, name)
        return cls(cls.config_class(**self.configuration))

    def example(self) -> Any:
        if self.is_convolutional or len(self.input) == 4:
            return torch.randn(self.input)
        tokens = torch.randint(0, 100, self.input)
        return {"input_ids": tokens, "labels": tokens}


SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
LLAMA = {**SMALL, "num_attention_heads": 4, "vocab_size": 100}
BERT = {**SMALL, "num_attention_heads": 4, "vocab_size": 100}
GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 100}
VIT = {**SMALL, "num_attention_heads": 4, "hidden_act": "relu", "image_size": 64, "patch_size": 16}
EFFICIENTNET_B0 = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}

MODELS = [
    Model("timm:convnext_tiny", 18, 18, in_ci=True, is_convolutional=False),
    Model("timm:cspdarknet53", 67, 67),
    Model("timm:darknet53", 52, 52),
    Model("timm:densenet121", 121, 121),
    Model("timm:efficientnet_b0", 49, 49, in_ci=True),
    Model("timm:ghostnet_100", 42, 42),
    Model("timm:hrnet_w18_small", 69, 69),
    Model("timm:inception_v3", 94, 94, (2, 3, 96, 96)),
    Model("timm:mobilenetv3_small_100", 14, 14),
    Model("timm:mobilevit_xxs", 34, 34),
    Model("timm:mobilenetv2_100", 35, 35),
    Model("timm:mobilenetv3_large_100", 40, 40),
    Model("timm:swin_tiny_patch4_window7_224", 12, 12, (1, 3, 224, 224)),
    Model("timm:vit_small_patch16_224", 12, 12, (1, 3, 224, 224)),
    # Their preactivated blocks add the activation's input.
    Model("timm:nfnet_l0", 56, 64),
    Model("timm:regnety_002", 53, 53),
    Model("timm:resnet18", 17, 17, in_ci=True),
    Model("timm:resnet50", 49, 49),
    Model("timm:tf_efficientnetv2_b0", 55, 55),
    Model("timm:xception41", 32, 44),
    # One activation is a function; in GoogLeNet all of them are.
    Model("torchvision:densenet121", 120, 121),
    Model("torchvision:efficientnet_b0", 49, 49),
    Model("torchvision:googlenet", 0, 61, is_convolutional=False),
    Model("torchvision:mobilenet_v2", 35, 35, in_ci=True),
    Model("torchvision:mobilenet_v3_large", 40, 40, in_ci=True),
    Model("torchvision:regnet_y_400mf", 65, 65),
    Model("torchvision:resnet50", 17, 17),
    Model("torchvision:shufflenet_v2_x1_0", 37, 37, in_ci=True),
    Model("torchvision:squeezenet1_1", 26, 26),
    Model("torchvision:vgg11_bn", 10, 10),
    Model("ultralytics:yolov8n.yaml", 57, 57, in_ci=True),
    Model("ultralytics:yolo11n.yaml", 77, 77),
    Model("transformers:ResNetModel", 25, 25, configuration={"depths": [2, 2, 2, 2]}),
    Model("transformers:EfficientNetModel", 49, 49, configuration=EFFICIENTNET_B0),
    Model("transformers:MobileViTModel", 34, 34, configuration={}),
    Model(
        "transformers:LlamaForCausalLM", 4, 4, (2, 16), LLAMA, in_ci=True, is_convolutional=False
    ),
    Model("transformers:BertForMaskedLM", 5, 5, (2, 16), BERT, in_ci=True, is_convolutional=False),
    Model("transformers:GPT2LMHeadModel", 4, 4, (2, 16), GPT2, in_ci=True, is_convolutional=False),
    Model("transformers:ViTModel", 4, 4, configuration=VIT, is_convolutional=False),
]


def losses(model: nn.Module, example: Any) -> list[float]:
    """Three steps on one example."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    found = []
    for step in range(3):
        torch.manual_seed(step)
        output = model(**example) if isinstance(example, dict) else model(example)
        tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        loss = torch.stack([t.double().square().mean() for t in tensors]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    "row",
    [m for m in MODELS if m.in_ci or os.environ.get("INPLACE_OPS_MODELS") == "all"],
    ids=lambda row: row.name,
)
def test_model(row: Model) -> None:
    model = row.build().train()
    example = row.example()
    arguments = example if isinstance(example, dict) else {}
    positional = () if isinstance(example, dict) else (example,)
    original = copy.deepcopy(model)
    before = saved_bytes(model, *positional, **arguments)

    report = inplace_ops.convert(model, example)
    print(report)
    assert (sum(s.converted for s in report.sites), len(report.sites)) == (row.converted, row.sites)
    if row.is_convolutional:
        assert row.converted > row.sites / 2
    dropped = {d.name: d.bytes_before - d.bytes_after for d in report.dropped}
    assert all(s.bytes_after <= s.bytes_before + dropped.get(s.name, 0) for s in report.sites)
    after = saved_bytes(model, *positional, **arguments)
    assert (report.model_bytes_before, report.model_bytes_after) == (before, after)
    assert before - after == report.bytes_before - report.bytes_after + sum(dropped.values())
    assert list(model.state_dict()) == list(original.state_dict())

    torch.testing.assert_close(losses(model, example), losses(original, example), rtol=1e-3, atol=0)
    inplace_ops.revert(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]


@pytest.mark.parametrize(
    ("name", "bits", "limit"),
    [
        ("timm:efficientnet_b0", None, 0.43),
        ("ultralytics:yolov8n.yaml", None, 0.475),
        ("timm:convnext_tiny", None, 0.64),
        ("timm:convnext_tiny", 1, 0.60),
    ],
)
def test_saved_bytes_over_those_of_pytorch_in_place(
    name: str, bits: int | None, limit: float
) -> None:
    model = Model(name, 0, 0).build().train()
    for module in model.modules():
        if hasattr(module, "inplace"):
            module.inplace = True
    x = torch.randn(2, 3, 128, 128)
    in_place = saved_bytes(model, x)
    inplace_ops.convert(model, x, bits=bits, verify=False)
    assert saved_bytes(model, x) <= limit * in_place


# Held by the allocator's account when forward has returned, the model's outputs with it, over
# PyTorch out of place, batch 2 at 128 x 128, and of YOLO at 256.
HELD = {
    "timm:efficientnet_b0": 0.45,
    "torchvision:mobilenet_v2": 0.38,
    "torchvision:mobilenet_v3_large": 0.53,
    "torchvision:densenet121": 0.53,
    "torchvision:resnet50": 0.82,
    "ultralytics:yolov8n.yaml": 0.485,
    "ultralytics:yolo11n.yaml": 0.475,
    "timm:cspdarknet53": 0.46,
    "torchvision:vgg16_bn": 0.59,
    "torchvision:efficientnet_v2_s": 0.47,
    "timm:regnety_016": 0.70,
    "unets:SegmentationUNet": 0.44,
    "unets:DiffusionUNet": 0.40,
}
HELD_IN_CI = (
    ("timm:efficientnet_b0", False),
    ("torchvision:mobilenet_v2", False),
    ("torchvision:mobilenet_v2", True),
    ("torchvision:densenet121", False),
    ("ultralytics:yolov8n.yaml", False),
    ("unets:SegmentationUNet", False),
    ("unets:DiffusionUNet", False),
)


@pytest.mark.parametrize(
    ("name", "autocast"),
    [
        (name, autocast)
        for name in HELD
        for autocast in (False, True)
        if (name, autocast) in HELD_IN_CI or os.environ.get("INPLACE_OPS_MODELS") == "all"
    ],
)
def test_held_over_pytorch_out_of_place(
    name: str, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    original = Model(name, 0, 0).build().train()
    model = copy.deepcopy(original)
    for module in original.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    side = 256 if name.startswith("ultralytics") else 128
    x = torch.randn(2, 3, side, side)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        inplace_ops.convert(model, x, verify=False)
        held, before = (held_allocation(lambda m=m: m(x)) for m in (model, original))
    if autocast:  # both hold 16-bit copies of the layers' parameters
        layers = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
        copies = [m for m in model.modules() if isinstance(m, layers)]
        size = sum(2 * p.numel() for m in copies for p in m.parameters())
        held, before = held - size, before - size
    print(f"{name}: {held / before:.3f}")
    assert held <= (HELD[name] + (0.03 if autocast else 0)) * before


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

    def converted(model: nn.Module) -> int:
        return sum(isinstance(m, inplace_ops.SiLU) for m in model.modules())

    def average_of(trainer: Any) -> float:
        return sum(p.double().abs().sum().item() for p in trainer.ema.ema.parameters())

    def losses_of(name: str, *callbacks: Callable[[Any], Any]) -> list[float]:
        """Those of the steps, a sum over their average model, how many were converted."""
        found: list[float] = []
        torch.manual_seed(0)
        yolo = ultralytics.YOLO("yolov8n.yaml")
        for callback in callbacks:
            yolo.add_callback("on_pretrain_routine_end", callback)
        yolo.add_callback("on_train_batch_end", lambda t: found.append(t.loss.item()))
        yolo.add_callback("on_train_end", lambda t: found.append(average_of(t)))
        yolo.add_callback("on_train_end", lambda t: found.append(converted(t.model)))
        settings = {"imgsz": 64, "batch": 2, "epochs": 2, "device": "cpu", "workers": 0}
        quiet = {"plots": False, "val": False, "verbose": False, "project": str(tmp_path)}
        yolo.train(data=str(data), name=name, mosaic=0.0, amp=False, **settings, **quiet)
        return found

    def put_in_place(trainer: Any) -> None:
        inplace_ops.convert(trainer.model.train(), torch.randn(2, 3, 64, 64))

    *expected, none = losses_of("original")
    *actual, count = losses_of("converted", put_in_place)
    assert (none, count, len(actual)) == (0, 57, 5)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=0)
    saved = ultralytics.YOLO(tmp_path / "converted" / "weights" / "last.pt")
    assert converted(saved.model) == 0


def operations(function: Callable[[], Any]) -> int:
    """Of floating point, in products: not seconds, which depend on what else a machine does."""
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def test_cost_of_the_analysis() -> None:
    model = Model("ultralytics:yolov8n.yaml", 57, 57).build().train()
    x = torch.randn(4, 3, 256, 256)

    def step() -> None:
        tensors = [t for t in tree_leaves(model(x)) if t.requires_grad]
        torch.autograd.backward([t.square().mean() for t in tensors])

    def analyze() -> None:
        inplace_ops.analyze(model, x)

    step()
    analyze()
    assert 0 < operations(analyze) <= 4.01 * operations(lambda: model(x))
    with largest_allocation() as of_step:
        step()
    with largest_allocation() as of_analysis:
        analyze()
    assert of_analysis[0] <= 2 * of_step[0]
