"""Draw the pictures of the documentation from the result files: `report.py --pictures`.

Each is next to its result file, under the same name. `saved_over_forward.png` has no result file.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean

import matplotlib
import numpy as np
import torch
from common import IN_PLACE, Row, read_csv, values
from PIL import Image

import inplace_ops
from inplace_ops.conversion.library import load

matplotlib.use("agg")
import matplotlib.pyplot as plt  # the backend is chosen first

Rows = list[Row]
MARKERS = "osD^vP*X"
COLORS = 256  # of a picture: a palette makes the file a third as large


def panels(
    count: int, width: float, height: float, columns: int = 4, **options: object
) -> tuple[plt.Figure, list[plt.Axes]]:
    """Return a figure and `count` panels of this size in inches."""
    columns = min(columns, count)
    lines = -(-count // columns)
    size = (width * columns, height * lines)
    figure, axes = plt.subplots(
        lines, columns, figsize=size, squeeze=False, layout="constrained", **options
    )
    for axis in axes.flat[:count]:
        axis.grid(alpha=0.3)
    for axis in axes.flat[count:]:
        axis.axis("off")
    return figure, list(axes.flat[:count])


def save(figure: plt.Figure, path: Path, row: Row) -> None:
    """Write the figure next to its result file, titled with where and when it was measured."""
    figure.suptitle(f"{row['device']}, torch {row['torch']}, {row['date']}", fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100)
    plt.close(figure)
    out = path.with_suffix(".png")
    Image.open(buffer).convert("RGB").quantize(COLORS).save(out, optimize=True)
    print(out)


def where(rows: Rows, **wanted: str) -> Rows:
    """Return the rows that have the wanted values."""
    return [row for row in rows if wanted.items() <= row.items()]


def draw_dots(
    path: Path, rows: Rows, names: Sequence[str], label: str, shown: Mapping[str, str]
) -> None:
    """Draw a dot for each row, in a panel for each figure.

    Args:
        path: The result file.
        rows: Its rows.
        names: Columns that name the dot's line.
        label: The column that decides its marker and color.
        shown: The panels' titles, by the column that a panel shows.
    """
    lines = list(dict.fromkeys(", ".join(row[name] for name in names) for row in rows))
    figure, axes = panels(
        len(shown), 4.2 if len(shown) > 1 else 7, 0.23 * len(lines) + 1.1, sharey=True
    )
    for axis, (column, title) in zip(axes, shown.items(), strict=True):
        for value, marker in zip(values(rows, label), MARKERS, strict=False):
            own = [row for row in where(rows, **{label: value}) if row[column]]
            places = [lines.index(", ".join(row[name] for name in names)) for row in own]
            figures = [float(row[column]) for row in own]
            axis.plot(figures, places, marker, label=value, alpha=0.6, markersize=5)
        axis.set_xlim(left=0)
        axis.set_xlabel(title, fontsize=8)
        axis.tick_params(labelsize=8)
    axes[0].set_yticks(range(len(lines)), lines)
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=7)
    save(figure, path, rows[0])


def draw_bandwidth(path: Path) -> None:
    """Draw each kernel's share of the copy bandwidth at large sizes, by dtype."""
    rows = [row for row in read_csv(path) if int(row["bytes"]) >= 64 * 2**20]
    for row in rows:
        row[row["direction"]] = row["share_of_copy"]
    shown = {
        direction: f"{direction}: share of a copy's bandwidth"
        for direction in ("forward", "backward")
    }
    rows = [dict.fromkeys(shown, "") | row for row in rows]
    draw_dots(path, rows, ("activation", "variant"), "dtype", shown)


def draw_batches(path: Path) -> None:
    """Draw the largest batch over PyTorch's in the same memory."""
    rows = read_csv(path)
    for row in rows:
        (torch_in_place,) = where(rows, network=row["network"], variant=IN_PLACE)
        row["ratio"] = str(int(row["largest_batch"]) / int(torch_in_place["largest_batch"]))
    title = f"largest batch in {rows[0]['memory_limit_gib']} GiB, over that of PyTorch in place"
    draw_dots(path, rows, ("network",), "variant", {"ratio": title})


def draw_models(path: Path) -> None:
    """Draw saved bytes of models over PyTorch's: a dot for each model."""
    rows = [row for row in where(read_csv(path), memory_format="contiguous") if row["ratio"]]
    for row in rows:
        row["library"] = row["model"].partition(":")[0]
    shown = {"ratio": "saved bytes of a model, over PyTorch's; contiguous"}
    draw_dots(path, where(rows, policy="float32"), ("library",), "policy", shown)


def draw_bytes(path: Path) -> None:
    """Draw saved, peak and moved bytes of a step over PyTorch's."""
    kinds = ("saved", "peak", "moved")
    shown = {f"{kind}_ratio": f"{kind} bytes of a step, over PyTorch's" for kind in kinds}
    draw_dots(path, where(read_csv(path), max_ops="4"), ("network",), "policy", shown)


def draw_memory(path: Path) -> None:
    """Draw the MiB allocated after an activation's forward, without and with a gradient."""
    titles = [f"MiB after forward, {grad}" for grad in ("no grad", "with grad")]
    shown = dict(zip(titles, titles, strict=True))
    draw_dots(path, read_csv(path), ("activation", "variant"), "size", shown)


def draw_activations(path: Path) -> None:
    """Draw the time of forward and backward over PyTorch in place, by size, in float32."""
    rows = where(read_csv(path), phase="both", dtype="float32")
    activations = values(rows, "activation")
    figure, axes = panels(len(activations), 3.2, 2.7, sharex=True)
    for axis, activation in zip(axes, activations, strict=True):
        case = where(rows, activation=activation)
        for variant in values(case, "variant"):
            points = where(case, variant=variant)
            sizes = [int(row["elements"]) for row in points]
            low, ratios, high = (
                [float(row[f"ratio_{column}"]) for row in points]
                for column in ("first_quartile", "to_torch_in_place", "third_quartile")
            )
            (drawn,) = axis.plot(sizes, ratios, "o-", label=variant, markersize=3)
            axis.fill_between(sizes, low, high, alpha=0.2, color=drawn.get_color())
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_title(f"{activation}, float32", fontsize=9)
        axis.legend(fontsize=7)
    for axis in axes[-4:]:
        axis.set_xlabel("elements", fontsize=8)
    for axis in axes[::4]:
        axis.set_ylabel("time over PyTorch in place", fontsize=8)
    save(figure, path, rows[0])


def draw_training(path: Path) -> None:
    """Draw losses over epochs: the mean over the seeds, and the band from lowest to highest."""
    rows = read_csv(path)
    cases = list(dict.fromkeys((row["network"], row["precision"]) for row in rows))
    figure, axes = panels(2 * len(cases), 3.6, 2.7, columns=len(cases), sharex=True, sharey="row")
    for i, axis in enumerate(axes):
        loss, (network, precision) = ("training", "test")[i // len(cases)], cases[i % len(cases)]
        runs = where(rows, network=network, precision=precision)
        for j, variant in enumerate(values(runs, "variant")):
            losses = [row[f"{loss}_losses"].split() for row in where(runs, variant=variant)]
            by_epoch = [list(map(float, epoch)) for epoch in zip(*losses, strict=True)]
            epochs = range(1, len(by_epoch) + 1)
            # Each line is thinner than the one below it, so that equal lines stay visible.
            axis.plot(epochs, [*map(mean, by_epoch)], label=variant, linewidth=5 - 0.8 * j)
            axis.fill_between(epochs, [*map(min, by_epoch)], [*map(max, by_epoch)], alpha=0.1)
        axis.set_yscale("log")
        axis.set_title(f"{network}, {precision}", fontsize=8)
        axis.set_ylabel(f"{loss} loss", fontsize=8)
        if i < len(cases):
            axis.legend(fontsize=6)
    seeds = len(values(rows, "seed"))
    for axis in axes[-len(cases) :]:
        axis.set_xlabel(f"epoch; mean of {seeds} seeds, band from lowest to highest", fontsize=7)
        axis.xaxis.get_major_locator().set_params(integer=True)
    save(figure, path, rows[0])


# What a step costs, by column, and the variants of which each tool has a line, by their beginning.
COSTS = {
    "flops_over_torch_in_place": "FLOPs of a step",
    "moved_over_torch_in_place": "bytes that a step moves",
    "ratio_to_torch_in_place": "time of a step",
}
PEAK = "peak_over_torch_in_place"
TOOL_LINES = {"convert, max_ops": "C0", "checkpoint": "C3", "torch.compile": "C1"}


def draw_networks(path: Path) -> None:
    """Draw the frontier: a step's peak against what it costs, over PyTorch in place.

    Each network has a panel for each cost, each tool a line through its variants. The peak
    decides what fits into memory. Saved bytes would mislead: checkpoints save little, but allocate
    in backward what they recompute. Next to batches that fill the memory, the markers of compiled
    code are hollow: it was measured at smaller batches, in another run.
    """
    rows = read_csv(path)
    networks = values(rows, "network")
    is_filled = path.stem.startswith("filled")
    if is_filled:
        rows += read_csv(path.with_name(path.name.replace("filled", "baselines")))
    costs = [cost for cost in COSTS if any(row.get(cost) for row in rows)]
    top = max(1.1, *(1.05 * float(row[PEAK]) for row in rows if row[PEAK]))
    columns = 2 * len(costs) if len(costs) > 1 else 4
    figure, axes = panels(
        len(networks) * len(costs), 2.3, 2.1, columns, sharey=True, sharex=is_filled
    )
    for i, axis in enumerate(axes):
        network, cost = networks[i // len(costs)], costs[i % len(costs)]
        for tool, color in TOOL_LINES.items():
            own = [row for row in where(rows, network=network) if row["variant"].startswith(tool)]
            points = [(float(row[cost]), float(row[PEAK])) for row in own if row[cost]]
            (line,) = axis.plot(*np.array(points).reshape(-1, 2).T, "o-", color=color, label=tool)
            if is_filled and tool == "torch.compile":
                line.set_markerfacecolor("white")
        axis.plot(1, 1, "k+", markersize=12, label=IN_PLACE)
        axis.set_title(network, fontsize=9)
        axis.set_ylim(0, top)
        axis.set_xlabel(COSTS[cost], fontsize=8)
    for axis in axes[::columns]:
        axis.set_ylabel("peak of a step", fontsize=8)
    lines, labels = axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=4, fontsize=8)
    save(figure, path, rows[0])


PICTURES: dict[str, Callable[[Path], None]] = {
    "activations": draw_activations,
    "bandwidth": draw_bandwidth,
    "batches": draw_batches,
    "bytes": draw_bytes,
    "filled": draw_networks,
    "memory": draw_memory,
    "models": draw_models,
    "networks": draw_networks,
    "training": draw_training,
}


def draw_all(folder: Path) -> None:
    """Draw the pictures of all result files in a folder, and what a model saves over forward."""
    report = inplace_ops.analyze(load("timm:efficientnet_b0"), torch.randn(2, 3, 224, 224))
    report.plot(folder / "saved_over_forward.png")
    for kind, draw in PICTURES.items():
        for path in sorted(folder.glob(f"{kind}_*.csv")):
            draw(path)
