"""Plot the result files: bandwidth and time by size, memory and time of networks, trainings."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

import matplotlib
from measure import RESULTS, read_csv

matplotlib.use("agg")
import matplotlib.pyplot as plt  # the backend is chosen first

Rows = list[dict[str, str]]


def plot_by_size(
    path: Path, rows: Rows, size: str, ratio: str, quartiles: str, label: str, log: bool
) -> None:
    """Plot medians and quartiles by size: a panel per activation and dtype, a line per variant."""
    activations = list(dict.fromkeys(row["activation"] for row in rows))
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure, axes = plt.subplots(
        len(activations),
        len(dtypes),
        figsize=(4 * len(dtypes), 3 * len(activations)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for line, activation in zip(axes, activations, strict=True):
        for axis, dtype in zip(line, dtypes, strict=True):
            case = [r for r in rows if (r["activation"], r["dtype"]) == (activation, dtype)]
            for variant in dict.fromkeys(row["variant"] for row in case):
                points = [row for row in case if row["variant"] == variant]
                sizes = [int(row[size]) for row in points]
                low, ratios, high = (
                    [float(row[key]) for row in points]
                    for key in (f"{quartiles}_first_quartile", ratio, f"{quartiles}_third_quartile")
                )
                (drawn,) = axis.plot(sizes, ratios, "o-", label=variant, markersize=3)
                axis.fill_between(sizes, low, high, alpha=0.2, color=drawn.get_color())
            axis.set_xscale("log", base=2)
            if log:
                axis.set_yscale("log", base=2)
            axis.yaxis.set_major_formatter("{x:g}")
            axis.set_title(f"{activation}, {dtype}", fontsize=9)
            axis.grid(alpha=0.3)
        line[0].set_ylabel(label)
        line[0].legend(fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel(size)
    save(figure, path, rows[0])


def plot_times(path: Path) -> None:
    """Plot the time of forward and backward over PyTorch in place."""
    rows = [row for row in read_csv(path) if row["phase"] == "both"]
    label = "time over torch in place"
    plot_by_size(path, rows, "elements", "ratio_to_torch_in_place", "ratio", label, log=True)


def plot_bandwidth(path: Path) -> None:
    """Plot the share of the copy bandwidth, for forward and backward."""
    rows = read_csv(path)
    for row in rows:
        row["variant"] += f", {row['direction']}"
    label = "share of copy bandwidth"
    plot_by_size(path, rows, "bytes", "share_of_copy", "share", label, log=False)


def plot_memory(path: Path) -> None:
    """Plot the MiB allocated after an activation's forward, without and with a gradient."""
    rows = read_csv(path)
    labels = [f"{row['activation']}, {row['variant']}" for row in rows]
    figure, axis = plt.subplots(figsize=(9, 0.4 * len(rows) + 1), layout="constrained")
    for shift, key in ((-0.2, "MiB after forward, no grad"), (0.2, "MiB after forward, with grad")):
        positions = [i + shift for i in range(len(rows))]
        bars = axis.barh(positions, [float(row[key]) for row in rows], height=0.4, label=key)
        axis.bar_label(bars, fontsize=7, padding=2)
    axis.set_yticks(range(len(rows)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(f"MiB, float32 {rows[0]['size']}")
    axis.legend(loc="lower right", fontsize=8)
    save(figure, path, rows[0])


def plot_blocks(path: Path) -> None:
    """Plot the tensors that a block of convolution, norm and activation saves, and its time."""
    rows = read_csv(path)
    activations = list(dict.fromkeys(row["activation"] for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    figure, axis = plt.subplots(figsize=(9, 0.6 * len(variants) + 1), layout="constrained")
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
    axis.margins(x=0.2)
    axis.set_xlabel("tensors that a block of convolution, norm and activation saves for backward")
    axis.legend(loc="lower right", fontsize=8)
    save(figure, path, rows[0])


def plot_training(path: Path) -> None:
    """Plot losses over epochs: the mean over the seeds, and the band from lowest to highest."""
    rows = read_csv(path)
    columns = {"training_losses": "training loss", "test_losses": "test loss"}
    cases = list(dict.fromkeys((row["network"], row["precision"]) for row in rows))
    size = (4.5 * len(cases), 3.5 * len(columns))
    figure, axes = plt.subplots(
        len(columns), len(cases), figsize=size, sharex=True, sharey="row", layout="constrained"
    )
    for line, (column, label) in zip(axes, columns.items(), strict=True):
        for axis, case in zip(line, cases, strict=True):
            runs = [row for row in rows if (row["network"], row["precision"]) == case]
            for i, variant in enumerate(dict.fromkeys(row["variant"] for row in runs)):
                losses = [
                    [float(loss) for loss in run[column].split()]
                    for run in runs
                    if run["variant"] == variant
                ]
                epochs = range(1, len(losses[0]) + 1)
                by_epoch = list(zip(*losses, strict=True))
                # Each line is thinner than the one below it, so that equal lines stay visible.
                axis.plot(epochs, [*map(mean, by_epoch)], label=variant, linewidth=5 - 0.8 * i)
                axis.fill_between(epochs, [*map(min, by_epoch)], [*map(max, by_epoch)], alpha=0.1)
            axis.set_yscale("log")
            axis.grid(alpha=0.3)
        line[0].set_ylabel(label)
    for axis, case in zip(axes[0], cases, strict=True):
        axis.set_title(", ".join(case), fontsize=9)
        axis.legend(fontsize=7)
    seeds = len({row["seed"] for row in rows})
    for axis in axes[-1]:
        axis.set_xlabel(f"epoch; mean of {seeds} seeds, band from lowest to highest", fontsize=8)
        axis.xaxis.get_major_locator().set_params(integer=True)
    save(figure, path, rows[0])


def plot_networks(path: Path) -> None:
    """Plot a step's peak against its time, over PyTorch in place: a panel per network and policy.

    The plot shows the peak because it decides what fits into memory. Saved bytes would mislead:
    checkpoints save little, but allocate in backward what they recompute.
    """
    rows = [row for row in read_csv(path) if row["source"] == "measured" and row["median_ms"]]
    cases = list(dict.fromkeys((row["network"], row["policy"]) for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    looks = {variant: ("o.sDX^v<>P"[i % 10], f"C{i}") for i, variant in enumerate(variants)}
    top = 1.05 * max(float(row["peak_over_torch_in_place"]) for row in rows)
    width = min(4, len(cases) + 1)
    height = -(-(len(cases) + 1) // width)  # the legend takes one panel
    figure, axes = plt.subplots(
        height,
        width,
        figsize=(3.4 * width, 3.5 * height),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    points = {}
    for axis, (network, policy) in zip(axes.flat, cases, strict=False):
        case = [row for row in rows if (row["network"], row["policy"]) == (network, policy)]
        for row in case:
            low, time, high = (
                float(row[f"ratio_{column}"])
                for column in ("first_quartile", "to_torch_in_place", "third_quartile")
            )
            marker, color = looks[row["variant"]]
            points[row["variant"]] = axis.errorbar(
                time,
                float(row["peak_over_torch_in_place"]),
                xerr=[[time - low], [high - time]],
                marker=marker,
                color=color,
                linestyle="none",
                elinewidth=0.8,
                markersize=7,
                alpha=0.85,
            )
        base = next(row for row in case if row["variant"] == "torch in place")
        title = f"{network}, {base['input']}, {policy}\n"
        axis.set_title(f"{title}1 is {base['peak_mib']} MiB, {base['median_ms']} ms", fontsize=8)
        axis.set_ylim(0, top)
        axis.grid(alpha=0.3)
        axis.set_xlabel("time of a step, over torch in place")
    for line in axes:
        line[0].set_ylabel("peak of a step, over torch in place")
    for axis in axes.flat[len(cases) :]:
        axis.axis("off")
    axes.flat[-1].legend(points.values(), points, loc="center", fontsize=9)
    save(figure, path, rows[0])


def save(figure: plt.Figure, path: Path, row: dict[str, str]) -> None:
    """Write the figure next to its result file, titled with where and when it was measured."""
    figure.suptitle(f"{row['device']}, torch {row['torch']}, {row['date']}", fontsize=9)
    out = path.with_suffix(".png")
    figure.savefig(out, dpi=120)
    print(out)


def main() -> None:
    """Plot every result file of a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV files")
    results = parser.parse_args().results
    plots = {
        "activations": plot_times,
        "bandwidth": plot_bandwidth,
        "memory": plot_memory,
        "blocks": plot_blocks,
        "networks": plot_networks,
        "training": plot_training,
    }
    for kind, plot in plots.items():
        for path in sorted(results.glob(f"{kind}_*.csv")):
            plot(path)


if __name__ == "__main__":
    main()
