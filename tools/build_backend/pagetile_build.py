"""The build backend of pyproject.toml: scikit-build-core, plus what the CUDA part needs from PyPI.

PAGETILE_CUDA (a CMake define, else the environment, else ON on Linux) decides whether the CUDA part
is built. If it is, the build requires the CUTLASS headers, unless CUTLASS_ROOT names a checkout,
and nvcc, unless CUDACXX or PATH has one.
"""

from __future__ import annotations

import os
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


def _define(name: str, config_settings: ConfigSettings) -> str | None:
    """The value that -Ccmake.define.NAME gives, if it is given."""
    settings = config_settings or {}
    value = settings.get(f"cmake.define.{name}", settings.get(f"skbuild.cmake.define.{name}"))
    return value[-1] if isinstance(value, list) else value


def _cuda(config_settings: ConfigSettings) -> bool:
    value = _define("PAGETILE_CUDA", config_settings) or os.environ.get("PAGETILE_CUDA")
    if not value:
        return sys.platform == "linux"
    return value.upper() not in {"0", "OFF", "NO", "FALSE", "N"}


def _cuda_requires(config_settings: ConfigSettings) -> list[str]:
    requires: list[str] = []
    if _cuda(config_settings):
        if not (_define("CUTLASS_ROOT", config_settings) or os.environ.get("CUTLASS_ROOT")):
            requires += CUTLASS
        named = _define("CMAKE_CUDA_COMPILER", config_settings) or os.environ.get("CUDACXX")
        if not (named or shutil.which("nvcc")):
            requires += NVCC
    return requires


def _show_packages_to_cmake() -> None:
    """Put every package folder on CMake's path: pip keeps those that a hook asked for apart."""
    folders = [path for path in sys.path if os.path.basename(path) == "site-packages"]
    before = os.environ.get("CMAKE_PREFIX_PATH")
    os.environ["CMAKE_PREFIX_PATH"] = os.pathsep.join([*folders, *([before] if before else [])])


def _settings(config_settings: ConfigSettings) -> dict[str, Any]:
    """Say PAGETILE_CUDA outright: a build folder in use again would keep its first value."""
    settings = dict(config_settings or {})
    if _define("PAGETILE_CUDA", settings) is None:
        settings["cmake.define.PAGETILE_CUDA"] = "ON" if _cuda(settings) else "OFF"
    return settings


def get_requires_for_build_wheel(config_settings: ConfigSettings = None) -> list[str]:
    return _backend.get_requires_for_build_wheel(config_settings) + _cuda_requires(config_settings)


def get_requires_for_build_editable(config_settings: ConfigSettings = None) -> list[str]:
    return _backend.get_requires_for_build_editable(config_settings) + _cuda_requires(
        config_settings
    )


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
