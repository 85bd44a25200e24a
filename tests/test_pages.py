"""Pages that list messages, variables, members or files list all; drawings are up to date."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pagetile
import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


# validate.md: every message of the source


def messages_of(source: str) -> list[str]:
    """Patterns of the messages of check() calls, in the order of the source."""
    patterns = []
    for call in re.findall(r"\bcheck\((.*?)\);", source, re.DOTALL):
        words = re.findall(r'"((?:[^"\\]|\\.)*)"', call)
        if words:
            patterns.append(".*".join(map(re.escape, words)))
    return patterns


def metadata_checks() -> str:
    source = (ROOT / "cpp/src/attention/paged_attention.cpp").read_text()
    return source[source.index("void check_offsets(") : source.index("void check_metadata(")]


def printed_messages() -> list[str]:
    """What validate.md prints; test_docs.py has run it."""
    block = re.search(r"^```text\n(.*?)^```", (DOCS / "validate.md").read_text(), re.M | re.S)
    return [f"paged_attention: {line}" for line in block[1].splitlines()]


def test_validate_has_every_message():
    patterns, lines = messages_of(metadata_checks()), printed_messages()
    assert len(patterns) == len(lines) == 6
    for pattern in patterns:
        assert sum(bool(re.match(pattern, line)) for line in lines) == 1, pattern


def test_validate_explains_every_message():
    table = re.findall(r"^\| `(.*?)` \|", (DOCS / "validate.md").read_text(), re.M)
    explained = [f"paged_attention: {words}" for words in table]
    for line in printed_messages():
        assert any(line.startswith(words) for words in explained), line


def test_messages_are_found():
    source = 'check(a, "f: b is ", b(),\n  ", not ", c);\ncheck(d);\ncheck(x == "y", "f: no");'
    assert messages_of(source)[0] == r"f:\ b\ is\ .*,\ not\ "
    assert len(messages_of(source)) == 2


# options.md: every variable that is read


READ = re.compile(
    r"""getenv\("(\w+)" | environ(?:\.get\(|\[)"(\w+)" | ENV\{(\w+)\}
    | OVERRIDE\ =\ "(\w+)" | \$\{(PAGETILE_\w+)""",
    re.VERBOSE,
)
OURS = ("PAGETILE_", "CUDAARCHS", "CUDACXX", "CUTLASS_ROOT", "XLA_FFI_ROOT", "CMAKE_BUILD_")


def variables_in(text: str) -> set[str]:
    return {next(filter(None, names)) for names in READ.findall(text)}


def test_options_has_every_variable():
    files = [
        path
        for folder in ("cpp", "cmake", "python", "tools", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".cpp", ".h", ".cmake", ".py", ".sh"}
    ]
    found = set().union(
        *(variables_in(path.read_text()) for path in files if path != Path(__file__))
    )
    cmake = set(re.findall(r"option\((\w+)", (ROOT / "cmake/Options.cmake").read_text()))
    wanted = {name for name in found | cmake if name.startswith(OURS)}
    assert {"PAGETILE_VALIDATE", "PAGETILE_CPU_ISA", "CUDAARCHS", "PAGETILE_LINEINFO"} <= wanted
    page = (DOCS / "options.md").read_text()
    assert {name for name in wanted if not re.search(rf"\b{name}\b", page)} == set()


def test_variables_are_found():
    text = 'std::getenv("A") os.environ.get("B", 0) os.environ["C"] $ENV{D} ${PAGETILE_E:-OFF} ${F}'
    assert variables_in(text) == {"A", "B", "C", "D", "PAGETILE_E"}


# api/: every public name


def public_names(module: str) -> list[str]:
    path = ROOT / "python" / module.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{module} has no __all__")


SHOWN = {
    match[1]: [name.strip() for name in match[2].split(",")]
    for page in sorted((DOCS / "api").glob("*.md"))
    for match in re.finditer(r"autoapimodule:: (\S+)\n +:members: (.*)", page.read_text())
}


@pytest.mark.parametrize("module", SHOWN)
def test_api_pages_show_what_a_module_offers(module):
    assert SHOWN[module] == public_names(module)


def test_every_module_has_a_page():
    package = ROOT / "python" / "pagetile"
    modules = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        for folder in ("compat", "integrations", ".")
        for path in (package / folder).glob("*.py" if folder == "." else "**/*.py")
        if "__all__ = " in path.read_text()
    }
    inner = {"attention", "block_pool", "cache_write", "plan"}  # pagetile's own page has them
    wanted = modules - {"pagetile", "pagetile.compat"} - {f"pagetile.{name}" for name in inner}
    assert set(SHOWN) == wanted


def test_the_package_has_a_page():
    page = (DOCS / "api" / "pagetile.md").read_text()
    shown = re.findall(r":: pagetile\.(\w+)$", page, re.M)
    assert {*shown} == {*pagetile.__all__} - {"compat"}


def test_plan_is_shown_as_it_says():
    """It is compiled: the page has its words, which nothing reads from there."""
    text = " ".join((DOCS / "api" / "pagetile.md").read_text().split())
    properties = inspect.getmembers(pagetile.Plan, lambda x: isinstance(x, property))
    members = properties or [
        (name, x) for name, x in vars(pagetile.Plan).items() if not name.startswith("_")
    ]
    assert len(members) > 10
    for name, member in members:
        words = " ".join(inspect.getdoc(member).split())
        assert re.search(rf"py:property:: {name} (:type: [^:]* )?{re.escape(words)}", text), name
    for paragraph in inspect.getdoc(pagetile.Plan).split("\n\n"):
        assert " ".join(paragraph.split()) in text


# Files that pages name exist


@pytest.mark.parametrize("name", ["architecture.md", "extend.md", "memory_safety.md", "options.md"])
def test_files_exist(name):
    assert missing_files((DOCS / name).read_text()) == []


def missing_files(page: str) -> list[str]:
    """What a page names that is a file's name, and is none."""
    missing = []
    endings = "h|cpp|cu|cuh|in|py|md|sh|txt|cmake"
    for name in re.findall(rf"`([\w./]+\.(?:{endings}|\{{h,cpp\}}))`", page):
        for file in [name.replace("{h,cpp}", end) for end in ("h", "cpp")][: 1 + ("{" in name)]:
            parts = (ROOT / "cpp/src/attention", ROOT)
            if not any((part / file).exists() for part in parts) and not found_below(file):
                missing.append(file)
    return missing


def found_below(file: str) -> bool:
    """A bare name stands for a file of some folder, named before it on the page."""
    return any(
        next((ROOT / folder).rglob(file), None) for folder in ("cpp", "python", "tests", "docs")
    )


def test_missing_files_are_found():
    page = "`cpp/src/attention/dispatch.cpp` `kv_ring.cuh` `none.cuh` `sm80/prefill_launch.{h,cpp}`"
    assert missing_files(page) == ["none.cuh"]


# extend.md names every file of C++ that names a type


TYPES = re.compile(r"kFloat8E[45]M|kBFloat16|float_e[45]m\d_t|bfloat16_t")


def test_every_file_with_a_type_is_on_the_list():
    page = (DOCS / "extend.md").read_text()
    spread = [page.replace("{h,cpp}", end) for end in ("h", "cpp")]
    files = [
        path
        for path in (ROOT / "cpp").rglob("*")
        if path.is_file() and TYPES.search(path.read_text())
    ]
    assert len(files) > 30
    unnamed = [
        path.relative_to(ROOT).as_posix()
        for path in files
        if not any(re.search(rf"\b{re.escape(path.name)}\b", text) for text in spread)
    ]
    assert unnamed == []


# Drawings


@pytest.mark.parametrize(
    "script",
    [path for path in sorted((DOCS / "drawings").glob("*.py")) if path.name != "drawing.py"],
    ids=lambda path: path.stem,
)
def test_drawings_are_up_to_date(script):
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
