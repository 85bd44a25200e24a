"""Results in the caller's own framework, and current streams that DLPack does not tell."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from pagetile import _C

Allocator = Callable[[Any, tuple[int, ...], "str | None"], Any]


class SupportsDLPack(Protocol):
    """A tensor of any framework: PyTorch, NumPy, JAX, CuPy, or whatever exports DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Export the tensor as a DLPack capsule."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's device type and the device's index."""


def _empty_torch(like: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
    torch = sys.modules["torch"]
    if dtype is None and like.shape == shape:  # in 0.75 us for 1.25 (torch 2.13)
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    return like.new_empty(
        shape, dtype=None if dtype is None else getattr(torch, dtype), requires_grad=False
    )


def _empty_numpy(like: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
    return sys.modules["numpy"].empty(shape, dtype=like.dtype if dtype is None else dtype)


def _empty_cupy(like: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
    with like.device:
        return sys.modules["cupy"].empty(shape, dtype=like.dtype if dtype is None else dtype)


_JAX_DTYPES = ("float32", "float16", "bfloat16", "int32")


def _empty_jax(like: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
    name = str(like.dtype) if dtype is None else dtype
    # No result has another dtype: of like's own, the extension says that it does not fit.
    return _C.empty(shape, name if name in _JAX_DTYPES else "float32")


_ALLOCATORS: dict[str, Allocator] = {
    "torch": _empty_torch,
    "numpy": _empty_numpy,
    "cupy": _empty_cupy,
    "jax": _empty_jax,
    "jaxlib": _empty_jax,
}
_allocator_of_type: dict[type, Allocator] = {}  # filled as types come by


def _type_name(tensor_type: type) -> str:
    module = tensor_type.__module__
    return (
        tensor_type.__qualname__ if module == "builtins" else f"{module}.{tensor_type.__qualname__}"
    )


def _check_jax(function: str, name: str, like: Any) -> None:
    """Refuse what looks like a JAX array and has no memory, or none that could be written to."""
    if not hasattr(like, "__dlpack_device__"):
        raise TypeError(
            f"{function}: {name} must be a DLPack tensor, got {_type_name(type(like))}: JAX's "
            "tracers have no memory, so under jax.jit and its like call pagetile.jax"
        )
    if getattr(like, "is_deleted", bool)():
        raise TypeError(f"{function}: {name} has been deleted or donated")
    if like.__dlpack_device__()[0] != 1:  # DLPack's number of the CPU
        raise TypeError(
            f"{function}: out must be given for JAX arrays on a GPU: they cannot be written to"
        )


def find_allocator(function: str, name: str, like: Any, takes_out: bool = True) -> Allocator:
    """Return what allocates in the framework of a tensor. takes_out: results can be given, too."""
    tensor_type = type(like)
    for base in tensor_type.__mro__:
        allocator = _ALLOCATORS.get(base.__module__.partition(".")[0])
        if allocator is not None:
            _allocator_of_type[tensor_type] = allocator
            return allocator
    if not hasattr(tensor_type, "__dlpack__"):
        raise TypeError(
            f"{function}: {name} must be a DLPack tensor, got {_type_name(tensor_type)}"
        )
    if not takes_out:
        raise TypeError(
            f"{function}: {name} must be a tensor of PyTorch, NumPy, JAX or CuPy, got "
            f"{_type_name(tensor_type)}"
        )
    raise TypeError(
        f"{function}: out must be given where {name} is a {_type_name(tensor_type)}: "
        "results are allocated for PyTorch, NumPy, JAX and CuPy alone"
    )


def prepare(function: str, name: str, like: Any, meaning: str) -> tuple[int, ...]:
    """Return the shape of the tensor that results are made like, of the rank of ``meaning``.

    Raises TypeError where it is no tensor, or of a library that `empty` does not know.
    """
    allocator = _allocator_of_type.get(type(like)) or find_allocator(function, name, like)
    if allocator is _empty_jax:
        _check_jax(function, name, like)
    return shape_of(function, name, like, 3, meaning)


def empty(like: Any, shape: tuple[int, ...], dtype: str | None = None) -> Any:
    """Return a writable tensor of the framework and device of ``like``, which `prepare` has seen.

    dtype is a name such as "bfloat16", or None for like's own. For a JAX array it is a buffer that
    `finish` turns into one.
    """
    return _allocator_of_type[type(like)](like, shape, dtype)


def finish(like: Any, result: Any) -> Any:
    """Return what `empty` gave for ``like``, now filled, as a tensor of its framework."""
    if _allocator_of_type.get(type(like)) is _empty_jax:
        return sys.modules["jax"].dlpack.from_dlpack(result)
    return result


def shape_of(function: str, name: str, tensor: Any, ndim: int, meaning: str) -> tuple[int, ...]:
    """Return the shape of a tensor, or say that it is none, or that it has another rank."""
    shape = getattr(tensor, "shape", None)
    if shape is None or not hasattr(tensor, "__dlpack__"):
        raise TypeError(
            f"{function}: {name} must be a DLPack tensor, got {_type_name(type(tensor))}"
        )
    if len(shape) != ndim:
        raise ValueError(
            f"{function}: {name} must have {ndim} dimensions {meaning}, got shape {tuple(shape)}"
        )
    return tuple(shape)


def current_stream(tensor: Any, device_index: int) -> int:
    """Return the address of the current stream of a framework without DLPack's exchange API.

    0 is the legacy default stream.
    CuPy and PyTorch before 2.10 tell their current streams. JAX has none that others could use, and
    neither has an unknown type.
    """
    frameworks = {base.__module__.partition(".")[0] for base in type(tensor).__mro__}
    if "cupy" in frameworks:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device_index):
            return int(cupy.cuda.get_current_stream().ptr)
    if "torch" in frameworks:
        return int(sys.modules["torch"].cuda.current_stream(device_index).cuda_stream)
    return 0


def explain_scalars(
    function: str, error: TypeError, *scalars: tuple[str, type[Any], Any]
) -> NoReturn:
    """Re-raise a TypeError of the extension, naming the argument where a scalar is to blame.

    scalars: (name, wanted type, value) of each argument that is no tensor.
    """
    for name, wanted, value in scalars:
        protocol = {int: "__index__", float: "__float__"}.get(wanted)
        if not isinstance(value, wanted) and not (protocol and hasattr(value, protocol)):
            got = _type_name(type(value))
            raise TypeError(f"{function}: {name} must be {wanted.__name__}, got {got}") from error
        if wanted is int and not -(2**63) <= int(value) < 2**63:
            raise ValueError(f"{function}: {name} must be a 64-bit int, got {value}") from error
    raise error
