"""Writes a libstdc++.so to link with: this machine's symbols, up to the versions of an older one.

    python tools/old_libstdcxx.py build/old_glibc/lib/libstdc++.so

The functions in it are empty: the linker reads names and versions alone, and a program then loads
the real library. GLIBCXX_3.4.25 and CXXABI_1.3.11 are what manylinux_2_28 promises.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

NEWEST = {"GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}


def is_old(version: str) -> bool:
    found = re.fullmatch(r"(GLIBCXX|CXXABI)_([\d.]+)", version)
    return bool(found) and tuple(map(int, found[2].split("."))) <= NEWEST[found[1]]


def old_symbols(library: str) -> dict[str, list[tuple[str, str]]]:
    """Names and types, by version."""
    table = subprocess.run(
        ["readelf", "--dyn-syms", "--wide", library], capture_output=True, text=True, check=True
    ).stdout
    symbols = defaultdict(list)
    for line in table.splitlines():
        fields = line.split()
        if len(fields) < 8 or fields[6] == "UND" or "@@" not in fields[7]:
            continue
        name, version = fields[7].split("@@")
        if is_old(version) and name != version:
            symbols[version].append((name, "object" if fields[3] == "OBJECT" else "function"))
    return symbols


def main(out: Path) -> None:
    library = subprocess.run(
        ["g++", "-print-file-name=libstdc++.so.6"], capture_output=True, text=True, check=True
    ).stdout.strip()
    symbols = old_symbols(library)
    assembly, versions = out.with_suffix(".s"), out.with_suffix(".map")
    with assembly.open("w") as file:
        for name, kind in (symbol for names in symbols.values() for symbol in names):
            file.write(f".globl {name}\n.type {name}, %{kind}\n{name}:\n")
        file.write('.section .note.GNU-stack, "", %progbits\n')
    with versions.open("w") as file:
        for version, names in symbols.items():
            listed = "".join(f' "{name}";' for name, _ in names)
            file.write(f"{version} {{ global:{listed} }};\n")
    flags = ["-shared", "-nostdlib", "-Wl,-soname,libstdc++.so.6"]
    script = f"-Wl,--version-script={versions}"
    subprocess.run(["gcc", *flags, script, "-o", out, assembly], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
