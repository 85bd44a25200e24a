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
    return like.new_empty(
        shape,
        dtype=None if dtype is None else getattr(sys.modules["torch"], dtype),
        requires_grad=False,
    )


def _empty_numpy(like: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
    return sys.modules["numpy"].empty(shape, dtype=like.dtype if dtype is None else dtype)


def _empty_cupy(like: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
    with like.device:
        return sys.modules["cupy"].empty(shape, dtype=like.dtype if dtype is None else dtype)


def _empty_jax(like: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
    if like.__dlpack_device__()[0] != 1:  # DLPack's number of the CPU
        raise TypeError(
            "out must be given for JAX arrays on a GPU: they cannot be written to once they exist"
        )
    return _C.empty(shape, str(like.dtype) if dtype is None else dtype)


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


def _find_allocator(tensor_type: type) -> Allocator:
    for base in tensor_type.__mro__:
        allocator = _ALLOCATORS.get(base.__module__.partition(".")[0])
        if allocator is not None:
            _allocator_of_type[tensor_type] = allocator
            return allocator
    raise TypeError(
        f"out must be given for a {_type_name(tensor_type)}: "
        "pagetile allocates results for PyTorch, NumPy, JAX and CuPy"
    )


def empty(like: Any, shape: tuple[int, ...], dtype: str | None = None) -> Any:
    """Return a writable tensor of the framework and device of ``like``.

    dtype is a name such as "bfloat16", or None for like's own.

    For a JAX array it is a buffer that `finish` turns into one.
    """
    kind = type(like)
    allocator = _allocator_of_type.get(kind) or _find_allocator(kind)
    return allocator(like, shape, dtype)


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
    CuPy tells its current stream. JAX has no current stream that others could use, and neither has
    an unknown type.
    """
    if type(tensor).__module__.partition(".")[0] != "cupy":
        return 0
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(device_index):
        return int(cupy.cuda.get_current_stream().ptr)


def explain_scalars(function: str, error: TypeError, **scalars: tuple[type, Any]) -> NoReturn:
    """Re-raise a TypeError of the extension, naming the argument where a scalar is to blame."""
    for name, (wanted, value) in scalars.items():
        protocol = {int: "__index__", float: "__float__"}.get(wanted)
        if not isinstance(value, wanted) and not (protocol and hasattr(value, protocol)):
            raise TypeError(
                f"{function}: {name} must be {wanted.__name__}, got {_type_name(type(value))}"
            ) from error
    raise error
