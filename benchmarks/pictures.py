"""Draw the pictures of the documentation from the result files: `report.py --pictures`.

Each is next to its result file, under the same name. `saved_over_forward.png` has no result file.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import matplotlib
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


def draw_activations(path: Path) -> None:
    """Draw the time of forward and backward over PyTorch in place, by size, in float32."""
    rows = [r for r in read_csv(path) if (r["phase"], r["dtype"]) == ("both", "float32")]
    activations = values(rows, "activation")
    figure, axes = panels(len(activations), 3.2, 2.7, sharex=True)
    for axis, activation in zip(axes, activations, strict=True):
        case = [row for row in rows if row["activation"] == activation]
        for variant in values(case, "variant"):
            points = [row for row in case if row["variant"] == variant]
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


def draw_bandwidth(path: Path) -> None:
    """Draw each kernel's lowest share of the copy bandwidth among large sizes, by dtype."""
    rows = [row for row in read_csv(path) if int(row["bytes"]) >= 64 * 2**20]
    variants = list(dict.fromkeys((row["activation"], row["variant"]) for row in rows))
    names = [", ".join(variant) for variant in variants]
    directions = values(rows, "direction")
    figure, axes = panels(len(directions), 4.5, 0.22 * len(names) + 0.8, sharey=True)
    for axis, direction in zip(axes, directions, strict=True):
        for dtype, marker in zip(values(rows, "dtype"), MARKERS, strict=False):
            shares = [
                min(
                    float(row["share_of_copy"])
                    for row in rows
                    if (row["activation"], row["variant"]) == variant
                    and (row["direction"], row["dtype"]) == (direction, dtype)
                )
                for variant in variants
            ]
            axis.plot(shares, names, marker, label=dtype, alpha=0.8)
        axis.axvline(1, color="gray", linewidth=1)
        axis.set_title(direction, fontsize=9)
        axis.set_xlabel("lowest share of the bandwidth of a copy, from 64 MiB on", fontsize=8)
        axis.tick_params(labelsize=8)
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=8)
    save(figure, path, rows[0])


def draw_memory(path: Path) -> None:
    """Draw the MiB allocated after an activation's forward, without and with a gradient."""
    rows = read_csv(path)
    labels = [f"{row['activation']}, {row['variant']}" for row in rows]
    figure, (axis,) = panels(1, 8, 0.24 * len(rows) + 1)
    for shift, key in ((-0.2, "MiB after forward, no grad"), (0.2, "MiB after forward, with grad")):
        positions = [i + shift for i in range(len(rows))]
        bars = axis.barh(positions, [float(row[key]) for row in rows], height=0.4, label=key)
        axis.bar_label(bars, fontsize=6, padding=2)
    axis.set_yticks(range(len(rows)), labels, fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel(f"MiB, float32 {rows[0]['size']}", fontsize=8)
    axis.legend(loc="lower right", fontsize=8)
    save(figure, path, rows[0])


def draw_blocks(path: Path) -> None:
    """Draw the tensors that a block of convolution, norm and activation saves, and its time."""
    rows = read_csv(path)
    activations, variants = values(rows, "activation"), values(rows, "variant")
    figure, (axis,) = panels(1, 8, 0.5 * len(variants) + 1)
    height = 0.8 / len(activations)
    for i, activation in enumerate(activations):
        own = [row for row in rows if row["activation"] == activation]
        positions = [j + height * (i - (len(activations) - 1) / 2) for j in range(len(variants))]
        saved = [float(row["tensors saved"]) for row in own]
        bars = axis.barh(positions, saved, height=0.9 * height, label=activation)
        times = [
            f"{row['tensors saved']}; {row['time over torch in place']} of the time" for row in own
        ]
        axis.bar_label(bars, times, fontsize=7, padding=2)
    axis.set_yticks(range(len(variants)), variants, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.25)
    axis.set_xlabel("tensors that a block of convolution, norm and activation saves", fontsize=8)
    axis.legend(loc="lower right", fontsize=8)
    save(figure, path, rows[0])


def draw_bytes(path: Path) -> None:
    """Draw saved, peak and moved bytes of a step over PyTorch's: a line for each network."""
    rows = [row for row in read_csv(path) if row["max_ops"] == "4"]
    networks = values(rows, "network")
    figure, axes = panels(3, 3.5, 0.25 * len(networks) + 1.1, sharey=True)
    for axis, kind in zip(axes, ("saved", "peak", "moved"), strict=True):
        for policy, marker in zip(values(rows, "policy"), MARKERS, strict=False):
            own = [row for row in rows if row["policy"] == policy]
            ratios = [float(row[f"{kind}_ratio"]) for row in own]
            axis.plot(ratios, values(own, "network"), marker, label=policy, alpha=0.8)
        axis.axvline(1, color="gray", linewidth=1)
        axis.set_xlabel(f"{kind} bytes of a step, over PyTorch's", fontsize=8)
        axis.tick_params(labelsize=8)
    axes[0].invert_yaxis()
    axes[0].legend(fontsize=8)
    save(figure, path, rows[0])


CASE = ("float32", "contiguous")


def draw_models(path: Path) -> None:
    """Draw saved bytes of models over PyTorch's, in float32: a dot for each model."""
    every = read_csv(path)
    rows = [row for row in every if (row["policy"], row["memory_format"]) == CASE and row["ratio"]]
    for row in rows:
        row["library"] = row["model"].partition(":")[0]
    libraries = values(rows, "library")
    figure, (axis,) = panels(1, 8, 0.4 * len(libraries) + 1.1)
    for i, library in enumerate(libraries):
        ratios = sorted(float(row["ratio"]) for row in rows if row["library"] == library)
        heights = [i + 0.1 * (j % 7 - 3) for j in range(len(ratios))]  # so that dots overlap less
        axis.plot(ratios, heights, "o", markersize=4, alpha=0.6)
    counts = [sum(row["library"] == library for row in rows) for library in libraries]
    names = [f"{name}: {count}" for name, count in zip(libraries, counts, strict=True)]
    axis.set_yticks(range(len(libraries)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.05)
    axis.set_xlabel(f"saved bytes of a model, over PyTorch's; {', '.join(CASE)}", fontsize=8)
    save(figure, path, rows[0])


def draw_training(path: Path) -> None:
    """Draw losses over epochs: the mean over the seeds, and the band from lowest to highest."""
    rows = read_csv(path)
    columns = {"training_losses": "training loss", "test_losses": "test loss"}
    cases = list(dict.fromkeys((row["network"], row["precision"]) for row in rows))
    figure, axes = panels(
        len(columns) * len(cases), 3.6, 2.7, columns=len(cases), sharex=True, sharey="row"
    )
    for i, axis in enumerate(axes):
        column, case = list(columns)[i // len(cases)], cases[i % len(cases)]
        runs = [row for row in rows if (row["network"], row["precision"]) == case]
        for j, variant in enumerate(values(runs, "variant")):
            own = [row for row in runs if row["variant"] == variant]
            by_epoch = list(zip(*([float(x) for x in r[column].split()] for r in own), strict=True))
            epochs = range(1, len(by_epoch) + 1)
            # Each line is thinner than the one below it, so that equal lines stay visible.
            axis.plot(epochs, [*map(mean, by_epoch)], label=variant, linewidth=5 - 0.8 * j)
            axis.fill_between(epochs, [*map(min, by_epoch)], [*map(max, by_epoch)], alpha=0.1)
        axis.set_yscale("log")
        axis.set_title(", ".join(case), fontsize=8)
        axis.set_ylabel(columns[column], fontsize=8)
        if i < len(cases):
            axis.legend(fontsize=6)
    seeds = len(values(rows, "seed"))
    for axis in axes[-len(cases) :]:
        axis.set_xlabel(f"epoch; mean of {seeds} seeds, band from lowest to highest", fontsize=7)
        axis.xaxis.get_major_locator().set_params(integer=True)
    save(figure, path, rows[0])


# The variants of networks that pictures show, and their colors.
SHOWN = {
    "torch.compile": "C1",
    "torch.compile, memory budget 0.5": "C2",
    "checkpoint of each block": "C3",
    "convert, max_ops=1": "C9",
    "convert, max_ops=4": "C0",
}


def draw_filled(path: Path) -> None:
    """Draw a step's peak against its time at large batches: a panel for each network.

    Compiled code was measured in another run, at smaller batches: its markers are hollow.
    """
    other = path.with_name(path.name.replace("filled", "baselines"))
    rows = [row for row in read_csv(path) if row["source"] == "measured"]
    compiled = [row for row in read_csv(other) if row["variant"] in SHOWN]
    networks = values(rows, "network")
    figure, axes = panels(len(networks) + 1, 2.6, 2.1, sharex=True, sharey=True)
    for axis, network in zip(axes, networks, strict=False):
        for row in (*rows, *compiled):
            if row["network"] == network:
                is_torch = row["variant"] == IN_PLACE
                axis.plot(
                    float(row["ratio_to_torch_in_place"]),
                    float(row["peak_over_torch_in_place"]),
                    "+" if is_torch else "o",
                    color=SHOWN.get(row["variant"], "black"),
                    markersize=10 if is_torch else 7,
                    markerfacecolor="white" if "compile" in row["variant"] else None,
                    label=row["variant"],
                )
        axis.set_title(network, fontsize=9)
        axis.set_ylim(0, 1.1)
    for axis in axes[3:]:
        axis.set_xlabel("time of a step", fontsize=9)
        axis.tick_params(labelbottom=True)
    for axis in axes[::4]:
        axis.set_ylabel("peak of a step", fontsize=9)
    looks = {line.get_label(): line for axis in axes for line in axis.get_lines()}
    axes[-1].axis("off")
    axes[-1].legend(handles=[*looks.values()], loc="center", fontsize=8)
    save(figure, path, rows[0])


# What a step costs, by column, and the variants of which each tool has a line, by their beginning.
COSTS = {
    "flops_over_torch_in_place": "FLOPs of a step",
    "moved_over_torch_in_place": "bytes that a step moves",
    "ratio_to_torch_in_place": "time of a step",
}
TOOL_LINES = {"convert, max_ops": "C0", "checkpoint": "C3", "torch.compile": "C1"}


def draw_networks(path: Path) -> None:
    """Draw the frontier: a step's peak against what it costs, over PyTorch in place.

    Each network has a column, each cost a row, each tool a line through its variants. The peak
    decides what fits into memory. Saved bytes would mislead: checkpoints save little, but allocate
    in backward what they recompute.
    """
    measured = [row for row in read_csv(path) if row["source"] == "measured"]
    rows = [row for row in measured if row["policy"] == measured[0]["policy"]]
    networks = values(rows, "network")
    costs = [cost for cost in COSTS if any(row.get(cost) for row in rows)]
    size = (len(networks) * len(costs), 2.2, 2.1)
    figure, axes = panels(*size, columns=len(networks), sharey=True)
    for i, axis in enumerate(axes):
        cost, network = costs[i // len(networks)], networks[i % len(networks)]
        for tool, color in TOOL_LINES.items():
            points = [
                (float(row[cost]), float(row["peak_over_torch_in_place"]))
                for row in rows
                if row["network"] == network and row["variant"].startswith(tool) and row[cost]
            ]
            axis.plot(
                *zip(*points, strict=True) if points else ([], []), "o-", color=color, label=tool
            )
        axis.plot(1, 1, "k+", markersize=12, label=IN_PLACE)
        axis.set_title(network if i < len(networks) else "", fontsize=9)
        axis.set_ylim(0, 1.1)
        axis.set_xlabel(COSTS[cost], fontsize=8)
    for axis in axes[:: len(networks)]:
        axis.set_ylabel("peak of a step", fontsize=8)
    lines, labels = axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=4, fontsize=8)
    save(figure, path, rows[0])


def draw_batches(path: Path) -> None:
    """Draw the largest batch over PyTorch's in the same memory: bars for each network."""
    rows = read_csv(path)
    networks = values(rows, "network")
    variants = [variant for variant in values(rows, "variant") if variant in SHOWN]
    figure, (axis,) = panels(1, 8, 0.45 * len(networks) + 1.1)
    for i, variant in enumerate(variants):
        ratios = []
        for network in networks:
            own = {r["variant"]: int(r["largest_batch"]) for r in rows if r["network"] == network}
            ratios.append(own[variant] / own[IN_PLACE])
        positions = [j + 0.4 * (i - (len(variants) - 1) / 2) for j in range(len(networks))]
        bars = axis.barh(positions, ratios, height=0.36, label=variant)
        axis.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    axis.axvline(1, color="gray", linewidth=1)
    axis.set_yticks(range(len(networks)), networks, fontsize=8)
    axis.invert_yaxis()
    limit = rows[0]["memory_limit_gib"]
    axis.set_xlabel(f"largest batch in {limit} GiB, over that of PyTorch in place", fontsize=8)
    axis.legend(fontsize=8)
    save(figure, path, rows[0])


PICTURES: dict[str, Callable[[Path], None]] = {
    "activations": draw_activations,
    "bandwidth": draw_bandwidth,
    "batches": draw_batches,
    "blocks": draw_blocks,
    "bytes": draw_bytes,
    "filled": draw_filled,
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
