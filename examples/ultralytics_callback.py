"""A callback of Ultralytics that converts the model which `train` builds, on one device.

Needs ultralytics, which trains in mixed precision on a GPU by default. The script draws the images:
squares on noise.
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.gettempdir())

import numpy as np
import torch
from before_after import DEVICE, Training, before_after
from PIL import Image
from ultralytics import YOLO

import inplace_ops

IMAGES, BATCH, SIDE = 24, 4, 128


def write_squares(folder: Path) -> Path:
    """Write images with one square each, their labels, and the file that describes them."""
    random = np.random.default_rng(0)
    for name in ("images", "labels"):
        (folder / name).mkdir()
    for i in range(IMAGES):
        pixels = random.integers(0, 100, (SIDE, SIDE, 3), dtype=np.uint8)
        top, left, size = random.integers(8, SIDE // 2, 3)
        pixels[top : top + size, left : left + size] = 250
        Image.fromarray(pixels).save(folder / "images" / f"{i}.png")
        box = [(left + size / 2) / SIDE, (top + size / 2) / SIDE, size / SIDE, size / SIDE]
        (folder / "labels" / f"{i}.txt").write_text("0 " + " ".join(map(str, box)))
    description = folder / "squares.yaml"
    description.write_text(f"path: {folder}\ntrain: images\nval: images\nnames: [square]\n")
    return description


def train(is_converted: bool) -> Training:
    """Train YOLOv8n for one epoch."""
    training = Training()

    def convert(trainer):
        example = torch.zeros(BATCH, 3, SIDE, SIDE, device=trainer.device)
        with torch.autocast(DEVICE, enabled=bool(trainer.amp)):
            training.report = inplace_ops.convert(trainer.model, example)

    model = YOLO("yolov8n.yaml")
    if is_converted:
        model.add_callback("on_pretrain_routine_end", convert)
    model.add_callback("on_train_batch_end", lambda trainer: training.step(trainer.loss.item()))
    with tempfile.TemporaryDirectory() as folder:
        data = write_squares(Path(folder))
        options = {"epochs": 1, "batch": BATCH, "imgsz": SIDE, "device": DEVICE, "workers": 0}
        model.train(data=data, project=folder, val=False, plots=False, verbose=False, **options)
    return training


if __name__ == "__main__":
    before_after(train)
