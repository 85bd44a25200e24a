"""show_config(), python -m pagetile, and what the build asks PyPI for."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pagetile
import pytest
from pagetile import _C

BACKEND = Path(__file__).parents[1] / "tools" / "build_backend" / "pagetile_build.py"


def test_show_config_dicts():
    config = pagetile.show_config("dicts")
    build = config["build"]
    assert build["version"] == metadata.version("pagetile")
    functions = ["cache_write", "copy_pages", "paged_attention", "merge_states"]
    families = build["families"]
    assert families["cpu"]["kernels"] == functions
    mma = ["split_kv (mma.sync)", "prefill (mma.sync)"]
    wgmma = ["prefill (TMA, WGMMA)", "prefill (TMA, WGMMA of e4m3)"]
    attention = {"sm80": mma, "sm90": [*mma, *wgmma]}
    for name in set(attention) & set(families):
        assert families[name]["kernels"] == [*functions, *attention[name]]
    assert build["cpu_isa"] in families["cpu"]["targets"]
    assert bool(build["cuda_version"]) == ({"sm80", "sm90"} & set(families) != set())
    assert config["frameworks"]["numpy"] == metadata.version("numpy")
    # Either there are devices, or there is a reason why not.
    assert bool(config["devices"]) == (config["no_devices_reason"] is None)


def test_show_config_prints_what_dicts_holds(capsys: pytest.CaptureFixture[str]):
    assert pagetile.show_config() is None
    lines = capsys.readouterr().out.splitlines()
    config = pagetile.show_config("dicts")
    assert lines[0].split()[:2] == ["pagetile", config["build"]["version"]]
    assert any(
        line.startswith("cpu kernels") and config["build"]["cpu_isa"] in line for line in lines
    )
    if not config["devices"]:
        assert any(line.endswith(f"none: {config['no_devices_reason']}") for line in lines)


def test_show_config_refuses_other_modes():
    with pytest.raises(ValueError, match="mode must be 'stdout' or 'dicts', got 'json'"):
        pagetile.show_config("json")


def test_command_line_imports_no_framework():
    code = (
        "import runpy, sys; runpy.run_module('pagetile', run_name='__main__');"
        "sys.exit(str({'torch', 'jax', 'cupy'} & set(sys.modules) or '') or 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("pagetile")


def test_describes_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    gpus = [
        {
            "index": 0,
            "name": "A",
            "capability": (9, 0),
            "memory_bytes": 2**37,
            "families": ["sm90"],
        },
        {"index": 1, "name": "B", "capability": (7, 5), "memory_bytes": 2**34, "families": []},
    ]
    monkeypatch.setattr(pagetile.config, "_C", FakeExtension(gpus))
    pagetile.show_config()
    out = capsys.readouterr().out
    assert "cuda:0 A, compute capability 9.0, 128 GiB, kernel families sm90" in out
    assert "cuda:1 B, compute capability 7.5, 16 GiB, not covered by this build" in out
    assert "XLA handlers  not built" in out


class FakeExtension:
    def __init__(self, gpus: list[dict[str, object]]):
        self.devices = lambda: gpus
        self.no_devices_reason = lambda: ""
        self.build_info = _C.build_info
        self.xla_ffi_handlers = dict


@pytest.mark.parametrize(
    ("architectures", "capability", "covered"),
    [
        ("80", (8, 0), True),
        ("80", (8, 9), True),
        ("80", (7, 5), False),
        ("80", (9, 0), True),  # by PTX
        ("80", (12, 0), True),
        ("80-real", (8, 6), True),
        ("80-real", (9, 0), False),
        ("89-real", (8, 6), False),
        ("80-virtual", (8, 0), True),
        ("100", (9, 0), False),
        ("100", (12, 0), True),
        ("90a-real", (9, 0), True),
        ("90a-real", (10, 0), False),
        ("90a-real", (8, 9), False),
        ("100f-real", (10, 0), True),
        ("100f-real", (10, 3), True),
        ("100f-real", (12, 0), False),
        ("100f", (12, 0), False),  # not by the PTX of a family either
        ("103f", (10, 0), False),
        ("80-real;120", (12, 0), True),
        ("80-real;120", (12, 1), True),
        ("80-real;120", (10, 0), False),
        ("", (9, 0), False),
    ],
)
def test_covers(architectures: str, capability: tuple[int, int], covered: bool):
    assert _C.covers(architectures, *capability) is covered


def test_a_gpu_that_is_not_covered():
    """The error names the GPU's capability and all that is built."""
    gpu = "CUDA device 0 (NVIDIA T4, capability 7.5)"
    text = _C.not_built_message("cache_write", gpu)
    assert text.startswith(f"cache_write: not built for {gpu}; built: cpu for ")
    for name, family in _C.build_info()["families"].items():
        targets = ", ".join(family["targets"])
        assert f"{name} for {targets}: {' '.join(family['kernels'])}" in text


@pytest.mark.gpu
@pytest.mark.skipif(not _C.devices(), reason="no CUDA device")
def test_probe_kernels_run_on_every_covered_gpu():
    for device in _C.devices():
        assert _C.run_probes(device["index"]) == device["families"]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The build backend on a Linux machine without nvcc."""
    pytest.importorskip("scikit_build_core")
    if not BACKEND.exists():
        pytest.skip("no source tree beside the tests")
    for name in ("PAGETILE_CUDA", "CUDACXX", "CUTLASS_ROOT", "PAGETILE_JAX", "XLA_FFI_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "platform", "linux")
    spec = importlib.util.spec_from_file_location("pagetile_build", BACKEND)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_build_requires_cutlass_and_one_release_of_nvcc(backend: ModuleType):
    requires = backend._cuda_requires({})
    assert requires == backend.CUTLASS + backend.NVCC
    assert all("==13.0." in package for package in backend.NVCC)


@pytest.mark.parametrize(
    ("settings", "environment", "expected"),
    [
        ({"cmake.define.PAGETILE_CUDA": "OFF"}, {}, ""),
        ({"skbuild.cmake.define.PAGETILE_CUDA": ["ON", "off"]}, {}, ""),
        ({}, {"PAGETILE_CUDA": "OFF"}, ""),
        ({"cmake.define.PAGETILE_CUDA": "ON"}, {"PAGETILE_CUDA": "OFF"}, "cutlass nvcc"),
        ({}, {"CUDACXX": "/some/nvcc"}, "cutlass"),
        ({"cmake.define.CMAKE_CUDA_COMPILER": "/some/nvcc"}, {}, "cutlass"),
        ({}, {"CUTLASS_ROOT": "/some/checkout"}, "nvcc"),
        ({"cmake.define.CUTLASS_ROOT": "/some/checkout"}, {}, "nvcc"),
    ],
)
def test_build_requires_no_more_than_it_needs(
    backend: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    environment: dict[str, str],
    expected: str,
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    parts = {"cutlass": backend.CUTLASS, "nvcc": backend.NVCC}
    wanted = [package for part in expected.split() for package in parts[part]]
    assert backend._cuda_requires(settings) == wanted


def test_build_uses_nvcc_on_path(backend: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert backend._cuda_requires({}) == backend.CUTLASS


@pytest.mark.parametrize(
    ("settings", "environment", "value"),
    [
        ({}, None, "ON"),
        ({}, "OFF", "OFF"),
        ({"cmake.define.{part}": "OFF"}, None, "OFF"),
    ],
)
@pytest.mark.parametrize("part", ["PAGETILE_CUDA", "PAGETILE_JAX"])
def test_build_always_tells_cmake(
    backend: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    environment: str | None,
    value: str,
    part: str,
):
    if environment is not None:
        monkeypatch.setenv(part, environment)
    settings = {name.format(part=part): given for name, given in settings.items()}
    assert backend._settings(settings)[f"cmake.define.{part}"] == value


def test_no_cuda_by_default_elsewhere(backend: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert backend._cuda_requires({}) == []


@pytest.mark.parametrize(
    ("settings", "environment", "needs_headers"),
    [
        ({}, {}, True),
        ({"cmake.define.PAGETILE_CUDA": "OFF"}, {}, True),
        ({"cmake.define.PAGETILE_JAX": "OFF"}, {}, False),
        ({}, {"PAGETILE_JAX": "OFF"}, False),
        ({"cmake.define.XLA_FFI_ROOT": "/some/folder"}, {}, False),
        ({}, {"XLA_FFI_ROOT": "/some/folder"}, False),
    ],
)
def test_build_requires_a_jaxlib_for_its_headers(
    backend: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    environment: dict[str, str],
    needs_headers: bool,
):
    monkeypatch.setattr(backend.platform, "machine", lambda: "x86_64")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for version, wanted in (((3, 10, 13), "0.6.2"), ((3, 11, 0), "0.8.0"), ((3, 14, 2), "0.8.0")):
        monkeypatch.setattr(sys, "version_info", version)
        requires = backend._jax_requires(settings)
        assert requires == ([f"jaxlib=={wanted}"] if needs_headers else [])


def test_build_does_without_jaxlib_where_there_is_no_wheel(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backend.platform, "machine", lambda: "riscv64")
    assert backend._jax_requires({}) == []
    monkeypatch.setattr(backend.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(sys, "version_info", (3, 15, 0))
    assert backend._jax_requires({}) == []


def test_build_tells_cmake_whose_headers(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Those of the jaxlib that the build sees, unless somebody names others or wants none."""
    (tmp_path / "jaxlib").mkdir()
    (tmp_path / "jaxlib" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jaxlib", raising=False)  # other tests import the real one
    named = "cmake.define.XLA_FFI_ROOT"
    assert backend._settings({})[named] == str(tmp_path / "jaxlib" / "include")
    assert named not in backend._settings({"cmake.define.PAGETILE_JAX": "OFF"})
    assert backend._settings({named: "/some/folder"})[named] == "/some/folder"
    monkeypatch.setenv("XLA_FFI_ROOT", "/some/folder")
    assert named not in backend._settings({})
