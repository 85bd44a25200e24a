"""What this build of pagetile contains and what it finds on this machine."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any, Literal, overload

from pagetile import _C

# Import name -> the distributions that provide it. CuPy's is named after the CUDA release.
_FRAMEWORKS = {
    "numpy": ("numpy",),
    "torch": ("torch",),
    "jax": ("jax",),
    "cupy": ("cupy", "cupy-cuda13x", "cupy-cuda12x"),
}


def _framework_versions() -> dict[str, str | None]:
    """Versions from the packages' metadata: importing torch to print a number takes seconds."""
    versions: dict[str, str | None] = {}
    for name, distributions in _FRAMEWORKS.items():
        versions[name] = None
        for distribution in distributions:
            try:
                versions[name] = metadata.version(distribution)
                break
            except metadata.PackageNotFoundError:
                continue
    return versions


def _config() -> dict[str, Any]:
    return {
        "build": _C.build_info(),
        "devices": _C.devices(),
        "no_devices_reason": _C.no_devices_reason() or None,
        "xla_handlers": bool(_C.xla_ffi_handlers()),
        "python": platform.python_version(),
        "frameworks": _framework_versions(),
    }


def _describe_device(device: dict[str, Any]) -> str:
    major, minor = device["capability"]
    memory = device["memory_bytes"] / 2**30
    covered = (
        "kernel families " + ", ".join(device["families"])
        if device["families"]
        else "not covered by this build"
    )
    what = f"{device['name']}, compute capability {major}.{minor}, {memory:.0f} GiB"
    return f"cuda:{device['index']} {what}, {covered}"


def _describe(config: dict[str, Any]) -> str:
    build = config["build"]
    rows = [
        ("pagetile", f"{build['version']} (git {build['git_hash']})"),
        (
            "build",
            f"{build['build_type']}, {build['compiler']}, OpenMP {build['openmp'] or 'none'}",
        ),
        ("CUDA", build["cuda_version"] or "not built"),
    ]
    for name, family in build["families"].items():
        chosen = f" (this machine: {build['cpu_isa']})" if name == "cpu" else ""
        kernels = ", ".join(family["kernels"]) or "none yet"
        rows.append(
            (f"{name} kernels", f"{kernels}; built for {', '.join(family['targets'])}{chosen}")
        )
    if config["devices"]:
        rows += [("device", _describe_device(device)) for device in config["devices"]]
    else:
        rows.append(("devices", f"none: {config['no_devices_reason']}"))
    rows.append(("XLA handlers", "built" if config["xla_handlers"] else "not built"))
    rows.append(("python", config["python"]))
    rows += [(name, version or "not installed") for name, version in config["frameworks"].items()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


@overload
def show_config(mode: Literal["stdout"] = ...) -> None: ...
@overload
def show_config(mode: Literal["dicts"]) -> dict[str, Any]: ...
def show_config(mode: str = "stdout") -> dict[str, Any] | None:
    """Show what this build contains and which devices and frameworks are here.

    Args:
        mode: ``"stdout"`` prints it for people. ``"dicts"`` returns it, with the keys

            - ``build``: version, git_hash, build_type, compiler, cuda_version (empty without CUDA),
              cpu_isa (the instruction set in use), openmp,
              families (kernel family -> targets it is built for, kernels it has);
            - ``devices``: one dict a GPU: index, name, capability, memory_bytes,
              families (those whose kernels run on it; empty: not covered);
            - ``no_devices_reason``: why ``devices`` is empty, or None;
            - ``xla_handlers``: whether this build has what `pagetile.jax` calls;
            - ``python``, ``frameworks``: versions (None: not installed). No framework is imported.

    Raises:
        ValueError: mode is neither.
    """
    if mode not in ("stdout", "dicts"):
        raise ValueError(f"show_config: mode must be 'stdout' or 'dicts', got {mode!r}")
    config = _config()
    if mode == "dicts":
        return config
    print(_describe(config))
    return None
