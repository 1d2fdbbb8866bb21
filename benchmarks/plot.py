"""Draws the result files: time over PyTorch in place by size, and the memory that is held."""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
from measure import RESULTS, read_csv

matplotlib.use("agg")
import matplotlib.pyplot as plt  # the backend is chosen first


def plot_times(path: Path) -> None:
    """Forward and backward over PyTorch in place: the median of the ratios and their quartiles."""
    rows = [row for row in read_csv(path) if row["phase"] == "both"]
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
                sizes = [int(row["elements"]) for row in points]
                low, ratios, high = (
                    [float(row[key]) for row in points]
                    for key in (
                        "ratio_first_quartile",
                        "ratio_to_torch_in_place",
                        "ratio_third_quartile",
                    )
                )
                (drawn,) = axis.plot(sizes, ratios, "o-", label=variant, markersize=3)
                axis.fill_between(sizes, low, high, alpha=0.2, color=drawn.get_color())
            axis.set_xscale("log", base=2)
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_formatter("{x:g}")
            axis.set_title(f"{activation}, {dtype}", fontsize=9)
            axis.grid(alpha=0.3)
        line[0].set_ylabel("time over torch in place")
        line[0].legend(fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("elements")
    save(figure, path, rows[0])


def plot_memory(path: Path) -> None:
    """MiB that an activation holds after forward, without and with a gradient."""
    rows = read_csv(path)
    labels = [f"{row['activation']}, {row['variant']}" for row in rows]
    figure, axis = plt.subplots(figsize=(9, 0.4 * len(rows) + 1), layout="constrained")
    for shift, key in ((-0.2, "MiB held, no grad"), (0.2, "MiB held, with grad")):
        places = [i + shift for i in range(len(rows))]
        bars = axis.barh(places, [float(row[key]) for row in rows], height=0.4, label=key)
        axis.bar_label(bars, fontsize=7, padding=2)
    axis.set_yticks(range(len(rows)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(f"MiB, float32 {rows[0]['size']}")
    axis.legend(loc="lower right", fontsize=8)
    save(figure, path, rows[0])


def save(figure: plt.Figure, path: Path, row: dict[str, str]) -> None:
    """Write the figure beside its result file, with where and when it was measured."""
    figure.suptitle(f"{row['device']}, torch {row['torch']}, {row['date']}", fontsize=9)
    out = path.with_suffix(".png")
    figure.savefig(out, dpi=120)
    print(out)


def main() -> None:
    """Draw every result file of a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV files")
    results = parser.parse_args().results
    for path in sorted(results.glob("activations_*.csv")):
        plot_times(path)
    for path in sorted(results.glob("memory_*.csv")):
        plot_memory(path)


if __name__ == "__main__":
    main()
