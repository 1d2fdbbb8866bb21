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
from functools import partial
from pathlib import Path
from statistics import mean, stdev

import torch
from common import IN_PLACE, RESULTS, by_seed, quartiles, read_csv, values
from integrations import INTEGRATIONS
from variants import CONVERT, OFFLOAD

from inplace_ops.activations import ACTIVATIONS
from inplace_ops.recompute.nodes import name_of_type
from inplace_ops.recompute.operations import OPERATIONS, VIEWS, Operation, Output, ProductRule

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


def pivot(
    title: str,
    rows: Rows,
    lines: Sequence[str],
    columns: Sequence[str],
    cell: Callable[[Rows], str],
) -> str:
    """Return a table with a line, and a column, for each combination of values.

    Args:
        title: The header of the first column, which has the values of `lines`.
        rows: The rows of a result file.
        lines: Columns of the result file whose values make a line of the table.
        columns: Columns of the result file whose values make a column of the table.
        cell: Returns the text for the rows of a line and column; where there are none it is a dash.
    """
    header = list(grouped(rows, *columns))
    body = []
    for names, own in grouped(rows, *lines).items():
        cells = grouped(own, *columns)
        texts = (cell(cells[column]) if column in cells else "-" for column in header)
        body.append([", ".join(names), *texts])
    return markdown([title, *map(", ".join, header)], body)


def find(rows: Rows, column: str, **wanted: str) -> str:
    """Return a column of the row that has the wanted values; a dash if there is none."""
    return next((row[column] for row in rows if wanted.items() <= row.items()), "-")


def time_over_torch(row: Row) -> str:
    """Return the time over PyTorch in place, with quartiles."""
    low, high = row["ratio_first_quartile"], row["ratio_third_quartile"]
    return f"{row['ratio_to_torch_in_place']} ({low} to {high})"


def activations(rows: Rows) -> str:
    """Forward plus backward: the largest size in every dtype, the smallest size in float32."""
    sizes = sorted(values(rows, "elements"), key=int)
    shown = [row for row in rows if row["phase"] == "both" and row["elements"] == sizes[-1]]
    small = {"phase": "both", "elements": sizes[0], "dtype": rows[0]["dtype"]}
    shown += [row for row in rows if small.items() <= row.items()]
    title = "forward and backward, by elements and dtype: time (bytes) over PyTorch in place"

    def cell(own: Rows) -> str:
        return f"{own[0]['ratio_to_torch_in_place']} ({own[0]['bytes_ratio_to_torch_in_place']})"

    return pivot(title, shown, ("activation", "variant"), ("elements", "dtype"), cell)


def lowest_share(rows: Rows) -> str:
    """Return the title of a table with the lowest shares of the copy bandwidth."""
    copies = [float(row["copy_gigabytes_per_second"]) for row in rows]
    sizes = sorted({int(row["bytes"]) / 2**20 for row in rows})
    title = f"lowest share of the copy bandwidth ({min(copies):.0f} to {max(copies):.0f} GB/s)"
    return f"{title} at {', '.join(f'{size:g}' for size in sizes)} MiB"


def bandwidth(rows: Rows) -> str:
    """The lowest share of the copy bandwidth among the large sizes."""
    limit = min(LARGE, max(int(row["bytes"]) for row in rows))
    large = [row for row in rows if int(row["bytes"]) >= limit]
    sizes = len(values(large, "bytes"))

    def cell(own: Rows) -> str:
        share = min(float(row["share_of_copy"]) for row in own)
        missing = sizes - len(own)  # failed, or the time limit came first
        return f"{share:.3f}" + (f" ({missing} of {sizes} sizes missing)" if missing else "")

    lines, columns = ("activation", "variant"), ("direction", "dtype")
    return pivot(lowest_share(large), large, lines, columns, cell)


def norms(rows: Rows) -> str:
    """The lowest share of the copy bandwidth of the kernels after a norm, by memory layout."""
    dtypes = values(rows, "dtype")

    def cell(own: Rows) -> str:
        shares = [
            [float(row["share_of_copy"]) for row in own if row["dtype"] == dtype]
            for dtype in dtypes
        ]
        return ", ".join(f"{min(each):.2f}" if each else "-" for each in shares)

    title = f"{lowest_share(rows)}: {', '.join(dtypes)}"
    return pivot(title, rows, ("activation", "kernel"), ("layout",), cell)


def host(rows: Rows) -> str:
    """Host microseconds of a call."""
    title, lines = "host time of a call, us", ("activation", "variant")
    return pivot(title, rows, lines, ("phase",), lambda own: own[0]["median_us"])


def steps(rows: Rows) -> str:
    """The time of a step, and the extra time that each activation costs."""
    header = ["network, variant", "step, ms", "time over PyTorch in place (quartiles)"]
    header += ["extra time per activation, us: forward", "backward"]
    body = []
    for row in rows:
        extra = [row[f"{half}_us_per_activation"] for half in ("forward", "backward")]
        name = f"{row['network']}, {row['variant']}"
        body.append([name, row["step_ms"], time_over_torch(row), *extra])
    return markdown(header, body)


def calls(rows: Rows) -> str:
    """The functions that take the most time in a block, with all commits side by side."""
    functions = ("phase", "function")
    shown = [
        row
        for own in grouped(rows, *functions).values()
        for row in own
        if max(float(each["us_per_block"]) for each in own) >= SHOWN_US
    ]

    def cell(own: Rows) -> str:
        return f"{own[0]['us_per_block']} ({own[0]['calls_per_block']})"

    title = "phase, function: us a block (calls)"
    return pivot(title, shown, functions, ("variant", "commit"), cell)


def memory(rows: Rows) -> str:
    """MiB allocated after forward."""
    header = [f"MiB after forward, {rows[0]['size']} float32", "without grad", "with grad"]
    columns = ("MiB after forward, no grad", "MiB after forward, with grad")
    return markdown(
        header,
        (
            [f"{row['activation']}, {row['variant']}", *(row[column] for column in columns)]
            for row in rows
        ),
    )


def blocks(rows: Rows) -> str:
    """The tensors that a block saves, and its time over PyTorch in place."""
    title = f"block of convolution, norm, activation: {rows[0]['input']}: tensors saved, "
    title += "time over PyTorch in place (quartiles)"

    def cell(own: Rows) -> str:
        (row,) = own
        return f"{row['tensors saved']}, {row['time over torch in place']} ({row['quartiles']})"

    return pivot(title, rows, ("variant",), ("activation",), cell)


def models(rows: Rows) -> str:
    """Gradients and memory of models of other libraries, by library and case."""
    header = ["library", "case", "models", "same gradients", "bit for bit"]
    header += ["saved bytes relative to PyTorch's: median (quartiles)", "best, worst"]
    header += ["first step's peak relative to PyTorch's: median, worst"]
    body = []
    for library in [*dict.fromkeys(row["model"].partition(":")[0] for row in rows), ""]:
        for case, of_case in grouped(rows, "policy", "memory_format").items():
            own = [row for row in of_case if row["model"].startswith(library)]
            ran = [row for row in own if row["ratio"]]
            if len(ran) < 2:
                continue
            ratios, peaks = (
                sorted(float(row[column]) for row in ran if row[column])
                for column in ("ratio", "first_peak_over_torch")
            )
            low, middle, high = quartiles(ratios)
            counts = [len(own), sum(row["result"] == "same gradients" for row in own)]
            counts.append(sum(row["gradients_differ_by"] == "0" for row in ran))
            body.append([library or "all", ", ".join(case), *map(str, counts)])
            body[-1] += [f"{middle:.2f} (quartiles {low:.2f}, {high:.2f})"]
            body[-1] += [f"{ratios[0]:.2f}, {ratios[-1]:.2f}"]
            body[-1] += [f"{quartiles(peaks)[1]:.2f}, {peaks[-1]:.3f}"]
    failed = [row for row in rows if row["result"] != "same gradients"]
    columns = ("model", "policy", "memory_format", "result")
    reasons = markdown(columns, ([row[column] for column in columns] for row in failed))
    return f"{markdown(header, body)}\n\nCases that failed, and why:\n\n{reasons}"


def remaining(rows: Rows) -> str:
    """The kinds of tensors that most often remain saved."""
    header = ["libraries", "dtype policy", "output of", "saved by", "reason"]
    header += ["mean share of what remains", "models"]
    body = []
    for case, own in grouped(rows, "libraries", "policy").items():
        for i, row in enumerate(own[:SHOWN_KINDS]):
            what = [row[column] for column in ("output_of", "saved_by", "reason")]
            share = [f"{float(row['mean_share']):.1%}", f"{row['models']} of {row['of']}"]
            body.append([*(case if i == 0 else ("", "")), *what, *share])
    return markdown(header, body)


def bytes_of_a_step(rows: Rows) -> str:
    """Saved, peak and moved bytes and FLOPs relative to PyTorch's, by max_ops."""
    kinds = {kind: f"{kind} bytes" for kind in ("saved", "peak", "moved")} | {"flops": "FLOPs"}
    numbers = ", ".join(values(rows, "max_ops"))
    header = ["network", "input", "dtype policy", "MiB saved by PyTorch"]
    header += [f"{name} relative to PyTorch's, max_ops {numbers}" for name in kinds.values()]
    body = []
    for case, own in grouped(rows, "network", "input", "policy").items():
        ratios = (", ".join(f"{float(row[f'{kind}_ratio']):.2f}" for row in own) for kind in kinds)
        body.append([*case, f"{int(own[0]['saved_torch']) / 2**20:.1f}", *ratios])
    return markdown(header, body)


def gpu(filled: Rows, batches: Rows) -> str:
    """Memory, time and the largest batch of converted networks on a GPU."""
    columns = [f"{kind}_over_torch_in_place" for kind in ("saved", "peak")]
    columns.append("ratio_to_torch_in_place")
    body = []
    for row in filled:
        if row["variant"] == CONVERT:
            ours, theirs = (
                int(find(batches, "largest_batch", network=row["network"], variant=variant))
                for variant in (CONVERT, IN_PLACE)
            )
            ratios = [*(float(row[column]) for column in columns), ours / theirs]
            name = f"{row['network']}, {row['input']}"
            body.append([name, *(f"{ratio:.2f}" for ratio in ratios)])
    device = filled[0]["device"].removeprefix("NVIDIA ")
    header = [f"`convert` on an {device}, relative to PyTorch in place", "saved for backward"]
    limit = float(batches[0]["memory_limit_gib"])
    header += ["peak memory", "time of a step", f"largest batch in {limit:g} GiB"]
    return markdown(header, body)


def networks(rows: Rows, kinds: Sequence[str] = ("saved", "peak", "flops", "moved")) -> str:
    """Memory and time by network, variant and dtype policy: MiB and ms, or ratios to them."""

    def cell(own: Rows) -> str:
        (row,) = own
        if row["variant"] == IN_PLACE:
            parts = [f"{kind} {row[f'{kind}_mib']} MiB" for kind in ("saved", "peak")]
        else:
            ratios = {kind: row.get(f"{kind}_over_torch_in_place") for kind in kinds}
            parts = [f"{kind} {ratio}" for kind, ratio in ratios.items() if ratio]
        # On a CPU the copies that offload makes do not cross a bus.
        if row["median_ms"] and not (OFFLOAD in row["variant"] and row["cuda"] == "none"):
            is_torch = row["variant"] == IN_PLACE
            parts.append(f"time {row['median_ms']} ms" if is_torch else _time(row))
        if row["largest_batch"]:
            parts.append(f"largest batch in {row['memory_limit_gib']} GiB: {row['largest_batch']}")
        return ", ".join(parts)

    measured = [row for row in rows if row["source"] == "measured"]
    title = "network, input, memory format, variant: relative to torch in place (quartiles)"
    lines = ("network", "input", "memory_format", "variant")
    return pivot(title, measured, lines, ("policy",), cell)


def _time(row: Row) -> str:
    return f"time {time_over_torch(row)}"


def integrations(rows: Rows) -> str:
    """What `convert` saves in a network of each library, and the line to add."""
    policies = values(rows, "policy")
    header = ["library and its script: network", "the line"]
    header += ["saved bytes", "peak bytes", "time of a step"]
    columns = [f"{kind}_over_torch_in_place" for kind in ("saved", "peak")]
    columns.append("ratio_to_torch_in_place")
    body = []
    for (name, shape), own in grouped(rows, "network", "input").items():
        each = INTEGRATIONS[name]
        wanted = [{"variant": CONVERT, "policy": policy} for policy in policies]
        ratios = [
            ", ".join(find(own, column, **case) or "-" for case in wanted) for column in columns
        ]
        where = f"[{each.library}](../examples/{each.script}): {name}, {shape}"
        body.append([where, f"`{each.line}`", *ratios])
    return f"Relative to PyTorch in place, in {', '.join(policies)}:\n\n{markdown(header, body)}"


def budgets(rows: Rows) -> str:
    """What `convert` chooses for a budget, its peak and time, and the peak of a training script."""
    header = ["network", "budget", "chosen", "saved", "peak", "FLOPs", "time", "peak of a script"]
    body = []
    for case, own in grouped([row for row in rows if not row["note"]], "network", "input").items():
        for i, row in enumerate(own):
            chosen = row["variant"]
            if row["max_ops"]:
                chosen = f"`max_ops={row['max_ops']}`, {row['checkpointed']} checkpoints"
            budget, saved, peak, script = (
                f"{row[f'{kind}_mib']} MiB" if row[f"{kind}_mib"] else ""
                for kind in ("budget", "saved", "peak", "script_peak")
            )
            time = time_over_torch(row) if row["median_ms"] else "-"  # `--repetitions 0`
            name = ", ".join(case) if i == 0 else ""
            body.append([name, budget, chosen, saved, peak, row["flops_ratio"], time, script])
    return markdown(header, body)


def profile(rows: Rows) -> str:
    """Device time by operation, of the operations that take the most time or change the most."""
    both = values(rows, "variant")[:2]
    body = []
    for case, own in grouped(rows, "network", "input").items():
        times = {
            name: [sum(float(row["ms"]) for row in of if row["variant"] == v) for v in both]
            for (name,), of in grouped(own, "operation").items()
        }
        before, after = map(sum, zip(*times.values(), strict=True))
        total = [f"{before:.2f}", f"{after:.2f}", f"{after / before:.3f} x"]
        body.append([", ".join(case), "all", *total])
        body += [
            ["", f"`{name}`", f"{old:.2f}", f"{new:.2f}", f"{new - old:+.2f}"]
            for name, (old, new) in times.items()
            if max(old, new) >= 0.05 * before or abs(new - old) >= 0.003 * before
        ]
    titles = [f"{variant}, ms" for variant in both]
    return markdown(["network", "operation", *titles, "difference, ms"], body)


def training(rows: Rows) -> str:
    """Mean ± standard deviation over the seeds of what trainings reach, by save mode."""
    seeds = len(values(rows, "seed"))
    title = f"{rows[0]['epochs']} epochs, {seeds} seeds (difference from {IN_PLACE}): saved over "
    title += "PyTorch's, gradient off by, test accuracy in %, test loss"

    def spread(found: list[float], form: str) -> str:
        return f"{mean(found):{form}}" + (f" ± {stdev(found):{form}}" if len(found) > 1 else "")

    def cell(own: Rows) -> str:
        case = {key: own[0][key] for key in ("network", "precision")}
        theirs = [row for row in rows if {**case, "variant": IN_PLACE}.items() <= row.items()]
        saved, torch_saved = (int(each[0]["saved_bytes"]) for each in (own, theirs))
        parts = [f"{saved / torch_saved:.3f}", f"{float(own[0]['gradient_off_by']):.0e}"]
        for column, scale, form, small in (
            ("test_accuracy", 100, ".2f", "+.2f"),
            ("test_loss", 1, ".4f", "+.0e"),
        ):
            found, expected = (
                [scale * value for value in by_seed(each, column)] for each in (own, theirs)
            )
            differences = [a - b for a, b in zip(found, expected, strict=True)]
            difference = spread(differences, small) if any(differences) else "equal"
            parts.append(f"{spread(found, form)} ({difference})".replace("± +", "± "))
        return ", ".join(parts)

    return pivot(title, rows, ("network", "variant"), ("precision",), cell)


# By kind: what makes a table of a result file, and the command that measures it.
TRAIN = "bench_networks.py train"
TABLES: dict[str, tuple[Callable[[Rows], str], str]] = {
    "bandwidth": (bandwidth, "bench_bandwidth.py activations"),
    "norms": (norms, "bench_bandwidth.py norms"),
    "activations": (activations, "bench_ops.py time"),
    "host": (host, "bench_ops.py host"),
    "steps": (steps, "bench_networks.py steps"),
    "calls": (calls, "bench_networks.py calls"),
    "memory": (memory, "bench_ops.py memory"),
    "blocks": (blocks, "bench_networks.py blocks"),
    "graphs": (networks, f"{TRAIN} --graphs"),
    "filled": (networks, f"{TRAIN} --fill-gib"),
    "batches": (networks, f"{TRAIN} --largest-batch"),
    "baselines": (networks, f"{TRAIN} --variants"),
    "profile": (profile, f"{TRAIN} --profile"),
    "integrations": (integrations, f"{TRAIN} --selection integrations"),
    "tools": (partial(networks, kinds=("saved", "peak")), f"{TRAIN} --selection tools"),
    "bytes": (bytes_of_a_step, "bench_networks.py bytes"),
    "budgets": (budgets, "bench_budgets.py"),
    "networks": (networks, TRAIN),
    "peaks": (partial(networks, kinds=("saved", "peak")), f"{TRAIN} --memory-only"),
    "models": (models, "bench_models.py"),
    "remaining": (remaining, "bench_models.py"),
    "training": (training, "bench_training.py"),
}
ALONE = list(TABLES)[list(TABLES).index("integrations") :]


def captioned(path: Path) -> str:
    """Return the table of a result file, with where and when it was measured."""
    rows = read_csv(path)
    draw, command = TABLES[path.stem.rpartition("_")[0]]
    found = {
        column: " and ".join(filter(None, values(rows, column)))
        for column in ("device", "driver", "cuda", "torch", "python", "date", "commit")
    }
    where = [found["device"]]
    if found["cuda"] != "none":
        where += [f"driver {found['driver']}", f"CUDA {found['cuda']}"]
    where += [f"torch {found['torch']}", f"Python {found['python']}", found["date"]]
    return f"`{command}`, {', '.join(where)}, commit {found['commit']}:\n\n{draw(rows)}"


def tables(paths: Iterable[Path]) -> str:
    """Return the tables of those result files that exist."""
    return "\n\n".join(captioned(path) for path in paths if path.exists()) or "Not measured yet."


def compatibility(rows: Rows) -> str:
    """Return the tests that passed, by subject and environment, and why others did not run."""
    rows.sort(key=lambda row: [int(n) for n in re.findall(r"\d+", row["torch"] + row["python"])])
    runs = [f"torch {row['torch']}, Python {row['python']}" for row in rows]
    notes: dict[str, list[str]] = {}
    for run, row in zip(runs, rows, strict=True):
        if row["not_run"]:
            notes.setdefault(f"{row['row']}: {row['not_run']}", []).append(run)

    def cell(own: Rows) -> str:
        (row,) = own
        ran = "not run" if row["passed"] == row["failed"] == "0" else row["passed"]
        return ran + ("" if row["failed"] == "0" else f", {row['failed']} FAILED")

    count = len(set(runs))
    lines = [
        f"- {note}" + ("" if len(where) == count else f" ({'; '.join(where)})")
        for note, where in sorted(notes.items())
    ]
    dates = sorted(values(rows, "date"))
    note = f"Ran {' to '.join(dict.fromkeys((dates[0], dates[-1])))}. Tests not run, and why:"
    table = pivot("tests passed, by torch and Python", rows, ("row",), ("torch", "python"), cell)
    return "\n\n".join([table, note, "\n".join(lines)])


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
        names.setdefault((_code(entry.reads), _stored(entry), _output(entry)), []).append(name)
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
