"""pagetile as a backend of vLLM: its registration, a step's metadata, and the forward of a layer.

Most tests run over vLLM where it is installed and over stand-ins of its base classes elsewhere.
Those of vLLM's own code need it: tools/test_vllm.sh.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata as packages
from types import ModuleType, SimpleNamespace

import numpy as np
import pagetile
import pytest
import reference
import torch
import vllm_standins
from gpu import captured, needs_gpus

USES = ("paged_attention", "cache_write")

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(
    not HAS_VLLM, reason="vllm is not installed: tools/test_vllm.sh runs this"
)

PAGE_SIZE = 16
NUM_PAGES = 40
MAX_MODEL_LEN = 512
FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


@pytest.fixture(autouse=True, scope="module")
def vllm():
    with contextlib.nullcontext() if HAS_VLLM else vllm_standins.installed():
        yield


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What a machine without a GPU, or a test before this one, would change."""
    set_layout("NHD", monkeypatch)
    if HAS_VLLM and not torch.cuda.is_available():
        monkeypatch.setattr(module_of("vllm.utils.torch_utils"), "PIN_MEMORY", False)


def module_of(name: str) -> ModuleType:
    return importlib.import_module(name)


def backend_class():
    return module_of("pagetile.integrations.vllm.backend").PagetileBackend


# A step, as vLLM's scheduler makes one


@dataclass
class Step:
    """Sequences of (new tokens, all tokens), their pages, and vLLM's metadata for them."""

    common: object
    slots: list[int]  # of the new tokens
    history: list[int]  # slots of the earlier ones
    tables: np.ndarray

    @property
    def num_tokens(self) -> int:
        return len(self.slots)


def make_step(lengths, device="cpu", *, pad_seqs=0, pad_tokens=0, bound=None, **changes) -> Step:
    """Pages are dealt at random, never page 0, which is vLLM's page of nobody.

    bound: (longest query, longest sequence) that the scheduler knows; None is exact.
    """
    rng = np.random.default_rng(len(lengths) + sum(n for _, n in lengths))
    free = list(rng.permutation(np.arange(1, NUM_PAGES)))
    num_seqs = len(lengths) + pad_seqs
    tables = np.zeros((num_seqs, MAX_MODEL_LEN // PAGE_SIZE), np.int32)
    slots, history, starts = [], [], [0]
    for row, (new, total) in enumerate(lengths):
        for page in range(-(-total // PAGE_SIZE)):
            tables[row, page] = free.pop()
        pages = tables[row].astype(int).repeat(PAGE_SIZE)[:total]
        places = (pages * PAGE_SIZE + np.arange(total) % PAGE_SIZE).tolist()
        history += places[: total - new]
        slots += places[total - new :]
        starts.append(starts[-1] + new)
    starts += [starts[-1]] * pad_seqs
    seq_lens = torch.tensor([n for _, n in lengths] + [0] * pad_seqs, dtype=torch.int32)
    max_query_len, max_seq_len = bound or (max(n for n, _ in lengths), int(seq_lens.max()))
    starts_cpu = torch.tensor(starts, dtype=torch.int32)
    common = module_of("vllm.v1.attention.backend").CommonAttentionMetadata(
        **{
            "query_start_loc": starts_cpu.to(device),
            "query_start_loc_cpu": starts_cpu,
            "seq_lens": seq_lens.to(device),
            "seq_lens_cpu_upper_bound": seq_lens,
            "num_reqs": num_seqs,
            "num_actual_tokens": len(slots) + pad_tokens,
            "max_query_len": max_query_len,
            "max_seq_len": max_seq_len,
            "block_table_tensor": torch.from_numpy(tables).to(device),
            "slot_mapping": torch.tensor(slots + [-1] * pad_tokens, device=device),
            **changes,
        }
    )
    return Step(common, slots, history, tables)


def make_impl(num_heads=4, head_size=32, num_kv_heads=2, device="cpu", **changes):
    """By position, as vLLM's layers do."""
    options = {
        "alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto",
        "logits_soft_cap": None, "attn_type": "decoder", "kv_sharing_target_layer_name": None,
    }  # fmt: skip
    extra = {name: changes.pop(name) for name in ("sinks",) if name in changes}
    options.update(changes)
    with torch.device(device):  # as during vLLM's construction of a model
        return backend_class().get_impl_cls()(
            num_heads, head_size, head_size**-0.5, num_kv_heads, *options.values(), **extra
        )


def make_builder(*impls, device="cpu", mixed_graphs=False):
    """mixed_graphs: whole batches of any kind are captured, not of decoding alone."""
    layers = {f"layers.{i}": SimpleNamespace(impl=impl) for i, impl in enumerate(impls)}
    mixed_mode = SimpleNamespace(has_full_cudagraphs=lambda: mixed_graphs)
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
        compilation_config=SimpleNamespace(
            static_forward_context=layers,
            cudagraph_mode=SimpleNamespace(mixed_mode=lambda: mixed_mode),
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=16),
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
    )
    return backend_class().get_builder_cls()(
        SimpleNamespace(block_size=PAGE_SIZE), list(layers), config, torch.device(device)
    )


def make_cache(impl, dtype=torch.bfloat16, device="cpu") -> torch.Tensor:
    """As vLLM allocates it, and full of NaN."""
    backend = backend_class()
    shape = backend.get_kv_cache_shape(NUM_PAGES, PAGE_SIZE, impl.num_kv_heads, impl.head_size)
    order = backend.get_kv_cache_stride_order()
    memory = [shape[i] for i in order]
    if impl.kv_cache_dtype in FP8:
        cache = torch.full(memory, 0x7F, dtype=torch.uint8, device=device)
    else:
        cache = torch.full(memory, torch.nan, dtype=dtype, device=device)
    return cache.permute(*np.argsort(order).tolist())


class Problem:
    """Keys and values of all tokens of a step, queries of the new ones, and what must come out."""

    def __init__(self, impl, step, dtype=torch.bfloat16, device="cpu", scales=None, seed=0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.impl, self.step, self.device = impl, step, device
        self.dtype = str(dtype).removeprefix("torch.")
        self.cache_dtype = FP8.get(impl.kv_cache_dtype, self.dtype)
        one = torch.tensor(1.0)
        self.layer = SimpleNamespace(
            _k_scale=(scales[0] if scales else one).to(device),
            _v_scale=(scales[1] if scales else one).to(device),
            kv_sharing_target_layer_name=None,
        )

        def floats(rows, heads):
            shape = (rows, heads, impl.head_size)
            return torch.randn(shape, generator=generator).to(dtype).to(device)

        padded = step.common.num_actual_tokens
        self.q = floats(padded + 3, impl.num_heads)
        self.new = [floats(padded + 3, impl.num_kv_heads) for _ in "kv"]
        self.old = [floats(len(step.history), impl.num_kv_heads) for _ in "kv"]

    def write(self, cache) -> None:
        """The earlier tokens, then those of this step."""
        slots = torch.tensor(self.step.history, dtype=torch.int64, device=self.device)
        self.impl.do_kv_cache_update(self.layer, *self.old, cache, slots)
        self.impl.do_kv_cache_update(self.layer, *self.new, cache, self.step.common.slot_mapping)

    def forward(self, metadata, cache, output=None) -> torch.Tensor:
        output = torch.full_like(self.q, 7.0) if output is None else output
        result = self.impl.forward(self.layer, self.q, *self.new, cache, metadata, output)
        assert result is output
        return output

    def caches(self) -> list[np.ndarray]:
        """Logical caches in float64, scales multiplied in."""
        result = []
        scales = (self.layer._k_scale, self.layer._v_scale)
        for old, new, scale in zip(self.old, self.new, scales, strict=True):
            shape = (NUM_PAGES, PAGE_SIZE, self.impl.num_kv_heads, self.impl.head_size)
            cache = np.zeros(shape, reference.FORMATS[self.cache_dtype].raw)
            rows = np.concatenate([raw(old), raw(new)[: self.step.num_tokens]])
            reference.cache_write(
                cache, rows, self.step.history + self.step.slots, dtype=self.dtype,
                cache_dtype=self.cache_dtype, scale=scale.cpu().numpy(),
            )  # fmt: skip
            values = reference.decode(cache, self.cache_dtype)
            if self.cache_dtype in reference.FP8:
                values *= np.broadcast_to(scale.cpu().numpy(), self.impl.num_kv_heads)[:, None]
            result.append(values)
        return result

    def expected(self, round_dtype=None, **changes) -> np.ndarray:
        impl, common = self.impl, self.step.common
        num_seqs = len(self.step.tables)
        causal = changes.pop("causal", True)
        window = impl.sliding_window
        sides = (-1, -1) if window is None else (window - 1, 0 if causal else window - 1)
        slopes = impl.alibi_slopes
        options = {
            "block_table": self.step.tables,
            "seqused_k": common.seq_lens.tolist(),
            "cu_seqlens_q": common.query_start_loc.tolist(),
            "softmax_scale": impl.scale,
            "causal": causal,
            "window": sides,
            "softcap": impl.logits_soft_cap,
            "alibi_slopes": None if slopes is None else [slopes.tolist()] * num_seqs,
            "sinks": None if impl.sinks is None else impl.sinks.tolist(),
            **changes,
        }
        q = reference.decode(raw(self.q)[: self.step.num_tokens], self.dtype)
        return reference.attention(q, *self.caches(), round_dtype=round_dtype, **options)[0]

    def check(self, output, floor=1e-5, **changes) -> None:
        count = self.step.num_tokens
        reference.assert_close(
            output[:count].double().cpu().numpy(), self.expected(**changes),
            self.expected(round_dtype=self.dtype, **changes), floor=floor,
        )  # fmt: skip
        assert (output[count:] == 7).all(), "padding was written to"


def raw(tensor) -> np.ndarray:
    return tensor.cpu().contiguous().view(torch.int16).numpy().view(np.uint16)


STEPS = {
    "decode": [(1, 37), (1, 16), (1, 100)],
    "prefill": [(40, 40), (17, 17)],
    "chunked_prefill": [(20, 75), (16, 64)],
    "mixed": [(1, 60), (1, 33), (24, 90), (33, 33)],
    "drafts": [(4, 50), (4, 17), (4, 4)],
    "one_token": [(1, 1)],
}


# The forward of a layer


@pytest.mark.parametrize("name", STEPS)
def test_steps(name, device):
    impl = make_impl(device=device)
    step = make_step(STEPS[name], device)
    problem, cache = Problem(impl, step, device=device), make_cache(impl, device=device)
    problem.write(cache)
    metadata = make_builder(impl, device=device).build(0, step.common)
    problem.check(problem.forward(metadata, cache))


LAYERS = {
    "mqa": {"num_heads": 6, "num_kv_heads": 1},
    "mha_256": {"num_heads": 2, "num_kv_heads": 2, "head_size": 256},
    "gqa_128": {"num_heads": 8, "num_kv_heads": 2, "head_size": 128},
    "window": {"sliding_window": 20},
    "softcap": {"logits_soft_cap": 3.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": torch.tensor([1.5, -2.0, 0.0, 4.0]).bfloat16()},
    "all": {
        "sliding_window": 30, "logits_soft_cap": 5.0, "alibi_slopes": [0.5, 0.25, 0.125, 0.0625],
        "sinks": torch.tensor([1.5, -2.0, 0.0, 4.0]).bfloat16(), "kv_cache_dtype": "fp8",
    },
}  # fmt: skip


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, layout, device, monkeypatch):
    set_layout(layout, monkeypatch)
    options = dict(LAYERS[name])
    if "sinks" in options:
        options["sinks"] = options["sinks"].to(device)
    impl = make_impl(device=device, **options)
    step = make_step(STEPS["mixed"], device)
    problem, cache = Problem(impl, step, device=device), make_cache(impl, device=device)
    problem.write(cache)
    metadata = make_builder(impl, device=device).build(0, step.common)
    problem.check(problem.forward(metadata, cache))


def set_layout(layout, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    get_layout = module_of("vllm.v1.attention.backends.utils").get_kv_cache_layout
    getattr(get_layout, "cache_clear", lambda: None)()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("per_head", [False, True], ids=["per_tensor", "per_head"])
def test_fp8_caches_with_16_bit_queries(dtype, kv_cache_dtype, per_head, device):
    impl = make_impl(kv_cache_dtype=kv_cache_dtype, device=device)
    assert not impl.supports_quant_query_input  # or vLLM would quantise them
    scales = (torch.tensor([0.25, 0.5]), torch.tensor([2.0, 0.125]))
    if not per_head:
        scales = (torch.tensor(0.25), torch.tensor(2.0))
    step = make_step(STEPS["mixed"], device)
    problem = Problem(impl, step, dtype, device, scales)
    cache = make_cache(impl, dtype, device)
    problem.write(cache)
    metadata = make_builder(impl, device=device).build(0, step.common)
    problem.check(problem.forward(metadata, cache))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16"])
def test_scales_of_other_caches_are_ignored(kv_cache_dtype):
    """vLLM's layers have scales whatever their cache."""
    impl = make_impl(kv_cache_dtype=kv_cache_dtype)
    step = make_step(STEPS["mixed"])
    problem = Problem(impl, step, scales=(torch.tensor(0.5), torch.tensor(3.0)))
    cache = make_cache(impl)
    problem.write(cache)
    problem.check(problem.forward(make_builder(impl).build(0, step.common), cache))


def test_without_a_causal_mask_windows_reach_both_ways(device):
    impl = make_impl(sliding_window=12, device=device)
    step = make_step(STEPS["mixed"], device, causal=False)
    problem, cache = Problem(impl, step, device=device), make_cache(impl, device=device)
    problem.write(cache)
    metadata = make_builder(impl, device=device).build(0, step.common)
    problem.check(problem.forward(metadata, cache), causal=False)


@pytest.mark.parametrize("attn_type", ["encoder_only", "encoder"])
@pytest.mark.parametrize("window", [None, 9])
def test_encoders_attend_to_their_input(attn_type, window, device):
    impl = make_impl(attn_type=attn_type, sliding_window=window, device=device)
    step = make_step([(40, 40), (1, 1), (17, 17)], device, causal=False)
    problem = Problem(impl, step, device=device)
    cache = torch.tensor([])  # vLLM's, for a layer without one
    impl.do_kv_cache_update(problem.layer, *problem.new, cache, step.common.slot_mapping)
    metadata = make_builder(impl, device=device).build(0, step.common)
    assert metadata.plans == {}
    problem.check(problem.forward(metadata, cache), causal=False)


def test_cross_attention(device):
    """The cache holds the encoder's keys; a decoder's step may come without new ones."""
    impl = make_impl(attn_type="encoder_decoder", device=device)
    step = make_step([(1, 70), (5, 33)], device, causal=False)
    problem, cache = Problem(impl, step, device=device), make_cache(impl, device=device)
    problem.write(cache)
    metadata = make_builder(impl, device=device).build(0, step.common)
    output = torch.full_like(problem.q, 7.0)
    impl.forward(problem.layer, problem.q, None, None, cache, metadata, output)
    problem.check(output, causal=False)


def test_a_padded_batch(device):
    """With a full CUDA graph, vLLM pads tokens and sequences; nothing of that may be read."""
    impl = make_impl(device=device)
    step = make_step(STEPS["decode"], device, pad_seqs=5, pad_tokens=5)
    problem, cache = Problem(impl, step, device=device), make_cache(impl, device=device)
    problem.write(cache)
    assert cache[0].float().isnan().all()
    metadata = make_builder(impl, device=device).build(0, step.common)
    problem.check(problem.forward(metadata, cache))


def test_bounds_instead_of_lengths(device):
    """Asynchronous scheduling knows bounds of the lengths alone."""
    impl = make_impl(device=device, sliding_window=20)
    step = make_step(STEPS["mixed"], device, bound=(64, MAX_MODEL_LEN))
    problem, cache = Problem(impl, step, device=device), make_cache(impl, device=device)
    problem.write(cache)
    metadata = make_builder(impl, device=device).build(0, step.common)
    problem.check(problem.forward(metadata, cache))


def test_rows_of_a_fused_projection(device):
    """vLLM's q, k and v are slices of one row."""
    impl = make_impl(device=device)
    step = make_step(STEPS["mixed"], device)
    problem, cache = Problem(impl, step, device=device), make_cache(impl, device=device)
    fused = torch.cat([problem.q, *problem.new], 1)
    problem.q, *problem.new = fused.split([4, 2, 2], 1)
    assert not problem.q.is_contiguous()
    problem.write(cache)
    metadata = make_builder(impl, device=device).build(0, step.common)
    problem.check(problem.forward(metadata, cache, torch.full((len(fused), 4, 32), 7.0).to(fused)))


def test_batch_invariance(device, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    impl = make_impl(device=device)
    builder = make_builder(impl, device=device)
    step = make_step(STEPS["mixed"], device)
    problem, cache = Problem(impl, step, device=device), make_cache(impl, device=device)
    problem.write(cache)
    metadata = builder.build(0, step.common)
    assert all(plan.batch_invariant for plan in metadata.plans.values())
    together = problem.forward(metadata, cache)
    problem.check(together)

    begin, end = 2, 26  # the third sequence, alone
    common = step.common
    alone = builder.build(0, make_step([(24, 90)], device).common)
    alone.block_table = common.block_table_tensor[2:3]
    output = torch.empty_like(problem.q[begin:end])
    impl.forward(problem.layer, problem.q[begin:end], None, None, cache, alone, output)
    assert output.equal(together[begin:end])


def test_profiling_runs_give_zeros():
    impl = make_impl()
    output = torch.full((3, 4, 32), torch.nan)
    assert impl.forward(None, output, None, None, torch.tensor([]), None, output) is output
    assert (output == 0).all()


def test_a_layer_that_vllm_does_not_list_goes_without_a_plan():
    impl = make_impl()
    step = make_step(STEPS["mixed"])
    problem, cache = Problem(impl, step), make_cache(impl)
    problem.write(cache)
    metadata = make_builder().build(0, step.common)
    assert metadata.plans == {}
    assert metadata.workspace is None
    problem.check(problem.forward(metadata, cache))


# What is refused


@pytest.mark.parametrize("name", ["int8_per_token_head", "nvfp4", "turboquant_k8v4"])
def test_other_caches_are_refused(name):
    with pytest.raises(NotImplementedError, match=f"kv_cache_dtype '{name}' .*fp8_e5m2"):
        make_impl(kv_cache_dtype=name)


@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_quantised_outputs_are_refused(name):
    impl = make_impl()
    with pytest.raises(NotImplementedError, match="a quantised output is not supported"):
        impl.forward(None, *[None] * 5, torch.zeros(1), **{name: torch.ones(1)})


def test_masks_of_single_sequences_are_refused():
    step = make_step(STEPS["decode"], causal=torch.tensor([True, False, True]))
    with pytest.raises(NotImplementedError, match="causal sequences and others in one batch"):
        make_builder(make_impl()).build(0, step.common)


def test_reference_windows_are_refused():
    step = make_step(STEPS["decode"], rswa_prefix_lens=torch.tensor([1, 2, 3]))
    with pytest.raises(NotImplementedError, match="R-SWA"):
        make_builder(make_impl()).build(0, step.common)


# Plans, graphs and workspaces


def plan_of(impl, common, **bounds) -> pagetile.Plan:
    """As a caller of pagetile would make it."""
    sizes = {"max_seqlen_q": common.max_query_len, "max_seqlen_k": common.max_seq_len, **bounds}
    window = impl.sliding_window
    return pagetile.make_plan(
        seqused_k=common.seq_lens, cu_seqlens_q=common.query_start_loc,
        num_q_heads=impl.num_heads, num_kv_heads=impl.num_kv_heads, head_dim=impl.head_size,
        page_size=PAGE_SIZE, window=(-1, -1) if window is None else (window - 1, 0), **sizes,
    )  # fmt: skip


def same_schedule(plan, other) -> bool:
    return plan.buffer.equal(other.buffer) and repr(plan) == repr(other)


def test_any_batch_can_be_captured():
    builder = backend_class().get_builder_cls()
    support = module_of("vllm.v1.attention.backend").AttentionCGSupport
    assert builder._cudagraph_support is support.ALWAYS


def test_layers_share_a_plan_where_they_can(device):
    near = {"sliding_window": 20, "device": device}
    impls = [make_impl(**near), make_impl(**near, logits_soft_cap=3.0), make_impl(device=device)]
    step = make_step(STEPS["mixed"], device)
    metadata = make_builder(*impls, device=device).build(0, step.common)
    assert impls[0].calls == impls[1].calls != impls[2].calls
    assert list(metadata.plans) == [impls[0].calls, impls[2].calls]
    for impl in impls:
        assert same_schedule(metadata.plans[impl.calls], plan_of(impl, step.common))
        problem, cache = Problem(impl, step, device=device), make_cache(impl, device=device)
        problem.write(cache)
        problem.check(problem.forward(metadata, cache))


def test_layers_attend_with_the_steps_plan_and_workspace(monkeypatch):
    """Without them results would be right, too."""
    impl = make_impl()
    step = make_step(STEPS["mixed"])
    problem, cache = Problem(impl, step), make_cache(impl)
    problem.write(cache)
    metadata = make_builder(impl).build(0, step.common)
    module = module_of("pagetile.integrations.vllm.impl")
    seen = []
    real = module.paged_attention

    def spy(*args, **kwargs):
        seen.append((kwargs["plan"], kwargs["workspace"]))
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "paged_attention", spy)
    problem.check(problem.forward(metadata, cache))
    assert seen == [(metadata.plans[impl.calls], metadata.workspace)]
    assert seen[0][0] is not None
    assert seen[0][1] is not None


def test_captured_plans_are_renewed_in_place(device):
    impl = make_impl(device=device)
    builder = make_builder(impl, device=device)
    build = lambda lengths, **options: builder.build(  # noqa: E731
        0, make_step(lengths, device, **options).common
    ).plans[impl.calls]
    at_capture = make_step([(1, 1)] * 8, device, bound=(1, MAX_MODEL_LEN))
    plan = builder.build_for_cudagraph_capture(at_capture.common).plans[impl.calls]
    assert (plan.max_seqlen_q, plan.max_seqlen_k) == (1, MAX_MODEL_LEN)
    again = builder.build_for_cudagraph_capture(at_capture.common).plans[impl.calls]
    assert again is plan  # another graph of this size, say for LoRA

    address = plan.buffer.data_ptr()
    for lengths in ([(1, 37), (1, 100)], [(1, 200)] * 2 + [(1, 3)]):
        step = make_step(lengths, device, pad_seqs=8 - len(lengths), pad_tokens=8 - len(lengths))
        assert builder.build(0, step.common).plans[impl.calls] is plan
        bounds = {"max_seqlen_q": 1, "max_seqlen_k": MAX_MODEL_LEN}
        assert same_schedule(plan, plan_of(impl, step.common, **bounds))
    assert plan.buffer.data_ptr() == address

    kept = plan.buffer.clone()
    assert build([(1, 50)] * 7) is not plan  # another batch size
    assert build([(2, 50)] + [(1, 50)] * 7) is not plan  # a longer query: that runs in no graph
    assert plan.buffer.equal(kept)


@pytest.mark.parametrize("mixed_first", [True, False])
def test_graphs_of_one_batch_size_keep_their_plans_apart(mixed_first):
    """vLLM may capture 4 tokens of 4 sequences, and 4 sequences of one token each."""
    impl = make_impl()
    builder = make_builder(impl)
    bounds = [(4, MAX_MODEL_LEN), (1, MAX_MODEL_LEN)]
    plans = {}
    for bound in bounds if mixed_first else bounds[::-1]:
        step = make_step([(1, 1)] * 4, bound=bound)
        plans[bound[0]] = builder.build_for_cudagraph_capture(step.common).plans[impl.calls]
    assert plans[4] is not plans[1]

    step = make_step([(1, 90), (1, 20), (1, 64), (1, 5)])  # either graph may run
    assert builder.build(0, step.common).plans[impl.calls] is plans[1]
    for most in (1, 4):
        fresh = plan_of(impl, step.common, max_seqlen_q=most, max_seqlen_k=MAX_MODEL_LEN)
        assert same_schedule(plans[most], fresh)
    step = make_step([(3, 90), (1, 20)], pad_seqs=2)
    assert builder.build(0, step.common).plans[impl.calls] is plans[4]


def test_graphs_of_any_batch_are_captured_for_their_longest_query():
    """vLLM's newer runner captures 3, 3 and 4 tokens; 8, 1 and 1 replay that graph."""
    impl = make_impl()
    builder = make_builder(impl, mixed_graphs=True)
    step = make_step([(3, 3), (3, 3), (4, 4)])
    metadata = builder.build_for_cudagraph_capture(step.common)
    plan = metadata.plans[impl.calls]
    assert metadata.max_query_len == plan.max_seqlen_q == 10
    assert metadata.max_seq_len == plan.max_seqlen_k == MAX_MODEL_LEN
    step = make_step([(8, 60), (1, 90), (1, 5)])
    metadata = builder.build(0, step.common)
    assert metadata.plans[impl.calls] is plan
    assert metadata.max_query_len == 8
    fresh = plan_of(impl, step.common, max_seqlen_q=10, max_seqlen_k=MAX_MODEL_LEN)
    assert same_schedule(plan, fresh)


def test_lengths_beyond_those_captured_are_not_run():
    impl = make_impl()
    builder = make_builder(impl)
    builder.build_for_cudagraph_capture(make_step([(1, 1)] * 2).common)
    step = make_step([(1, 40)] * 2, bound=(1, MAX_MODEL_LEN + 1))
    with pytest.raises(ValueError, match="max_seqlen_k"):
        builder.build(0, step.common)


def test_drafts_go_without_a_plan():
    impl = make_impl()
    metadata = make_builder(impl).build(0, make_step(STEPS["decode"]).common, fast_build=True)
    assert metadata.plans == {}


def test_block_tables_of_another_group_get_a_plan_of_their_own():
    """vLLM would hand on another builder's metadata, with a plan that no graph here reads."""
    assert not backend_class().get_builder_cls().supports_update_block_table


def test_each_builder_owns_a_workspace(device):
    impls = [make_impl(device=device), make_impl(num_heads=8, head_size=128, device=device)]
    builders = [make_builder(*impls, device=device) for _ in range(2)]  # of two micro-batches
    step = make_step(STEPS["mixed"], device)
    first, other = (builder.build(0, step.common).workspace for builder in builders)
    assert builders[0].build(0, step.common).workspace is first
    assert first is not other
    assert first.device.type == device
    sizes = [
        pagetile.workspace_size(
            max_seqlen_q=0, max_seqlen_k=MAX_MODEL_LEN, num_q_heads=impl.num_heads,
            num_kv_heads=2, head_dim=impl.head_size, device=device,
        )
        for impl in impls
    ]  # fmt: skip
    assert first.nbytes == max(sizes)
    assert (first == 0).all()


def test_longer_texts_of_an_encoder_use_the_librarys_workspace():
    impl = make_impl(attn_type="encoder_decoder")
    step = make_step(STEPS["decode"], causal=False, bound=(1, MAX_MODEL_LEN + 1))
    assert make_builder(impl).build(0, step.common).workspace is None


@needs_gpus(1)
def test_a_graph_of_two_layers_is_replayed_with_other_batches():
    """Captured at vLLM's bounds over vLLM's buffers; each step only fills these and builds."""
    impls = [make_impl(device="cuda"), make_impl(device="cuda", sliding_window=20)]
    builder = make_builder(*impls, device="cuda", mixed_graphs=True)
    most = make_step([(1, 1)] * 8, "cuda").common
    buffers = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    caches = [make_cache(impl, device="cuda") for impl in impls]
    shown = [Problem(impl, make_step([(1, 1)] * 8, "cuda"), device="cuda") for impl in impls]
    outputs = [torch.full_like(problem.q, 7.0) for problem in shown]
    metadata = builder.build_for_cudagraph_capture(most)

    def layers():
        for problem, cache, output in zip(shown, caches, outputs, strict=True):
            slots = metadata.slot_mapping
            problem.impl.do_kv_cache_update(problem.layer, *problem.new, cache, slots)
            problem.forward(metadata, cache, output)

    graph = captured(layers)
    for number, lengths in enumerate(
        ([(1, 37), (1, 200)], [(1, 16)] * 8, [(3, 300), (1, 5), (2, 2)], [(8, 500)], [(1, 1)])
    ):
        step = make_step(lengths, "cuda", pad_seqs=8 - len(lengths))
        pad = 8 - step.num_tokens
        step = make_step(lengths, "cuda", pad_seqs=8 - len(lengths), pad_tokens=pad)
        for name in buffers:
            getattr(most, name).copy_(getattr(step.common, name))
            setattr(step.common, name, getattr(most, name))
        problems = []
        for impl, problem, cache, output in zip(impls, shown, caches, outputs, strict=True):
            now = Problem(impl, step, device="cuda", seed=number)
            cache.fill_(torch.nan)
            slots = torch.tensor(step.history, dtype=torch.int64, device="cuda")
            impl.do_kv_cache_update(now.layer, *now.old, cache, slots)
            problem.q.copy_(now.q)
            for mine, its in zip(problem.new, now.new, strict=True):
                mine.copy_(its)
            output.fill_(7.0)
            problems.append(now)
        assert builder.build(0, step.common).plans == metadata.plans
        graph.replay()
        for problem, output in zip(problems, outputs, strict=True):
            problem.check(output)


# Decode context parallelism: two ranks, one after the other


class Group:
    """vLLM's group of a rank: its all_gather gives all ranks' queries."""

    world_size = 2

    def __init__(self, rank, queries) -> None:
        self.rank_in_group = rank
        self.queries = queries

    def all_gather(self, query, dim):
        assert dim == 1
        assert query.equal(self.queries[self.rank_in_group])
        return torch.cat(self.queries, dim)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [[(1, 37), (1, 16)], [(20, 75), (1, 8), (5, 5)], [(1, 2)]],
    ids=["decode", "mixed", "a_rank_without_keys"],
)
def test_decode_context_parallelism(lengths, with_sinks, device, monkeypatch):
    """Each rank holds every other token; LSE are natural logarithms."""
    state = module_of("vllm.distributed.parallel_state")
    sinks = torch.tensor([1.5, -2.0, 0.0, 4.0], device=device) if with_sinks else None
    whole = make_impl(num_heads=4, num_kv_heads=1, device=device, sinks=sinks)
    step = make_step(lengths, device)
    problem = Problem(whole, step, device=device)
    count = step.num_tokens
    queries = [x.contiguous() for x in problem.q[:count].split(2, 1)]

    contexts, results = [], []
    for phase in range(2):  # what the ranks compute, then what they make of it
        for rank in range(2):
            group = Group(rank, queries)
            monkeypatch.setattr(state, "get_dcp_group", lambda group=group: group)
            own_sinks = None if sinks is None else sinks[2 * rank : 2 * rank + 2]
            impl = make_impl(num_heads=2, num_kv_heads=1, device=device, sinks=own_sinks)
            assert impl.can_return_lse_for_decode
            assert impl.lse_base_on_e
            builder = make_builder(impl, device=device)
            metadata = builder.build(0, step.common)
            local = [-(-(total - new - rank) // 2) for new, total in lengths]
            assert metadata.context_lens.tolist() == local
            assert metadata.context_lens.data_ptr() == builder._context_lens.data_ptr()
            cache = make_cache(impl, device=device)
            write_every_other(impl, problem, lengths, cache, rank)

            def combine(out, lse, group, return_lse, rank=rank, phase=phase):
                assert return_lse
                assert lse.shape == (count, 4)
                if phase == 0:
                    contexts.append((out.double().cpu().numpy(), lse.double().cpu().numpy().T))
                    return out[:, :2], lse[:, :2]
                heads = slice(2 * rank, 2 * rank + 2)
                merged, lses = reference.merge(*contexts[0], *contexts[1])
                return (
                    torch.from_numpy(merged[:, heads]).to(out),
                    torch.from_numpy(lses.T[:, heads]).to(lse),
                )

            impl._combine = combine
            output = torch.full_like(problem.q[:, :2], 7.0)
            new = [x[: count + 1] for x in problem.new]
            impl.forward(problem.layer, queries[rank], *new, cache, metadata, output)
            if phase == 1:
                results.append(output)
    most = max(float(x.abs().max()) for x in (problem.old[1], problem.new[1]))
    # Both parts, and what the ranks make of the one, are rounded to bf16.
    problem.check(torch.cat(results, 1), floor=3 * 2**-9 * most)


def write_every_other(impl, problem, lengths, cache, rank) -> None:
    """Rank r holds the tokens r, r + 2, ... of a sequence, in its pages from their beginning."""
    old, tables = 0, problem.step.tables
    for row, (new, total) in enumerate(lengths):
        held = torch.arange(total - new)[rank::2]
        if held.numel():
            local = torch.arange(held.numel())
            pages = torch.from_numpy(tables[row])[local // PAGE_SIZE]
            slots = (pages * PAGE_SIZE + local % PAGE_SIZE).long().to(problem.device)
            rows = [x[(old + held).to(problem.device)] for x in problem.old]
            impl.do_kv_cache_update(problem.layer, *rows, cache, slots)
        old += total - new


def test_ranks_do_not_meet_for_a_batch_of_new_sequences(device, monkeypatch):
    """All ranks must see that from what all ranks know; a capture always lets them meet."""
    state = module_of("vllm.distributed.parallel_state")
    step = make_step(STEPS["prefill"], device)
    problem = Problem(make_impl(device=device), step, device=device)
    group = Group(1, [])  # would fail to gather
    monkeypatch.setattr(state, "get_dcp_group", lambda: group)
    impl = make_impl(device=device)
    builder = make_builder(impl, device=device)
    metadata = builder.build(0, step.common)
    assert not metadata.has_context
    problem.impl = impl
    problem.check(problem.forward(metadata, make_cache(impl, device=device)))

    at_capture = builder.build_for_cudagraph_capture(step.common)
    assert at_capture.has_context
    plan = at_capture.plans[impl.calls]
    assert (plan.causal, plan.max_seqlen_k, plan.num_q_heads) == (False, MAX_MODEL_LEN // 2, 8)
    now = make_step([(40, 400), (17, 35)], device)  # the same numbers of tokens and sequences
    metadata = builder.build(0, now.common)
    assert metadata.has_context
    assert metadata.plans[impl.calls] is plan
    assert metadata.context_lens.tolist() == [180, 9]
    full = plan.buffer.clone()
    # A graph of this size would attend to the context of the step before, were it not told.
    metadata = builder.build(0, step.common)
    assert not metadata.has_context
    assert at_capture.context_lens.tolist() == [0, 0]
    assert not plan.buffer.equal(full)

    step.common.seq_lens_cpu_upper_bound = None  # nobody knows
    assert builder.build(0, step.common).has_context


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"sliding_window": 8}, "a sliding window"),
        ({"alibi_slopes": [0.5] * 4}, "ALiBi"),
        ({"attn_type": "encoder_decoder"}, "cross attention"),
    ],
)
def test_what_context_parallelism_refuses(options, what, monkeypatch):
    state = module_of("vllm.distributed.parallel_state")
    monkeypatch.setattr(state, "get_dcp_group", lambda: Group(0, []))
    with pytest.raises(NotImplementedError, match=f"{what} with decode context parallelism"):
        make_impl(**options)


@pytest.mark.parametrize(("way", "name"), [("ag_rs", "ag_rs"), ("a2a", "a2a")])
def test_ranks_combine_as_vllm_is_configured(way, name, monkeypatch):
    config = SimpleNamespace(parallel_config=SimpleNamespace(dcp_comm_backend=way))
    monkeypatch.setattr(module_of("vllm.config"), "get_current_vllm_config_or_none", lambda: config)
    combine = module_of("pagetile.integrations.vllm.impl")._dcp_combine()
    functions = {
        "ag_rs": module_of("vllm.v1.attention.ops.common").cp_lse_ag_out_rs,
        "a2a": module_of("vllm.v1.attention.ops.dcp_alltoall").dcp_a2a_lse_reduce,
    }
    assert combine is functions[name]


# What the backend says of itself


def test_head_sizes():
    supports = backend_class().supports_head_size
    assert all(map(supports, (8, 64, 72, 80, 96, 128, 192, 256)))
    assert not any(map(supports, (0, 4, 100, 264, 512)))


def test_what_every_architecture_has():
    backend = backend_class()
    assert backend.supports_sink()
    assert backend.supports_sliding_window()
    assert backend.supports_non_causal()
    assert backend.supports_per_head_quant_scales()
    assert backend.supports_batch_invariance()
    assert backend.supported_kv_cache_dtypes == [
        "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2",
    ]  # fmt: skip


def test_attention_types():
    supports = backend_class().supports_attn_type
    assert all(map(supports, ("decoder", "encoder", "encoder_only", "encoder_decoder")))
    assert not supports("other")


def test_pages_are_multiples_of_16():
    for arguments in ((), ("kv_cache_spec",)):  # some later releases pass the spec
        (size,) = backend_class().get_supported_kernel_block_sizes(*arguments)
        assert size.base == 16


def test_a_16_bit_cache_has_the_models_type():
    reason = lambda kv, dtype: backend_class().supports_combination(  # noqa: E731
        128, dtype, kv, 16, False, False, False, False, None
    )
    assert reason("bfloat16", torch.float16) == "a bfloat16 cache of a torch.float16 model"
    assert reason("float16", torch.bfloat16)
    for kv in (None, "auto", "bfloat16", "fp8", "fp8_e5m2"):
        assert reason(kv, torch.bfloat16) is None


@pytest.mark.parametrize(
    ("target", "yes", "no"),
    [
        ("80", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)], [(7, 5)]),
        ("86-real", [(8, 6), (8, 9)], [(8, 0), (9, 0)]),
        ("90-virtual", [(9, 0), (10, 0)], [(8, 9)]),
        ("90a-real", [(9, 0)], [(8, 9), (10, 0), (9, 1)]),
        ("120", [(12, 0), (12, 1)], [(10, 0), (10, 3)]),
    ],
)
def test_capabilities_are_those_of_the_build(target, yes, no, monkeypatch):
    families = {"cpu": {"targets": ["x86_64_v4"]}, "sm80": {"targets": [target]}}
    monkeypatch.setattr(pagetile._C, "build_info", lambda: {"families": families})
    supports = lambda major, minor: backend_class().supports_compute_capability(  # noqa: E731
        SimpleNamespace(major=major, minor=minor)
    )
    assert all(supports(*capability) for capability in yes)
    assert not any(supports(*capability) for capability in no)


def test_a_build_without_cuda_supports_no_gpu():
    supports = backend_class().supports_compute_capability(SimpleNamespace(major=9, minor=0))
    assert supports == (len(pagetile._C.build_info()["families"]) > 1)


def test_memory_orders(monkeypatch):
    backend = backend_class()
    shape = backend.get_kv_cache_shape(5, 16, 2, 64, "fp8")
    assert shape == (5, 2, 16, 128)
    layers = (9, *shape)
    for layout, memory, memory_of_layers in (
        ("NHD", (5, 16, 2, 128), (5, 9, 16, 2, 128)),
        ("HND", (5, 2, 16, 128), (5, 2, 9, 16, 128)),
    ):
        set_layout(layout, monkeypatch)
        assert tuple(shape[i] for i in backend.get_kv_cache_stride_order()) == memory
        order = backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
        assert tuple(layers[i] for i in order) == memory_of_layers
    utilities = module_of("vllm.v1.attention.backends.utils")
    monkeypatch.setattr(utilities, "get_kv_cache_layout", lambda: "DHN")
    with pytest.raises(ValueError, match="unknown KV cache layout 'DHN'"):
        backend.get_kv_cache_stride_order()


def test_hooks_of_later_releases():
    backend = backend_class()
    spec = object()
    assert backend.supported_kv_cache_layouts() is None
    assert backend.customize_spec(spec) is spec
    assert backend.supports_device_cpu_query_lens_mismatch() is False


def test_any_memory_order_of_later_releases(device):
    """Layers may stand anywhere in [L, B, H, N, C]."""
    impl = make_impl(device=device)
    step = make_step(STEPS["mixed"], device)
    sizes = {"L": 3, "B": NUM_PAGES, "H": 2, "N": PAGE_SIZE, "C": 64}
    for layout in ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"):
        memory = torch.full([sizes[c] for c in layout], torch.nan, device=device).bfloat16()
        cache = memory.permute([layout.index(c) for c in "LBHNC"])[1]
        problem = Problem(impl, step, device=device)
        problem.write(cache)
        metadata = make_builder(impl, device=device).build(0, step.common)
        problem.check(problem.forward(metadata, cache))


# Registration


@pytest.fixture
def registry(monkeypatch):
    module = module_of("vllm.v1.attention.backends.registry")
    overridden = dict(module._ATTN_OVERRIDES)
    module._ATTN_OVERRIDES.clear()
    yield module.AttentionBackendEnum
    module._ATTN_OVERRIDES.clear()
    module._ATTN_OVERRIDES.update(overridden)


def integration() -> ModuleType:
    return module_of("pagetile.integrations.vllm")


def test_registration_is_for_custom_alone(registry, monkeypatch):
    for value in (None, "", "0"):
        if value is None:
            monkeypatch.delenv(integration().OVERRIDE, raising=False)
        else:
            monkeypatch.setenv(integration().OVERRIDE, value)
        integration().register()
        integration().register()  # in each of vLLM's processes, maybe more than once
        path = "pagetile.integrations.vllm.backend.PagetileBackend"
        assert registry.CUSTOM.get_path() == path
        assert not registry.FLASH_ATTN.is_overridden()


def test_an_environment_switch_overrides_flash_attn(registry, monkeypatch):
    monkeypatch.setenv(integration().OVERRIDE, "1")
    integration().register()
    backend = module_of("pagetile.integrations.vllm.backend")
    assert registry.FLASH_ATTN.get_path() == f"{backend.__name__}.PagetileFlashAttnBackend"
    # vLLM looks the member up by the name that the class gives.
    assert registry[backend.PagetileFlashAttnBackend.get_name()] is registry.FLASH_ATTN
    assert registry[backend.PagetileBackend.get_name()] is registry.CUSTOM


def test_another_plugins_custom_stays(registry, caplog):
    register = module_of("vllm.v1.attention.backends.registry").register_backend
    register(registry.CUSTOM, "other.Backend")
    with caplog.at_level(logging.WARNING):
        integration().register()
    assert registry.CUSTOM.get_path() == "other.Backend"
    assert "already other.Backend" in caplog.text


def test_the_wheel_has_the_entry_point():
    (entry,) = packages.entry_points(group="vllm.general_plugins", name="pagetile")
    assert entry.value == "pagetile.integrations.vllm:register"
    assert entry.load() is integration().register


def test_import_takes_nothing_of_vllm():
    code = (
        "import pagetile.integrations.vllm, sys\n"
        "print([n for n in sys.modules if n.split('.')[0] in ('vllm', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# vLLM itself


@pytest.fixture
def cuda_platform(monkeypatch):
    """vLLM's choice for an H200. Its compiled operators, which no test calls, need a driver."""
    try:
        importlib.import_module("vllm._C_stable_libtorch")
    except ImportError:
        monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("ops"))
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    platform = type("H200", (CudaPlatformBase,), {
        "get_device_capability": classmethod(lambda cls, device_id=0: DeviceCapability(9, 0)),
    })  # fmt: skip
    return platform


@pytest.fixture
def hopper_build(monkeypatch):
    families = {"sm80": {"targets": ["80"]}, "sm90": {"targets": ["90a-real"]}}
    monkeypatch.setattr(pagetile._C, "build_info", lambda: {"families": families})


def selector(**changes):
    from vllm.v1.attention.selector import AttentionSelectorConfig

    options = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto"}
    return AttentionSelectorConfig(**{"block_size": 16, **options, **changes})


@needs_vllm
@pytest.mark.parametrize(
    "options",
    [
        {}, {"kv_cache_dtype": "fp8_e5m2"}, {"dtype": torch.float16, "kv_cache_dtype": "fp8"},
        {"has_sink": True, "has_sliding_window": True}, {"block_size": None, "head_size": 72},
        {"use_per_head_quant_scales": True, "use_batch_invariant": True, "use_kv_connector": True},
        {"attn_type": "encoder_only"}, {"attn_type": "encoder_decoder"}, {"use_non_causal": True},
    ],
)  # fmt: skip
def test_vllm_chooses_custom_by_name(options, registry, cuda_platform, hopper_build):
    integration().register()
    path = cuda_platform.get_attn_backend_cls(registry.CUSTOM, selector(**options))
    assert path == "pagetile.integrations.vllm.backend.PagetileBackend"


@needs_vllm
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"head_size": 512}, "head_size"), ({"use_mla": True}, "MLA"),
        ({"use_sparse": True}, "sparse"), ({"block_size": 8}, "block_size"),
        ({"dtype": torch.float32}, "dtype"), ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
        ({"use_mm_prefix": True}, "multimodal"), ({"use_pcp": True}, "PCP"),
        ({"kv_cache_dtype": "float16"}, "a float16 cache of a torch.bfloat16 model"),
    ],
)  # fmt: skip
def test_vllm_hears_what_is_not_supported(options, reason, registry, cuda_platform, hopper_build):
    integration().register()
    with pytest.raises(ValueError, match=reason):
        cuda_platform.get_attn_backend_cls(registry.CUSTOM, selector(**options))


@needs_vllm
@pytest.mark.skipif(len(pagetile._C.build_info()["families"]) > 1, reason="has CUDA kernels")
def test_vllm_hears_that_no_kernels_are_built(registry, cuda_platform):
    integration().register()
    with pytest.raises(ValueError, match="compute capability not supported"):
        cuda_platform.get_attn_backend_cls(registry.CUSTOM, selector())


@needs_vllm
def test_vllm_chooses_the_override_by_itself(registry, cuda_platform, hopper_build, monkeypatch):
    monkeypatch.setenv(integration().OVERRIDE, "1")
    integration().register()
    path = cuda_platform.get_attn_backend_cls(None, selector())
    assert path == "pagetile.integrations.vllm.backend.PagetileFlashAttnBackend"


@needs_vllm
def test_vllm_finds_the_plugin(registry, monkeypatch):
    plugins = module_of("vllm.plugins")
    for allowed, found in (("pagetile", True), ("other", False)):
        monkeypatch.setattr(plugins, "plugins_loaded", False)
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
        plugins.load_general_plugins()
        assert registry.CUSTOM.is_overridden() == found
        registry.CUSTOM.clear_override()


@pytest.fixture
def vllm_config(tmp_path):
    """Of a tiny Llama that is never loaded."""
    from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config

    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64,
        "num_hidden_layers": 1, "intermediate_size": 64, "max_position_embeddings": MAX_MODEL_LEN,
        "torch_dtype": "bfloat16",
    }))  # fmt: skip
    model = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16")
    config = VllmConfig(model_config=model, device_config=DeviceConfig(device="cpu"))
    config.cache_config.block_size = PAGE_SIZE
    with set_current_vllm_config(config):
        yield config


@needs_vllm
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("name", STEPS)
def test_a_layer_of_vllm(name, kv_cache_dtype, window, layout, vllm_config, monkeypatch):
    """vLLM's Attention, its cache spec, its allocation of the cache, its builder, its forward."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.worker.gpu.attn_utils import _reshape_kv_cache
    from vllm.v1.worker.utils import AttentionGroup

    set_layout(layout, monkeypatch)
    monkeypatch.setattr(vllm_config.cache_config, "cache_dtype", kv_cache_dtype)
    integration().register()
    layer_name = "model.layers.0.self_attn.attn"
    layer = Attention(
        4, 32, 32**-0.5, 2, cache_config=vllm_config.cache_config, prefix=layer_name,
        per_layer_sliding_window=window, attn_backend=backend_class(),
    )  # fmt: skip
    layer._k_scale.fill_(0.5)
    layer._v_scale.fill_(0.25)
    assert layer.query_quant is None
    spec = layer.get_kv_cache_spec(vllm_config)
    group = AttentionGroup(layer.get_attn_backend(), [layer_name], spec, 0)
    group.create_metadata_builders(vllm_config, torch.device("cpu"), PAGE_SIZE)

    memory = torch.full((NUM_PAGES * spec.page_size_bytes,), -1, dtype=torch.int8)  # NaN
    caches = _reshape_kv_cache([group], {layer_name: memory}, kv_cache_dtype, [PAGE_SIZE], {})
    layer.kv_cache = caches[layer_name]
    assert layer.kv_cache.is_contiguous() == (layout == "HND")

    step = make_step(STEPS[name])
    scales = (torch.tensor(0.5), torch.tensor(0.25))
    problem = Problem(layer.impl, step, scales=scales)
    problem.q, *problem.new = (x[: step.num_tokens] for x in (problem.q, *problem.new))
    history = torch.tensor(step.history, dtype=torch.int64)
    layer.impl.do_kv_cache_update(layer, *problem.old, layer.kv_cache, history)

    metadata = group.get_metadata_builder().build(0, step.common)
    assert list(metadata.plans) == [layer.impl.calls]
    slots = {layer_name: step.common.slot_mapping}
    with set_forward_context({layer_name: metadata}, vllm_config, slot_mapping=slots):
        output = layer(*(x.flatten(1) for x in (problem.q, *problem.new)))
    problem.check(output.view(-1, 4, 32))


@needs_vllm
@pytest.mark.parametrize(
    ("mode", "longest"), [("FULL", 8), ("FULL_DECODE_ONLY", 2), ("FULL_AND_PIECEWISE", 2)]
)
def test_vllms_modes_of_capture(mode, longest):
    from vllm.config import CUDAGraphMode

    impl = make_impl()
    builder = make_builder(impl)
    builder.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
    step = make_step([(2, 2)] * 4)
    assert builder.build_for_cudagraph_capture(step.common).max_query_len == longest


@needs_vllm
def test_vllms_variants_of_a_backend():
    """vLLM makes subclasses for encoders, cross attention, chunks and shared caches."""
    from vllm.model_executor.layers.attention import (
        chunked_local_attention,
        cross_attention,
        encoder_only_attention,
    )
    from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

    backend = backend_class()

    def build(variant, step, capture=False, **impl_options):
        impl = variant.get_impl_cls()(4, 32, 1.0, 2, **impl_options)
        layers = {"layer": SimpleNamespace(impl=impl)}
        plain = make_builder(impl)
        plain.vllm_config.compilation_config.static_forward_context = layers
        builder = variant.get_builder_cls()(
            SimpleNamespace(block_size=PAGE_SIZE), ["layer"], plain.vllm_config, plain.device
        )
        if capture:
            return impl, builder.build_for_cudagraph_capture(step.common)
        return impl, builder.build(0, step.common)

    encoder = encoder_only_attention.create_encoder_only_attention_backend(backend)
    _, metadata = build(encoder, make_step(STEPS["prefill"]), attn_type="encoder_only")
    assert metadata.causal is False

    cross = cross_attention.create_cross_attention_backend(backend)
    lengths = torch.tensor([50, 33, 20], dtype=torch.int32)
    encoded = {"encoder_seq_lens": lengths, "encoder_seq_lens_cpu": lengths.numpy()}
    for capture in (False, True):
        step = make_step(STEPS["decode"], **encoded)
        impl, metadata = build(cross, step, capture, attn_type="encoder_decoder")
        assert metadata.causal is False
        assert metadata.seq_lens.equal(lengths)
        assert not metadata.plans[impl.calls].causal
    problem, cache = Problem(impl, step), make_cache(impl)
    problem.write(cache)
    metadata.slot_mapping = step.common.slot_mapping[:0]  # its impl writes, too
    cache_lens = torch.minimum(lengths, step.common.seq_lens)
    metadata.seq_lens = cache_lens
    expected = {"causal": False, "seqused_k": cache_lens.tolist(), "softmax_scale": 1.0}
    problem.check(problem.forward(metadata, cache), **expected)

    chunked = chunked_local_attention.create_chunked_local_attention_backend(backend, 32)
    step = make_step(STEPS["mixed"])
    impl, metadata = build(chunked, step)
    assert metadata.seq_lens.max() <= 32
    problem, cache = Problem(impl, step), make_cache(impl)
    problem.write(cache)
    output = problem.forward(metadata, cache)
    last = 90 % 32 or 32  # keys of the last chunk of the third sequence
    alone = make_step([(1, last)])
    metadata_alone = make_builder(impl).build(0, alone.common)
    metadata_alone.block_table = step.common.block_table_tensor[2:3, 64 // PAGE_SIZE :]
    row = torch.empty_like(problem.q[25:26])
    impl.forward(problem.layer, problem.q[25:26], None, None, cache, metadata_alone, row)
    torch.testing.assert_close(output[25:26], row)

    fast = create_fast_prefill_custom_backend("FastPrefill_", backend)
    step = make_step(STEPS["prefill"])
    step.common.logits_indices_padded = torch.tensor([39, 56])
    step.common.num_logits_indices = 2
    impl, metadata = build(fast, step)
    assert metadata.max_query_len == 1
    assert impl.calls in metadata.plans
