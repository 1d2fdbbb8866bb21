"""The scripts in `examples/` train with other libraries, and save less after `convert`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOT_SCRIPTS = {"before_after.py", "demo.py"}

# By command: the library that it needs, and the most that it may save, relative to PyTorch.
COMMANDS = {
    "training_loop.py": ("timm", 0.6),
    "torchvision_segmentation.py": ("torchvision", 0.75),
    "ultralytics_callback.py": ("ultralytics", 0.5),
    "monai_unet3d.py": ("monai", 0.65),
    "diffusers_unet.py": ("diffusers", 0.5),
    "transformers_trainer.py": ("transformers", 0.6),
    "transformers_trainer.py --lora": ("peft", 0.85),
    "lightning_callback.py": ("lightning", 0.4),
}
LINE = re.compile(
    r"saved, MiB: (\S+) -> (\S+); peak, MiB: (\S+) -> (\S+); "
    r"step, ms: (\S+) -> (\S+); last loss: (\S+) -> (\S+)"
)


@pytest.mark.skipif(not EXAMPLES.exists(), reason="no examples next to these tests")
def test_every_script_runs_here() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")} - NOT_SCRIPTS
    assert {command.split()[0] for command in COMMANDS} == scripts
    for name in scripts:
        assert len((EXAMPLES / name).read_text().splitlines()) <= 75


@pytest.mark.parametrize("command", COMMANDS)
def test_script_trains_and_saves_less(command: str, tmp_path: Path) -> None:
    library, ratio = COMMANDS[command]
    pytest.importorskip(library)
    pytest.importorskip("sklearn")
    name, *options = command.split()
    text = (EXAMPLES / name).read_text()
    # Fewer steps than the script has: the bytes are those of an example, before the first step.
    script = tmp_path / name
    script.write_text(re.sub(r"(?m)^(BATCH, .*STEPS = .*, )\d+$", r"\g<1>3", text))
    result = subprocess.run(
        [sys.executable, str(script), *options],
        cwd=tmp_path,
        # Several threads would wait long for a core that is busy with other tests.
        env={
            **os.environ,
            "YOLO_CONFIG_DIR": str(tmp_path),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    found = LINE.fullmatch(result.stdout.splitlines()[-1])
    assert found, result.stdout
    saved, saved_now, peak, peak_now, _, _, loss, loss_now = map(float, found.groups())
    assert saved_now <= ratio * saved
    assert peak_now < peak
    # A training in 16 bits amplifies roundings.
    assert loss_now == pytest.approx(loss, rel=0.05)
