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
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from common import IN_PLACE, RESULTS, paired_lines, quartiles, read_csv, values
from integrations import INTEGRATIONS
from variants import CONVERT, OFFLOAD, TOOLS

from inplace_ops.activations import ACTIVATIONS
from inplace_ops.recompute.nodes import name_of_type
from inplace_ops.recompute.operations import OPERATIONS, Operation, Output, ProductRule
from inplace_ops.recompute.views import VIEWS

PROJECT = Path(__file__).parent.parent
PAGES = [PROJECT / "README.md", RESULTS / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]
COMPATIBILITY = PROJECT / "tests" / "compatibility.csv"
Rows = list[dict[str, str]]
OUTPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SHOWN_US = 5.0  # of a function of a block, in the profiler
LARGE = 64 * 2**20  # bytes; from this size on, kernels should reach the copy bandwidth


def markdown(header: list[str], body: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def find(rows: Rows, column: str, **wanted: str) -> str:
    """Return a column of the row that has the wanted values; a dash if there is none."""
    found = [row.get(column, "-") for row in rows if all(row[k] == v for k, v in wanted.items())]
    return found[0] if found else "-"


def grouped(rows: Rows, *columns: str) -> dict[tuple[str, ...], Rows]:
    """Return the rows grouped by their values in some columns, in order."""
    groups: dict[tuple[str, ...], Rows] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups


def time_over_torch(row: dict[str, str]) -> str:
    """Return the time over PyTorch in place, with quartiles."""
    low, high = row["ratio_first_quartile"], row["ratio_third_quartile"]
    return f"{row['ratio_to_torch_in_place']} ({low} to {high})"


def variants(rows: Rows) -> list[dict[str, str]]:
    """Return the combinations of activation and variant, in order."""
    pairs = dict.fromkeys((row["activation"], row["variant"]) for row in rows)
    return [{"activation": activation, "variant": variant} for activation, variant in pairs]


def activations(rows: Rows) -> str:
    """Forward plus backward: the largest size in every dtype, the smallest size in float32."""
    both = [row for row in rows if row["phase"] == "both"]
    sizes = sorted(values(both, "elements"), key=int)
    dtypes = values(both, "dtype")
    ratio, bytes_ratio = "ratio_to_torch_in_place", "bytes_ratio_to_torch_in_place"
    has_bytes = bytes_ratio in rows[0]
    over = "time" + (" (bytes)" if has_bytes else "") + " over PyTorch in place"
    header = [f"{sizes[-1]} elements, forward and backward", f"ms, {dtypes[0]}"]
    header += [f"{over}, {dtype}" for dtype in dtypes]
    header.append(f"time over PyTorch in place, {sizes[0]} elements, {dtypes[0]}")
    body = []
    for variant in variants(both):
        large = {**variant, "elements": sizes[-1]}
        time = find(both, "median_us", **large, dtype=dtypes[0])
        line = [", ".join(variant.values())]
        line.append("-" if time == "-" else f"{float(time) / 1e3:.3g}")
        for dtype in dtypes:
            cell = find(both, ratio, **large, dtype=dtype)
            if has_bytes:
                cell += f" ({find(both, bytes_ratio, **large, dtype=dtype)})"
            line.append(cell)
        line.append(find(both, ratio, **variant, elements=sizes[0], dtype=dtypes[0]))
        body.append(line)
    return markdown(header, body)


def bandwidth(rows: Rows) -> str:
    """The lowest share of the copy bandwidth among the large sizes."""
    sizes = [int(size) for size in values(rows, "bytes")]
    large = {str(size) for size in sizes if size >= min(LARGE, max(sizes))}
    counted = [row for row in rows if row["bytes"] in large]
    columns = [(d, t) for t in values(rows, "dtype") for d in values(rows, "direction")]
    body = []
    for variant in variants(rows):
        line = [", ".join(variant.values())]
        for direction, dtype in columns:
            wanted = {**variant, "direction": direction, "dtype": dtype}
            shares = [
                float(row["share_of_copy"])
                for row in counted
                if all(row[k] == v for k, v in wanted.items())
            ]
            cell = f"{min(shares):.3f}" if shares else "-"
            if 0 < len(shares) < len(large):  # the other sizes failed, or the time limit came first
                cell += f" ({len(shares)} of {len(large)} sizes)"
            line.append(cell)
        body.append(line)
    copies = [float(row["copy_gigabytes_per_second"]) for row in counted]
    header = [f"lowest share of the copy bandwidth ({min(copies):.0f} to {max(copies):.0f} GB/s)"]
    header[0] += f" from {min(map(int, large)) / 2**20:g} MiB on"
    return markdown([*header, *(f"{direction}, {dtype}" for direction, dtype in columns)], body)


def norms(rows: Rows) -> str:
    """The lowest share of the copy bandwidth of the kernels after a norm, by memory layout."""
    layouts, dtypes = values(rows, "layout"), values(rows, "dtype")
    body = []
    for activation, kernel in dict.fromkeys((row["activation"], row["kernel"]) for row in rows):
        line = [f"{'norm without activation' if activation == 'none' else activation}, {kernel}"]
        for layout in layouts:
            shares = []
            for dtype in dtypes:
                wanted = {"activation": activation, "kernel": kernel}
                wanted |= {"layout": layout, "dtype": dtype}
                own = [float(r["share_of_copy"]) for r in rows if wanted.items() <= r.items()]
                shares.append(f"{min(own):.2f}" if own else "-")
            line.append(", ".join(shares))
        body.append(line)
    copies = [float(row["copy_gigabytes_per_second"]) for row in rows]
    sizes = sorted({int(row["bytes"]) / 2**20 for row in rows})
    header = [f"lowest share of the copy bandwidth ({min(copies):.0f} to {max(copies):.0f} GB/s)"]
    header[0] += f" at {', '.join(f'{size:g}' for size in sizes)} MiB: {', '.join(dtypes)}"
    return markdown([*header, *layouts], body)


def host(rows: Rows) -> str:
    """Host microseconds of a call."""
    phases = values(rows, "phase")
    body = [
        [", ".join(variant.values())]
        + [find(rows, "median_us", **variant, phase=phase) for phase in phases]
        for variant in variants(rows)
    ]
    return markdown(["host time of a call, us", *phases], body)


def steps(rows: Rows) -> str:
    """The time of a step, and the extra time that each activation costs."""
    header = [
        "network, variant",
        "step, ms",
        "time over PyTorch in place (quartiles)",
        "extra time per activation, us: forward",
    ]
    body = [
        [
            f"{row['network']}, {row['variant']}",
            row["step_ms"],
            time_over_torch(row),
            row["forward_us_per_activation"],
            row["backward_us_per_activation"],
        ]
        for row in rows
    ]
    return markdown([*header, "backward"], body)


def calls(rows: Rows) -> str:
    """The functions that take the most time in a block, with all commits side by side."""
    commits = values(rows, "commit")
    columns = [(v, c) for v in values(rows, "variant") for c in commits]
    columns = [
        (v, c) for v, c in columns if any(r["variant"] == v and r["commit"] == c for r in rows)
    ]
    body = []
    for (phase, function), own in grouped(rows, "phase", "function").items():
        wanted = [{"variant": variant, "commit": commit} for variant, commit in columns]
        cells = [
            (find(own, "us_per_block", **each), find(own, "calls_per_block", **each))
            for each in wanted
        ]
        if max((float(us) for us, _ in cells if us != "-"), default=0.0) >= SHOWN_US:
            shown = [us if us == "-" else f"{us} ({n})" for us, n in cells]
            body.append([phase, f"`{function}`", *shown])
    header = [f"{variant}, {commit}" for variant, commit in columns]
    return markdown(["phase", "function: us a block (calls)", *header], body)


def memory(rows: Rows) -> str:
    """MiB allocated after forward."""
    header = [f"MiB after forward, {rows[0]['size']} float32", "without grad", "with grad"]
    columns = ("MiB after forward, no grad", "MiB after forward, with grad")
    body = [
        [f"{row['activation']}, {row['variant']}", *(row[column] for column in columns)]
        for row in rows
    ]
    return markdown(header, body)


def blocks(rows: Rows) -> str:
    """The tensors that a block saves, and its time over PyTorch in place."""
    kinds = values(rows, "activation")
    header = [f"block of convolution, norm, activation: {rows[0]['input']}"]
    header += [f"tensors saved, {kind}" for kind in kinds]
    header += [f"time over PyTorch in place, {kind} (quartiles)" for kind in kinds]
    body = []
    for variant in values(rows, "variant"):
        line = [variant]
        line += [find(rows, "tensors saved", activation=kind, variant=variant) for kind in kinds]
        for kind in kinds:
            wanted = {"activation": kind, "variant": variant}
            ratio = find(rows, "time over torch in place", **wanted)
            line.append(f"{ratio} ({find(rows, 'quartiles', **wanted)})")
        body.append(line)
    return markdown(header, body)


def models(rows: Rows) -> str:
    """Gradients and memory of models of other libraries, by library and case."""
    header = ["library", "case", "models", "same gradients", "bit for bit"]
    header += ["saved bytes relative to PyTorch's: median (quartiles)", "best, worst"]
    header += ["first step's peak relative to PyTorch's: median, worst"]
    body, others = [], []
    libraries = dict.fromkeys(row["model"].partition(":")[0] for row in rows)
    for library in [*libraries, ""]:
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
    for row in rows:
        if row["result"] != "same gradients":
            others.append([row["model"], f"{row['policy']}, {row['memory_format']}", row["result"]])
    table = markdown(header, body)
    if others:
        table += "\n\nCases that failed, and why:\n\n"
        table += markdown(["model", "case", "reason"], others)
    return table


def remaining(rows: Rows) -> str:
    """The kinds of tensors that most often remain saved."""
    header = ["libraries", "dtype policy", "output of", "saved by", "reason"]
    header += ["mean share of what remains", "models"]
    body = []
    for (libraries, policy), own in grouped(rows, "libraries", "policy").items():
        for i, row in enumerate(own[:12]):
            case = [libraries, policy] if i == 0 else ["", ""]
            what = [row[column] for column in ("output_of", "saved_by", "reason")]
            share = [f"{float(row['mean_share']):.1%}", f"{row['models']} of {row['of']}"]
            body.append([*case, *what, *share])
    return markdown(header, body)


def bytes_of_a_step(rows: Rows) -> str:
    """Saved, peak and moved bytes and FLOPs relative to PyTorch's, by max_ops."""
    numbers = values(rows, "max_ops")
    header = ["network", "input", "dtype policy", "MiB saved by PyTorch"]
    kinds = {kind: f"{kind} bytes" for kind in ("saved", "peak", "moved")} | {"flops": "FLOPs"}
    header += [
        f"{name} relative to PyTorch's, max_ops {', '.join(numbers)}" for name in kinds.values()
    ]
    body = []
    for case, own in grouped(rows, "network", "input", "policy").items():
        cells = [*case, f"{int(own[0]['saved_torch']) / 2**20:.1f}"]
        for kind in kinds:
            ratios = [find(own, f"{kind}_ratio", max_ops=number) for number in numbers]
            cells.append(
                ", ".join(
                    f"{float(ratio):.2f}" if ratio not in ("", "-") else "-" for ratio in ratios
                )
            )
        body.append(cells)
    return markdown(header, body)


def gpu(filled: Rows, batches: Rows) -> str:
    """Memory, time and the largest batch of converted networks on a GPU."""
    body = []
    for row in filled:
        if row["variant"] == "convert, max_ops=4":
            line = [f"{row['network']}, {row['input']}"]
            line += [
                f"{float(row[column]):.2f}"
                for column in (
                    "saved_over_torch_in_place",
                    "peak_over_torch_in_place",
                    "ratio_to_torch_in_place",
                )
            ]
            ours, theirs = (
                int(find(batches, "largest_batch", network=row["network"], variant=variant))
                for variant in (row["variant"], "torch in place")
            )
            body.append([*line, f"{ours / theirs:.2f}"])
    device = filled[0]["device"].removeprefix("NVIDIA ")
    header = [f"`convert` on an {device}, relative to PyTorch in place", "saved for backward"]
    limit = float(batches[0]["memory_limit_gib"])
    header += ["peak memory", "time of a step", f"largest batch in {limit:g} GiB"]
    return markdown(header, body)


def networks(rows: Rows) -> str:
    """Memory and time by network, variant and dtype policy, and figures that others published."""
    measured = [row for row in rows if row["source"] == "measured"]
    policies = values(measured, "policy")
    header = ["network", "variant"]
    header += [f"{policy}: saved, peak, time (quartiles)" for policy in policies]
    work = [f"{kind}_over_torch_in_place" for kind in ("flops", "moved")]
    has_work = any(row.get(column) for row in measured for column in work)
    header += ["FLOPs, moved bytes"] if has_work else []
    body = []
    cases = grouped(measured, "network", "input", "memory_format", "variant")
    for (*names, variant), own in cases.items():
        network = ", ".join(name for name in names if name != "contiguous")
        cells = {row["policy"]: _memory_and_time(row) for row in own}
        body.append([network, variant, *(cells.get(policy, "-") for policy in policies)])
        if has_work:
            body[-1].append(", ".join(own[0][column] or "-" for column in work))
    table = markdown(header, body)
    published = [row for row in rows if row["source"] != "measured"]
    if not published:
        return table
    titles = ["published for", "variant"]
    titles += ["saved bytes relative to PyTorch's", "time relative to PyTorch's"]
    columns = ["network", "variant", "saved_over_torch_in_place", "ratio_to_torch_in_place"]
    others = markdown(titles, [[row[column] or "-" for column in columns] for row in published])
    names = ", ".join(values(published, "variant"))
    source = published[0]["source"]
    return f"{table}\n\nFigures of {names} that were not measured here, but {source}.\n\n{others}"


def peaks(rows: Rows) -> str:
    """Saved and peak bytes relative to PyTorch in place, by network, dtype policy and variant."""
    others = [variant for variant in values(rows, "variant") if variant != "torch in place"]
    header = ["network", "dtypes", "torch in place: saved, peak MiB"]
    header += [f"{variant}: saved, peak" for variant in others]
    body = []
    for (name, shape, policy), own in grouped(rows, "network", "input", "policy").items():
        wanted = {"variant": "torch in place"}
        mib = [find(own, f"{kind}_mib", **wanted) for kind in ("saved", "peak")]
        cells = [f"{name}, {shape}", policy, ", ".join(mib)]
        for variant in others:
            ratios = [
                find(own, f"{kind}_over_torch_in_place", variant=variant)
                for kind in ("saved", "peak")
            ]
            cells.append(", ".join(ratios) if "-" not in ratios else "-")
        body.append(cells)
    return markdown(header, body)


def _ratios(rows: Rows, policies: Iterable[str], kind: str, **wanted: str) -> str:
    """Return a ratio to PyTorch in place for each dtype policy."""
    column = "ratio_to_torch_in_place" if kind == "time" else f"{kind}_over_torch_in_place"
    cells = [find(rows, column, **wanted, policy=policy) for policy in policies]
    return ", ".join(cell or "-" for cell in cells)


def integrations(rows: Rows) -> str:
    """What `convert` saves in a network of each library, and the line to add."""
    policies = values(rows, "policy")
    header = ["library and its script: network", "the line"]
    header += ["saved bytes", "peak bytes", "time of a step"]
    body = []
    for name, integration in INTEGRATIONS.items():
        own = [row for row in rows if row["network"] == name]
        if own:
            library = f"[{integration.library}](../examples/{integration.script})"
            ratios = [
                _ratios(own, policies, kind, variant=CONVERT) for kind in ("saved", "peak", "time")
            ]
            where = f"{library}: {name}, {own[0]['input']}"
            body.append([where, f"`{integration.line}`", *ratios])
    return f"Relative to PyTorch in place, in {', '.join(policies)}:\n\n{markdown(header, body)}"


def tools(rows: Rows) -> str:
    """Saved and peak bytes and the time of a step with other tools, and with combinations."""
    policies = values(rows, "policy")
    header = ["network", "variant", *(f"saved, peak: {policy}" for policy in policies)]
    header.append(f"time: {policies[0]} (quartiles)")
    body = []
    for (name, shape), own in grouped(rows, "network", "input").items():
        measured = values(own, "variant")
        for variant in (v for v in (IN_PLACE, CONVERT, *TOOLS) if v in measured):
            cells = [
                f"{find(own, 'saved_over_torch_in_place', variant=variant, policy=policy)}, "
                f"{find(own, 'peak_over_torch_in_place', variant=variant, policy=policy)}"
                for policy in policies
            ]
            wanted = {"variant": variant, "policy": policies[0]}
            timed = [row for row in own if wanted.items() <= row.items() and row["median_ms"]]
            # On a CPU the copies that offload makes do not cross a bus.
            is_emulated = OFFLOAD in variant and "NVIDIA" not in own[0]["device"]
            time = time_over_torch(timed[0]) if timed and not is_emulated else "-"
            body.append(["" if variant != IN_PLACE else f"{name}, {shape}", variant, *cells, time])
    return markdown(header, body)


def budgets(rows: Rows) -> str:
    """What `convert` chooses for a budget, its peak and time, and the peak of a training script."""
    header = ["network", "budget", "chosen", "saved", "peak", "FLOPs", "time", "peak of a script"]
    body = []
    for (name, shape), own in grouped(rows, "network", "input").items():
        for i, row in enumerate(own):
            first = f"{name}, {shape}" if i == 0 else ""
            if row["note"]:
                body.append([first, "the same", row["variant"], row["note"], "", "", "", ""])
                continue
            chosen = row["variant"]
            if row["max_ops"]:
                chosen = f"`max_ops={row['max_ops']}`, {row['checkpointed']} checkpoints"
            script = f"{row['script_peak_mib']} MiB" if row["script_peak_mib"] else ""
            budget = f"{row['budget_mib']} MiB" if row["budget_mib"] else ""
            memory = [f"{row[column]} MiB" for column in ("saved_mib", "peak_mib")]
            time = time_over_torch(row) if row.get("median_ms") else "-"  # `--repetitions 0`
            body.append([first, budget, chosen, *memory, row["flops_ratio"], time, script])
    return markdown(header, body)


def _memory_and_time(row: dict[str, str]) -> str:
    """Return MiB and ms of PyTorch in place, and ratios to them for other variants."""
    if row["variant"] == "torch in place":
        cells = [f"{row[column]} MiB" for column in ("saved_mib", "peak_mib")]
        cells += [f"{row['median_ms']} ms"] if row["median_ms"] else ["-"]
    else:
        cells = [row[f"{kind}_over_torch_in_place"] for kind in ("saved", "peak")]
        cells += [time_over_torch(row)] if row["median_ms"] else ["-"]
    if row["largest_batch"]:
        cells.append(f"largest batch in {row['memory_limit_gib']} GiB: {row['largest_batch']}")
    return ", ".join(cells)


def profile(rows: Rows) -> str:
    """Device time by operation, of the operations that take the most time or change the most."""
    theirs, ours = values(rows, "variant")[:2]
    body = []
    for (network, size), own in grouped(rows, "network", "input").items():
        times = {
            name: [
                sum(float(row["ms"]) for row in of if row["variant"] == variant)
                for variant in (theirs, ours)
            ]
            for (name,), of in grouped(own, "operation").items()
        }
        before, after = (sum(column) for column in zip(*times.values(), strict=True))
        total = [f"{before:.2f}", f"{after:.2f}", f"{after / before:.3f} x"]
        body.append([f"{network}, {size}", "all", *total])
        body += [
            ["", f"`{name}`", f"{old:.2f}", f"{new:.2f}", f"{new - old:+.2f}"]
            for name, (old, new) in times.items()
            if max(old, new) >= 0.05 * before or abs(new - old) >= 0.003 * before
        ]
    header = ["network", "operation", f"{theirs}, ms", f"{ours}, ms", "difference, ms"]
    return markdown(header, body)


def training(rows: Rows) -> str:
    """Test accuracy and loss, by save mode."""
    header, *body = paired_lines(rows)
    return markdown(header, body)


Drawings = dict[str, Callable[[Rows], str]]
TABLES: Drawings = {
    "bandwidth": bandwidth,
    "norms": norms,
    "activations": activations,
    "host": host,
    "steps": steps,
    "calls": calls,
    "memory": memory,
    "blocks": blocks,
    "graphs": networks,
    "filled": networks,
    "batches": networks,
    "baselines": networks,
    "profile": profile,
}
ALONE: Drawings = {
    "integrations": integrations,
    "tools": tools,
    "bytes": bytes_of_a_step,
    "budgets": budgets,
    "networks": networks,
    "peaks": peaks,
    "models": models,
    "remaining": remaining,
    "training": training,
}
# The commands that measure each kind of result.
COMMANDS = {
    "bandwidth": "bench_bandwidth.py activations",
    "norms": "bench_bandwidth.py norms",
    "activations": "bench_ops.py time",
    "host": "bench_ops.py host",
    "memory": "bench_ops.py memory",
    "steps": "bench_networks.py steps",
    "calls": "bench_networks.py calls",
    "blocks": "bench_networks.py blocks",
    "bytes": "bench_networks.py bytes",
    "budgets": "bench_budgets.py",
    "integrations": "bench_networks.py train --selection integrations",
    "tools": "bench_networks.py train --selection tools",
    "networks": "bench_networks.py train",
    "graphs": "bench_networks.py train --graphs",
    "peaks": "bench_networks.py train --memory-only",
    "filled": "bench_networks.py train --fill-gib",
    "batches": "bench_networks.py train --largest-batch",
    "baselines": "bench_networks.py train --variants",
    "profile": "bench_networks.py train --profile",
    "models": "bench_models.py",
    "remaining": "bench_models.py",
    "training": "bench_training.py",
}


def captioned(path: Path, draw: Callable[[Rows], str]) -> str:
    """Return the table of a result file, with where and when it was measured."""
    kind, device = path.stem.split("_")
    rows = read_csv(path)
    row = rows[0]
    where = [" and ".join(filter(None, values(rows, "device")))]
    if device == "cuda":
        where += [f"driver {row['driver']}", f"CUDA {row['cuda']}"]
    where += [f"torch {row['torch']}", f"Python {row['python']}"]
    where.append(" and ".join(filter(None, values(rows, "date"))))
    commits = [commit for commit in values(rows, "commit") if commit]
    where.append(f"{'commit' if len(commits) == 1 else 'commits'} {', '.join(commits)}")
    return f"`{COMMANDS[kind]}`, {', '.join(where)}:\n\n{draw(rows)}"


def tables(folder: Path, device: str, kinds: Drawings) -> str:
    """Return the tables of a device."""
    paths = {folder / f"{kind}_{device}.csv": draw for kind, draw in kinds.items()}
    blocks = [captioned(path, draw) for path, draw in paths.items() if path.exists()]
    return "\n\n".join(blocks) or "Not measured yet."


def compatibility(rows: Rows) -> str:
    """Return the tests that passed, by subject and environment, and why others did not run."""
    rows.sort(key=lambda row: [int(n) for n in re.findall(r"\d+", row["torch"] + row["python"])])
    runs = list(dict.fromkeys((row["torch"], row["python"], row["date"]) for row in rows))
    subjects = values(rows, "row")
    body: list[list[str]] = []
    notes: dict[str, list[str]] = {}
    for subject in subjects:
        line = [subject]
        for version, python, _ in runs:
            wanted = {"row": subject, "torch": version, "python": python}
            passed, failed = (find(rows, c, **wanted) for c in ("passed", "failed"))
            why = find(rows, "not_run", **wanted)
            ran = passed if (passed, failed) != ("0", "0") else "not run"
            line.append(ran + ("" if failed == "0" else f", {failed} FAILED"))
            if why:
                notes.setdefault(f"{subject}: {why}", []).append(f"{version} on {python}")
        body.append(line)
    header = ["tests passed", *(f"torch {torch}, Python {python}" for torch, python, _ in runs)]
    lines = [
        f"- {note}" + ("" if len(where) == len(runs) else f" ({', '.join(where)})")
        for note, where in notes.items()
    ]
    dates = sorted({date for *_, date in runs})
    note = f"Ran {' to '.join(dict.fromkeys((dates[0], dates[-1])))}. Tests not run, and why:"
    return "\n\n".join([markdown(header, body), note, "\n".join(lines)])


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
    if name == "errors":
        return errors()
    if name == "rules":
        return rules()
    if name == "gpu":
        return gpu(*(read_csv(RESULTS / f"{kind}_cuda.csv") for kind in ("filled", "batches")))
    if name == "compatibility":
        return compatibility(read_csv(COMPATIBILITY))
    if name in ALONE:
        paths = sorted(RESULTS.glob(f"{name}_*.csv"))
        return "\n\n".join(captioned(path, ALONE[name]) for path in paths)
    return tables(RESULTS, name, TABLES)


def main() -> None:
    """Rewrite the pages, check them, or print the tables of a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--print", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.print:
        devices = {path.stem.split("_")[-1] for path in arguments.print.glob("*_*.csv")}
        print(
            "\n\n".join(
                tables(arguments.print, device, TABLES | ALONE) for device in sorted(devices)
            )
        )
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
