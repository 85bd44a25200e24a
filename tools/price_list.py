"""What each kernel instance costs: bytes in the wheel and seconds of its build, as tables.

    python tools/price_list.py            # writes them into docs/build.md
    python tools/price_list.py --print    # onto the terminal

It reads what `CCACHE_RECACHE=1 make wheel` leaves behind (without that, ccache may have answered,
and seconds say nothing):

- build/wheel.log: what ptxas says of each kernel, its seconds and its spills
- build/wheel.compiles.jsonl: seconds and memory of each file (tools/measure_compile.py)
- the wheel in dist/: the size of each kernel's machine code (cuobjdump takes the cubins out)

A kernel's bytes are those of its sections in the cubins, before they are compressed. Its seconds
are those that ptxas, the last step, takes for it. The steps before it, of which the largest part
parses and optimises the file's templates, cannot be told apart by kernel: they are in the files'.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "build.md"
NOBITS = 8  # the ELF type of a section that has a size, and nothing in the file
BEGIN, END = "<!-- prices: begin -->", "<!-- prices: end -->"

# What the template parameters of a kernel are. A type or number that all instances share is no
# axis.
AXES = {
    "sm80::split_kv_kernel": ("computed type", "stored type", "head_dim", "head_dim of V", "rows"),
    "sm80::split_kv_beside_kernel": ("computed type", "head_dim"),
    "sm80::prefill_kernel": ("computed type", "stored type", "head_dim", "head_dim of V"),
    "sm90::prefill_kernel": ("computed type", "head_dim", "head_dim of V", "transforms", "loading"),
    "gpu::cache_write_kernel": ("source", "cache", "vector", "wide", "pdl", "tokens"),
    "gpu::copy_pages_kernel": ("vector",),
    "gpu::legacy_kernel": ("computed type", "stored type", "partitions"),
    "gpu::legacy_reduce_kernel": ("type",),
    "gpu::merge_states_kernel": ("type", "vector"),
}
DTYPES = ("fp32", "fp16", "bf16", "e4m3", "e5m2")  # pagetile::DType, in its order
SHORT = {
    "cutlass::bfloat16_t": "bf16",
    "cutlass::half_t": "fp16",
    "cutlass::float_e4m3_t": "e4m3",
    "cutlass::float_e5m2_t": "e5m2",
    "float": "fp32",
}


@dataclass
class Price:
    """Of an instance, by architecture."""

    bytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    spills: dict[str, int] = field(default_factory=dict)


Prices = dict[str, Price]  # by mangled name


# What a build leaves behind


def read_log(text: str, prices: Prices) -> None:
    """The seconds and spilled bytes of each kernel, from what ptxas -v says.

    Its functions that are not inlined come behind a kernel, and spill on their own account.
    """
    entry = function = architecture = ""
    for line in text.splitlines():
        if found := re.search(r"Compiling entry function '(\w+)' for 'sm_(\w+?)f?'", line):
            entry, architecture = found[1], found[2]
        elif found := re.search(r"Function properties for (\w+)", line):
            function = found[1]
        elif found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            if spilled := int(found[1]) + int(found[2]):
                prices[function].spills[architecture] = spilled
        elif found := re.search(r"Compile time = ([\d.]+) ms", line):
            prices[entry].seconds[architecture] = float(found[1]) / 1000


def section_sizes(cubin: bytes) -> dict[str, int]:
    """Bytes of all sections of each kernel: its code, constants and what describes it.

    Read from the file's table of sections. readelf does not know these files and warns of them.
    """
    (table_at,) = struct.unpack_from("<Q", cubin, 0x28)  # e_shoff
    entry_size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    # name, type, flags, address, offset, size
    headers = [
        struct.unpack_from("<IIQQQQ", cubin, table_at + i * entry_size) for i in range(count)
    ]
    names_at = headers[names][4]
    sizes: dict[str, int] = defaultdict(int)
    for name_at, kind, _, _, _, size in headers:
        start = names_at + name_at
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if found := re.search(r"\.(_Z\w+)$", name):
            sizes[found[1]] += size if kind != NOBITS else 0
    return dict(sizes)


def read_wheel(wheel: Path, prices: Prices) -> None:
    """The bytes of each kernel."""
    with tempfile.TemporaryDirectory() as folder:
        module = zipfile.ZipFile(wheel).extract("pagetile/_C.abi3.so", folder)
        run([tool("cuobjdump"), "-xelf", "all", module], cwd=folder)
        for cubin in Path(folder).glob("*.cubin"):
            architecture = re.search(r"sm_(\w+?)\.cubin", cubin.name)
            assert architecture, cubin
            for name, size in section_sizes(cubin.read_bytes()).items():
                if name in prices:
                    prices[name].bytes[architecture[1]] = size


def tool(name: str) -> str:
    """A program on PATH, or of the environment that this runs in."""
    beside = Path(sys.prefix).glob(f"lib/python3*/site-packages/nvidia/cu13/bin/{name}")
    found = next((str(path) for path in beside), None) or shutil.which(name)
    return found or sys.exit(f"no {name}: pip install nvidia-cuda-{name}")


def run(command: list[str], **options: object) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options).stdout


# Names


def short_names(mangled: Iterable[str]) -> dict[str, str]:
    """Names to read, as in "sm80::split_kv_kernel<bf16, bf16, 128, 128, 8>"."""
    names = list(mangled)
    filled = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return {name: shorten(text) for name, text in zip(names, filled, strict=True)}


def shorten(name: str) -> str:
    """A demangled name without what every kernel has."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    name = re.sub(r"\(pagetile::DType\)(\d)", lambda m: DTYPES[int(m[1])], name)
    name = re.sub(r"\([\w:]+\)(\d+)", r"\1", name)  # other enumerations
    name = name.split("(")[0].replace("pagetile::", "")
    name = re.sub(r"<sm80::PrefillInstance<(.*?)> *>", r"<\1>", name)
    return re.sub(r"[\w:]+", lambda m: SHORT.get(m[0], m[0]), name)


def parts(name: str) -> tuple[str, list[str]]:
    """A kernel and its template arguments."""
    kernel, _, arguments = name.partition("<")
    return kernel, arguments.removesuffix(">").split(", ") if arguments else []


# Tables


def table(head: str, rows: Iterable[Iterable[object]]) -> list[str]:
    columns = head.split("|")
    rule = "|".join("---" if i == 0 else "---:" for i in range(len(columns)))
    return [f"| {head} |", f"|{rule}|", *(f"| {' | '.join(map(str, row))} |" for row in rows), ""]


def total(prices: Iterable[Price], architecture: str | None = None) -> tuple[int, str, str]:
    """How many, KB and seconds."""
    members = [
        p for p in prices if (p.seconds if architecture is None else architecture in p.seconds)
    ]
    size = sum(n for p in members for a, n in p.bytes.items() if architecture in (None, a))
    seconds = sum(s for p in members for a, s in p.seconds.items() if architecture in (None, a))
    return len(members), f"{size / 1000:,.0f}", f"{seconds:,.1f}"


def by_architecture(prices: Prices) -> list[str]:
    names = {a for price in prices.values() for a in price.seconds}
    order = sorted(names, key=lambda a: int(re.sub(r"\D", "", a)))
    return table(
        "architecture | kernels | KB | ptxas, s",
        [*((a, *total(prices.values(), a)) for a in order), ("all", *total(prices.values()))],
    )


def by_file(compiles: list[dict[str, object]]) -> list[str]:
    largest = [c for c in compiles if str(c["object"]).endswith(".cu.o") and "cmTC" not in str(c)]
    others = [c for c in compiles if c not in largest]
    rows = [
        (f"`{Path(str(c['object'])).name.removesuffix('.o')}`", c["cpu_s"], c["peak_mb"])
        for c in sorted(largest, key=lambda c: -float(str(c["cpu_s"])))
    ]
    for title, group in ((f"{len(others)} others, in C++", others), ("all", compiles)):
        seconds = sum(float(str(c["cpu_s"])) for c in group)
        rows.append((title, round(seconds, 2), max(int(str(c["peak_mb"])) for c in group)))
    return table("file | processor, s | peak memory, MB", rows)


def by_axis(prices: dict[str, Price]) -> list[str]:
    """What each value of each template parameter costs; prices by short name."""
    sums: dict[tuple[str, str, str], list[Price]] = defaultdict(list)
    for name, price in prices.items():
        if not price.seconds:  # a function that kernels call
            continue
        kernel, arguments = parts(name)
        axes = AXES.get(kernel, ())
        if len(axes) != len(arguments):
            sys.exit(f"price_list: AXES has no words for the parameters of {name}")
        for axis, value in zip(axes, arguments, strict=True):
            sums[kernel, axis, value].append(price)
    values = defaultdict(set)
    for kernel, axis, value in sums:
        values[kernel, axis].add(value)
    rows = [
        (f"`{kernel}`", axis, value, *total(members))
        for (kernel, axis, value), members in sorted(sums.items(), key=axis_order)
        if len(values[kernel, axis]) > 1
    ]
    return table("kernel | parameter | value | instances | KB | ptxas, s", rows)


def axis_order(item: tuple[tuple[str, str, str], object]) -> tuple[object, ...]:
    kernel, axis, value = item[0]
    return kernel, AXES[kernel].index(axis), int(value) if value.isdigit() else 0, value


def instance_order(name: str) -> tuple[object, ...]:
    kernel, arguments = parts(name)
    return kernel, [(int(a), "") if a.isdigit() else (0, a) for a in arguments]


def by_instance(prices: dict[str, Price]) -> list[str]:
    rows = [
        (f"`{name}`", *total([prices[name]])[1:], spill_text(prices[name]))
        for name in sorted(prices, key=instance_order)
    ]
    return table("instance | KB | ptxas, s | spills, bytes", rows)


def spill_text(price: Price) -> str:
    return ", ".join(f"{n} on {a}" for a, n in price.spills.items())


def tables(prices: Prices, compiles: list[dict[str, object]], wheel: Path) -> str:
    """All of them."""
    short = short_names(prices)
    named = {short[name]: price for name, price in prices.items() if "probe_kernel" not in name}
    size = wheel.stat().st_size / 1e6
    lines = [
        f"The wheel has {size:.1f} MB, its machine code {total(prices.values())[1]} KB before it",
        "is compressed.",
        "",
        *by_architecture(prices),
        *by_file(compiles),
        *by_axis(named),
        *by_instance(named),
    ]
    return "\n".join(lines)


def complain_of_cache(prices: Prices, compiles: list[dict[str, object]]) -> None:
    """Seconds that ptxas alone says it took were not taken if ccache had the object."""
    said = sum(s for price in prices.values() for s in price.seconds.values())
    taken = sum(float(str(c["cpu_s"])) for c in compiles)
    if taken < said:
        sys.exit(
            f"price_list: the compiles took {taken:.0f} s, ptxas alone says {said:.0f} s: ccache "
            "answered; build with CCACHE_RECACHE=1 make wheel"
        )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--print", action="store_true", help="write no page")
    parser.add_argument("--log", type=Path, default=ROOT / "build" / "wheel.log")
    parser.add_argument("--compiles", type=Path, default=ROOT / "build" / "wheel.compiles.jsonl")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("wheel", type=Path, nargs="?")
    options = parser.parse_args(arguments)
    wheel = options.wheel or next((ROOT / "dist").glob("*.whl"))

    prices: Prices = defaultdict(Price)
    read_log(options.log.read_text(), prices)
    if not prices:
        sys.exit(f"price_list: no kernel in {options.log}")
    read_wheel(wheel, prices)
    lost = [name for name, price in prices.items() if set(price.bytes) != set(price.seconds)]
    if lost:
        sys.exit(f"price_list: {wheel} and {options.log} differ: {short_names(lost[:3])}")
    compiles = [json.loads(line) for line in options.compiles.read_text().splitlines()]
    complain_of_cache(prices, compiles)
    text = tables(prices, compiles, wheel)
    if options.print:
        print(text)
        return
    page = options.page.read_text()
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    options.page.write_text(f"{page[:start]}\n{text}{page[end:]}")


if __name__ == "__main__":
    main(sys.argv[1:])
