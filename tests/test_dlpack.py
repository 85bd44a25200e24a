"""Tensors of any library: torch, NumPy, JAX, and objects that know nothing but DLPack."""

from __future__ import annotations

import contextlib
import gc
import sys
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pagetile
import pytest
import reference
import torch
from pagetile._tensor import current_stream
from torch._subclasses.fake_tensor import FakeTensorMode

PAGE_SIZE = 4


def attention_arguments(dtype=np.float32) -> dict:
    """A small problem in NumPy: two sequences, group 2, whole and partly filled pages."""
    rng = np.random.default_rng(0)
    k_cache, v_cache = rng.standard_normal((2, 5, PAGE_SIZE, 2, 16)).astype(dtype)
    return {
        "q": rng.standard_normal((4, 4, 16)).astype(dtype),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": np.array([[3, 0], [1, 4]], np.int32),
        "seqused_k": np.array([5, 8], np.int32),
        "cu_seqlens_q": np.array([0, 1, 4], np.int32),
        "max_seqlen_q": 3,
    }


def converted(arguments, convert) -> dict:
    return {n: convert(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}


def check_attention(out, dtype=np.float32) -> None:
    arguments = attention_arguments(dtype)
    del arguments["max_seqlen_q"]
    wide = {n: arguments[n].astype(float) for n in ("q", "k_cache", "v_cache")}
    name = np.dtype(dtype).name
    expected, _ = reference.attention(**{**arguments, **wide})
    low, _ = reference.attention(**{**arguments, **wide}, round_dtype=name)
    reference.assert_close(np.asarray(out, float), expected, low)


def write_arguments(dtype=np.float32) -> dict:
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 3, 2, 16)).astype(dtype)
    caches = np.full((2, 2, PAGE_SIZE, 2, 16), 7, dtype)
    slots = np.array([6, -1, 0])
    return {"k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1], "slot_mapping": slots}


def check_written(cache, rows) -> None:
    expected = np.full((8, 2, 16), 7.0)
    expected[6], expected[0] = rows[0], rows[2]
    np.testing.assert_array_equal(np.asarray(cache).reshape(8, 2, 16), expected)


class OnlyDLPack:
    """A tensor of an unknown library."""

    def __init__(self, array) -> None:
        self.array = array
        self.exports = 0

    def __dlpack__(self, **options):
        self.exports += 1
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OldDLPack(OnlyDLPack):
    """One from before versioned capsules."""

    def __dlpack__(self, stream=None):
        self.exports += 1
        return self.array.__dlpack__(stream=stream)


LIBRARIES = {
    "numpy": (np.array, np.ndarray),
    "torch": (lambda x: torch.from_numpy(x.copy()), torch.Tensor),
    "jax": (jnp.asarray, jax.Array),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("library", LIBRARIES)
def test_attention_answers_in_the_library_of_q(library, dtype):
    convert, result_type = LIBRARIES[library]
    arguments = converted(attention_arguments(dtype), convert)
    out, lse = pagetile.paged_attention(**arguments, return_softmax_lse=True)
    assert isinstance(out, result_type)
    assert isinstance(lse, result_type)
    assert str(out.dtype).endswith(np.dtype(dtype).name)
    assert str(lse.dtype).endswith("float32")
    assert tuple(lse.shape) == (4, 4)
    check_attention(out, dtype)


@pytest.mark.parametrize("library", LIBRARIES)
def test_merge_answers_in_the_library_of_out_a(library):
    convert, result_type = LIBRARIES[library]
    rng = np.random.default_rng(2)
    out_a, out_b = rng.standard_normal((2, 3, 2, 16)).astype(np.float32)
    lse_a, lse_b = rng.standard_normal((2, 2, 3)).astype(np.float32)
    merged = pagetile.merge_states(*map(convert, (out_a, lse_a, out_b, lse_b)))
    assert all(isinstance(x, result_type) for x in merged)
    for actual, expected in zip(merged, reference.merge(out_a, lse_a, out_b, lse_b), strict=True):
        np.testing.assert_allclose(np.asarray(actual), expected, atol=1e-5)


def test_libraries_may_be_mixed():
    """q by torch, caches by JAX, metadata by NumPy: all on the CPU, so all one device."""
    arguments = attention_arguments()
    arguments["q"] = torch.from_numpy(arguments["q"])
    for name in ("k_cache", "v_cache"):
        arguments[name] = jnp.asarray(arguments[name])
    out = pagetile.paged_attention(**arguments)
    assert isinstance(out, torch.Tensor)
    check_attention(out)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_write_into(library):
    convert, _ = LIBRARIES[library]
    arguments = converted(write_arguments(), convert)
    assert pagetile.cache_write(**arguments) is None
    for name in "kv":
        check_written(arguments[f"{name}_cache"], np.asarray(arguments[name]))


def test_rows_of_jax_into_a_cache_of_numpy():
    arguments = write_arguments()
    for name in ("k", "v", "slot_mapping"):
        arguments[name] = jnp.asarray(arguments[name])
    pagetile.cache_write(**arguments)
    for name in "kv":
        check_written(arguments[f"{name}_cache"], np.asarray(arguments[name]))


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_jax_caches_are_refused(name):
    """JAX arrays are immutable, and say so."""
    arguments = write_arguments()
    array = arguments[name] = jnp.asarray(arguments[name])
    before = np.array(array)
    with pytest.raises((TypeError, ValueError), match=f"cache_write: {name} .*immutable"):
        pagetile.cache_write(**arguments)
    np.testing.assert_array_equal(np.asarray(array), before)
    assert (arguments["k_cache" if name == "v_cache" else "v_cache"] == 7).all()


def test_jax_out_is_refused():
    arguments = attention_arguments()
    out = jnp.full((4, 4, 16), 7.0)
    with pytest.raises((TypeError, ValueError), match=r"paged_attention: out .*immutable"):
        pagetile.paged_attention(**arguments, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("wrapper", [OnlyDLPack, OldDLPack])
@pytest.mark.parametrize("inner", ["numpy", "torch"])
def test_any_object_with_dlpack(inner, wrapper):
    convert = LIBRARIES[inner][0]
    wrapped = converted(attention_arguments(), lambda x: wrapper(convert(x)))
    out = np.zeros((4, 4, 16), np.float32)
    given = wrapper(out)
    assert pagetile.paged_attention(**wrapped, out=given) is given
    check_attention(out)
    assert all(x.exports for x in [*wrapped.values(), given] if isinstance(x, OnlyDLPack))
    arguments = write_arguments()
    pagetile.cache_write(**converted(arguments, wrapper))
    for name in "kv":
        check_written(arguments[f"{name}_cache"], arguments[name])


@pytest.mark.parametrize("with_shape", [True, False])
def test_results_of_unknown_libraries_must_be_given(with_shape):
    """pagetile cannot allocate for a type it does not know; it says so."""
    arguments = attention_arguments()
    arguments["q"] = OnlyDLPack(arguments["q"])
    if with_shape:
        arguments["q"].shape = arguments["q"].array.shape
        arguments["q"].dtype = arguments["q"].array.dtype
    with pytest.raises(TypeError, match=r"paged_attention: out must be given .*OnlyDLPack"):
        pagetile.paged_attention(**arguments)


class CuPy(types.ModuleType):
    """A stand-in with CuPy's names, on the CPU: arrays with a device to enter, current streams."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.entered = []
        self.allocated = []
        self.cuda = types.SimpleNamespace(
            Device=self.device,
            get_current_stream=lambda: types.SimpleNamespace(ptr=1000 + self.entered[-1]),
        )
        self.ndarray = type("ndarray", (OnlyDLPack,), {"__module__": "cupy"})

    @contextlib.contextmanager
    def device(self, index):
        self.entered.append(index)
        yield

    def array(self, x):
        array = self.ndarray(x)
        array.shape, array.dtype, array.device = x.shape, x.dtype, self.device(3)
        return array

    def empty(self, shape, dtype):
        assert self.entered, "allocated on whatever device is current"
        self.allocated.append(self.array(np.empty(shape, dtype)))
        return self.allocated[-1]


@pytest.fixture
def cupy(monkeypatch):
    module = CuPy()
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def test_cupy_results_are_cupys(cupy):
    """Allocated by CuPy, on the device of q."""
    arguments = attention_arguments()
    arguments["q"] = cupy.array(arguments["q"])
    out = pagetile.paged_attention(**arguments)
    assert [out] == cupy.allocated
    assert cupy.entered == [3]
    check_attention(out.array)


def test_current_stream(cupy):
    """CuPy tells its stream of a device; those that have none to tell mean the default one."""
    assert current_stream(cupy.array(np.zeros(1)), 5) == 1005
    assert cupy.entered == [5]
    for name, (convert, _) in LIBRARIES.items():
        if name != "torch":
            assert current_stream(convert(np.zeros(1, np.float32)), 0) == 0


@pytest.mark.parametrize("tensor", [torch.zeros(1), torch.nn.Parameter(torch.zeros(1))], ids=str)
def test_current_stream_of_torch(tensor, monkeypatch):
    """Asked for where torch has no exchange API to tell it: before 2.10."""
    stream_of = lambda index: types.SimpleNamespace(cuda_stream=2000 + index)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", stream_of)
    assert current_stream(tensor, 5) == 2005


def test_torch_dtypes():
    """bf16 and both fp8, which NumPy has not."""
    base = converted(attention_arguments(), lambda x: torch.from_numpy(x.copy()))
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        arguments = {**base, "q": base["q"].bfloat16()}
        for name in ("k_cache", "v_cache"):
            arguments[name] = base[name].to(dtype)
        out = pagetile.paged_attention(**arguments)
        assert out.dtype == torch.bfloat16
        wide = {n: arguments[n].float() for n in ("q", "k_cache", "v_cache")}
        plain = pagetile.paged_attention(**{**arguments, **wide})
        torch.testing.assert_close(out.float(), plain, atol=1e-5, rtol=2**-8)


def test_torch_subclasses_and_gradients():
    """A Parameter is a tensor; the result carries no gradient."""
    arguments = converted(attention_arguments(), lambda x: torch.from_numpy(x.copy()))
    arguments["q"] = torch.nn.Parameter(arguments["q"], requires_grad=False)
    out = pagetile.paged_attention(**arguments)
    assert isinstance(out, torch.Tensor)
    assert not out.requires_grad
    check_attention(out)


@pytest.mark.parametrize("cache", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_jax_dtypes(cache):
    """bf16 and fp8 arrays of JAX give a bf16 array of JAX: the bits that torch's tensors give."""
    arguments = converted(attention_arguments(), jnp.asarray)
    arguments["q"] = arguments["q"].astype(jnp.bfloat16)
    for name in ("k_cache", "v_cache"):
        arguments[name] = arguments[name].astype(cache)
    out = pagetile.paged_attention(**arguments)
    assert isinstance(out, jax.Array)
    assert out.dtype == jnp.bfloat16
    same = {}
    for name, x in arguments.items():
        same[name] = x
        if isinstance(x, jax.Array):
            raw = torch.from_numpy(np.array(x).view(np.uint8))
            same[name] = raw.view(getattr(torch, str(x.dtype)))
    expected = pagetile.paged_attention(**same).view(torch.int16).numpy()
    np.testing.assert_array_equal(np.array(out).view(np.int16), expected)


def test_numpy_dtypes_beyond_dlpack_are_refused():
    """NumPy cannot export the bf16 that an extension gives it; uint8 with kv_dtype is the way."""
    arguments = attention_arguments()
    arguments["q"] = arguments["q"].astype(jnp.bfloat16)
    with pytest.raises(TypeError, match=r"paged_attention: q must be a DLPack tensor, got"):
        pagetile.paged_attention(**arguments)


@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_numpy_fp8_is_uint8(kv_dtype):
    """Written and read back: what a key loses is fp8's rounding."""
    name = "float8_e5m2" if kv_dtype.endswith("e5m2") else "float8_e4m3fn"
    row = np.random.default_rng(3).standard_normal((1, 2, 16)).astype(np.float32)
    caches = np.zeros((2, 1, 4, 2, 16), np.uint8)
    pagetile.cache_write(row, row, *caches, np.array([2]), kv_dtype=kv_dtype)
    codes = reference.fp8_encode(row[0], name)
    np.testing.assert_array_equal(caches[0, 0, 2], codes)
    out = pagetile.paged_attention(
        row, *caches[:, :, 2:], block_table=np.zeros((1, 1), np.int32), max_seqlen_q=1,
        seqused_k=np.ones(1, np.int32), cu_seqlens_q=np.array([0, 1], np.int32), kv_dtype=kv_dtype,
    )  # fmt: skip
    np.testing.assert_array_equal(out[0], reference.FP8_TABLES[name][codes].astype(np.float32))


def test_tensors_without_memory_are_refused():
    """What torch.compile traces with has a shape and a device, but nothing to read or write."""
    arguments = converted(attention_arguments(), lambda x: torch.from_numpy(x.copy()))
    for name in ("q", "k_cache", "block_table", "out"):
        like = arguments["q"] if name == "out" else arguments[name]
        with FakeTensorMode():
            fake = torch.zeros(like.shape, dtype=like.dtype)
        with pytest.raises((TypeError, ValueError), match=f"paged_attention: {name} "):
            pagetile.paged_attention(**{**arguments, name: fake})


def test_strided_views():
    """A table of reversed rows, a cache with gaps: strides as they are, negative too."""
    arguments = attention_arguments()
    arguments["block_table"] = np.array([[1, 4], [3, 0]], np.int32)[::-1]
    wide = np.full((5, PAGE_SIZE, 4, 16), np.nan, np.float32)
    wide[:, :, ::2] = arguments["k_cache"]
    arguments["k_cache"] = wide[:, :, ::2]
    check_attention(pagetile.paged_attention(**arguments))


# Read-only inputs


def test_read_only_inputs_are_accepted():
    arguments = attention_arguments()
    for x in arguments.values():
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
    check_attention(pagetile.paged_attention(**arguments))
    arguments = write_arguments()
    for name in ("k", "v", "slot_mapping"):
        arguments[name].flags.writeable = False
    pagetile.cache_write(**arguments)
    for name in "kv":
        check_written(arguments[f"{name}_cache"], arguments[name])


# Streams


class Stream:
    def __cuda_stream__(self):
        return (0, 0)


@pytest.mark.parametrize("stream", [None, 0, 1, 2, 123456, Stream()], ids=str)
def test_streams_are_accepted(stream):
    """On the CPU a stream means nothing, so that the same call works on both."""
    check_attention(pagetile.paged_attention(**attention_arguments(), stream=stream))
    arguments = write_arguments()
    pagetile.cache_write(**arguments, stream=stream)
    check_written(arguments["k_cache"], arguments["k"])
    pagetile.merge_states(*merge_arguments(), stream=stream)


def merge_arguments():
    x, lse = np.ones((1, 2, 8), np.float32), np.zeros((2, 1), np.float32)
    return x, lse, x, lse


@pytest.mark.parametrize(
    "stream", ["default", 1.5, [0], object(), True], ids=lambda x: type(x).__name__
)
def test_other_streams_are_not(stream):
    calls = {
        "paged_attention": lambda: pagetile.paged_attention(**attention_arguments(), stream=stream),
        "cache_write": lambda: pagetile.cache_write(**write_arguments(), stream=stream),
        "merge_states": lambda: pagetile.merge_states(*merge_arguments(), stream=stream),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"{name}: stream"):
            call()


# Lifetime


@pytest.mark.parametrize("library", [*LIBRARIES, "wrapped"])
def test_nothing_is_kept(library):
    """After a call, the arguments' reference counts are what they were, and they can die."""
    convert = OnlyDLPack if library == "wrapped" else LIBRARIES[library][0]
    arguments = converted(attention_arguments(), convert)
    arguments["out"] = np.zeros((4, 4, 16), np.float32)
    tensors = [x for x in arguments.values() if not isinstance(x, int)]
    pagetile.paged_attention(**arguments)
    gc.collect()
    before = [sys.getrefcount(x) for x in tensors]
    for _ in range(50):
        pagetile.paged_attention(**arguments)
    gc.collect()
    assert [sys.getrefcount(x) for x in tensors] == before
    alive = [weakref.ref(x) for x in tensors]
    del arguments, tensors
    gc.collect()
    assert not any(x() is not None for x in alive)


@pytest.mark.parametrize("library", LIBRARIES)
def test_nothing_is_kept_after_an_error(library):
    arguments = converted(attention_arguments(), LIBRARIES[library][0])
    tensors = [x for x in arguments.values() if not isinstance(x, int)]
    before = [sys.getrefcount(x) for x in tensors]
    for _ in range(20):
        with pytest.raises(ValueError, match="num_splits"):
            pagetile.paged_attention(**arguments, num_splits=-1)
    gc.collect()
    assert [sys.getrefcount(x) for x in tensors] == before


@pytest.mark.parametrize("library", LIBRARIES)
def test_results_outlive_the_arguments(library):
    arguments = converted(attention_arguments(), LIBRARIES[library][0])
    out = pagetile.paged_attention(**arguments)
    del arguments
    gc.collect()
    junk = [np.full((4, 4, 16), np.nan, np.float32) for _ in range(100)]
    check_attention(out)
    del junk
