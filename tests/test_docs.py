"""The pages of docs/ and the README: their code runs, their C++ compiles, their links hold.

What the site makes of them is checked by `make docs`, facts by test_pages.py.

A page's ```python blocks run in order, as one script. ```python gpu runs where there is a CUDA
device and what the block imports, ```python no-run never. The text of a block that names a file,
as in ```cmake examples/cpp/CMakeLists.txt, must stand in that file.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKING = [*PAGES, *sorted({*ROOT.glob("*.md")} - {*PAGES}), *sorted(ROOT.glob("bench/**/*.md"))]
SIGNATURES = {"docs/design.md"}  # its block lists signatures
INFOS = {"python", "python gpu", "python no-run"}


@dataclass(frozen=True)
class Block:
    info: str  # what follows the fence: "python gpu"
    line: int  # of its first line of code, counted from 1
    text: str

    def imports(self) -> set[str]:
        """Top-level names of the modules that it imports."""
        modules = set()
        for node in ast.walk(ast.parse(self.text)):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module)
        return {name.partition(".")[0] for name in modules}


def blocks_of(text: str) -> list[Block]:
    blocks, lines = [], text.splitlines()
    fence = None
    for number, line in enumerate(lines, 1):
        mark = re.match(r"(`{3,})(.*)", line)
        if fence is None and mark:
            fence, info, first = mark[1], mark[2].strip(), number + 1
        elif fence is not None and line.rstrip() == fence:
            blocks.append(Block(info, first, "\n".join(lines[first - 1 : number - 1])))
            fence = None
    assert fence is None, f"line {first - 1}: a block that does not end"
    return blocks


def missing(block: Block) -> list[str]:
    return sorted(n for n in block.imports() if importlib.util.find_spec(n) is None)


def script_of(blocks: list[Block]) -> str:
    """The blocks at their lines of the page, so that a traceback names them."""
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return "\n".join(lines) + "\n"


def runnable(text: str) -> list[Block]:
    """What can run here. Skips the test where the page needs a library that is not installed."""
    chosen = []
    for block in blocks_of(text):
        if block.info == "python":
            if lacking := missing(block):
                pytest.skip(f"not installed: {', '.join(lacking)}")
            chosen.append(block)
        elif block.info == "python gpu" and torch.cuda.is_available() and not missing(block):
            chosen.append(block)
    return chosen


def run(text: str, folder: Path, name: str = "page.md") -> subprocess.CompletedProcess:
    """Runs a page's code in a process and a folder of its own."""
    script = folder / Path(name).name
    script.write_text(script_of(runnable(text)))
    return subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, check=False,
        cwd=folder,
    )  # fmt: skip


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


WITH_CODE = [
    page
    for page in PAGES
    if name_of(page) not in SIGNATURES
    and any(b.info in ("python", "python gpu") for b in blocks_of(page.read_text()))
]


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_runs(page, tmp_path):
    done = run(page.read_text(), tmp_path, page.name)
    assert done.returncode == 0, done.stderr[-4000:]
    if printed := [b.text for b in blocks_of(page.read_text()) if b.info == "text"]:
        assert done.stdout.splitlines() == "\n".join(printed).splitlines()


def test_every_framework_has_an_example():
    pages = [page for page in PAGES if page.parent.name == "frameworks"]
    assert pages
    for page in pages:
        infos = {block.info.split(" ")[0] for block in blocks_of(page.read_text())}
        assert infos & {"python", "cpp"}, name_of(page)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_fences(page):
    """A slip such as ```Python or ```python norun would keep a block from being run."""
    for block in blocks_of(page.read_text()):
        if "py" in block.info.lower():
            assert block.info in INFOS, f"{name_of(page)}, line {block.line - 1}: {block.info}"


def named_files(text: str) -> list[tuple[str, Block]]:
    split = [(block.info.partition(" ")[2], block) for block in blocks_of(text)]
    return [(name, block) for name, block in split if "/" in name]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_stand_in_the_files_they_name(page):
    for name, block in named_files(page.read_text()):
        assert block.text in (ROOT / name).read_text(), f"line {block.line} is not in {name}"


COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
WITH_CPP = [page for page in PAGES if any(b.info == "cpp" for b in blocks_of(page.read_text()))]


def compile_cpp(text: str) -> subprocess.CompletedProcess:
    """Checks the ```cpp blocks as one translation unit; nothing is generated."""
    assert COMPILER is not None
    source = script_of([b for b in blocks_of(text) if b.info == "cpp"])
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    return subprocess.run(
        [COMPILER, *flags, "-I", ROOT / "cpp" / "include", "-x", "c++", "-"],
        input=source, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("page", WITH_CPP, ids=name_of)
def test_cpp_compiles(page):
    done = compile_cpp(page.read_text())
    assert done.returncode == 0, done.stderr[-4000:]


# Links


def without_code(text: str) -> str:
    text = re.sub(r"^(`{3,})[^\n]*\n.*?^\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors_of(text: str) -> set[str]:
    """The names that a web view gives to headings."""
    anchors = set()
    for heading in re.findall(r"^#+ +(.*)$", re.sub(r"`", "", text), re.MULTILINE):
        anchors.add(re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-"))
    return anchors


def broken_links(page: Path) -> list[str]:
    """Relative links of a page to files or headings that do not exist."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", without_code(page.read_text())):
        if re.match(r"[a-z][a-z+.-]*:", link):  # https:, mailto:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        headings = target.suffix == ".md" and anchor
        known = target.exists() and not link.startswith("/")
        if not known or (headings and anchor not in anchors_of(target.read_text())):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_links(page):
    assert broken_links(page) == []


# These tests can fail


GOOD = "```python\nx = 1\n```\n\n```python\nassert x == 1\n```\n"


def test_blocks_share_a_namespace(tmp_path):
    assert run(GOOD, tmp_path).returncode == 0


def test_wrong_code_is_found_at_its_line(tmp_path):
    done = run(GOOD + "\nText.\n\n```python\nassert x == 2\n```\n", tmp_path)
    assert done.returncode == 1
    assert 'page.md", line 12' in done.stderr
    assert "AssertionError" in done.stderr


def test_marked_blocks_do_not_run(tmp_path):
    text = "```python no-run\nraise\n```\n```text\nraise\n```\n```python gpu\nimport no_such\n```\n"
    assert runnable(text) == []
    assert run(text, tmp_path).returncode == 0


def test_missing_libraries_skip_the_page():
    with pytest.raises(pytest.skip.Exception, match="not installed: no_such_library"):
        runnable(GOOD + "```python\nfrom no_such_library.sub import x\n```\n")


def test_missing_parts_of_pagetile_do_not(tmp_path):
    done = run("```python\nimport pagetile.no_such_part\n```\n", tmp_path)
    assert "ModuleNotFoundError" in done.stderr


def test_open_fences_are_found():
    with pytest.raises(AssertionError, match="line 1: a block that does not end"):
        blocks_of("```python\nx = 1\n")


def test_broken_links_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# A `b`, c\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#a-b-c) [c](#here) [d](https://x.org/y)\n# Here\n"
        "[no](gone.md) ![no](gone.svg) [no](other.md#gone) [no](#gone) `[code](code.md)`\n"
        "```\n[code](code.md)\n```\n"
    )
    assert broken_links(page) == ["gone.md", "gone.svg", "other.md#gone", "#gone"]


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_wrong_cpp_is_found():
    text = '```cpp\n#include "pagetile/attention.h"\n```\n'
    assert compile_cpp(text).returncode == 0
    done = compile_cpp(text + "```cpp\nvoid f(pagetile::Scale s) { s.no_such_member = 1; }\n```\n")
    assert "<stdin>:5" in done.stderr
