"""The installed distribution: its tag, what it requires and brings; it needs no framework."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pagetile
import pytest

FRAMEWORKS = ("torch", "jax", "cupy", "tensorflow", "nvidia", "cuda")


@pytest.fixture(scope="module")
def distribution():
    return metadata.distribution("pagetile")


def python(*arguments, **options) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_tests_import_the_installed_package(distribution):
    files = {file.locate().resolve() for file in distribution.files}
    editable = "direct_url.json" in {f.name for f in distribution.files} and not any(
        f.name == "__init__.py" for f in distribution.files
    )
    assert not editable, "an editable install is not what users get"
    assert any(str(f) == pagetile.__file__ for f in map(str, files))


def test_tag(distribution):
    """One wheel for every Python from 3.10."""
    text = distribution.read_text("WHEEL")
    assert "Tag: cp310-abi3-" in text
    assert "Root-Is-Purelib: false" in text


def test_requirements(distribution):
    required = [text.split(";")[0].lower() for text in distribution.requires if "extra" not in text]
    assert any(text.startswith("nanobind-backend") for text in required)
    for framework in FRAMEWORKS:
        assert not any(text.startswith(framework) for text in required), required


def test_contents(distribution):
    """The package and its licence; no tests, no sources, no second copy of the extension.

    auditwheel adds an OpenMP run time to a wheel for other machines.
    """
    names = [str(file) for file in distribution.files]
    openmp = [n for n in names if n.startswith("pagetile.libs/libgomp-")]
    ours = [n for n in names if "__pycache__" not in n and ".dist-info/" not in n]
    ours = [n for n in ours if n not in openmp]
    assert len(openmp) <= 1
    assert all(name.startswith("pagetile/") for name in ours), ours
    assert [n for n in ours if n.endswith(".so")] == ["pagetile/_C.abi3.so"]
    assert {"pagetile/_C.pyi", "pagetile/py.typed", "pagetile/compat/vllm.py"} <= set(ours)
    assert any(n.split("/")[-1].startswith("LICENSE") for n in names)


def test_version(distribution):
    assert pagetile.__version__ == distribution.version


BLOCKED = """
import sys
for name in ("torch", "jax", "cupy", "tensorflow", "ml_dtypes"):
    sys.modules[name] = None  # an import of it raises
import numpy as np
import pagetile
cache = np.zeros((2, 4, 1, 8), np.float32)
row = np.ones((1, 1, 8), np.float32)
pagetile.cache_write(row, row, cache, cache.copy(), np.array([5]))
assert cache[1, 1].all() and cache.sum() == 8
out = pagetile.paged_attention(
    row, cache, cache, block_table=np.array([[1]], np.int32), seqused_k=np.array([2], np.int32),
    cu_seqlens_q=np.array([0, 1], np.int32), max_seqlen_q=1,
)
assert type(out) is np.ndarray and 0 < out[0, 0, 0] < 1
lse = np.zeros((1, 1), np.float32)
pagetile.merge_states(out, lse, out, lse)
pagetile.show_config()
print(sorted(m for m in sys.modules if m.split(".")[0] in ("torch", "jax", "cupy")))
"""


def test_works_without_any_framework(tmp_path):
    """Import and every function, with NumPy alone; a blocked module stays blocked."""
    assert python("-c", BLOCKED, cwd=tmp_path).splitlines()[-1] == "['cupy', 'jax', 'torch']"


def test_import_loads_no_framework(tmp_path):
    loaded = python("-c", "import sys, pagetile; print(*sys.modules)", cwd=tmp_path).split()
    assert not {"torch", "jax", "cupy"} & set(loaded)


def test_import_is_quick(tmp_path):
    """In under 150 ms, in a new interpreter; the best of five, for other programs take time."""
    code = "from time import perf_counter as now; t = now(); import pagetile; print(now() - t)"
    python("-c", code, cwd=tmp_path)  # writes what Python compiles
    assert min(float(python("-c", code, cwd=tmp_path)) for _ in range(5)) < 0.150


def test_python_m_pagetile(tmp_path):
    """Version, git hash, CUDA version, every kernel family with its architectures, the devices."""
    text = python("-m", "pagetile", cwd=tmp_path)
    build = pagetile.show_config(mode="dicts")["build"]
    assert f"{pagetile.__version__} (git {build['git_hash']})" in text
    assert (build["cuda_version"] or "not built") in text
    assert "cpu" in build["families"]
    for name, family in build["families"].items():
        line = next(line for line in text.splitlines() if line.startswith(f"{name} kernels"))
        assert family["targets"]
        for word in (*family["targets"], *family["kernels"]):
            assert word in line
    assert "device" in text
