"""Tensors that a framework owns in a way pagetile cannot use: the message names the argument.

Other devices, gradients, tracers, strides, arrays that must not be written to. The patterns follow
"function: ". Messages that are not there yet are expected failures; tests are strict about them.
"""

from __future__ import annotations

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pagetile
import pytest
import torch
from gpu import needs_gpus
from pagetile.compat import vllm

PAGE_SIZE = 4
CACHE = (3, PAGE_SIZE, 2, 16)


@pytest.fixture(autouse=True)
def jax_on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


# The arguments of a good call of each function, as NumPy arrays. Tensors stand under their names.


def attention_arguments(**changed) -> dict:
    k_cache, v_cache = np.ones((2, *CACHE), np.float32)
    arguments = {
        "q": np.ones((3, 4, 16), np.float32),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": np.array([[2, 0], [1, 0]], np.int32),
        "seqused_k": np.array([5, 3], np.int32),
        "cu_seqlens_q": np.array([0, 1, 3], np.int32),
        "max_seqlen_q": 2,
        "out": np.full((3, 4, 16), 7, np.float32),
        "softmax_lse": np.full((4, 3), 7, np.float32),
        "return_softmax_lse": True,
    }
    return {**arguments, **changed}


def write_arguments(**changed) -> dict:
    k, v = np.ones((2, 2, 2, 16), np.float32)
    k_cache, v_cache = np.full((2, *CACHE), 7, np.float32)
    arguments = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
    return {**arguments, "slot_mapping": np.array([4, 9]), **changed}


def copy_arguments(**changed) -> dict:
    arguments = {"src_caches": np.ones(CACHE, np.float32), "dst_caches": np.full(CACHE, 7.0, "f4")}
    return {**arguments, "src_pages": np.array([0]), "dst_pages": np.array([1]), **changed}


def merge_arguments(**changed) -> dict:
    arguments = {}
    for side in ("a", "b"):
        arguments[f"out_{side}"] = np.ones((3, 4, 16), np.float32)
        arguments[f"lse_{side}"] = np.zeros((4, 3), np.float32)
    results = {"out": np.full((3, 4, 16), 7, np.float32), "lse": np.full((4, 3), 7, np.float32)}
    return {**arguments, **results, **changed}


def plan_arguments(**changed) -> dict:
    arguments = {n: attention_arguments()[n] for n in ("seqused_k", "cu_seqlens_q")}
    sizes = {"max_seqlen_q": 2, "max_seqlen_k": 8, "num_q_heads": 4, "num_kv_heads": 2}
    return {**arguments, **sizes, "head_dim": 16, "page_size": PAGE_SIZE, **changed}


CALLS = {
    "cache_write": (pagetile.cache_write, write_arguments),
    "copy_pages": (pagetile.copy_pages, copy_arguments),
    "paged_attention": (pagetile.paged_attention, attention_arguments),
    "merge_states": (pagetile.merge_states, merge_arguments),
    "make_plan": (pagetile.make_plan, plan_arguments),
}
WRITTEN = {
    "cache_write": ("k_cache", "v_cache"),
    "copy_pages": ("dst_caches",),
    "paged_attention": ("out", "softmax_lse"),
    "merge_states": ("out", "lse"),
    "make_plan": (),
}
ARGUMENTS = [
    (function, name)
    for function, (_, arguments) in CALLS.items()
    for name, value in arguments().items()
    if isinstance(value, np.ndarray)
]
RESULTS = [(function, name) for function, names in WRITTEN.items() for name in names]


def refused(function: str, match: str, error=ValueError, **changed) -> None:
    """The call raises what it should and leaves what it would have written as it was."""
    call, arguments = CALLS[function]
    given = arguments(**changed)
    with pytest.raises(error, match=f"^{function}: {match}"):
        call(**given)
    for name in WRITTEN[function]:
        if isinstance(given[name], np.ndarray):
            assert (given[name] == 7).all()


@pytest.mark.parametrize("function", CALLS)
def test_the_calls_are_good(function):
    """What the other tests change one argument of."""
    call, arguments = CALLS[function]
    given = arguments()
    call(**given)
    assert all((given[name] != 7).any() for name in WRITTEN[function])


# Devices


class OnDevice:
    """An array that says it is on another device. Its memory is the CPU's: never let it be used."""

    def __init__(self, array, kind, index=0) -> None:
        self.array, self.device = array, (kind, index)
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack__(self, **_):
        capsule = self.array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        managed = pointer(capsule, b"dltensor")  # begins with a DLTensor: data, device, ...
        device = (ctypes.c_int32 * 2).from_address(managed + ctypes.sizeof(ctypes.c_void_p))
        device[:] = self.device
        return capsule

    def __dlpack_device__(self):
        return self.device


CUDA, CUDA_HOST, ROCM, CUDA_MANAGED = 2, 3, 10, 13  # DLPack's numbers


def first_of(function: str) -> str:
    """The argument that decides a call's device."""
    return next(iter(CALLS[function][1]()))


@pytest.mark.parametrize(("function", "name"), ARGUMENTS)
def test_one_argument_on_a_gpu(function, name):
    first = first_of(function)
    value = CALLS[function][1]()[name]
    for kind in (CUDA, CUDA_MANAGED):
        for index in (0, 1):
            gpu = f"CUDA device {index}"
            if name == first:  # then it is another argument that stands out
                match = rf"\w+ must be on {gpu} like {first}, got the CPU$"
            else:
                match = f"{name} must be on the CPU like {first}, got {gpu}$"
            refused(function, match, **{name: OnDevice(value, kind, index)})


@pytest.mark.parametrize(("function", "name"), ARGUMENTS)
def test_other_accelerators(function, name):
    value = CALLS[function][1]()[name]
    match = f"{name} must be on the CPU or on a CUDA device, got DLPack device type {ROCM}$"
    refused(function, match, **{name: OnDevice(value, ROCM)})


def test_two_gpus_in_one_call():
    arguments = attention_arguments()
    q = OnDevice(arguments["q"], CUDA, 0)
    k_cache = OnDevice(arguments["k_cache"], CUDA, 1)
    match = "k_cache must be on CUDA device 0 like q, got CUDA device 1$"
    refused("paged_attention", match, q=q, k_cache=k_cache)


ALLOCATED_LIKE = {("make_plan", "seqused_k")}  # results for unknown types must be given


@pytest.mark.parametrize(("function", "name"), [x for x in ARGUMENTS if x not in ALLOCATED_LIKE])
def test_pinned_memory_is_the_cpus(function, name):
    call, arguments = CALLS[function]
    given = arguments()
    given[name] = OnDevice(given[name], CUDA_HOST)
    call(**given)


def test_one_cache_of_a_list_on_a_gpu():
    dst = [np.full(CACHE, 7, np.float32), OnDevice(np.ones(CACHE, np.float32), CUDA)]
    with pytest.raises(ValueError, match=r"^copy_pages: dst_caches\[1\] must be on the CPU"):
        pagetile.copy_pages(
            [np.ones(CACHE, "f4")] * 2, dst, *list(copy_arguments().values())[2:]
        )  # fmt: skip
    assert (dst[0] == 7).all()


def test_vllms_calls_say_it_in_vllms_words():
    a, w = attention_arguments(), write_arguments()
    on_gpu = OnDevice(a["k_cache"], CUDA)
    metadata = (a["max_seqlen_q"], a["cu_seqlens_q"], 8)
    with pytest.raises(ValueError, match=r"^flash_attn_varlen_func: k must be on the CPU like q"):
        vllm.flash_attn_varlen_func(
            a["q"], on_gpu, a["v_cache"], *metadata, seqused_k=a["seqused_k"],
            block_table=a["block_table"],
        )  # fmt: skip
    with pytest.raises(
        ValueError, match=r"^reshape_and_cache_flash: key_cache must be on the CPU like key, got"
    ):
        vllm.reshape_and_cache_flash(
            w["k"], w["v"], on_gpu, w["v_cache"], w["slot_mapping"], "auto", None, None
        )
    assert (w["v_cache"] == 7).all()


def on_gpu(arguments: dict, device="cuda:0") -> dict:
    return {
        n: torch.from_numpy(x).to(device) if isinstance(x, np.ndarray) else x
        for n, x in arguments.items()
    }


@needs_gpus(1)
@pytest.mark.parametrize(("function", "name"), ARGUMENTS)
def test_one_argument_on_the_cpu(function, name):
    """For one, the metadata of a BlockPool step that was not moved."""
    call, arguments = CALLS[function]
    given = on_gpu(arguments())
    given[name] = given[name].cpu()
    first = first_of(function)
    if name == first:
        match = rf"\w+ must be on the CPU like {first}, got CUDA device 0$"
    else:
        match = f"{name} must be on CUDA device 0 like {first}, got the CPU$"
    with pytest.raises(ValueError, match=f"^{function}: {match}"):
        call(**given)


@needs_gpus(2)
@pytest.mark.parametrize(("function", "name"), ARGUMENTS)
def test_one_argument_on_another_gpu(function, name):
    call, arguments = CALLS[function]
    given = on_gpu(arguments())
    given[name] = given[name].to("cuda:1")
    with pytest.raises(ValueError, match=rf"^{function}: \w+ must be on CUDA device \d like"):
        call(**given)


def test_meta_tensors():
    """They have a device that DLPack cannot name."""
    cache = torch.zeros(CACHE, device="meta")
    arguments = {n: torch.from_numpy(x) for n, x in write_arguments().items()}
    with pytest.raises(TypeError, match=r"^cache_write: k_cache cannot be read through DLPack: "):
        pagetile.cache_write(**{**arguments, "k_cache": cache})
    assert (arguments["v_cache"] == 7).all()


def test_plans_for_unknown_types():
    seqused_k = OnDevice(plan_arguments()["seqused_k"], CUDA_HOST)
    with pytest.raises(TypeError, match=r"^make_plan: seqused_k must be .*PyTorch, NumPy, JAX or"):
        pagetile.make_plan(**plan_arguments(seqused_k=seqused_k))


# Gradients


def torch_arguments(function: str, **changed) -> dict:
    arguments = CALLS[function][1](**changed)
    return {
        n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in arguments.items()
    }


def test_results_carry_no_gradient():
    """There is no backward pass: PyTorch says so when it is asked for one."""
    arguments = torch_arguments("paged_attention", out=None, softmax_lse=None)
    for name in ("q", "k_cache", "v_cache"):
        arguments[name].requires_grad_()
    out, lse = pagetile.paged_attention(**arguments)
    merged, _ = pagetile.merge_states(out, lse, out, lse)
    for result in (out, lse, merged):
        assert not result.requires_grad
        with pytest.raises(RuntimeError, match="does not require grad"):
            result.sum().backward()


def test_inference_mode():
    """Tensors made there are written to and read like others."""
    with torch.inference_mode():
        arguments = torch_arguments("cache_write")
        pagetile.cache_write(**arguments)
        assert (arguments["k_cache"].flatten(0, 1)[[4, 9]] == 1).all()
        out = pagetile.paged_attention(**torch_arguments("paged_attention"))[0]
    torch.testing.assert_close(out, torch.ones(3, 4, 16))


NEEDS_GRAD = [(f, n) for f, n in RESULTS if f in ("cache_write", "paged_attention", "copy_pages")]


@pytest.mark.parametrize(("function", "name"), NEEDS_GRAD)
def test_writing_to_what_requires_grad(function, name):
    arguments = torch_arguments(function)
    arguments[name].requires_grad_()
    with pytest.raises(ValueError, match=rf"^{function}: {name} .*grad"):
        CALLS[function][0](**arguments)
    with torch.no_grad():  # as with PyTorch's own functions
        CALLS[function][0](**arguments)


# PyTorch's other tensors


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda x: x.to_sparse()),
        ("k_cache", lambda x: x.to_sparse()),
        ("v_cache", lambda x: x.to_mkldnn()),
    ],
    ids=["sparse_q", "sparse_cache", "mkldnn_cache"],
)
def test_tensors_without_strides(name, change):
    arguments = torch_arguments("paged_attention")
    arguments[name] = change(arguments[name])
    with pytest.raises(TypeError, match=f"^paged_attention: {name} cannot be read through DLPack"):
        pagetile.paged_attention(**arguments)
    assert (arguments["out"] == 7).all()


def test_torch_vmap():
    arguments = torch_arguments("paged_attention")

    def attend(q):
        return pagetile.paged_attention(**{**arguments, "q": q})[0]

    with pytest.raises(TypeError, match=r"^paged_attention: q cannot be read through DLPack"):
        torch.func.vmap(attend)(torch.ones(2, 3, 4, 16))


# JAX's tracers


def jax_arguments(function: str) -> dict:
    """JAX arrays, but for what is written to."""
    arguments = CALLS[function][1]()
    return {
        n: jnp.asarray(x) if isinstance(x, np.ndarray) and n not in WRITTEN[function] else x
        for n, x in arguments.items()
    }


TRACED = [(f, n) for f, n in ARGUMENTS if n not in WRITTEN[f]]
AN_ABSTRACT = r"must be a DLPack tensor, got .*Tracer that DLPack cannot describe \(Abstract tracer"


@pytest.mark.parametrize(("function", "name"), TRACED)
def test_traced_arguments(function, name):
    """Under jit there are no values, so there is nothing to read."""
    arguments = jax_arguments(function)

    @jax.jit
    def traced(x):
        CALLS[function][0](**{**arguments, name: x})
        return x

    with pytest.raises(TypeError, match=f"^{function}: {name} {AN_ABSTRACT}"):
        traced(arguments[name])
    assert all((arguments[n] == 7).all() for n in WRITTEN[function])


@pytest.mark.parametrize(("function", "name"), RESULTS)
def test_traced_results(function, name):
    arguments = jax_arguments(function)

    @jax.jit
    def traced(x):
        CALLS[function][0](**{**arguments, name: x})
        return x

    with pytest.raises(ValueError, match=f"^{function}: {name} is written to, but JAX arrays are"):
        traced(jnp.asarray(arguments[name]))
    assert all((arguments[n] == 7).all() for n in WRITTEN[function])


def attend_eagerly(q):
    arguments = jax_arguments("paged_attention")
    del arguments["out"], arguments["softmax_lse"], arguments["return_softmax_lse"]
    return pagetile.paged_attention(**{**arguments, "q": q})


def test_jax_eagerly():
    out = attend_eagerly(jnp.ones((3, 4, 16)))
    assert isinstance(out, jax.Array)
    np.testing.assert_allclose(np.asarray(out), 1, rtol=1e-6)


@pytest.mark.parametrize("transform", ["jit", "vmap", "grad", "merge"])
def test_tracers_where_results_are_allocated(transform):
    q = jnp.ones((3, 4, 16))
    lse = jnp.zeros((4, 3))
    calls = {
        "jit": lambda: jax.jit(attend_eagerly)(q),
        "vmap": lambda: jax.vmap(attend_eagerly)(q[None]),
        "grad": lambda: jax.grad(lambda x: attend_eagerly(x).sum())(q),
        "merge": lambda: jax.jit(lambda x: pagetile.merge_states(x, lse, x, lse)[0])(q),
    }
    first = "merge_states: out_a" if transform == "merge" else "paged_attention: q"
    with pytest.raises(TypeError, match=f"^{first} "):
        calls[transform]()


# Arrays that must not be written to


@pytest.mark.parametrize(("function", "name"), RESULTS)
def test_jax_arrays_are_not_written_to(function, name):
    arguments = CALLS[function][1]()
    array = jnp.asarray(arguments[name])
    refused(function, f"{name} is written to, but JAX arrays are immutable$", **{name: array})
    assert (array == 7).all()


def test_jax_arrays_among_caches_and_workspaces():
    cache = jnp.full(CACHE, 7.0)
    src = [np.ones(CACHE, np.float32)] * 2
    dst = [np.full(CACHE, 7, np.float32), cache]
    pages = np.array([0]), np.array([1])
    with pytest.raises(ValueError, match=r"^copy_pages: dst_caches\[1\] is written to, but JAX"):
        pagetile.copy_pages(src, dst, *pages)
    assert (dst[0] == 7).all()
    refused("paged_attention", "workspace is written to, but JAX arrays", workspace=cache)
    w = write_arguments()
    with pytest.raises(
        ValueError, match=r"^reshape_and_cache_flash: key_cache is written to, but JAX arrays"
    ):
        vllm.reshape_and_cache_flash(
            w["k"], w["v"], cache, w["v_cache"], w["slot_mapping"], "auto", None, None
        )
    assert (cache == 7).all()


def test_jax_arrays_that_were_donated():
    arguments = {n: jnp.asarray(attention_arguments()[n]) for n in ("q", "k_cache", "v_cache")}
    for name, array in arguments.items():
        array.delete()
        match = rf"{name} must be a DLPack tensor, got .*\(Array has been deleted"
        refused("paged_attention", match, TypeError, **{name: array})


def test_queries_that_were_donated_where_results_are_allocated():
    q = jnp.ones((3, 4, 16))
    q.delete()
    with pytest.raises(TypeError, match=r"^paged_attention: q "):
        attend_eagerly(q)


def test_jax_on_a_gpu_needs_out():
    """A stand-in: an array of JAX's that says it is on a GPU. It is never read."""
    array_type = type("ArrayImpl", (OnDevice,), {"__module__": "jaxlib._jax"})
    q = array_type(np.ones((3, 4, 16), np.float32), CUDA)
    with pytest.raises(TypeError, match=r"^paged_attention: out must be given .*JAX arrays"):
        pagetile.paged_attention(**attention_arguments(q=q, out=None))


def read_only(array):
    copy = array.copy()
    copy.flags.writeable = False
    return copy


READ_ONLY = {
    "flag": read_only,
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    "bytes": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
}


@pytest.mark.parametrize("how", READ_ONLY)
@pytest.mark.parametrize(("function", "name"), RESULTS)
def test_read_only_arrays_are_not_written_to(function, name, how):
    array = READ_ONLY[how](CALLS[function][1]()[name])
    match = f"{name} is written to, but the given ndarray is read-only$"
    refused(function, match, **{name: array})
    assert (array == 7).all()


def test_read_only_arrays_among_caches_and_workspaces():
    dst = [np.full(CACHE, 7, np.float32), read_only(np.full(CACHE, 7, np.float32))]
    with pytest.raises(ValueError, match=r"^copy_pages: dst_caches\[1\] is written to, but the"):
        pagetile.copy_pages([np.ones(CACHE, "f4")] * 2, dst, np.array([0]), np.array([1]))
    assert all((x == 7).all() for x in dst)
    refused("paged_attention", "workspace is written to, but the given ndarray", workspace=dst[1])


def test_a_cache_on_a_read_only_map(tmp_path):
    """A file that is mapped for reading is attended over, and not written to."""
    np.full(CACHE, 7, np.float32).tofile(tmp_path / "cache")
    cache = np.memmap(tmp_path / "cache", np.float32, "r", shape=CACHE)
    out = np.zeros((3, 4, 16), np.float32)
    pagetile.paged_attention(**attention_arguments(k_cache=cache, v_cache=cache, out=out))
    np.testing.assert_allclose(out, 7, rtol=1e-6)
    match = r"k_cache is written to, but the given numpy\.memmap is read-only$"
    refused("cache_write", match, k_cache=cache)


# Strides


def every_second(array):
    wide = np.full((*array.shape[:-1], 2 * array.shape[-1]), 7, array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


NOT_DENSE = {
    "every_second": every_second,
    "fortran": np.asfortranarray,
    "reversed": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
}
DENSE = [
    *(("cache_write", name) for name in ("k", "v", "k_cache", "v_cache")),
    *(("paged_attention", name) for name in ("q", "k_cache", "v_cache", "out")),
    *(("merge_states", name) for name in ("out_a", "out_b", "out")),
]
VECTORS = [
    ("cache_write", "slot_mapping"),
    *(("paged_attention", name) for name in ("block_table", "seqused_k", "cu_seqlens_q")),
    *(("make_plan", name) for name in ("seqused_k", "cu_seqlens_q")),
]


@pytest.mark.parametrize("how", NOT_DENSE)
@pytest.mark.parametrize(("function", "name"), DENSE)
def test_last_dimension_of_numpy_arrays(function, name, how):
    """NumPy makes such views of a slice, a transposition or another order."""
    array = NOT_DENSE[how](CALLS[function][1]()[name])
    stride = array.strides[-1] // array.itemsize
    assert stride != 1
    match = rf"{name} must be dense in its last dimension \(stride 1\), got stride {stride}$"
    refused(function, match, **{name: array})


@pytest.mark.parametrize("how", ["every_second", "reversed"])
@pytest.mark.parametrize(("function", "name"), VECTORS)
def test_vectors_of_numpy(function, name, how):
    array = NOT_DENSE[how](CALLS[function][1]()[name])
    stride = {"every_second": 2, "reversed": -1}[how]
    refused(function, rf"{name} must be dense .*got stride {stride}$", **{name: array})


@pytest.mark.parametrize("change", [lambda x: x.mT.contiguous().mT, lambda x: x[..., :1].expand(
    *x.shape)], ids=["transposed", "expanded"])  # fmt: skip
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_last_dimension_of_torch_tensors(name, change):
    arguments = torch_arguments("paged_attention")
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=rf"^paged_attention: {name} must be dense .*stride \d+$"):
        pagetile.paged_attention(**arguments)
    assert (arguments["out"] == 7).all()


@pytest.mark.parametrize("name", ["seqused_k", "block_table"])
def test_a_dimension_of_size_1_may_have_any_stride(name):
    arguments = attention_arguments(q=np.ones((1, 4, 16), np.float32), max_seqlen_q=1)
    for given in ("out", "softmax_lse", "return_softmax_lse"):
        del arguments[given]
    arguments["cu_seqlens_q"] = np.array([0, 1], np.int32)
    arguments["seqused_k"] = np.array([3, 9], np.int32)[:1]
    arguments["block_table"] = np.array([[2, 9]], np.int32)[:, :1]
    arguments[name] = every_second(arguments[name])
    np.testing.assert_allclose(pagetile.paged_attention(**arguments), 1, rtol=1e-6)


# Types that NumPy makes by itself


@pytest.mark.parametrize("name", ["block_table", "seqused_k", "cu_seqlens_q"])
def test_int64_metadata(name):
    array = attention_arguments()[name].astype(np.int64)
    refused("paged_attention", f"{name} must be int32, got int64$", **{name: array})


@pytest.mark.parametrize("name", ["block_table", "seqused_k", "cu_seqlens_q"])
def test_unsigned_metadata(name):
    array = attention_arguments()[name].astype(np.uint32)
    refused("paged_attention", f"{name} must be int32, got uint32$", **{name: array})


def test_byte_order():
    q = attention_arguments()["q"].astype(">f4")
    match = r"q must be a DLPack tensor, got ndarray that DLPack cannot describe \(.*byte order"
    refused("paged_attention", match, TypeError, q=q)
