"""The build backend of pyproject.toml: scikit-build-core, plus what optional parts need from PyPI.

PAGETILE_CUDA (a CMake define, else the environment, else ON on Linux) decides whether the CUDA part
is built. If it is, the build requires the CUTLASS headers, unless CUTLASS_ROOT names a checkout,
and nvcc, unless CUDACXX or PATH has one.

PAGETILE_JAX (likewise, else ON) decides whether the handlers of pagetile.jax are built. If they
are, the build requires a jaxlib for its headers, unless XLA_FFI_ROOT names a folder of them.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from typing import Any

from scikit_build_core import build as _backend
from scikit_build_core.build import *  # noqa: F403  (the hooks that are not replaced below)

ConfigSettings = dict[str, Any] | None

CUTLASS = ["nvidia-cutlass==4.2.0.0"]
# One CUDA release, 13.0 update 2. Unpinned, crt and nvvm would resolve to a newer one than nvcc.
NVCC = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
]
# For XLA's FFI headers alone, so an old one: XLA loads handlers of its own FFI version and of older
# ones, and these have the oldest that it still loads, 0.1 (tried: jaxlib 0.6.2 to 0.12.0). With the
# headers of jaxlib 0.10 (0.3), a wheel would need jaxlib >= 0.9.1. 300 MB while the build runs.
JAXLIB = {(3, 10): "jaxlib==0.6.2", (3, 11): "jaxlib==0.8.0"}  # for Python from that version on
JAXLIB_PYTHON_END = (3, 15)


def _define(name: str, config_settings: ConfigSettings) -> str | None:
    """The value that -Ccmake.define.NAME gives, if it is given."""
    settings = config_settings or {}
    value = settings.get(f"cmake.define.{name}", settings.get(f"skbuild.cmake.define.{name}"))
    return value[-1] if isinstance(value, list) else value


def _is_on(name: str, default: bool, config_settings: ConfigSettings) -> bool:
    value = _define(name, config_settings) or os.environ.get(name)
    return value.upper() not in {"0", "OFF", "NO", "FALSE", "N"} if value else default


def _parts(config_settings: ConfigSettings) -> dict[str, bool]:
    """Which optional parts are built."""
    return {
        "PAGETILE_CUDA": _is_on("PAGETILE_CUDA", sys.platform == "linux", config_settings),
        "PAGETILE_JAX": _is_on("PAGETILE_JAX", True, config_settings),
    }


def _cuda_requires(config_settings: ConfigSettings) -> list[str]:
    requires: list[str] = []
    if _parts(config_settings)["PAGETILE_CUDA"]:
        if not (_define("CUTLASS_ROOT", config_settings) or os.environ.get("CUTLASS_ROOT")):
            requires += CUTLASS
        named = _define("CMAKE_CUDA_COMPILER", config_settings) or os.environ.get("CUDACXX")
        if not (named or shutil.which("nvcc")):
            requires += NVCC
    return requires


def _wants_headers(config_settings: ConfigSettings) -> bool:
    """Whether XLA's FFI headers are needed that nobody has named."""
    named = _define("XLA_FFI_ROOT", config_settings) or os.environ.get("XLA_FFI_ROOT")
    return _parts(config_settings)["PAGETILE_JAX"] and not named


def _jax_requires(config_settings: ConfigSettings) -> list[str]:
    """Nothing where PyPI has no such jaxlib: the part is left out if there are no other headers."""
    has_wheels = (
        sys.platform == "linux"
        and platform.machine() in ("x86_64", "aarch64")
        and sys.version_info < JAXLIB_PYTHON_END
    )
    if not has_wheels or not _wants_headers(config_settings):
        return []
    return [JAXLIB[max(version for version in JAXLIB if version <= sys.version_info)]]


def _show_packages_to_cmake() -> None:
    """Put every package folder on CMake's path: pip keeps those that a hook asked for apart."""
    folders = [path for path in sys.path if os.path.basename(path) == "site-packages"]
    before = os.environ.get("CMAKE_PREFIX_PATH")
    os.environ["CMAKE_PREFIX_PATH"] = os.pathsep.join([*folders, *([before] if before else [])])


def _settings(config_settings: ConfigSettings) -> dict[str, Any]:
    """Say the parts outright: a build folder in use again would keep its first values.

    And the headers: CMake would sooner find those of a jaxlib in the environment that pip runs in
    than those of the jaxlib that the build has asked for.
    """
    settings = dict(config_settings or {})
    for name, is_on in _parts(settings).items():
        if _define(name, settings) is None:
            settings[f"cmake.define.{name}"] = "ON" if is_on else "OFF"
    jaxlib = importlib.util.find_spec("jaxlib") if _wants_headers(settings) else None
    if jaxlib is not None and jaxlib.submodule_search_locations:
        folder = os.path.join(jaxlib.submodule_search_locations[0], "include")
        settings["cmake.define.XLA_FFI_ROOT"] = folder
    return settings


def _requires(config_settings: ConfigSettings) -> list[str]:
    return _cuda_requires(config_settings) + _jax_requires(config_settings)


def get_requires_for_build_wheel(config_settings: ConfigSettings = None) -> list[str]:
    return _backend.get_requires_for_build_wheel(config_settings) + _requires(config_settings)


def get_requires_for_build_editable(config_settings: ConfigSettings = None) -> list[str]:
    return _backend.get_requires_for_build_editable(config_settings) + _requires(config_settings)


def build_wheel(
    wheel_directory: str,
    config_settings: ConfigSettings = None,
    metadata_directory: str | None = None,
) -> str:
    _show_packages_to_cmake()
    return _backend.build_wheel(wheel_directory, _settings(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: ConfigSettings = None,
    metadata_directory: str | None = None,
) -> str:
    _show_packages_to_cmake()
    return _backend.build_editable(wheel_directory, _settings(config_settings), metadata_directory)
