"""The table of kernels in README.md and docs/index.md, made from the installed package.

    python tools/support_table.py           # writes the table into them
    python tools/support_table.py --check   # says whether it is true

What a row says is asked of the build itself, without a GPU:

- the kernels and their head dimensions: names that the extension registers with CUDA, which are in
  its file. What is not compiled has no name there.
- the types: each pair goes through the checks of a real call, on a CPU or a GPU.
- the targets: `pagetile.show_config`.

The table is that of the wheel that CI builds, for 80 and 90a. Another build can check the CPU's
rows alone, and says so.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pagetile
from pagetile import _C

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md"]
BEGIN, END = "<!-- kernels: begin -->", "<!-- kernels: end -->"
HEAD = """\
| call | kernel | built for | q, or k and v | cache | head_dim |
|---|---|---|---|---|---|
"""

TARGETS = {"80", "90a-real"}

FLOATS = ("float32", "float16", "bfloat16")
FLOAT8S = ("float8_e4m3fn", "float8_e5m2")
SHORT = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}
CUTLASS = {
    "6half_t": "float16",
    "10bfloat16_t": "bfloat16",
    "12float_e4m3_t": "float8_e4m3fn",
    "12float_e5m2_t": "float8_e5m2",
}

Pair = tuple[str, str]  # types: (q, cache)
Dims = tuple[int, int]  # head dimensions: (K, V)


@dataclass(frozen=True, order=True)
class Instance:
    """A compiled attention kernel."""

    kernel: str  # "split_kv", "prefill", "wgmma" or "fp8"
    math: str
    stored: str
    dims: Dims


# What is compiled

NUMBERS = r"Li(?P<k>\d+)ELi(?P<v>\d+)E"
TYPES = r"N7cutlass(?P<math>\d+[a-z]\w*?_t)E(?:S\d*_|NS\d*_(?P<stored>\d+[a-z]\w*?_t)E)"
NAMES = {
    "split_kv": rf"4sm8015split_kv_kernelI{TYPES}{NUMBERS}",
    "prefill": rf"4sm8014prefill_kernelINS0_15PrefillInstanceI{TYPES}{NUMBERS}",
    "wgmma": rf"4sm9014prefill_kernelIN7cutlass(?P<math>\d+[a-z]\w*?_t)E{NUMBERS}"
    r"Lb(?P<transforms>[01])ELNS0_7LoadingE(?P<loading>\d)E",
}
WIDENED, TRANSPOSED = "2", "3"  # sm90::Loading
E4M3 = "float8_e4m3fn"
HOPPER = ("wgmma", "fp8")  # kernels for some types alone


def registered_names() -> str:
    """Every mangled name of the extension's file, a line each."""
    data = Path(_C.__file__).read_bytes()
    return "\n".join(sorted({n.decode() for n in re.findall(rb"_ZN8pagetile\w+", data)}))


def instances_in(names: str) -> set[Instance]:
    """The attention kernels among mangled names."""
    found = set()
    for kernel, pattern in NAMES.items():
        for name in re.finditer(rf"^_ZN8pagetile{pattern}", names, re.MULTILINE):
            parts = name.groupdict()
            math = CUTLASS[parts["math"]]
            stored = CUTLASS[parts["stored"]] if parts.get("stored") else math
            dims = int(parts["k"]), int(parts["v"])
            loading = parts.get("loading")
            if loading == WIDENED:  # one instance for both, converted while it is copied
                found |= {Instance(kernel, math, fp8, dims) for fp8 in FLOAT8S}
            elif loading == TRANSPOSED:  # the name has the results' type
                found.add(Instance("fp8", E4M3, E4M3, dims))
            elif parts.get("transforms", "0") == "0":
                found.add(Instance(kernel, math, stored, dims))
    return found


# What is taken


def taken(check: Callable[..., None], *arguments: object) -> bool:
    """Whether the checks of a call let these through."""
    try:
        check(*arguments)
    except (ValueError, RuntimeError):
        return False
    return True


def attention_pairs(on_gpu: bool) -> list[Pair]:
    """The types of q and of the caches that attention takes."""
    types = (*FLOATS, *FLOAT8S)
    return [
        (q, cache)
        for q in types
        for cache in types
        if taken(_C.check_attention_types, q, cache, 64, 64, on_gpu)
    ]


def write_pairs(on_gpu: bool) -> list[Pair]:
    """The types of k and of the caches that a write takes."""
    types = (*FLOATS, *FLOAT8S)
    return [
        (rows, cache)
        for rows in types
        for cache in types
        if taken(_C.check_write_types, rows, cache, 64, on_gpu)
    ]


def head_dims_text(takes: Callable[[int], bool]) -> str:
    """Which head dimensions up to 1024 a call takes, in words."""
    dims = [dim for dim in range(1, 1025) if takes(dim)]
    if dims == list(range(1, 1025)):
        return "any"
    step, most = dims[0], dims[-1]
    assert dims == list(range(step, most + 1, step)), dims
    return f"multiples of {step} up to {most}, K and V apart"


# The table


def rows_of(start: str, pairs: Iterable[Pair], head_dims: Callable[[str, str], str]) -> list[str]:
    """Rows of a kernel: those that store what they compute with, then those over fp8."""
    columns: dict[tuple[str, str], list[Pair]] = {}
    for q, cache in pairs:
        kind = "the same" if q == cache and q in FLOATS else "fp8"
        columns.setdefault((kind, head_dims(q, cache)), []).append((q, cache))
    rows = []
    for (kind, dims), members in columns.items():
        qs = list(dict.fromkeys(q for q, _ in members))
        caches = list(dict.fromkeys(cache for _, cache in members))
        if kind == "fp8":
            assert {*members} == {(q, cache) for q in qs for cache in caches}, members
        stored = kind if kind != "fp8" else ", ".join(SHORT[cache] for cache in caches)
        rows.append(f"{start} | {', '.join(SHORT[q] for q in qs)} | {stored} | {dims} |")
    return rows


def dims_text(instances: Iterable[Instance]) -> str:
    """Pairs of head dimensions, as in "64, 192/128"."""
    dims = sorted({i.dims for i in instances}, key=lambda d: (d[0] != d[1], d))
    return ", ".join(str(k) if k == v else f"{k}/{v}" for k, v in dims)


def attention_head_dims(on_gpu: bool) -> str:
    """Which head dimensions attention takes, of K beside another one of V and the reverse."""
    check = _C.check_attention_types
    return head_dims_text(
        lambda dim: all(
            taken(check, "float16", "float16", *dims, on_gpu)
            for other in (64, 256)
            for dims in ((dim, other), (other, dim))
        )
    )


def cpu_rows(build: dict[str, Any]) -> list[str]:
    """The rows of the CPU's kernels."""
    targets = ", ".join(build["families"]["cpu"]["targets"])
    write = head_dims_text(lambda d: taken(_C.check_write_types, "float32", "float32", d, False))
    attend = attention_head_dims(on_gpu=False)
    return [
        *rows_of(f"| `cache_write` | CPU | {targets}", write_pairs(False), lambda *_: write),
        *rows_of(
            f"| `paged_attention` | CPU | {targets}", attention_pairs(False), lambda *_: attend
        ),
    ]


def gpu_rows(build: dict[str, Any], names: str) -> list[str]:
    """The rows of the GPUs' kernels, and a sentence about head dimensions that have none."""
    families = build["families"]
    numbers = {
        name: [t.removesuffix("-real") for t in f["targets"]] for name, f in families.items()
    }
    portable = ", ".join([*numbers.get("sm80", []), *numbers.get("sm90", [])])
    hopper = ", ".join(numbers.get("sm90", []))
    write = head_dims_text(lambda d: taken(_C.check_write_types, "float16", "float16", d, True))
    rows = rows_of(f"| `cache_write` | GPU | {portable}", write_pairs(True), lambda *_: write)
    instances = instances_in(names)
    pairs = attention_pairs(True)

    def serving(kernel: str, q: str, cache: str) -> list[Instance]:
        """The instances for such a call. Over fp8, the portable kernels compute in fp16."""
        return sorted(
            i
            for i in instances
            if i.kernel == kernel
            and i.stored == cache
            and i.math == (q if kernel in HOPPER or cache in FLOATS else "float16")
        )

    for kernel, title, targets in (
        ("split_kv", "short queries: split-KV, mma.sync", portable),
        ("prefill", "long queries: portable, mma.sync", portable),
        ("wgmma", "long queries: WGMMA, TMA", hopper),
        ("fp8", "long queries, `fp8_products`: WGMMA, TMA", hopper),
    ):
        served = [pair for pair in pairs if serving(kernel, *pair)]
        if kernel not in HOPPER and served != pairs:
            sys.exit(f"{kernel} is not compiled for {set(pairs) - set(served)}, which calls take")
        rows += rows_of(
            f"| `paged_attention` | GPU, {title} | {targets}",
            served,
            lambda q, cache, kernel=kernel: dims_text(serving(kernel, q, cache)),
        )
    attend = attention_head_dims(on_gpu=True)
    return [*rows, "", f"On a GPU, attention takes {attend}, and pads to a head_dim that is built."]


def rows_in(page: str) -> list[str]:
    """The lines between the marks, without the head."""
    lines = page[page.index(BEGIN) : page.index(END)].splitlines()
    return lines[1 + HEAD.count("\n") :]


def with_rows(page: str, rows: list[str]) -> str:
    """The page with other lines between the marks."""
    table = HEAD + "".join(f"{row}\n" for row in rows)
    return f"{page[: page.index(BEGIN)]}{BEGIN}\n{table}{page[page.index(END) :]}"


def made_rows() -> tuple[list[str], bool]:
    """The rows of the installed package, and whether they are those of CI's wheel."""
    build = pagetile.show_config("dicts")["build"]
    families = build["families"]
    targets = {
        target
        for name in ("sm80", "sm90")
        if name in families
        for target in families[name]["targets"]
    }
    is_whole = targets == TARGETS
    return cpu_rows(build) + (gpu_rows(build, registered_names()) if is_whole else []), is_whole


def main(arguments: list[str]) -> int:
    """Write the table, or check it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    parser.add_argument("--all", action="store_true", help="fail if rows could not be checked")
    parser.add_argument("pages", type=Path, nargs="*", default=PAGES)
    options = parser.parse_args(arguments)
    rows, is_whole = made_rows()
    if not options.check:
        if not is_whole:
            sys.exit(f"this build is not for {sorted(TARGETS)}, as the table is")
        for page in options.pages:
            page.write_text(with_rows(page.read_text(), rows))
        return 0
    differs = False
    for page in options.pages:
        stated = [row for row in rows_in(page.read_text()) if is_whole or "| CPU |" in row]
        for line in difflib.unified_diff(stated, rows, page.name, "the build", lineterm=""):
            print(line)
        differs = differs or stated != rows
    print("checked: " + ("all rows" if is_whole else "the CPU's rows alone"))
    return int(differs or (options.all and not is_whole))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
