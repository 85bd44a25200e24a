"""Writes the tables of a page in bench/results/ from the JSON file beside it.

NAME.json holds a section for each run, as the benchmark wrote it. In NAME.md a table stands between

    <!-- table: decode -->
    <!-- end -->

and everything else is written by hand. A table whose section the JSON file lacks stays as it is.

    python bench/results_table.py h200                        # the tables again
    python bench/results_table.py h200 --collect build/bench  # first take decode.json, ... there
    python bench/results_table.py h200 --check                # fails where the page is out of date
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

RESULTS = pathlib.Path(__file__).parent / "results"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
TITLES = {
    "fa3": "FA3",
    "fa3_contiguous": "FA3 contiguous",
    "flashinfer": "FlashInfer",
    "flashinfer_fa3": "FlashInfer fa3",
    "flashinfer_xqa": "XQA",
    "sdpa": "SDPA",
    "legacy_v1": "legacy v1",
    "legacy_v2": "legacy v2",
    "vllm": "vLLM",
    "vllm_write": "vLLM",
}
BAR_PEER = "fa3_contiguous"

Row = dict[str, Any]

# Cells


def microseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 999.5 else f"{value:.1f}"


def small(value: float) -> str:
    """us, where tenths are too coarse."""
    return f"{value:.2f}"


def whole(value: float) -> str:
    return f"{value:.0f}"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def verdict(row: Row) -> str:
    """How a row stands to its bar, which is a time or a share of a peer's."""
    if row.get("bar_us"):
        return (
            "ok" if row["us"] <= row["bar_us"] else f"**+{percent(row['us'] / row['bar_us'] - 1)}**"
        )
    peer = row.get("peers", {}).get(BAR_PEER, {})
    if not row.get("bar_ratio") or "us" not in peer:
        return ""
    share = row["us"] / peer["us"]
    return f"{share:.3f}, ok" if share <= row["bar_ratio"] else f"**{share:.3f}**"


def bar(row: Row) -> str:
    if row.get("bar_us"):
        return f"{row['bar_us']:g}"
    return f"{row['bar_ratio']:g} of {TITLES[BAR_PEER]}" if row.get("bar_ratio") else ""


def cell(form: Callable[[float], str], value: float | None) -> str:
    return "" if value is None else form(value)


# Tables


def table(titles: list[str], lines: list[list[str]]) -> list[str]:
    """Columns without a single cell are left out."""
    kept = [i for i, title in enumerate(titles) if any(line[i] for line in lines)]
    rows = [[line[i] for i in kept] for line in [titles, *lines]]
    head, *rest = ("| " + " | ".join(row) + " |" for row in rows)
    return [head, "|" + "---|" * len(kept), *rest]


def machine_of(section: Row) -> list[str]:
    facts = [*section["machine"]]
    if section.get("read_gbps"):
        facts.append(f"a kernel that reads: {section['read_gbps']:.0f} GB/s")
    if section.get("product_tflops"):
        facts.append(f"a product of bf16 matrices: {section['product_tflops']:.0f} TFLOP/s")
    if section.get("limits"):
        facts.append(f"a copy kernel: {section['limits']['copy_gbps']:.0f} GB/s")
    return ["; ".join(facts) + ".", ""]


def peers_of(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.get("peers", {})))


def rows_of(section: Row, *suites: str) -> list[Row]:
    return [
        row
        for row in section["cases"]
        if "us" in row and (not suites or row.get("suite", row.get("section")) in suites)
    ]


def side_by_side(rows: list[Row], rate: tuple[str, str], time: Callable[[float], str]) -> list[str]:
    """A line a case: its time, a rate, its bar, and every peer's time beside it."""
    peers = peers_of(rows)
    titles = ["case", "us", "IQR", rate[0], "of floor", "of copy", "bar", ""]
    for name in peers:
        title = TITLES.get(name, name)
        titles += [f"{title} us", f"{title} / ours"]
    titles += ["cold us", "PDL us", "PDL cold us", "err", "host us"]
    lines = []
    for row in rows:
        line = [
            " ".join(filter(None, (row.get("suite"), row["name"]))),
            time(row["us"]),
            cell(time, row.get("iqr")),
            cell(whole, row.get(rate[1])),
            cell(percent, row.get("of_floor")),
            cell(percent, row.get("of_copy")),
            bar(row),
            verdict(row),
        ]
        for name in peers:
            us = row.get("peers", {}).get(name, {}).get("us")
            line += [cell(time, us), "" if us is None else f"{us / row['us']:.2f}"]
        line += [cell(time, row.get(key)) for key in ("cold_us", "pdl_us", "pdl_cold_us")]
        line += [cell("{:.1e}".format, row.get("err")), cell("{:.1f}".format, row.get("host_us"))]
        lines.append(line)
    return table(titles, lines)


def sweep(rows: list[Row], word: str) -> list[str]:
    """A line a kind of case and a column a number, of names like "page16 NHD bf16 ..."."""
    lines: dict[str, dict[int, str]] = {}
    for row in rows:
        if found := re.match(rf"{word}(\d+) (.*)", row["name"]):
            kind = found[2]
            if word == "group":  # their query heads are the column
                kind = re.sub(r"\d+/(\d+) ", r"\1 KV heads ", kind)
            lines.setdefault(kind, {})[int(found[1])] = microseconds(row["us"])
            for name, peer in row.get("peers", {}).items():
                if "us" in peer:
                    theirs = lines.setdefault(f"{kind}: {TITLES.get(name, name)}", {})
                    theirs[int(found[1])] = microseconds(peer["us"])
    numbers = sorted({number for line in lines.values() for number in line})
    cells = [[kind, *(line.get(n, "") for n in numbers)] for kind, line in lines.items()]
    return table([f"us, by {word}", *map(str, numbers)], cells)


def memory_table(section: Row) -> list[str]:
    return side_by_side(rows_of(section), ("GB/s", "gbps"), microseconds)


def product_table(section: Row) -> list[str]:
    return side_by_side(rows_of(section), ("TFLOP/s", "tflops"), microseconds)


def short_table(section: Row) -> list[str]:
    return side_by_side(rows_of(section), ("GB/s", "gbps"), small)


def sweep_table(suite: str, word: str) -> Callable[[Row], list[str]]:
    return lambda section: sweep(rows_of(section, suite), word)


def host_table(section: Row) -> list[str]:
    lines = [[c["name"], f"{c['us']:.2f}", f"{c['best_us']:.2f}"] for c in section["cases"]]
    return table(["call", "median us", "best us"], lines)


TABLES: dict[str, tuple[str, Callable[[Row], list[str]]]] = {  # section, its lines
    "decode": ("decode", memory_table),
    "prefill": ("prefill", product_table),
    "pages": ("sweeps", sweep_table("pages", "page")),
    "prefill_pages": ("sweeps", sweep_table("prefill_pages", "page")),
    "groups": ("sweeps", sweep_table("groups", "group")),
    "queries": ("sweeps", sweep_table("qlen", "q")),
    "cache_write": ("cache_write", short_table),
    "merge_states": ("merge_states", short_table),
    "host_overhead": ("host_overhead", host_table),
}
SECTIONS = tuple(dict.fromkeys(section for section, _ in TABLES.values()))


# Files


def with_tables(page: str, sections: dict[str, Row]) -> str:
    """The page with every table whose section is there. Raises ValueError for an unknown one."""

    def replaced(found: re.Match[str]) -> str:
        if found[2] not in TABLES:
            raise ValueError(f"no table {found[2]}; there are: {', '.join(TABLES)}")
        name, lines_of = TABLES[found[2]]
        if name not in sections:
            return found[0]
        lines = [*machine_of(sections[name]), *lines_of(sections[name])]
        return found[1] + "\n" + "\n".join(lines).rstrip() + "\n\n" + found[4]

    return BLOCK.sub(replaced, page)


def blank_page(name: str) -> str:
    """For a machine that has no page yet."""
    blocks = [f"<!-- table: {table} -->\n<!-- end -->\n" for table in TABLES]
    return "\n".join([f"# {name} results\n", *blocks])


def collect(folder: pathlib.Path, sections: dict[str, Row]) -> dict[str, Row]:
    """The sections, those that were measured again replaced."""
    new = {name: folder / f"{name}.json" for name in SECTIONS}
    return sections | {n: json.loads(f.read_text()) for n, f in new.items() if f.exists()}


def text_of(sections: dict[str, Row]) -> str:
    """JSON with a line a case, so that a change of one reads as such."""
    parts = []
    for name, section in sections.items():
        head = json.dumps({k: v for k, v in section.items() if k != "cases"}, indent=1)[:-2]
        cases = ",\n".join(f"  {json.dumps(row)}" for row in section["cases"])
        parts.append(f'"{name}": {head},\n "cases": [\n{cases}\n ]\n}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="of the page and the JSON file in --results")
    parser.add_argument("--collect", type=pathlib.Path, metavar="FOLDER", help="of new JSON files")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where it would")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, metavar="FOLDER")
    arguments = parser.parse_args(words)
    page = arguments.results / f"{arguments.name}.md"
    file = arguments.results / f"{arguments.name}.json"
    sections = json.loads(file.read_text()) if file.exists() else {}
    if arguments.collect:
        sections = collect(arguments.collect, sections)
        file.write_text(text_of(sections))
    old = page.read_text() if page.exists() else blank_page(arguments.name)
    new = with_tables(old, sections)
    if arguments.check:
        print(f"{page.name}: {'as' if new == old else 'NOT as'} {file.name} has it")
        return 0 if new == old else 1
    page.write_text(new)
    names = [found[2] for found in BLOCK.finditer(new)]
    left = [name for name in names if TABLES[name][0] not in sections]
    print(f"{page.name}: {len(names) - len(left)} tables written", end="")
    print(f"; left as they are, having no data: {', '.join(left)}" if left else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
