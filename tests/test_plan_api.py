"""make_plan, Plan, workspace_size, and the plan and workspace of paged_attention.

What a plan holds is test_attention_plan.py's.
"""

from __future__ import annotations

import gc
import inspect
import re
import weakref

import jax.numpy as jnp
import numpy as np
import pagetile
import pytest
import torch
from gpu import needs_gpus
from pagetile import _C
from problem import same_bits

USES = ("paged_attention",)

INT32 = {"dtype": torch.int32}
CALL, SIZES = (
    inspect.signature(function).parameters
    for function in (pagetile.paged_attention, pagetile.workspace_size)
)
# What a plan says of itself
HOST = ("max_seqlen_q", "max_seqlen_k", "num_q_heads", "num_kv_heads", "head_dim", "head_dim_v",
        "page_size", "causal", "window", "num_splits", "batch_invariant",
        "fp8_products")  # fmt: skip


def step(device="cpu", **changes) -> dict:
    """make_plan's arguments for the call below."""
    return {
        "seqused_k": torch.tensor([5, 8], **INT32, device=device),
        "cu_seqlens_q": torch.tensor([0, 2, 5], **INT32, device=device),
        "max_seqlen_q": 3,
        "max_seqlen_k": 8,
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "head_dim_v": 24,
        "page_size": 4,
        **changes,
    }


def call(device="cpu", **changes) -> dict:
    generator = torch.Generator().manual_seed(3)
    floats = lambda *shape: torch.randn(*shape, generator=generator).bfloat16().to(device)  # noqa: E731
    lengths = {n: x for n, x in step(device).items() if n in CALL}
    return {
        "q": floats(5, 4, 16),
        "k_cache": floats(6, 4, 2, 16),
        "v_cache": floats(6, 4, 2, 24),
        "block_table": torch.tensor([[3, 0], [1, 4]], **INT32, device=device),
        "out": torch.full((5, 4, 24), 7.0, device=device).bfloat16(),
        **lengths,
        **changes,
    }


def lanes_of(plan) -> np.ndarray:
    """The buffer: a row of 28 int32 for each lane."""
    return plan.buffer.cpu().numpy().copy().reshape(-1, 28)


# What a plan is


def test_plan_says_what_it_was_made_for(device):
    options = {"causal": False, "window": (5, 2), "num_splits": 3, "batch_invariant": True,
               "fp8_products": True}  # fmt: skip
    arguments = step(device, **options)
    plan = pagetile.make_plan(**arguments)
    assert isinstance(plan, pagetile.Plan)
    assert {name: getattr(plan, name) for name in HOST} == {name: arguments[name] for name in HOST}
    assert plan.batch == 2
    assert repr(plan).startswith("Plan(batch=2, max_seqlen_q=3, max_seqlen_k=8, num_q_heads=4, ")
    assert repr(plan).endswith(
        "causal=False, window=(5, 2), num_splits=3, batch_invariant=True, fp8_products=True) on "
        + ("the CPU" if device == "cpu" else "CUDA device 0")
    )


def test_defaults():
    arguments = step(max_seqlen_k=None)
    del arguments["head_dim_v"]
    plan = pagetile.make_plan(**arguments)
    assert plan.head_dim_v == plan.head_dim == 16
    assert plan.max_seqlen_k is None
    assert (plan.causal, plan.window, plan.num_splits, plan.batch_invariant) == (
        True, (-1, -1), 0, False,
    )  # fmt: skip
    assert plan.fp8_products is False
    assert "max_seqlen_k=None" in repr(plan)


def test_plans_come_from_make_plan_alone():
    with pytest.raises(TypeError, match="no constructor"):
        pagetile.Plan()


@pytest.mark.parametrize("name", [*HOST, "batch", "buffer"])
def test_plans_are_read_only(name):
    plan = pagetile.make_plan(**step())
    with pytest.raises(AttributeError):
        setattr(plan, name, getattr(plan, name))


# Its memory


def test_buffer_is_a_tensor_of_the_framework_and_device(device):
    buffer = pagetile.make_plan(**step(device)).buffer
    assert isinstance(buffer, torch.Tensor)
    assert (buffer.dtype, buffer.dim(), buffer.device.type) == (torch.int32, 1, device)
    assert buffer.numel() > 0


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_frameworks(convert):
    arguments = step()
    tensors = {n: convert(arguments[n].numpy()) for n in ("seqused_k", "cu_seqlens_q")}
    plan = pagetile.make_plan(**{**arguments, **tensors})
    np.testing.assert_array_equal(
        np.from_dlpack(plan.buffer), pagetile.make_plan(**arguments).buffer.numpy()
    )
    if convert is np.asarray:
        assert isinstance(plan.buffer, np.ndarray)
        assert plan.buffer.dtype == np.int32
    out = pagetile.paged_attention(**call(), plan=plan)  # of another framework, on the same device
    assert same_bits(out, pagetile.paged_attention(**call()))


class OnlyDLPack:
    """A tensor of an unknown library."""

    def __init__(self, array) -> None:
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_unknown_frameworks_need_out():
    arguments = step()
    plan = pagetile.make_plan(**arguments)
    expected = lanes_of(plan)
    unknown = {n: OnlyDLPack(arguments[n].numpy()) for n in ("seqused_k", "cu_seqlens_q")}
    match = r"seqused_k must be a tensor of PyTorch, NumPy, JAX or CuPy, got .*OnlyDLPack"
    with pytest.raises(TypeError, match=match):
        pagetile.make_plan(**{**arguments, **unknown})
    plan.buffer.zero_()
    assert pagetile.make_plan(**{**arguments, **unknown, "out": plan}) is plan
    np.testing.assert_array_equal(lanes_of(plan), expected)


def test_plan_and_buffer_live_as_long_as_each_other():
    seqused_k, cu_seqlens_q = (step()[n].numpy() for n in ("seqused_k", "cu_seqlens_q"))
    plan = pagetile.make_plan(**step(seqused_k=seqused_k, cu_seqlens_q=cu_seqlens_q))
    seen = weakref.ref(plan.buffer)
    gc.collect()
    assert seen() is plan.buffer
    buffer = plan.buffer
    del plan
    assert seen() is buffer
    del buffer
    assert seen() is None


@pytest.mark.parametrize("options", [
    {},
    {"window": (3, -1)},
    {"num_splits": 1},
    {"batch_invariant": True},
    {"cu_seqlens_q": None, "max_seqlen_q": 1},
], ids=str)  # fmt: skip
def test_cpu_plan_is_the_planners(options):
    arguments = step(seqused_k=torch.tensor([70_001, 3_000], **INT32), max_seqlen_k=70_001)
    arguments |= options
    left, right = options.get("window", (-1, -1))
    others = {n: x for n, x in arguments.items() if n not in ("page_size", "window")}
    lanes, _ = _C.attention_plan(
        others.pop("cu_seqlens_q"), others.pop("seqused_k"),
        **others, window_left=left, window_right=right, num_sms=132,
    )  # fmt: skip
    rows = [x["words"] for x in lanes]
    np.testing.assert_array_equal(lanes_of(pagetile.make_plan(**arguments)), rows)


# Refilling


def test_refill_in_place(device):
    plan = pagetile.make_plan(**step(device, max_seqlen_k=100_000))
    buffer, address = plan.buffer, plan.buffer.data_ptr()
    longer = step(device, max_seqlen_k=90_000, max_seqlen_q=2)
    longer["seqused_k"] = torch.tensor([90_000, 5], **INT32, device=device)
    before = lanes_of(plan)
    assert pagetile.make_plan(**longer, out=plan) is plan
    assert plan.buffer is buffer
    assert buffer.data_ptr() == address
    assert plan.max_seqlen_k == 100_000
    assert plan.max_seqlen_q == 3
    assert (lanes_of(plan) != before).any()
    np.testing.assert_array_equal(
        lanes_of(plan), lanes_of(pagetile.make_plan(**{**longer, "max_seqlen_q": 3}))
    )


# Use


def test_a_plan_costs_no_bits(device):
    plan = pagetile.make_plan(**step(device))
    expected = pagetile.paged_attention(**call(device))
    for _ in range(2):
        assert same_bits(pagetile.paged_attention(**call(device), plan=plan), expected)


@pytest.mark.parametrize("changes", [
    {"max_seqlen_q": 4},
    {"max_seqlen_q": 0},
    {"max_seqlen_k": 100},
    {"max_seqlen_k": None},
    {"causal": False, "window": (-1, 0)},
    {"window": (-1, 7)},
    {"window": (2**31, -1)},
], ids=str)  # fmt: skip
def test_plans_of_other_words_for_the_same(changes, device):
    """Bounds may be wider, and a mask may be said in another way."""
    plan = pagetile.make_plan(**step(device, **changes))
    out = pagetile.paged_attention(**call(device), plan=plan)
    close(out, pagetile.paged_attention(**call(device)))
    assert pagetile.make_plan(**step(device), out=plan) is plan


@pytest.mark.parametrize("changes", [{"max_seqlen_k": None}, {"max_seqlen_q": 0}], ids=str)
def test_unknown_bounds_of_a_call(changes, device):
    plan = pagetile.make_plan(**step(device))
    out = pagetile.paged_attention(**call(device, **changes), plan=plan)
    close(out, pagetile.paged_attention(**call(device)))


def test_kv_lengths_may_change(device):
    plan = pagetile.make_plan(**step(device))
    lens = torch.tensor([8, 3], **INT32, device=device)
    out = pagetile.paged_attention(**call(device, seqused_k=lens), plan=plan)
    close(out, pagetile.paged_attention(**call(device, seqused_k=lens)))


def close(a, b) -> None:
    torch.testing.assert_close(a.float(), b.float(), rtol=0.02, atol=0.02)


# (what the plan was made for, how the message goes on)
# fmt: off
MISFITS = {
    "batch": (
        {"seqused_k": torch.tensor([5, 8, 1], **INT32),
         "cu_seqlens_q": torch.tensor([0, 2, 5, 6], **INT32)},
        "batch 3, got 2"),
    "num_q_heads": ({"num_q_heads": 8}, "num_q_heads 8, got 4"),
    "num_kv_heads": ({"num_kv_heads": 4}, "num_kv_heads 4, got 2"),
    "head_dim": ({"head_dim": 24}, "head_dim 24, got 16"),
    "head_dim_v": ({"head_dim_v": None}, "head_dim_v 16, got 24"),
    "page_size": ({"page_size": 16}, "page_size 16, got 4"),
    "num_splits": ({"num_splits": 1}, "num_splits 1, got 0"),
    "batch_invariant": ({"batch_invariant": True}, "batch_invariant True, got False"),
    "fp8_products": ({"fp8_products": True}, "fp8_products True, got False"),
    "causal": (
        {"causal": False},
        r"causal False and window \(-1, -1\), got causal True and window \(-1, -1\)"),
    "window": (
        {"window": (127, 0)},
        r"causal True and window \(127, 0\), got causal True and window \(-1, -1\)"),
    "window_0": ({"window": (0, 0)}, r"causal True and window \(0, 0\), got causal True"),
    "max_seqlen_q": ({"max_seqlen_q": 2}, "max_seqlen_q from 0 to 2, got 3"),
    "max_seqlen_k": ({"max_seqlen_k": 7}, "max_seqlen_k from 0 to 7, got 8"),
    "cu_seqlens_q": (
        {"cu_seqlens_q": None},
        r"one query a sequence \(cu_seqlens_q None\), got a tensor"),
}
# fmt: on


def misfit(changes, device):
    changes = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in changes.items()}
    return pagetile.make_plan(**step(device, **changes))


@pytest.mark.parametrize("name", MISFITS)
def test_plan_for_other_calls(name, device):
    changes, text = MISFITS[name]
    arguments = call(device)
    with pytest.raises(ValueError, match=f"^paged_attention: plan was made for {text}"):
        pagetile.paged_attention(**arguments, plan=misfit(changes, device))
    assert (arguments["out"] == 7).all()


@pytest.mark.parametrize("name", MISFITS)
def test_out_for_other_steps(name, device):
    changes, text = MISFITS[name]
    plan = misfit(changes, device)
    before = lanes_of(plan)
    with pytest.raises(ValueError, match=f"^make_plan: out was made for {text}"):
        pagetile.make_plan(**step(device), out=plan)
    np.testing.assert_array_equal(lanes_of(plan), before)


def test_out_made_with_offsets():
    plan = pagetile.make_plan(**step(max_seqlen_q=1))
    with pytest.raises(ValueError, match=r"^make_plan: out was made with cu_seqlens_q, got None"):
        pagetile.make_plan(**step(max_seqlen_q=1, cu_seqlens_q=None), out=plan)


def test_wrong_bounds_with_a_plan():
    plan = pagetile.make_plan(**step(max_seqlen_q=0, max_seqlen_k=None))
    for changes, text in (
        ({"max_seqlen_q": -1}, "max_seqlen_q from 0 to 2147483647, got -1"),
        ({"max_seqlen_k": 2**31}, "max_seqlen_k from 0 to 2147483647, got 2147483648"),
    ):
        with pytest.raises(ValueError, match=f"^paged_attention: plan was made for {text}"):
            pagetile.paged_attention(**call(**changes), plan=plan)


@needs_gpus(1)
def test_plan_of_another_device():
    text = "paged_attention: plan was made on the CPU, got tensors on CUDA device 0"
    with pytest.raises(ValueError, match=text):
        pagetile.paged_attention(**call("cuda"), plan=pagetile.make_plan(**step("cpu")))
    text = "make_plan: out was made on CUDA device 0, got tensors on the CPU"
    with pytest.raises(ValueError, match=text):
        pagetile.make_plan(**step("cpu"), out=pagetile.make_plan(**step("cuda")))


# Wrong steps


INTS = ("max_seqlen_q", "max_seqlen_k", "num_q_heads", "num_kv_heads", "head_dim", "head_dim_v",
        "page_size", "num_splits")  # fmt: skip
# fmt: off
WRONG = [
    ({"seqused_k": lambda x: x.long()}, "seqused_k must be int32, got int64"),
    ({"seqused_k": lambda x: x[None]}, r"seqused_k must have 1 dimensions \[B\], got shape"),
    ({"seqused_k": lambda x: torch.stack([x, x], -1)[:, 0]}, "seqused_k must be dense .*stride 2"),
    ({"cu_seqlens_q": lambda x: x.long()}, "cu_seqlens_q must be int32, got int64"),
    ({"cu_seqlens_q": lambda x: x[:2]},
     r"cu_seqlens_q must have shape \(B \+ 1,\) = \(3,\), got \(2,\)"),
    ({"cu_seqlens_q": lambda x: torch.stack([x, x], -1)[:, 0]}, "cu_seqlens_q must be dense"),
    ({"num_splits": -2}, "num_splits must be >= 0.*, got -2"),
    *(({name: value}, rf"{name} must be from 0 to 2\*\*31 - 1, got {value}")
      for name in ("max_seqlen_q", "max_seqlen_k") for value in (-1, 2**31)),
    *(({"page_size": value}, f"page_size must be > 0, got {value}") for value in (0, -1)),
    *(({name: value}, rf"{name} must be from 1 to 2\*\*31 - 1, got {value}")
      for name in ("num_kv_heads", "num_q_heads") for value in (0, -1, 2**31)),
    ({"num_q_heads": 5}, r"num_q_heads must be a multiple of num_kv_heads \(2\), got 5"),
    *(({name: value}, f"head_dim and head_dim_v must be multiples of 8 from 8 to 256, got {value}")
      for name in ("head_dim", "head_dim_v") for value in (0, -8, 12, 264)),
    *(({"window": w}, rf"window must be >= 0, or -1 for unlimited, got {min(w)}")
      for w in ((-2, -1), (-1, -2))),
    *(({"window": w}, r"window must be \(left, right\), got") for w in ((1,), (1, 2, 3), 4, None)),
    *(({"batch_invariant": True, "max_seqlen_k": bound},
       "max_seqlen_k must be > 0 with batch_invariant, got 0") for bound in (0, None)),
]
NO_TYPES = [
    *(({name: value}, rf"{name} must be int, got {type(value).__name__}")
      for name in INTS for value in (1.5, "8")),
    ({"max_seqlen_q": None}, "max_seqlen_q must be int, got NoneType"),
    ({"window": (1.5, 0)}, "window must be int, got float"),
    *(({name: 3}, f"{name} must be bool, got int") for name in ("causal", "batch_invariant")),
    *(({name: value}, f"{name} must be a DLPack tensor, got")
      for name in ("seqused_k", "cu_seqlens_q") for value in ([5, 8], 3)),
    ({"seqused_k": None}, "seqused_k must be a DLPack tensor, got None"),
    ({"out": torch.ones(3)}, "out must be a pagetile.Plan or None, got .*Tensor"),
    ({"stream": "0"}, "stream must be None, an int or an object with __cuda_stream__, got"),
]
# fmt: on


def changed(arguments, changes) -> dict:
    return arguments | {n: x(arguments[n]) if callable(x) else x for n, x in changes.items()}


@pytest.mark.parametrize(
    ("changes", "text", "error"),
    [(*x, ValueError) for x in WRONG] + [(*x, TypeError) for x in NO_TYPES],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_arguments(changes, text, error, device):
    plan = pagetile.make_plan(**step(device))
    before = lanes_of(plan)
    arguments = changed(step(device), changes)
    for out in [None] if "out" in changes else [None, plan]:
        with pytest.raises(error, match=f"^make_plan: {text}"):
            pagetile.make_plan(**{"out": out, **arguments})
    np.testing.assert_array_equal(lanes_of(plan), before)


def test_huge_ints_are_named():
    with pytest.raises(ValueError, match=r"^make_plan: num_q_heads must be a 64-bit int, got"):
        pagetile.make_plan(**step(num_q_heads=2**64))


def test_meta_tensors_are_refused():
    with pytest.raises((TypeError, ValueError), match=r"^make_plan: seqused_k "):
        pagetile.make_plan(**step(seqused_k=torch.empty(2, **INT32, device="meta")))


@pytest.mark.parametrize("name", [n for n in step() if n != "head_dim_v"])
def test_required_keywords(name):
    arguments = step()
    del arguments[name]
    with pytest.raises(TypeError, match=name):
        pagetile.make_plan(**arguments)


def test_no_sequences():
    none = {"seqused_k": torch.empty(0, **INT32), "cu_seqlens_q": torch.zeros(1, **INT32)}
    plan = pagetile.make_plan(**step(**none))
    assert plan.batch == 0
    assert (lanes_of(plan)[:, :8] == 0).all()


# The workspace


def bytes_needed(device, **changes) -> int:
    sizes = {n: x for n, x in step().items() if n in SIZES}
    return pagetile.workspace_size(**{**sizes, "device": device, **changes})


@pytest.mark.parametrize("dtype", ["uint8", "float32", "int64", "bfloat16"])
def test_workspace_of_any_dtype(dtype, device):
    dtype = getattr(torch, dtype)
    count = -(-bytes_needed(device) // dtype.itemsize)
    workspace = torch.zeros(count, dtype=dtype, device=device)
    expected = pagetile.paged_attention(**call(device))
    plan = pagetile.make_plan(**step(device))
    for options in ({}, {"plan": plan}, {}):
        out = pagetile.paged_attention(**call(device), workspace=workspace, **options)
        assert same_bits(out, expected)


@pytest.mark.parametrize("changes", [
    {"max_seqlen_q": 1},
    {"max_seqlen_k": 1},
    {"max_seqlen_k": None},
    {"batch_invariant": True},
    {"head_dim_v": None},
], ids=str)  # fmt: skip
def test_the_cpu_needs_no_workspace(changes):
    assert bytes_needed("cpu", **changes) == 0
    out = pagetile.paged_attention(**call(), workspace=torch.empty(0))
    assert same_bits(out, pagetile.paged_attention(**call()))


@pytest.mark.parametrize(
    "name", ["cpu", "cpu:0", torch.device("cpu"), torch.ones(1), np.ones(1), jnp.ones(1)], ids=str
)
def test_names_of_the_cpu(name):
    assert bytes_needed(name) == 0


def test_default_device():
    assert (bytes_needed(None) == 0) == (not _C.devices())


@needs_gpus(1)
def test_names_of_a_gpu():
    names = [0, "cuda", "cuda:0", torch.device("cuda", 0), torch.ones(1, device="cuda"), None]
    sizes = {bytes_needed(name) for name in names}
    assert len(sizes) == 1
    assert min(sizes) > 0


@needs_gpus(1)
def test_workspaces_grow_with_the_bounds():
    assert bytes_needed("cuda", max_seqlen_q=1) <= bytes_needed("cuda", max_seqlen_q=64)
    unknown = bytes_needed("cuda", max_seqlen_q=0, max_seqlen_k=None)
    assert bytes_needed("cuda", max_seqlen_q=2**31 - 1) <= unknown
    invariant = {"batch_invariant": True}
    longest = bytes_needed("cuda", max_seqlen_k=1 << 20, **invariant)
    assert bytes_needed("cuda", max_seqlen_k=1, **invariant) < longest


@needs_gpus(1)
def test_workspace_too_small():
    needed = bytes_needed("cuda")
    arguments = call("cuda")
    for size in (0, 16, needed - 1):
        workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        text = f"^paged_attention: workspace must have .*{needed} bytes.*got {size}"
        with pytest.raises(ValueError, match=text):
            pagetile.paged_attention(**arguments, workspace=workspace)
    torch.cuda.synchronize()
    assert (arguments["out"] == 7).all()


def test_read_only_workspace():
    memory = np.zeros(64, np.uint8)
    memory.flags.writeable = False
    with pytest.raises((TypeError, ValueError), match=r"^paged_attention: workspace .*read-only"):
        pagetile.paged_attention(**call(), workspace=memory)


NAMES = r"a tensor, 'cpu', 'cuda', 'cuda:<index>' or the index of a GPU"


@pytest.mark.parametrize(("changes", "text", "error"), [
    *((*x, ValueError) for x in WRONG if x[0].keys() <= SIZES.keys()),
    *((*x, TypeError) for x in NO_TYPES if x[0].keys() <= SIZES.keys()),
    *(({"device": name}, f"device must be {NAMES}, got {re.escape(repr(name))}", ValueError)
      for name in ("tpu", "cuda:x", "", -1, 1.5)),
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_wrong_sizes(changes, text, error):
    with pytest.raises(error, match=f"^workspace_size: {text}"):
        bytes_needed(**{"device": "cpu", **changes})
