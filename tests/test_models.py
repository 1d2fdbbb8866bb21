"""Networks, most of other libraries: converted they save less and train the same.

With random weights. A few of those that the benchmarks measure; `make models` has all. Those whose
library is not installed are skipped.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import inplace_ops
from inplace_ops import saved_bytes
from inplace_ops.conversion.library import ModelNotFoundError
from inplace_ops.conversion.wiring import conversion_of

os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.gettempdir())

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own

MARGIN = 0.01  # over the committed ratios
MAX_OPS = 4

# Of `networks.py`, and the dtype policies.
COUNTED = [
    ("EfficientNet-B0", "float32"),
    ("EfficientNet-B0", "bfloat16"),
    ("EfficientNet-B0", "CUDA autocast"),
    ("MobileNetV2", "float32"),
    ("YOLOv8n", "float32"),
    ("diffusion U-Net", "float32"),
    ("diffusion U-Net", "CUDA autocast"),
    ("nnU-Net-like", "CUDA autocast"),
    ("ViT-S/16", "CUDA autocast"),
    ("Llama, 2 layers", "float32"),
    ("Llama, 2 layers", "bfloat16"),
    ("Llama, 2 layers", "CUDA autocast"),
    ("Llama blocks", "CUDA autocast"),
]

# Of `model_zoo.py`.
TRAINED = [
    *("timm:resnet10t", "timm:test_efficientnet", "timm:test_convnext", "timm:test_vit"),
    *("torchvision:mobilenet_v3_small", "torchvision:shufflenet_v2_x0_5"),
    *("ultralytics:yolov8n.yaml", "ultralytics:yolo11n-seg.yaml"),
    *("transformers:LlamaForCausalLM", "transformers:BertForMaskedLM"),
    *("transformers:GPT2LMHeadModel", "transformers:T5ForConditionalGeneration"),
    *("diffusers:UNet2DConditionModel", "diffusers:FluxTransformer2DModel"),
]


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """PyTorch's kernels take memory of their own for each thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(("network", "policy"), COUNTED)
def test_bytes_of_a_step(network: str, policy: str) -> None:
    """Saved and moved bytes are not above the committed figures, and gradients agree.

    Nor is the peak, where PyTorch's own is the committed one. Elsewhere, as its kernels take other
    memory, the peak is not above PyTorch's.
    """
    from bench_bytes import measured
    from measure import RESULTS, read_csv

    wanted = {"network": network, "policy": policy, "max_ops": str(MAX_OPS)}
    (committed,) = [
        row for row in read_csv(RESULTS / "bytes_cpu.csv") if wanted.items() <= row.items()
    ]
    try:
        (row,) = measured(network, policy, [MAX_OPS], "cpu")
    except ModelNotFoundError as error:
        pytest.skip(f"could not import {error}")
    columns = ["saved_ratio", "moved_ratio"]
    if int(row["peak_torch"]) == int(committed["peak_torch"]):
        columns.append("peak_ratio")
    for column in columns:
        assert float(row[column]) <= float(committed[column]) + MARGIN, column
    assert float(row["peak_ratio"]) <= 1.0


@pytest.mark.parametrize("name", TRAINED)
def test_training(name: str) -> None:
    """Three steps beside the original have its gradients, and the first needs no more memory."""
    pytest.importorskip(name.partition(":")[0])
    from bench_models import SAME, rows_of

    rows = [row for row, _ in rows_of(name)]
    assert [row["result"] for row in rows] == [SAME] * len(rows)
    assert len(rows) >= 2


@pytest.mark.parametrize("name", ["timm:efficientnet_b0", "transformers:LlamaForCausalLM"])
def test_an_example(name: str) -> None:
    """The report says what is measured; all but the model's class stays as it is."""
    pytest.importorskip(name.partition(":")[0])
    from bench_models import inputs_of
    from model_zoo import entry_of

    entry = entry_of(name)
    model = entry.model()
    types = [type(m) for m in model.modules()]
    inputs = inputs_of(entry, model)
    example = (inputs[""],) if "" in inputs else inputs
    args, kwargs = (example, {}) if isinstance(example, tuple) else ((), example)
    original = copy.deepcopy(model)
    report = inplace_ops.convert(model, example)
    saved = [saved_bytes(m, *args, **kwargs) for m in (original, model)]
    assert [report.saved_bytes_before, report.saved_bytes_after] == saved
    assert report.peak_bytes_before is not None
    assert report.peak_bytes_after is not None
    assert report.peak_bytes_after < report.peak_bytes_before
    torch.testing.assert_close(model.state_dict(), original.state_dict(), rtol=0, atol=0)
    assert [type(m) for m in model.modules()][1:] == types[1:]
    inplace_ops.revert(model)
    assert [type(m) for m in model.modules()] == types


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
