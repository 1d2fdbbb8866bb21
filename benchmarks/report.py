"""Write the tables of the documentation from the result files, and draw its pictures.

A page has the tables between `<!-- results: NAME -->` and `<!-- end -->`. NAME is one of

- a device: the tables of results/*_DEVICE.csv, without the kinds in `ALONE`;
- a kind in `ALONE`: the tables of that kind for all devices;
- "gpu": a summary of "filled" and "batches" on a GPU;
- "compatibility": the table of tests/compatibility.csv;
- "errors": the documented errors of the activations;
- "rules": the recompute engine's table of operations.

`--pictures` draws the pictures first. `--check` writes nothing, and fails if the tables are not up
to date. `--print FOLDER` prints the tables of the result files in that folder, for all devices.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import torch
from common import IN_PLACE, RESULTS, by_seed, quartiles, read_csv, values
from integrations import INTEGRATIONS
from variants import CONVERT, OFFLOAD

from inplace_ops.activations import ACTIVATIONS
from inplace_ops.recompute.nodes import name_of_type
from inplace_ops.recompute.operations import OPERATIONS, Operation, Output, ProductRule
from inplace_ops.recompute.views import VIEWS

PROJECT = Path(__file__).parent.parent
PAGES = [PROJECT / "README.md", RESULTS / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]
COMPATIBILITY = PROJECT / "tests" / "compatibility.csv"
Row = dict[str, str]
Rows = list[Row]
OUTPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SHOWN_US = 5.0  # of a function of a block, in the profiler
SHOWN_KINDS = 12  # of tensors that remain saved, in each policy
LARGE = 64 * 2**20  # bytes; from this size on, kernels should reach the copy bandwidth


def markdown(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def grouped(rows: Rows, *columns: str) -> dict[tuple[str, ...], Rows]:
    """Return the rows grouped by their values in some columns, in order."""
    groups: dict[tuple[str, ...], Rows] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups


class Table(NamedTuple):
    """How a result file becomes a table.

    Attributes:
        command: The command that measures the rows.
        lines: Columns of the file whose values name a line.
        columns: Columns of the file whose values name a column; without any, each of `cells` has a
            column of its own.
        cells: Columns of the file that a cell shows.
        prepared: Returns the rows to show, with all of these columns. Of several for one cell the
            first is shown.
    """

    command: str
    lines: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[str]
    prepared: Callable[[Rows], Rows] = lambda rows: rows

    def draw(self, rows: Rows) -> str:
        """Return the table in Markdown."""
        rows = self.prepared(rows)
        columns = list(grouped(rows, *self.columns)) if self.columns else list(self.cells)
        body = []
        for names, own in grouped(rows, *self.lines).items():
            cells = grouped(own, *self.columns) if self.columns else own[0]
            texts = (self._text(cells.get(column)) or "-" for column in columns)
            body.append([", ".join(filter(None, names)), *texts])
        title, titles = ", ".join(self.lines), [TITLES.get(cell, cell) for cell in self.cells]
        if not self.columns:
            return markdown([title, *titles], body)
        return markdown([f"{title}: {', '.join(titles)}", *map(", ".join, columns)], body)

    def _text(self, found: Rows | str | None) -> str:
        if isinstance(found, list):
            return ", ".join(found[0].get(column) or "-" for column in self.cells)
        return found or ""


def lowest_shares(rows: Rows) -> Rows:
    """Return each kernel's row with the lowest share of the copy bandwidth, of large tensors."""
    limit = min(LARGE, max(int(row["bytes"]) for row in rows))
    large = [row for row in rows if int(row["bytes"]) >= limit]
    names = ("activation", "variant", "direction", "kernel", "layout", "dtype")
    cases = grouped(large, *(name for name in names if name in rows[0]))
    return [min(own, key=lambda row: float(row["share_of_copy"])) for own in cases.values()]


def of_slow_functions(rows: Rows) -> Rows:
    """Return the rows of the functions that take the most time in a block."""
    slow = {row["function"] for row in rows if float(row["us_per_block"]) >= SHOWN_US}
    return [row for row in rows if row["function"] in slow]


def with_times(rows: Rows) -> Rows:
    """Return the rows, with the time over PyTorch in place and its quartiles."""
    for row in rows:
        ratio = row.get("ratio_to_torch_in_place")  # without it where nothing was timed
        # On a CPU the copies that offload makes do not cross a bus.
        is_emulated = OFFLOAD in row["variant"] and row["cuda"] == "none"
        row["time"] = ""
        if ratio and not is_emulated:
            low, high = row["ratio_first_quartile"], row["ratio_third_quartile"]
            row["time"] = f"{ratio} ({low} to {high})"
        if row["variant"] == IN_PLACE and "saved_over_torch_in_place" in row:
            row["saved_over_torch_in_place"] = f"{row['saved_mib']} MiB"
            row["peak_over_torch_in_place"] = f"{row['peak_mib']} MiB"
            row["time"] = row["median_ms"] and f"{row['median_ms']} ms"
    return rows


def with_lines(rows: Rows) -> Rows:
    """Return the rows of converted networks, with the line that a library's user adds."""
    for row in rows:
        each = INTEGRATIONS[row["network"]]
        row["library and its script"] = f"[{each.library}](../examples/{each.script})"
        row["the line"] = f"`{each.line}`"
    return with_times([row for row in rows if row["variant"] == CONVERT])


def of_mechanisms(rows: Rows) -> Rows:
    """Return for each mechanism what its absence raises and lowers most, and where."""
    cases = grouped(rows, "network", "policy", "mechanism", "commit")
    found = []
    for (mechanism,), own in grouped(rows, "mechanism").items():
        pairs = [(row, cases[row["network"], row["policy"], "", row["commit"]][0]) for row in own]
        shown = {"mechanism": mechanism}
        for kind in ABLATED:
            changes = [
                (round(float(row[kind]) - float(other[kind]), 3), row["network"], row["policy"])
                for row, other in pairs
            ]
            highest, lowest = max(changes), min(changes)
            ends = [highest] * (highest[0] > 0) + [lowest] * (lowest[0] < 0)
            texts = [f"{change:+.3f} ({', '.join(case)})" for change, *case in ends]
            shown[kind] = "; ".join(texts) or "0"
        ratios = sorted(int(row["calls"]) / int(other["calls"]) - 1 for row, other in pairs)
        shown["calls"] = f"{ratios[0]:+.1%} to {ratios[-1]:+.1%}"
        found += [shown] if mechanism else []
    return found


def of_models(rows: Rows) -> Rows:
    """Return a row for each library and case, and one for each case that failed."""
    found = []
    for library in [*dict.fromkeys(row["model"].partition(":")[0] for row in rows), ""]:
        for (policy, memory_format), of_case in grouped(rows, "policy", "memory_format").items():
            own = [row for row in of_case if row["model"].startswith(library)]
            ratios, peaks = (
                sorted(float(row[column]) for row in own if row["ratio"])
                for column in ("ratio", "first_peak_over_torch")
            )
            if len(ratios) > 1:
                same = sum(row["result"] == "same gradients" for row in own)
                low, middle, high = quartiles(ratios)
                found.append(
                    {
                        "model": library or "all",
                        "policy": policy,
                        "memory_format": memory_format,
                        "result": f"{same} of {len(own)} have the same gradients",
                        "equal": str(sum(row["gradients_differ_by"] == "0" for row in own)),
                        "ratio": f"{middle:.2f} ({low:.2f} to {high:.2f})",
                        "ends": f"{ratios[0]:.2f}, {ratios[-1]:.2f}",
                        "peaks": f"{quartiles(peaks)[1]:.2f}, {peaks[-1]:.3f}",
                    }
                )
    failed = [row for row in rows if row["result"] != "same gradients"]
    return found + [row | dict.fromkeys(("equal", "ratio", "ends", "peaks"), "") for row in failed]


def over_seeds(rows: Rows) -> Rows:
    """Return mean ± standard deviation over the seeds, and the same of differences from PyTorch."""

    def spread(found: list[float], form: str) -> str:
        plus_minus = f" ± {stdev(found):{form}}".replace("± +", "± ") if len(found) > 1 else ""
        return f"{mean(found):{form}}{plus_minus}"

    found = []
    for (network, precision, variant), own in grouped(rows, *SEEDED).items():
        case = {"network": network, "precision": precision, "variant": IN_PLACE}
        theirs = [row for row in rows if case.items() <= row.items()]
        row = case | {"variant": variant, "gradient": f"{float(own[0]['gradient_off_by']):.0e}"}
        row["saved"] = f"{int(own[0]['saved_bytes']) / int(theirs[0]['saved_bytes']):.3f}"
        for column, scale, form, small in (
            ("test_accuracy", 100, ".2f", "+.2f"),
            ("test_loss", 1, ".4f", "+.0e"),
        ):
            ours, others = ([scale * v for v in by_seed(each, column)] for each in (own, theirs))
            differences = [a - b for a, b in zip(ours, others, strict=True)]
            difference = spread(differences, small) if any(differences) else "equal"
            row[column] = f"{spread(ours, form)} ({difference})"
        found.append(row)
    return found


SEEDED = ("network", "precision", "variant")
TRAIN = "bench_networks.py train"
OP, NETWORK = ("activation", "variant"), ("network", "variant")
SAVED, TIME = ("saved_over_torch_in_place", "peak_over_torch_in_place"), ("time",)
WORK = ("flops_over_torch_in_place", "moved_over_torch_in_place")
EXTRA = ("forward_us_per_activation", "backward_us_per_activation")
SHARES = ("torch_ms", *TIME, "recomputing_over_torch")
ABLATED = ("saved_ratio", "peak_ratio", "moved_ratio")
KINDS = (*ABLATED, "flops_ratio")
INSTRUCTIONS = (
    *("torch_forward", "torch_backward", "convert_forward", "convert_backward"),
    *("added", "over_torch"),
)
AFTER = ("MiB after forward, no grad", "MiB after forward, with grad")
CHOSEN = ("max_ops", "checkpointed", "saved_mib", "peak_mib", "flops_ratio", "time")
CHOSEN += ("script_peak_mib",)
TRAINED = ("saved", "gradient", "test_accuracy", "test_loss")
# What columns are called in tables, where they have another name.
TITLES = {
    "share_of_copy": "lowest share of the copy bandwidth from 64 MiB on",
    "ratio_to_torch_in_place": "time of forward and backward over PyTorch in place",
    "bytes_ratio_to_torch_in_place": "bytes",
    "median_us": "host time of a call, us",
    "time": "time over PyTorch in place (quartiles)",
    "recomputing_over_torch": "of that, recomputing",
    "forward_us_per_activation": "extra time per activation, us: forward",
    "backward_us_per_activation": "backward",
    "us_per_block": "us a block",
    "result": "same gradients, or why it failed",
    "passes": "passes that a product takes",
    "passes_counted": "as counted",
    "flops_per_byte": "FLOPs per byte",
    "equal": "bit for bit",
    "ratio": "saved bytes over PyTorch's: median (quartiles)",
    "ends": "best, worst",
    "peaks": "first step's peak over PyTorch's: median, worst",
    "mean_share": "mean share of what remains",
    "added": "convert adds",
    "over_torch": "convert over torch",
    "tests": "tests passed, by torch and Python",
    "saved": "saved over PyTorch's",
    "gradient": "gradient off by",
    "test_accuracy": "test accuracy, % (difference from torch in place)",
    "test_loss": "test loss (difference)",
    "script_peak_mib": "peak_mib of a script",
    **{kind: f"{kind.partition('_')[0]} over PyTorch's" for kind in (*SAVED, *WORK, *KINDS)},
}


def trained(option: str, cells: Sequence[str]) -> Table:
    """Return the table of networks that `bench_networks.py train` measures with an option."""
    lines = ("network", "input", "memory_format", "variant")
    return Table(f"{TRAIN}{option}", lines, ["policy"], cells, with_times)


TABLES = {
    "bandwidth": Table(
        "bench_bandwidth.py activations",
        *(OP, ("direction", "dtype"), ["share_of_copy"], lowest_shares),
    ),
    "norms": Table(
        "bench_bandwidth.py norms",
        *(("activation", "kernel"), ("layout", "dtype"), ["share_of_copy"], lowest_shares),
    ),
    "products": Table(
        "bench_products.py", ["product"], ["dtype"], ("passes", "passes_counted", "flops_per_byte")
    ),
    "activations": Table(
        "bench_ops.py time",
        *(OP, ("elements", "dtype"), ("ratio_to_torch_in_place", "bytes_ratio_to_torch_in_place")),
        lambda rows: [row for row in rows if row["phase"] == "both"],
    ),
    "host": Table("bench_ops.py host", OP, ["phase"], ["median_us"]),
    "steps": Table("bench_networks.py steps", NETWORK, (), ("step_ms", *TIME, *EXTRA), with_times),
    "small": Table("bench_networks.py small", ["network"], (), SHARES, with_times),
    "calls": Table(
        "bench_networks.py calls",
        *(("phase", "function"), ["variant"], ("us_per_block", "calls_per_block")),
        of_slow_functions,
    ),
    "memory": Table("bench_ops.py memory", (*OP, "size"), (), AFTER),
    "graphs": trained(" --graphs", SAVED + TIME),
    "filled": trained(" --fill-gib", SAVED + TIME),
    "batches": trained(" --largest-batch", (*SAVED, "largest_batch")),
    "baselines": trained(" --variants", SAVED + TIME),
    "integrations": Table(
        f"{TRAIN} --selection integrations",
        *(("library and its script", "network", "input", "the line"), ["policy"], SAVED + TIME),
        with_lines,
    ),
    "instructions": Table("bench_instructions.py", ["block"], (), INSTRUCTIONS),
    "tools": trained(" --selection tools", SAVED + TIME),
    "bytes": Table("bench_networks.py bytes", ("network", "input", "policy"), ["max_ops"], KINDS),
    "ablation": Table(
        "bench_networks.py ablation", ["mechanism"], (), (*ABLATED, "calls"), of_mechanisms
    ),
    "budgets": Table("bench_budgets.py", ("network", "input", "variant"), (), CHOSEN, with_times),
    "networks": trained("", SAVED + WORK + TIME),
    "peaks": trained(" --memory-only", SAVED),
    "models": Table(
        "bench_models.py",
        *(("model", "policy", "memory_format"), (), ("result", "equal", "ratio", "ends", "peaks")),
        of_models,
    ),
    "remaining": Table(
        "bench_models.py",
        *(("policy", "output_of", "saved_by", "reason"), (), ("mean_share", "models", "of")),
        lambda rows: [row for own in grouped(rows, "policy").values() for row in own[:SHOWN_KINDS]],
    ),
    "training": Table("bench_training.py", NETWORK, ["precision"], TRAINED, over_seeds),
}
ALONE = list(TABLES)[list(TABLES).index("integrations") :]


def gpu(filled: Rows, batches: Rows) -> str:
    """Memory, time and the largest batch of converted networks on a GPU."""
    columns = (*SAVED, "ratio_to_torch_in_place")
    body = []
    for row in filled:
        if row["variant"] == CONVERT:
            cells = [f"{float(row[column]):.2f}" for column in columns]
            own = [each for each in batches if each["network"] == row["network"]]
            sizes = {each["variant"]: int(each["largest_batch"]) for each in own}
            is_measured = {CONVERT, IN_PLACE} <= sizes.keys()
            cells.append(f"{sizes[CONVERT] / sizes[IN_PLACE]:.2f}" if is_measured else "-")
            body.append([f"{row['network']}, {row['input']}", *cells])
    device = filled[0]["device"].removeprefix("NVIDIA ")
    header = [f"`convert` on an {device}, relative to PyTorch in place", "saved for backward"]
    limit = float(batches[0]["memory_limit_gib"])
    header += ["peak memory", "time of a step", f"largest batch in {limit:g} GiB"]
    return markdown(header, body)


def captioned(path: Path) -> str:
    """Return the table of a result file, with where and when it was measured."""
    rows, table = read_csv(path), TABLES[path.stem.rpartition("_")[0]]
    found = {
        column: " and ".join(filter(None, values(rows, column)))
        for column in ("device", "driver", "cuda", "torch", "python", "date", "commit")
    }
    where = [found["device"]]
    if found["cuda"] != "none":
        where += [f"driver {found['driver']}", f"CUDA {found['cuda']}"]
    where += [f"torch {found['torch']}", f"Python {found['python']}", found["date"]]
    text = f"`{table.command}`, {', '.join(where)}, commit {found['commit']}"
    return f"{text}:\n\n{table.draw(rows)}"


def tables(paths: Iterable[Path]) -> str:
    """Return the tables of those result files that exist."""
    return "\n\n".join(captioned(path) for path in paths if path.exists()) or "Not measured yet."


def compatibility(rows: Rows) -> str:
    """Return the tests that passed, by subject and environment, and why others did not run."""
    rows.sort(key=lambda row: [int(n) for n in re.findall(r"\d+", row["torch"] + row["python"])])
    notes: dict[str, list[str]] = {}
    for row in rows:
        ran = "not run" if row["passed"] == row["failed"] == "0" else row["passed"]
        row["tests"] = ran + ("" if row["failed"] == "0" else f" ({row['failed']} FAILED)")
        if row["not_run"]:
            where = f"{row['torch']} on {row['python']}"
            notes.setdefault(f"{row['row']}: {row['not_run']}", []).append(where)
    count = len(grouped(rows, "torch", "python"))
    lines = [
        f"- {note}" + ("" if len(where) == count else f" ({', '.join(where)})")
        for note, where in sorted(notes.items())
    ]
    dates = sorted(values(rows, "date"))
    note = f"Ran {' to '.join(dict.fromkeys((dates[0], dates[-1])))}. Tests not run, and why:"
    table = Table("", ["row"], ["torch", "python"], ["tests"])
    return "\n\n".join([table.draw(rows), note, "\n".join(lines)])


def errors() -> str:
    """Return a table of the derivative's largest errors with save="output", from `ACTIVATIONS`."""
    header = ["", *(str(dtype).removeprefix("torch.") for dtype in OUTPUT_DTYPES)]
    body = []
    for activation in ACTIVATIONS:
        if not activation.is_piecewise_linear:
            name = " ".join([activation.name, *activation.variant.values()]).replace(" none", "")
            body.append([name])
            for dtype in OUTPUT_DTYPES:
                by_bits = activation.output_errors[dtype].items()
                cells = [f"{error or 'exact'} ({bits})" for bits, error in by_bits]
                body[-1].append(", ".join(cells))
    return markdown(header, body)


def rules() -> str:
    """Return the tables of what the engine does with the tensors that each operation saves."""
    header = ["operations", "inputs read recomputed", "else saved", "output recomputed from"]
    names: dict[tuple[str, ...], list[str]] = {}  # by what is done
    for name, entry in OPERATIONS.items():
        exact = (f"`{field}`, if exact" for field in entry.reads_exact)
        reads = ", ".join(filter(None, [_code(entry.reads), *exact]))
        names.setdefault((reads, _stored(entry), _output(entry)), []).append(name)
    body = [[_code(_operations(own)), *cells] for cells, own in names.items()]
    return f"{markdown(header, body)}\n\nViews, which cost nothing: {_code(_operations(VIEWS))}."


def _operations(node_types: Iterable[str]) -> Iterable[str]:
    """Return the names of operations as reports print them."""
    return dict.fromkeys(name_of_type(node_type) for node_type in node_types)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _stored(entry: Operation) -> str:
    """Return what is done with the tensors that an operation saves besides its inputs."""
    mask = entry.mask is not None
    cells = {
        entry.result: "recomputed" + (", or 1 bit per element" if mask else ""),
        entry.activation_field if mask and not entry.result else "": "or 1 bit per element",
        entry.shape_only: "only its shape",
        entry.indices: "16 or 32 bits",
        entry.saved_mask: "1 bit per element of a mask",
    }
    texts = [f"`{field}`: {text}" for field, text in cells.items() if field]
    if entry.reads_no_values and not entry.shape_only and entry.output is None:
        texts.append("nothing: a ReLU or LeakyReLU before it saves 1 bit per element")
    return "; ".join(texts)


def _output(entry: Operation) -> str:
    """Return what an operation's output is recomputed from."""
    output = entry.output
    if output is None:
        return f"its saved `{entry.saved_output}`" if entry.saved_output else ""
    if output == "norm":
        return "`input`, scale and shift"
    if output == "activation after a norm":
        return "the norm's `input`, scale and shift"
    if isinstance(output, ProductRule):
        operands = " and ".join(f"`{field}`" for field, _ in output.operands)
        return f"{operands}, one of them a weight, if the output is larger than the other one"
    assert isinstance(output, Output)
    unsaved = "its input" if output.inputs.count(None) == 1 else "its inputs"
    sources = [f"`{field}`" if field else unsaved for field in output.inputs or (None,)]
    text = " and ".join(dict.fromkeys(sources)) + (", or a narrow copy" if output.narrow else "")
    return text if output.bound is not None else f"{text}, if exact"


def block(name: str) -> str:
    """Return the text of a page's block of that name."""
    made: dict[str, Callable[[], str]] = {
        "errors": errors,
        "rules": rules,
        "gpu": lambda: gpu(*(read_csv(RESULTS / f"{k}_cuda.csv") for k in ("filled", "batches"))),
        "compatibility": lambda: compatibility(read_csv(COMPATIBILITY)),
    }
    if name in made:
        return made[name]()
    if name in ALONE:
        return tables(sorted(RESULTS.glob(f"{name}_*.csv")))
    return tables(RESULTS / f"{kind}_{name}.csv" for kind in TABLES if kind not in ALONE)


def main() -> None:
    """Rewrite the pages, check them, or print the tables of a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--print", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if folder := arguments.print:
        print(tables(folder / f"{kind}_{d}.csv" for d in ("cpu", "cuda") for kind in TABLES))
        return
    if arguments.pictures:
        import pictures  # needs matplotlib, which the tables do not

        pictures.draw_all(RESULTS)
    for page in PAGES:
        text = page.read_text()
        updated = re.sub(
            r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)",
            lambda found: f"{found[1]}\n{block(found[2])}\n\n{found[3]}",
            text,
            flags=re.DOTALL,
        )
        if not arguments.check:
            page.write_text(updated)
        elif updated != text:
            sys.exit(f"{page.name}: its tables are out of date; run `make tables`")


if __name__ == "__main__":
    main()
