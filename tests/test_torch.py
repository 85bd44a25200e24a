"""pagetile.torch: the operators in eager, traced and captured code, and PagedKVCache."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pagetile
import pagetile.torch
import pytest
import reference
import torch
import torch._dynamo.testing
from gpu import captured, needs_gpus
from pagetile._tensor import current_stream
from pagetile.torch import PagedKVCache, plan_tensor
from problem import same_bits
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

USES = ("paged_attention", "cache_write", "merge_states")
DOCS = Path(__file__).parent.parent / "docs" / "frameworks"

ops = torch.ops.pagetile
INT32 = {"dtype": torch.int32}
RECENT = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
FP8 = torch.float8_e4m3fn

# Calls: the arguments of an operator by name, the same at every call of the function


def floats(*shape, seed=0, device="cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).bfloat16().to(device)


def write_call(device="cpu", **changes) -> dict:
    return {
        "k": floats(5, 2, 16, seed=1, device=device),
        "v": floats(5, 2, 24, seed=2, device=device),
        "k_cache": floats(6, 4, 2, 16, seed=3, device=device),
        "v_cache": floats(6, 4, 2, 24, seed=4, device=device),
        "slot_mapping": torch.tensor([3, 9, -1, 20, 21], device=device),
        **changes,
    }


def fp8_write_call(device="cpu", **changes) -> dict:
    call = write_call(device)
    return {
        **call,
        "k_cache": call["k_cache"].to(FP8),
        "v_cache": call["v_cache"].to(FP8),
        "k_scale": torch.tensor([0.5, 2.0], device=device),
        "v_scale": torch.tensor([3.0], device=device),
        **changes,
    }


def attention_call(device="cpu", **changes) -> dict:
    return {
        "q": floats(5, 4, 16, seed=5, device=device),
        "k_cache": floats(6, 4, 2, 16, seed=3, device=device),
        "v_cache": floats(6, 4, 2, 24, seed=4, device=device),
        "block_table": torch.tensor([[3, 0], [1, 4]], **INT32, device=device),
        "seqused_k": torch.tensor([5, 8], **INT32, device=device),
        "cu_seqlens_q": torch.tensor([0, 2, 5], **INT32, device=device),
        "max_seqlen_q": 3,
        **changes,
    }


def options_call(device="cpu") -> dict:
    """Every option but fp8's."""
    call = attention_call(device)
    return {
        **call,
        "k_cache": call["k_cache"].transpose(1, 2),
        "v_cache": call["v_cache"].transpose(1, 2),
        "max_seqlen_k": 8,
        "softmax_scale": 0.3,
        "causal": False,
        "window": [4, 1],
        "softcap": 5.0,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0], device=device),
        "sinks": torch.tensor([0.0, 1.0, -1.0, 0.5], device=device),
        "kv_dtype": "bfloat16",
        "layout": "HND",
        "num_splits": 2,
        "batch_invariant": True,
        "pdl": True,
    }


def fp8_attention_call(device="cpu") -> dict:
    call = attention_call(device)
    return {
        **call,
        "k_cache": call["k_cache"].to(FP8).view(torch.uint8),
        "v_cache": call["v_cache"].to(FP8).view(torch.uint8),
        "k_scale": torch.tensor([0.5, 2.0], device=device),
        "v_scale": torch.tensor([3.0], device=device),
        "kv_dtype": "fp8",
    }


def float8_attention_call(device="cpu") -> dict:
    """As above, the caches of float8's own type."""
    call = fp8_attention_call(device)
    caches = {name: call[name].view(FP8) for name in ("k_cache", "v_cache")}
    return {**call, **caches, "kv_dtype": "auto"}


def fp8_query_call(device="cpu") -> dict:
    call = float8_attention_call(device)
    return {**call, "q": call["q"].to(FP8), "q_scale": torch.tensor([2.0], device=device)}


def fp8_products_call(device="cpu") -> dict:
    return {**fp8_query_call(device), "fp8_products": True}


def attention_results(device="cpu", **changes) -> dict:
    return {
        "out": torch.full((5, 4, 24), 7.0, device=device).bfloat16(),
        "softmax_lse": torch.full((4, 5), 7.0, device=device),
        **changes,
    }


def merge_call(device="cpu", **changes) -> dict:
    return {
        "out_a": floats(5, 4, 24, seed=6, device=device),
        "lse_a": floats(4, 5, seed=7, device=device).float(),
        "out_b": floats(5, 4, 24, seed=8, device=device),
        "lse_b": floats(4, 5, seed=9, device=device).float(),
        **changes,
    }


def merge_results(device="cpu") -> dict:
    results = attention_results(device)
    return {"out": results["out"], "lse": results["softmax_lse"]}


recent_only = pytest.mark.skipif(not RECENT, reason="no fp8 queries before PyTorch 2.10")

# id -> (operator, function, its arguments)
CALLS = {
    "write": (ops.cache_write.default, write_call),
    "write_int32": (
        ops.cache_write.default,
        lambda device: write_call(
            device, slot_mapping=torch.tensor([5, 1, 0], **INT32, device=device)
        ),
    ),
    "write_fp8": (ops.cache_write.default, fp8_write_call),
    "write_uint8": (
        ops.cache_write.default,
        lambda device: (
            {
                n: x.view(torch.uint8) if x.dtype == FP8 else x
                for n, x in fp8_write_call(device).items()
            }
            | {"kv_dtype": "fp8"}
        ),
    ),
    "attention": (ops.paged_attention.default, attention_call),
    "attention_options": (ops.paged_attention.default, options_call),
    "attention_uint8": (ops.paged_attention.default, fp8_attention_call),
    "attention_float8": (ops.paged_attention.default, float8_attention_call),
    "attention_fp8_query": (ops.paged_attention.default, fp8_query_call),
    "attention_fp8_products": (ops.paged_attention.default, fp8_products_call),
    "attention_lse": (ops.paged_attention_lse.default, attention_call),
    "attention_lse_options": (ops.paged_attention_lse.default, options_call),
    "attention_out": (
        ops.paged_attention.out,
        lambda device: attention_call(device, out=attention_results(device)["out"]),
    ),
    "attention_out_lse": (
        ops.paged_attention.out,
        lambda device: {**options_call(device), **attention_results(device)},
    ),
    "merge": (ops.merge_states.default, merge_call),
    "merge_out": (ops.merge_states.out, lambda device: merge_call(device, **merge_results(device))),
}
FLOAT8_QUERIES = ("attention_fp8_query", "attention_fp8_products")
OF_ALL = pytest.mark.parametrize(
    ("op", "make_call"),
    [
        pytest.param(*call, id=name, marks=recent_only if name in FLOAT8_QUERIES else ())
        for name, call in CALLS.items()
    ],
)


def positional(op, call) -> tuple[tuple, dict]:
    """As opcheck and the dispatcher want them: required ones by position."""
    names = [a.name for a in op._schema.arguments if not a.kwarg_only and not a.has_default_value()]
    return tuple(call[n] for n in names), {n: x for n, x in call.items() if n not in names}


def directly(op, call) -> list[torch.Tensor]:
    """What pagetile's own function gives for an operator's call: results, then what is written."""
    call = dict(call)
    name = op._schema.name.removeprefix("pagetile::")
    if name == "paged_attention_lse":
        name, call["return_softmax_lse"] = "paged_attention", True
    results = getattr(pagetile, name)(**call)
    if op._overloadname == "out":
        results = None
    return [*tensors_of(results), *written(op, call)]


def tensors_of(results) -> list[torch.Tensor]:
    if results is None:
        return []
    return list(results) if isinstance(results, (tuple, list)) else [results]


def written(op, call) -> list[torch.Tensor]:
    names = [a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]
    return [call[name] for name in names if call.get(name) is not None]


def assert_same(actual, expected) -> None:
    assert len(actual) == len(expected) > 0
    for a, b in zip(actual, expected, strict=True):
        assert same_bits(a.cpu(), b.cpu())


# Eager


@OF_ALL
def test_equals_the_function(op, make_call, device):
    if not RECENT and make_call in (fp8_write_call, float8_attention_call):
        pytest.skip("pagetile's functions take no float8 of this PyTorch; see below")
    call = make_call(device)
    results = op(**call)
    assert_same([*tensors_of(results), *written(op, call)], directly(op, make_call(device)))


def test_float8_is_the_bytes(device):
    assert_same(
        [ops.paged_attention(**float8_attention_call(device))],
        [ops.paged_attention(**fp8_attention_call(device))],
    )
    call, twin = fp8_write_call(device), fp8_write_call(device, kv_dtype="fp8_e4m3")
    for name in ("k_cache", "v_cache"):
        twin[name] = twin[name].view(torch.uint8)
    ops.cache_write(**call)
    ops.cache_write(**twin)
    for name in ("k_cache", "v_cache"):
        assert not same_bits(call[name], fp8_write_call(device)[name])
        assert same_bits(call[name].view(torch.uint8), twin[name])


@pytest.mark.parametrize("op", [ops.paged_attention, ops.paged_attention_lse], ids=str)
def test_by_name_and_by_position(op):
    call = options_call()
    named = tensors_of(op(**call))
    order = [a.name for a in op.default._schema.arguments]
    defaults = {a.name: a.default_value for a in op.default._schema.arguments}
    assert_same(tensors_of(op(*(call.get(name, defaults[name]) for name in order))), named)


def test_packet_finds_the_overload():
    call = attention_call(**attention_results())
    assert ops.paged_attention(**call) is None
    assert_same([call["out"]], [ops.paged_attention(**attention_call())])


SCHEMAS = {
    ops.cache_write.default: ({"k_cache", "v_cache"}, 0),
    ops.paged_attention.default: (set(), 1),
    ops.paged_attention_lse.default: (set(), 2),
    ops.paged_attention.out: ({"out", "softmax_lse", "workspace"}, 0),
    ops.merge_states.default: (set(), 2),
    ops.merge_states.out: ({"out", "lse"}, 0),
}


@pytest.mark.parametrize("op", SCHEMAS, ids=str)
def test_schema_declares_what_is_written(op):
    mutated, num_results = SCHEMAS[op]
    arguments = op._schema.arguments
    assert {a.name for a in arguments if a.alias_info and a.alias_info.is_write} == mutated
    assert len(op._schema.returns) == num_results
    assert all(r.alias_info is None for r in op._schema.returns)


@pytest.mark.parametrize(
    ("op", "function", "less"),
    [
        (ops.cache_write.default, pagetile.cache_write, set()),
        (ops.paged_attention.default, pagetile.paged_attention,
         {"workspace", "out", "return_softmax_lse", "softmax_lse", "validate"}),
        (ops.paged_attention_lse.default, pagetile.paged_attention,
         {"workspace", "out", "return_softmax_lse", "softmax_lse", "validate"}),
        (ops.paged_attention.out, pagetile.paged_attention, {"return_softmax_lse", "validate"}),
        (ops.merge_states.out, pagetile.merge_states, set()),
    ],
    ids=str,
)  # fmt: skip
def test_schema_has_the_options_and_defaults_of_the_function(op, function, less):
    parameters = inspect.signature(function).parameters
    arguments = {a.name: a for a in op._schema.arguments}
    assert set(arguments) == set(parameters) - less - {"stream"}
    for name, argument in arguments.items():
        if argument.has_default_value():
            default = parameters[name].default
            assert argument.default_value == (list(default) if name == "window" else default), name


def test_writes_raise_version_counters(device):
    call = write_call(device)
    before = [call[name]._version for name in ("k_cache", "v_cache")]
    ops.cache_write(**call)
    assert [call[name]._version for name in ("k_cache", "v_cache")] == [n + 1 for n in before]
    results = merge_results(device)
    ops.merge_states.out(**merge_call(device), **results)
    assert results["out"]._version == results["lse"]._version == 1


def test_backward_notices_a_write(device):
    call = write_call(device)
    weight = torch.ones((), device=device, requires_grad=True)
    loss = (weight * call["k_cache"]).sum()
    ops.cache_write(**call)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Seen(TorchDispatchMode):
    """Names of the operators that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@OF_ALL
def test_modes_see_the_call(op, make_call, device):
    call = make_call(device)
    with Seen() as seen:
        op(**call)
    assert op.name() in seen.names


# Errors


@pytest.mark.parametrize(
    ("op", "make_call", "changes", "match"),
    [
        (ops.cache_write, write_call, {"k": lambda x: x[None]},
         r"cache_write: k must have 3 dimensions \[T, Hkv, D\], got shape \(1, 5, 2, 16\)"),
        (ops.cache_write, write_call, {"v": lambda x: x.half()},
         r"cache_write: v must be bfloat16, got float16"),
        (ops.cache_write, write_call, {"k_cache": lambda x: x[0]},
         r"cache_write: k_cache must have 4 dimensions \[P, S, Hkv, D\], got shape \(4, 2, 16\)"),
        (ops.cache_write, write_call, {"v_cache": lambda x: x.half()},
         r"cache_write: v_cache must be bfloat16, got float16"),
        (ops.cache_write, write_call, {"slot_mapping": lambda x: x.float()},
         r"cache_write: slot_mapping must be int64 or int32, got float32"),
        (ops.cache_write, write_call, {"layout": "nhd"},
         r"cache_write: layout must be 'NHD', 'HND' or 'legacy', got 'nhd'"),
        (ops.paged_attention, attention_call, {"q": lambda x: x[0]},
         r"paged_attention: q must have 3 dimensions \[T, Hq, D\], got shape \(4, 16\)"),
        (ops.paged_attention, attention_call, {"q": lambda x: x[..., :8]},
         r"paged_attention: k_cache must have q's head_dim 8, got 16"),
        (ops.paged_attention, attention_call, {"block_table": lambda x: x.long()},
         r"paged_attention: block_table must be int32, got int64"),
        (ops.paged_attention_lse, attention_call, {"block_table": lambda x: x[0]},
         r"paged_attention: block_table must have 2 dimensions \[B, max_pages\], got shape \(2,\)"),
        (ops.paged_attention, attention_call, {"seqused_k": lambda x: x.long()},
         r"paged_attention: seqused_k must be int32, got int64"),
        (ops.paged_attention, attention_call, {"cu_seqlens_q": lambda x: x.long()},
         r"paged_attention: cu_seqlens_q must be int32, got int64"),
        (ops.paged_attention, attention_call, {"cu_seqlens_q": lambda x: x[None]},
         r"paged_attention: cu_seqlens_q must have 1 dimensions \[B \+ 1\], got shape \(1, 3\)"),
        (ops.paged_attention, attention_call, {"layout": "HDN"},
         r"paged_attention: layout must be 'NHD', 'HND' or 'legacy', got 'HDN'"),
        (ops.merge_states, merge_call, {"out_a": lambda x: x[0]},
         r"merge_states: out_a must have 3 dimensions \[T, Hq, Dv\], got shape \(4, 24\)"),
        (ops.merge_states, merge_call, {"out_b": lambda x: x[:4]},
         r"merge_states: out_b must have shape \(T, Hq, Dv\) = \(5, 4, 24\), got \(4, 4, 24\)"),
        (ops.merge_states, merge_call, {"lse_a": lambda x: x.T},
         r"merge_states: lse_a must have shape \(Hq, T\) = \(4, 5\), got \(5, 4\)"),
        (ops.merge_states, merge_call, {"lse_b": lambda x: x[:, :4]},
         r"merge_states: lse_b must have shape \(Hq, T\) = \(4, 5\), got \(4, 4\)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_bad_arguments(op, make_call, changes, match, fake, device):
    """The same words, whether the call runs or is traced."""
    call = make_call(device)
    call |= {name: x(call[name]) if callable(x) else x for name, x in changes.items()}
    mode = FakeTensorMode() if fake else contextlib.nullcontext()
    if fake:
        call = {n: mode.from_tensor(x) if torch.is_tensor(x) else x for n, x in call.items()}
    with mode, pytest.raises(ValueError, match=f"^{match}$"):
        op(**call)


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize(
    ("op", "call", "match"),
    [
        (ops.paged_attention.out, attention_call(**attention_results(out=floats(5, 4, 16))),
         r"paged_attention: out must have shape \(T, Hq, Dv\) = \(5, 4, 24\), got \(5, 4, 16\)"),
        (ops.paged_attention.out,
         attention_call(**attention_results(softmax_lse=torch.zeros(5, 4))),
         r"paged_attention: softmax_lse must have shape \(Hq, T\) = \(4, 5\), got \(5, 4\)"),
        (ops.merge_states.out, merge_call(out=floats(5, 4, 16), lse=torch.zeros(4, 5)),
         r"merge_states: out must have shape \(T, Hq, Dv\) = \(5, 4, 24\), got \(5, 4, 16\)"),
        (ops.merge_states.out, merge_call(out=floats(5, 4, 24), lse=torch.zeros(5, 4)),
         r"merge_states: lse must have shape \(Hq, T\) = \(4, 5\), got \(5, 4\)"),
    ],
)  # fmt: skip
def test_bad_results(op, call, match, fake):
    mode = FakeTensorMode() if fake else contextlib.nullcontext()
    if fake:
        call = {n: mode.from_tensor(x) if torch.is_tensor(x) else x for n, x in call.items()}
    with mode, pytest.raises(ValueError, match=f"^{match}$"):
        op(**call)


def test_no_tensor_is_refused_by_the_schema():
    with pytest.raises(RuntimeError, match=r"pagetile::cache_write\(\).*'k'"):
        ops.cache_write(**write_call(k=1.0))


@pytest.mark.parametrize("kv_dtype", ["fp8_e5m2", "bfloat16"])
def test_kv_dtype_must_fit_float8(kv_dtype):
    with pytest.raises(ValueError, match=f"kv_dtype '{kv_dtype}' does not fit k_cache.*e4m3fn"):
        ops.cache_write(**fp8_write_call(kv_dtype=kv_dtype))


# PyTorch that exports no float8, has no exchange API


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "fp8_e4m3"])
def test_float8_as_bytes(monkeypatch, kv_dtype):
    expected = fp8_write_call()
    ops.cache_write(**expected)
    monkeypatch.setattr(pagetile.torch, "_EXPORTS_FLOAT8", False)
    call = fp8_write_call(kv_dtype=kv_dtype)
    ops.cache_write(**call)
    assert_same([call["k_cache"], call["v_cache"]], [expected["k_cache"], expected["v_cache"]])
    assert_same(
        [ops.paged_attention(**{**float8_attention_call(), "kv_dtype": kv_dtype})],
        [ops.paged_attention(**fp8_attention_call())],
    )
    with pytest.raises(ValueError, match=r"^cache_write: kv_dtype 'fp8_e5m2' does not fit k_cache"):
        ops.cache_write(**fp8_write_call(kv_dtype="fp8_e5m2"))


def test_detached_for_the_kernel():
    seen = []
    weight = torch.ones(2, requires_grad=True)
    pagetile.torch._without_grad(lambda *inputs: seen.extend(inputs))(weight, None, 3)
    assert [getattr(x, "requires_grad", None) for x in seen] == [False, None, None]
    assert seen[0].data_ptr() == weight.data_ptr()


@needs_gpus(1)
def test_current_stream_without_exchange_api():
    tensor, side = torch.zeros(1, device="cuda"), torch.cuda.Stream()
    assert pagetile._C.stream_of(torch.zeros(1), None) == 0
    with torch.cuda.stream(side):
        assert current_stream(tensor, tensor.device.index) == side.cuda_stream != 0


# Gradients


def with_gradient(op, make_call, device) -> list[str]:
    """Names of the arguments that could require a gradient."""
    call = make_call(device)
    return [n for n, x in call.items() if torch.is_tensor(x) and x.is_floating_point()]


@OF_ALL
def test_inputs_that_require_grad_are_refused(op, make_call, device):
    names = with_gradient(op, make_call, device)
    assert len(names) >= 3
    for name in names:
        call = make_call(device)
        before = [x.clone() for x in written(op, call)]
        call[name].requires_grad_()
        function = op._schema.name.replace("::", ".")
        with pytest.raises(RuntimeError, match=f"^torch.ops.{function}: {name} requires grad, but"):
            op(**call)
        assert all(map(same_bits, written(op, {**call}), before))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@OF_ALL
def test_without_gradients_they_are_taken(op, make_call, mode, device):
    expected = make_call(device)
    results = [*tensors_of(op(**expected)), *written(op, expected)]
    call = make_call(device)
    for name in with_gradient(op, make_call, device):
        call[name].requires_grad_()
    with mode():
        actual = [*tensors_of(op(**call)), *written(op, call)]
        assert not any(
            x.requires_grad for x in tensors_of(actual[: -len(written(op, call)) or None])
        )
        assert_same([x.detach() for x in actual], results)


def test_tensors_of_inference_mode(device):
    expected = write_call(device)
    ops.cache_write(**expected)
    with torch.inference_mode():
        call = {n: x.clone() for n, x in write_call(device).items()}
        ops.cache_write(**call)
    with torch.no_grad():
        ops.cache_write(**call)
    assert_same([call["k_cache"]], [expected["k_cache"]])


def test_function_transforms_are_refused(device):
    call = attention_call(device)
    q = call.pop("q")
    attend = lambda q: ops.paged_attention(q, **call)  # noqa: E731
    with pytest.raises(RuntimeError, match=r"^torch.ops.pagetile.paged_attention: q requires grad"):
        torch.func.grad(lambda q: attend(q).float().sum())(q)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), pytest.raises(RuntimeError, match=r"paged_attention: q requires grad"):
            torch.func.jvp(attend, (q,), (torch.ones_like(q),))


def test_compiled_code_refuses_gradients():
    call = attention_call()
    call["q"].requires_grad_()
    attend = torch.compile(lambda **call: ops.paged_attention(**call) * 2, backend="aot_eager")
    with pytest.raises(Exception, match=r"paged_attention: q requires grad"):
        attend(**call)
    with torch.no_grad():
        assert_same([attend(**call)], [ops.paged_attention(**call) * 2])


# Tracing


@OF_ALL
def test_opcheck(op, make_call, device):
    if make_call in (fp8_write_call, float8_attention_call, fp8_query_call, fp8_products_call):
        pytest.skip("opcheck multiplies what it gets, which PyTorch cannot do with float8")
    args, kwargs = positional(op, make_call(device))
    checks = opcheck(op, args, kwargs)
    assert len(checks) == 4
    assert set(checks.values()) == {"SUCCESS"}


@OF_ALL
@pytest.mark.parametrize("how", ["meta", "fake"])
def test_results_without_numbers(op, make_call, how, device):
    call = make_call(device)
    real = tensors_of(op(**call))
    mode = FakeTensorMode() if how == "fake" else contextlib.nullcontext()
    convert = mode.from_tensor if how == "fake" else lambda x: x.to("meta")
    with mode:
        results = tensors_of(
            op(**{n: convert(x) if torch.is_tensor(x) else x for n, x in call.items()})
        )
    assert len(results) == len(real) == len(op._schema.returns)
    for got, wanted in zip(results, real, strict=True):
        assert (got.shape, got.dtype, got.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
        assert got.device.type == ("meta" if how == "meta" else device)


def test_legacy_layout_without_numbers():
    shapes = {"k_cache": (6, 2, 2, 4, 8), "v_cache": (6, 2, 24, 4)}
    changes = {n: floats(*shape) for n, shape in shapes.items()}
    call = attention_call(**changes, layout="legacy")
    real = ops.paged_attention(**call)
    fake = ops.paged_attention(
        **{n: x.to("meta") if torch.is_tensor(x) else x for n, x in call.items()}
    )
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


class Layer(torch.nn.Module):
    """Writes, attends twice, merges, and computes around it. The caches are its buffers."""

    def __init__(self, device="cpu") -> None:
        super().__init__()
        call = write_call(device)
        self.register_buffer("k_cache", call["k_cache"])
        self.register_buffer("v_cache", call["v_cache"])

    def forward(self, q, k, v, slot_mapping, block_table, seqused_k, cu_seqlens_q, max_seqlen_q):
        call = (self.k_cache, self.v_cache, block_table, seqused_k, cu_seqlens_q, max_seqlen_q)
        ops.cache_write(k * 2, v, self.k_cache, self.v_cache, slot_mapping)
        whole = ops.paged_attention(q, *call)
        near, near_lse = ops.paged_attention_lse(q, *call, window=[2, 0])
        sunk, sunk_lse = torch.empty_like(near), torch.empty_like(near_lse)
        ops.paged_attention.out(q, *call, sunk, sunk_lse, sinks=near_lse[:, 0])
        merged, lse = ops.merge_states(near, near_lse, sunk, sunk_lse)
        return whole + merged, lse.exp()


def layer_inputs(device="cpu", total_q=5) -> tuple:
    attention, write = attention_call(device), write_call(device)
    cu_seqlens_q = torch.tensor([0, 2, total_q], **INT32, device=device)
    return (
        floats(total_q, 4, 16, seed=5, device=device),
        floats(total_q, 2, 16, seed=6, device=device),
        floats(total_q, 2, 24, seed=7, device=device),
        write["slot_mapping"][:total_q].clone(),
        attention["block_table"],
        attention["seqused_k"],
        cu_seqlens_q,
        total_q - 2,
    )


def run_layer(layer, module, *inputs) -> list[torch.Tensor]:
    with torch.no_grad():
        results = module(*inputs)
    return [*(x.float() for x in results), layer.k_cache, layer.v_cache]


@pytest.fixture(scope="module")
def fresh_cache():
    """What inductor keeps on the disk is found by the graph, which does not tell the schemas."""
    utils = importlib.import_module("torch._inductor.utils")
    fresh = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache
    with fresh():
        yield


compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler"
)


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=compiler)]
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile(backend, dynamic, device, fresh_cache):
    torch._dynamo.reset()
    layer, twin = Layer(device), Layer(device)
    compiled = torch.compile(twin, fullgraph=True, backend=backend, dynamic=dynamic)
    for total_q in (5, 4, 5):
        inputs = layer_inputs(device, total_q)
        expected = run_layer(layer, layer, *inputs)
        actual = run_layer(twin, compiled, *inputs)
        assert_same(actual[2:], expected[2:])
        for got, wanted in zip(actual[:2], expected[:2], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)  # of the sum, the exp
    assert not same_bits(twin.k_cache, Layer(device).k_cache)


def test_one_graph_for_all_lengths(device):
    """Sizes and max_seqlen_q are symbols: another batch needs no other graph."""
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layer = Layer(device)
    compiled = torch.compile(layer, fullgraph=True, backend=graphs, dynamic=True)
    for total_q in (5, 4, 5):
        run_layer(layer, compiled, *layer_inputs(device, total_q))
    assert graphs.frame_count == 1


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
def test_export(strict, device):
    layer, twin = Layer(device), Layer(device)
    inputs = layer_inputs(device)
    with torch.no_grad():
        program = torch.export.export(twin, inputs, strict=strict)
    called = {str(node.target) for node in program.graph.nodes}
    assert "pagetile.paged_attention.default" in called
    module = program.module()
    expected = run_layer(layer, layer, *inputs)
    with torch.no_grad():
        results = module(*inputs)
    state = module.state_dict()
    actual = [*(x.float() for x in results), state["k_cache"], state["v_cache"]]
    assert_same(actual, expected)
    assert not same_bits(state["k_cache"], Layer(device).k_cache)


class WriteAndRead(torch.nn.Module):
    def forward(self, k, k_cache, v, v_cache, slot_mapping):
        copy = k_cache.clone()
        ops.cache_write(k, v, copy, v_cache, slot_mapping)
        return copy + 1


def test_functionalisation_keeps_the_write(device):
    """In a graph without mutation, what is read after the write is what was written."""
    call, traced = write_call(device), write_call(device)
    names = ("k", "k_cache", "v", "v_cache", "slot_mapping")
    expected = WriteAndRead()(*(call[n] for n in names))
    assert not same_bits(expected, call["k_cache"] + 1)
    program = torch.export.export(WriteAndRead(), tuple(traced[n] for n in names))
    program = program.run_decompositions({})
    targets = " ".join(str(node.target) for node in program.graph.nodes)
    assert "auto_functionalized" in targets
    assert "pagetile.cache_write.default" not in targets  # it is an argument of the above
    result = program.module()(*(traced[n] for n in names))
    assert_same([result, traced["v_cache"]], [expected, call["v_cache"]])


# Plans


def plan_for(device="cpu", **changes) -> pagetile.Plan:
    call = attention_call(device)
    lengths = {n: call[n] for n in ("seqused_k", "cu_seqlens_q", "max_seqlen_q")}
    sizes = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "head_dim_v": 24, "page_size": 4}
    return pagetile.make_plan(**{**lengths, "max_seqlen_k": 8, **sizes, **changes})


def test_plan_gives_the_same(device):
    call = attention_call(device)
    expected = [ops.paged_attention(**call)]
    plan = plan_tensor(plan_for(device))
    assert (plan.dtype, plan.dim(), plan.device.type) == (torch.int32, 1, device)
    assert_same([ops.paged_attention(**call, plan=plan)], expected)
    assert_same([ops.paged_attention(**call, plan=plan.detach())], expected)
    torch._dynamo.reset()
    compiled = torch.compile(ops.paged_attention, fullgraph=True, backend="aot_eager")
    assert_same([compiled(**call, plan=plan)], expected)


def test_plan_is_checked(device):
    """So it does arrive."""
    call = attention_call(device, causal=False)
    with pytest.raises(ValueError, match=r"^paged_attention: plan .*causal"):
        ops.paged_attention(**call, plan=plan_tensor(plan_for(device)))


def test_plan_is_renewed_in_place(device):
    plan = plan_for(device)
    tensor = plan_tensor(plan)
    assert tensor.data_ptr() == plan.buffer.data_ptr()
    shorter = torch.tensor([1, 2], **INT32, device=device)
    plan_for(device, seqused_k=shorter, out=plan)
    assert torch.equal(tensor, plan_for(device, seqused_k=shorter).buffer)
    call = attention_call(device, seqused_k=shorter)
    assert_same([ops.paged_attention(**call, plan=tensor)], [ops.paged_attention(**call)])


def test_plan_lives_as_long_as_its_tensor():
    plan = plan_for()
    first, second = plan_tensor(plan), plan_tensor(plan)
    del plan
    gc.collect()
    ops.paged_attention(**attention_call(), plan=second)
    del second
    gc.collect()
    ops.paged_attention(**attention_call(), plan=first)
    rest = first.detach()
    del first
    gc.collect()
    with pytest.raises(ValueError, match=r"^paged_attention: plan must be a tensor by pagetile"):
        ops.paged_attention(**attention_call(), plan=rest)


def test_other_tensors_are_no_plans():
    tensor = plan_tensor(plan_for())
    for other in (tensor.clone(), tensor[1:], torch.zeros(4, **INT32)):
        with pytest.raises(ValueError, match=r"paged_attention: plan must be .*got another of sha"):
            ops.paged_attention(**attention_call(), plan=other)


def test_plan_tensor_refuses_others():
    plan = plan_for()
    with pytest.raises(TypeError, match=r"^plan_tensor: plan must be a Plan, got Tensor"):
        plan_tensor(plan.buffer)
    lengths = {n: attention_call()[n].numpy() for n in ("seqused_k", "cu_seqlens_q")}
    with pytest.raises(TypeError, match=r"^plan_tensor: plan must .* is a numpy.ndarray"):
        plan_tensor(plan_for(**lengths))


# CUDA graphs


@needs_gpus(1)
def test_captured():
    layer, twin = Layer("cuda"), Layer("cuda")
    q, k, v, slots, *metadata = layer_inputs("cuda")
    workspace = torch.zeros(
        pagetile.workspace_size(
            max_seqlen_q=3, max_seqlen_k=8, num_q_heads=4, num_kv_heads=2, head_dim=16,
            head_dim_v=24, device=q,
        ),
        dtype=torch.uint8, device="cuda",
    )  # fmt: skip
    plan, out = plan_tensor(plan_for("cuda")), attention_results("cuda")["out"]

    def step():
        ops.cache_write(k, v, twin.k_cache, twin.v_cache, slots)
        ops.paged_attention.out(
            q, twin.k_cache, twin.v_cache, *metadata, out, None, workspace, 8, plan=plan
        )

    graph = captured(step)
    k.mul_(-3)
    out.zero_()
    graph.replay()
    ops.cache_write(k, v, layer.k_cache, layer.v_cache, slots)
    expected = ops.paged_attention(q, layer.k_cache, layer.v_cache, *metadata, 8)
    assert_same([out, twin.k_cache], [expected, layer.k_cache])


# PagedKVCache


def new_cache(device="cpu", **changes) -> PagedKVCache:
    sizes = {"num_layers": 3, "num_pages": 12, "page_size": 4, "num_kv_heads": 2}
    options = {"head_dim": 16, "head_dim_v": 24, "dtype": torch.float16, "device": device}
    cache = PagedKVCache(**{**sizes, **options, **changes})
    for tensor in (*cache.k_caches, *cache.v_caches):  # what was never written is never read
        tensor.view(torch.uint8).fill_(0xFF)
    return cache


def as_float64(x: torch.Tensor) -> np.ndarray:
    return x.cpu().double().numpy()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_cache_against_the_reference(layout, device):
    """Prefill, decode, a fork that diverges, a sequence that ends: all layers, every step."""
    cache = new_cache(device, layout=layout)
    a, b = cache.allocate(), cache.allocate()
    history = {a: [], b: []}  # sequence -> the seeds of its tokens
    seed = 0

    def rows(seeds, layer, heads, dim, what) -> torch.Tensor:
        one = [floats(heads, dim, seed=97 * s + 7 * layer + what) for s in seeds]
        return torch.stack(one).half() if one else torch.empty(0, heads, dim).half()

    def check(sequences, counts) -> None:
        nonlocal seed
        step = cache.append(sequences, counts)
        new = []
        for sequence, count in zip(sequences, counts, strict=True):
            tokens = list(range(seed, seed + count))
            seed += count
            history[sequence] = history[sequence] + tokens
            new += tokens
        assert step.total_q == len(new) == step.slot_mapping.numel()
        for layer in range(3):
            q = rows(new, layer, 4, 16, 1)
            k, v = rows(new, layer, 2, 16, 2), rows(new, layer, 2, 24, 3)
            cache.write(layer, k.to(device), v.to(device), step)
            out = as_float64(cache.attend(layer, q.to(device), step, window=[6, 0]))
            begin = 0
            for sequence, count in zip(sequences, counts, strict=True):
                tokens = history[sequence]
                keys = as_float64(rows(tokens, layer, 2, 16, 2))[None]
                values = as_float64(rows(tokens, layer, 2, 24, 3))[None]
                arguments = {
                    "block_table": [[0]], "seqused_k": [len(tokens)], "cu_seqlens_q": [0, count],
                    "window": (6, 0),
                }  # fmt: skip
                part = slice(begin, begin + count)
                call = (as_float64(q[part]), keys, values)
                expected, _ = reference.attention(*call, **arguments)
                low, _ = reference.attention(*call, **arguments, round_dtype="float16")
                reference.assert_close(out[part], expected, low)
                begin += count

    check([a, b], [5, 2])
    check([a, b], [1, 1])
    fork = cache.fork(a)
    history[fork] = list(history[a])
    check([a, b, fork], [1, 1, 2])  # a or its fork gets a copy of the page that they shared
    check([fork, a], [1, 3])
    cache.free(b)
    c = cache.allocate()
    history[c] = []
    check([fork, c, a], [0, 7, 1])
    assert len(cache.pool) == 3


@pytest.mark.parametrize(("kv_dtype", "dtype"), [
    ("fp8", FP8), ("fp8_e4m3", FP8), ("fp8_e5m2", torch.float8_e5m2), ("auto", torch.float16),
])  # fmt: skip
def test_cache_storage_and_options(kv_dtype, dtype, device):
    cache = new_cache(device, kv_dtype=kv_dtype)
    assert len(cache.k_caches) == len(cache.v_caches) == 3
    assert all(x.shape == (12, 4, 2, 16) for x in cache.k_caches)
    assert all(x.shape == (12, 4, 2, 24) for x in cache.v_caches)
    assert {x.dtype for x in (*cache.k_caches, *cache.v_caches)} == {dtype}
    sequence = cache.allocate()
    step = cache.append([sequence], 6)
    k, v = (floats(6, 2, d, device=device).half() for d in (16, 24))
    q = floats(6, 4, 16, device=device).half()
    scales = {} if kv_dtype == "auto" else {
        "k_scale": torch.tensor([0.5], device=device),
        "v_scale": torch.tensor([4.0], device=device),
    }  # fmt: skip
    cache.write(1, k, v, step, **scales)
    out = cache.attend(1, q, step, softcap=3.0, **scales)
    k_cache, v_cache = (
        torch.zeros_like(pools[1].view(torch.uint8)).view(dtype)
        for pools in (cache.k_caches, cache.v_caches)
    )
    ops.cache_write(k, v, k_cache, v_cache, step.slot_mapping, **scales)
    assert_same([out], [ops.paged_attention(
        q, k_cache, v_cache, step.block_table, step.seqused_k, step.cu_seqlens_q, 6, softcap=3.0,
        **scales,
    )])  # fmt: skip
    assert (cache.k_caches[0].view(torch.uint8) == 0xFF).all()  # another layer
    fork = cache.fork(sequence)
    cache.append([fork], 1)
    shared, own = cache.pool.pages(sequence)[1], cache.pool.pages(fork)[1]
    assert shared != own
    for pool in (*cache.k_caches, *cache.v_caches):
        assert same_bits(pool.view(torch.uint8)[shared], pool.view(torch.uint8)[own])


def test_cache_without_head_dim_v():
    cache = PagedKVCache(num_layers=1, num_pages=2, page_size=3, num_kv_heads=4, head_dim=8)
    assert cache.v_caches[0].shape == cache.k_caches[0].shape == (2, 3, 4, 8)
    assert cache.k_caches[0].dtype == torch.bfloat16


def test_steps_keep_their_tables():
    cache = new_cache()
    a, b = cache.allocate(), cache.allocate()
    first = cache.append([a, b], 4)
    table = first.block_table.clone()
    cache.append([b, a], 4)
    assert torch.equal(first.block_table, table)


def test_cache_is_compiled(device):
    """Steps are made outside; one graph takes them all."""
    torch._dynamo.reset()
    cache, twin = new_cache(device), new_cache(device)

    def model(cache, q, k, v, step):
        for layer in range(3):
            cache.write(layer, k + layer, v, step)
            q = q + cache.attend(layer, q, step)[..., :16]
        return q

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    sequences = [[c.allocate() for _ in range(2)] for c in (cache, twin)]
    for num_tokens in (5, 1, 1, 1):
        q = floats(2 * num_tokens, 4, 16, seed=num_tokens, device=device).half()
        k, v = (floats(2 * num_tokens, 2, d, seed=d, device=device).half() for d in (16, 24))
        steps = [c.append(s, num_tokens) for c, s in zip((cache, twin), sequences, strict=True)]
        assert_same([compiled(twin, q, k, v, steps[1])], [model(cache, q, k, v, steps[0])])
    assert_same(twin.k_caches, cache.k_caches)


@pytest.mark.parametrize(("changes", "match"), [
    ({"num_layers": 0}, "PagedKVCache: num_layers must be > 0, got 0"),
    ({"num_kv_heads": 0}, "PagedKVCache: num_kv_heads must be > 0, got 0"),
    ({"head_dim": -1}, "PagedKVCache: head_dim must be > 0, got -1"),
    ({"head_dim_v": 0}, "PagedKVCache: head_dim_v must be > 0, got 0"),
    ({"num_pages": 0}, "num_pages must be"),
    ({"page_size": 0}, "page_size must be"),
    ({"kv_dtype": "int8"}, "PagedKVCache: kv_dtype must be 'auto', .*, got 'int8'"),
    ({"layout": "legacy"}, "PagedKVCache: layout must be 'NHD' or 'HND', got 'legacy'"),
])  # fmt: skip
def test_bad_caches(changes, match):
    with pytest.raises(ValueError, match=match):
        new_cache(**changes)


# Import, documents


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_of_pagetile_imports_no_torch():
    assert run_python("import sys, pagetile; print('torch' in sys.modules)") == "False"


OLD_TORCH = """
import types
old = sys.modules["torch"] = types.ModuleType("torch")
for name in ("autograd", "library"):
    module = sys.modules["torch." + name] = types.ModuleType("torch." + name)
    setattr(old, name, module)
old.autograd.forward_ad = None
"""


@pytest.mark.parametrize(
    ("block", "reason"),
    [("sys.modules['torch'] = None\n", "torch"), (OLD_TORCH, "register_fake")],
    ids=["none", "old"],
)
def test_import_without_torch(block, reason):
    code = """
import pagetile
try:
    import pagetile.torch
except ImportError as error:
    print(error)
"""
    message = run_python("import sys\n" + block + code)
    assert re.match(rf"pagetile.torch needs PyTorch >= 2.4: .*{reason}", message)


def test_documents_example(tmp_path):
    """The page's Python blocks, one after the other, as a reader would run them."""
    page = (DOCS / "torch.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert blocks
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, check=False,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("OK: ")


def test_one_file_for_every_release():
    """It is found as a module of the package, and the extension does not link torch."""
    assert importlib.util.find_spec("pagetile.torch").origin.endswith("torch.py")
    libraries = Path(pagetile._C.__file__).read_bytes()
    assert b"libtorch" not in libraries
    assert b"libc10" not in libraries
