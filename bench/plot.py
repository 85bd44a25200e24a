"""Draws what a benchmark measured, and the peers' points beside it: rates against size.

RESULTS.json is what attention.py or cache_write.py wrote with --json, or a file of bench/results/.
Each figure whose cases are in it becomes STEM_FIGURE.svg and .png:

    memory       GB/s against bytes: decode, a few tokens a sequence, caches in fp8
    products     TFLOP/s against FLOPs: prompts, the last tokens of prompts
    cache_write  GB/s against bytes read and written

The line is the floor: the rate of a kernel that only reads (copies, for a write), or of a large
product of matrices, in the same run; where that was not measured there is none. Higher is better.
The same numbers give the same files, byte by byte, with one version of matplotlib.

    python bench/plot.py bench/results/h200.json   # into docs/plots/
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from harness.report import lookup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from results_table import TITLES

Row = dict[str, Any]
OUT = pathlib.Path(__file__).parent.parent / "docs" / "plots"
STYLE = {
    "svg.hashsalt": "pagetile",  # names of marks would be random
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "figure.facecolor": "white",  # legible on a dark page, too
}
# Colours that the colour-blind can tell apart (Okabe and Ito), and shapes for those who print.
OURS = ("#0072b2", "o")
MARKS = {
    "fa3": ("#d55e00", "s"),
    "fa3_contiguous": ("#e69f00", "D"),
    "flashinfer": ("#009e73", "^"),
    "flashinfer_fa3": ("#117733", "v"),
    "flashinfer_xqa": ("#56b4e9", "<"),
    "sdpa": ("#cc79a7", "P"),
    "vllm_write": ("#d55e00", "s"),
    "legacy_v1": ("#888888", "X"),
    "legacy_v2": ("#444444", "*"),
    "sm80": ("#56b4e9", ">"),
    "sm90a": ("#009e73", "<"),
    "split_kv": ("#999933", "h"),
    "no_plan": ("#bbbbbb", "."),
    "fp8_products": ("#117733", "D"),
}


@dataclass(frozen=True)
class Panel:
    title: str
    takes: Callable[[Row], bool]


@dataclass(frozen=True)
class Plot:
    size: str  # the row's key
    unit: str
    rate: str
    per_us: float  # size over us becomes the rate
    floors: tuple[str, ...]  # where a section has it
    floor: str
    panels: tuple[Panel, ...]


def of_suites(*suites: str) -> Callable[[Row], bool]:
    return lambda row: row.get("suite") in suites


def writes(kind: str) -> Callable[[Row], bool]:
    """Rows of the table of cache_write.py, by their names."""
    return lambda row: (
        row.get("section", "").startswith("cache_write, page") and (kind in row["name"])
    )


PLOTS = {
    "memory": Plot(
        "bytes", "B", "GB/s", 1e-3, ("read_gbps",), "a kernel that reads",
        (
            Panel("decode: one token a sequence", of_suites("decode")),
            Panel("a few tokens; uneven lengths", of_suites("spec", "uneven")),
            Panel("fp8 caches", of_suites("fp8")),
        ),
    ),
    "products": Plot(
        "flops", "FLOP", "TFLOP/s", 1e-6, ("product_tflops",), "a product of matrices",
        (
            Panel("prompts", of_suites("prefill")),
            Panel("the last tokens of prompts", of_suites("chunk")),
            Panel("prompts, fp8 caches", of_suites("prefill_fp8")),
        ),
    ),
    "cache_write": Plot(
        "bytes", "B", "GB/s", 1e-3, ("limits.copy_gbps",), "a copy kernel",
        (Panel("bf16", writes("bf16 ")), Panel("bf16 into e4m3", writes("->e4m3"))),
    ),
}  # fmt: skip


def points(plot: Plot, rows: list[Row]) -> dict[str, list[tuple[float, float]]]:
    """Size and rate by peer, pagetile first."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        times = {"pagetile": row, **row.get("peers", {})}
        for name, timed in times.items():
            if "us" in timed:
                rate = row[plot.size] / timed["us"] * plot.per_us
                found.setdefault(name, []).append((row[plot.size], rate))
    return found


def draw_panel(axes: Axes, plot: Plot, panel: Panel, rows: list[Row], floor: float | None) -> None:
    found = points(plot, rows)
    for i, (name, at) in enumerate(found.items()):
        colour, shape = MARKS.get(name, ("#000000", "x")) if name != "pagetile" else OURS
        # Side by side: a case's points would hide each other.
        beside = 1.09 ** (i - (len(found) - 1) / 2)
        axes.plot(
            [size * beside for size, _ in at], [rate for _, rate in at],
            linestyle="", marker=shape, color=colour, markersize=6,
            markeredgecolor="white", markeredgewidth=0.6, label=TITLES.get(name, name),
            zorder=3 if name == "pagetile" else 2,
        )  # fmt: skip
    if floor:
        axes.axhline(floor, color="#222222", linewidth=1.2, label=f"floor: {plot.floor}")
    axes.set(xscale="log", title=panel.title, xlabel={"B": "bytes", "FLOP": "FLOPs"}[plot.unit])
    axes.xaxis.set_major_formatter(EngFormatter(unit=plot.unit))
    axes.xaxis.set_minor_formatter("")
    fastest = max([floor or 0, *(rate for at in found.values() for _, rate in at)])
    axes.set_ylim(0, max(axes.get_ylim()[1], 1.06 * fastest))


def draw(plot: Plot, section: Row) -> Figure | None:
    """The panels that have rows, or None."""
    panels = []
    for panel in plot.panels:
        if rows := [row for row in section["cases"] if "us" in row and panel.takes(row)]:
            panels.append((panel, rows))
    if not panels:
        return None
    floor = next(filter(None, (lookup(section, key) for key in plot.floors)), None)
    figure = Figure(figsize=(1.2 + 3.3 * len(panels), 3.9), layout="constrained")
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for each, (panel, rows) in zip(axes, panels, strict=True):
        draw_panel(each, plot, panel, rows, floor)
    axes[0].set_ylabel(plot.rate)
    marks: dict[str, Any] = {}
    for each in axes:
        drawn, labels = each.get_legend_handles_labels()
        marks |= dict(zip(labels, drawn, strict=True))
    figure.legend(
        marks.values(), marks.keys(), loc="outside lower center", ncols=min(4, len(marks)),
        frameon=False,
    )  # fmt: skip
    figure.suptitle("; ".join(section["machine"][:2]), fontsize=9)
    return figure


def write(figure: Figure, file: pathlib.Path) -> list[pathlib.Path]:
    """As SVG and PNG, without the date and the program's version in them."""
    files = [file.with_suffix(".svg"), file.with_suffix(".png")]
    figure.savefig(files[0], metadata={"Date": None, "Creator": None})
    figure.savefig(files[1], metadata={"Software": None}, dpi=160)
    return files


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=pathlib.Path, metavar="RESULTS.json")
    parser.add_argument("--out", type=pathlib.Path, default=OUT, metavar="FOLDER")
    arguments = parser.parse_args(words)
    found = json.loads(arguments.results.read_text())
    sections = [found] if "cases" in found else list(found.values())
    arguments.out.mkdir(parents=True, exist_ok=True)
    drawn = []
    with mpl.rc_context(STYLE):
        for name, plot in PLOTS.items():
            for section in sections:
                if figure := draw(plot, section):
                    drawn += write(figure, arguments.out / f"{arguments.results.stem}_{name}")
                    break
    if not drawn:
        print(f"bench/plot.py: {arguments.results} has no case of a figure", file=sys.stderr)
        return 1
    print("\n".join(str(file) for file in drawn))
    return 0


if __name__ == "__main__":
    sys.exit(main())
