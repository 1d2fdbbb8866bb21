"""Converted networks, most from other libraries, save less and train the same.

The weights are random. The networks are a few of those that the benchmarks measure; `make models`
runs all of them. Networks whose library is not installed are skipped.
"""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from pathlib import Path

import pytest
from _support.marks import quick
from _support.twins import HAS_HOOK, number_of_values

from inplace_ops.conversion.library import ModelNotFoundError

os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.gettempdir())

pytestmark = pytest.mark.filterwarnings("default")  # the libraries warn

MARGIN = 0.01  # above the committed ratios
MAX_OPS = 4

# Networks of `networks.py`, with dtype policies.
COUNTED = [
    ("EfficientNet-B0", "float32"),
    ("EfficientNet-B0", "CUDA autocast"),
    ("YOLOv8n", "float32"),
    ("DenseNet-121", "float32"),
    ("ESRGAN blocks", "float32"),
    ("Llama blocks", "CUDA autocast"),
    ("diffusion U-Net", "CUDA autocast"),
    ("nnU-Net-like", "CUDA autocast"),
    ("ViT-S/16", "CUDA autocast"),
    ("Llama, 2 layers", "CUDA autocast"),
    *quick(
        [
            ("GPT-2, 2 layers", "float32"),
            ("Qwen2, padded batch", "CUDA autocast"),
            ("Gemma 2, 2 layers", "float32"),
        ],
        always=(),
    ),
]

# Entries of `model_zoo.py`.
TRAINED = [
    *("timm:resnet10t", "timm:test_efficientnet", "timm:test_convnext", "timm:test_vit"),
    *("torchvision:mobilenet_v3_small", "ultralytics:yolo11n-seg.yaml"),
    *("transformers:LlamaForCausalLM", "transformers:GPT2LMHeadModel"),
    "transformers:T5ForConditionalGeneration",
    *("diffusers:UNet2DConditionModel", "diffusers:FluxTransformer2DModel"),
    *("monai:DynUNet", "peft:LoRA", "segmentation_models_pytorch:Unet mobilenet_v2"),
]


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")


@pytest.mark.usefixtures("_one_thread")  # PyTorch's kernels allocate memory for each thread
@pytest.mark.parametrize(("network", "policy"), COUNTED)
def test_bytes_of_a_step_do_not_exceed_committed_figures(network: str, policy: str) -> None:
    """Saved and moved bytes do not exceed the committed figures of torch 2.14, and gradients agree.

    The peak does not exceed PyTorch's. Where PyTorch's peak is the committed one, so that its
    kernels allocate the same memory, the converted peak does not exceed the committed one either.
    """
    from bench_networks import count
    from common import RESULTS, Failures, read_csv

    wanted = {"network": network, "policy": policy, "max_ops": str(MAX_OPS)}
    (committed,) = [
        row for row in read_csv(RESULTS / "bytes_cpu.csv") if wanted.items() <= row.items()
    ]
    try:
        (row,) = count(network, policy, Namespace(max_ops=[MAX_OPS], device="cpu"), Failures())
    except ModelNotFoundError as error:
        pytest.skip(f"could not import {error}")
    columns = ["saved_ratio", "moved_ratio"] if HAS_HOOK else []  # the walk proves less
    if columns and int(row["peak_torch"]) == int(committed["peak_torch"]):
        columns.append("peak_ratio")
    for column in columns:
        assert float(row[column]) <= float(committed[column]) + MARGIN, column
    assert float(row["peak_ratio"]) <= 1.0


@pytest.mark.parametrize("name", TRAINED)
def test_three_training_steps_match_pytorch(name: str) -> None:
    """The original's gradients, no higher peak in the first step, and no graph that stays alive."""
    pytest.importorskip(name.partition(":")[0])
    from bench_models import SAME, rows_of

    before = number_of_values()
    rows = [row for row, _ in rows_of(name)]
    assert number_of_values() <= before
    assert [row["result"] for row in rows] == [SAME] * len(rows)
    assert len(rows) >= 2
