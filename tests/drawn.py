"""Whole calls drawn at random, for fuzz.py: the problem and all that may be said with it.

A draw prints as what makes it again. `check` compares with the reference and seeks damage.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pagetile
import reference
import torch
from cases import Case, WriteCase
from gpu import prefill_by
from hypothesis import strategies as st
from problem import POISON, Buffer, Problem, WriteProblem, check_pair, rows_layout
from test_attention_gpu import Attention, raw
from test_copy_pages import Pools, copy, problems
from test_properties import DTYPES, attention_cases, head_dims, write_cases

INT32 = st.integers(-(2**31), 2**31 - 1)
MARGIN = 256  # bytes around a workspace; keeps its alignment


def literal(draw) -> str:
    """The constructor call, without what is as usual."""
    if not dataclasses.is_dataclass(draw):
        return repr(draw)
    values = [(field, getattr(draw, field.name)) for field in dataclasses.fields(draw)]
    given = [f"{f.name}={literal(x)}" for f, x in values if x is not f.default]
    return f"{type(draw).__name__}({', '.join(given)})"


def kernels(device: str):
    """Who serves long queries. The CPU has one kernel."""
    return st.sampled_from(["best", "portable", "none"] if device == "cuda" else ["best"])


def cases(device: str, **fixed):
    """GPUs take no float32 queries."""
    drawn = attention_cases(**fixed)
    return drawn.filter(lambda case: case.dtype != "float32") if device == "cuda" else drawn


# Attention


@dataclass(frozen=True)
class Attend:
    """One paged_attention call, made twice."""

    case: Case
    kernel: str = "best"  # see kernels
    large: bool = False  # the reference of test_attention_gpu.py, which is made for long queries
    slack: int | None = 0  # of both bounds above what they bound; None: they are unknown
    plan: str | None = None  # own; other: made for other KV lengths
    workspace: bool = False
    pdl: bool = False
    validate: bool = False

    def check(self, device: str) -> None:
        problem = (Attention if self.large else Problem)(self.case, device)
        kept = problem.memory.clone() if self.large else None
        problem.arguments.update(self.bounds())
        with prefill_by(self.kernel):
            memory, more = self.options(problem, device)
            first = problem.run(**more)
            problem.check(*first)
            first = problem.used(*first)
            second = problem.used(*problem.run(**more))
        for a, b in zip(first, second, strict=True):
            assert a.tobytes() == b.tobytes(), "the second call has other bits"
        assert (memory[:MARGIN] == 0xAB).all(), "written before the workspace"
        assert (memory[len(memory) - MARGIN :] == 0xAB).all(), "written behind the workspace"
        if self.large:
            assert torch.equal(raw(problem.memory), raw(kept)), "a cache was written"
            check_gaps(problem)

    def bounds(self) -> dict:
        if self.slack is None:
            return {"max_seqlen_q": 0, "max_seqlen_k": None}
        return {
            "max_seqlen_q": max(self.case.q_lens) + self.slack,
            "max_seqlen_k": max(1, max(self.case.kv_lens) + self.slack),
        }

    def options(self, problem, device: str):
        """(the memory that holds the workspace, arguments of the call)"""
        case, more = self.case, {"pdl": self.pdl, "validate": self.validate}
        sizes = {
            "num_q_heads": case.heads[0],
            "num_kv_heads": case.heads[1],
            "head_dim": case.head_dim[0],
            "head_dim_v": case.head_dim[1],
            "batch_invariant": case.batch_invariant,
            **self.bounds(),
        }
        size = pagetile.workspace_size(device=device, **sizes) if self.workspace else 0
        memory = torch.full((size + 2 * MARGIN,), 0xAB, dtype=torch.uint8, device=device)
        if self.workspace:
            more["workspace"] = memory[MARGIN : MARGIN + size].zero_()
        if self.plan:
            lens = problem.arguments["seqused_k"]
            more["plan"] = pagetile.make_plan(
                seqused_k=lens if self.plan == "own" else lens.flip(0),
                cu_seqlens_q=problem.arguments["cu_seqlens_q"],
                page_size=case.page_size, causal=case.causal, window=case.window,
                num_splits=case.num_splits, **sizes,
            )  # fmt: skip
        return memory, more


def check_gaps(problem: Attention) -> None:
    """Of a large problem's out, nothing but the batch's rows is written."""
    outside = torch.ones_like(problem.out_memory, dtype=torch.bool)
    rows = slice(problem.cu[0], problem.cu[-1])
    outside.as_strided(problem.out_shape, problem.out_strides)[rows] = False
    assert (raw(problem.out_memory)[outside] == -1).all(), "out: written outside the batch's rows"


@st.composite
def attends(draw, device: str) -> Attend:
    pick = lambda *options: draw(st.sampled_from(options))  # noqa: E731
    storage, head_dim = draw(head_dims() | head_dims(256))
    fixed, large = {"storage": storage, "head_dim": head_dim}, draw(st.integers(0, 3)) == 3
    if large:  # decodes, chunks and prompts in one batch
        kv_heads, group = draw(st.integers(1, 2)), pick(1, 2, 3, 4, 5, 7, 8, 12, 16, 64, 130)
        longest = min(300, 1200 // group)
        lens = st.tuples(st.integers(0, 5) | st.integers(0, longest), st.integers(0, 600))
        lens = draw(st.lists(lens, min_size=1, max_size=6))
        fixed["q_lens"], fixed["kv_lens"] = zip(*lens, strict=True)
        fixed["heads"] = (kv_heads * group, kv_heads)
        fixed["page_size"] = pick(1, 7, 8, 16, 48, 64, 128)
    case = draw(cases(device, **fixed))
    plan, workspace = pick(None, "own", "other"), draw(st.booleans())
    slack = pick(0, 1, 100, 100_000)
    if not (case.batch_invariant and (plan or workspace)):  # these need a bound
        slack = pick(slack, None)
    return Attend(case, draw(kernels(device)), large, slack, plan, workspace, draw(st.booleans()),
                  draw(st.booleans()))  # fmt: skip


# Attention with garbage for metadata


@dataclass(frozen=True)
class Garbage:
    """A paged_attention call whose metadata is wrong; None leaves what is right.

    With validate, an error names an argument that is wrong. Without, nothing is touched that the
    call may not touch, and the results are those of the metadata as design.md clamps it, but for
    rows that two sequences share, and where the bounds lie.
    """

    case: Case
    kernel: str = "best"
    cu_seqlens_q: tuple[int, ...] | None = None
    seqused_k: tuple[int, ...] | None = None
    pages: tuple[tuple[int, int, int], ...] = ()  # (sequence, entry, page): replaced in the table
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    plan: bool = False
    pdl: bool = False

    def check(self, device: str) -> None:
        problem = Problem(self.case, device)
        # Any page may come into use, so poison would come into results.
        problem.refill_unused(reference.encode(np.array([0.5, -1.0, 2.0]), self.case.kv))
        changes = self.replace(problem, device)
        with prefill_by(self.kernel):
            self.check_validate(problem, changes)
            if self.plan:
                changes["plan"] = self.make_plan(problem, changes)
            out, lse = problem.run(validate=False, pdl=self.pdl, **changes)
        self.check_results(problem, out, lse)

    def replace(self, problem: Problem, device: str) -> dict:
        """The arguments that change; the problem's own copies change as well."""
        for page in self.pages:
            problem.table[page[0] % len(problem.table), page[1] % problem.table.shape[1]] = page[2]
        if self.cu_seqlens_q is not None:
            problem.cu = np.array(self.cu_seqlens_q, np.int32)
        if self.seqused_k is not None:
            problem.lens = np.array(self.seqused_k, np.int64)
        on_device = lambda x: torch.from_numpy(x.astype(np.int32)).to(device)  # noqa: E731
        width = problem.table.shape[1]
        lengths = {"max_seqlen_q": self.max_seqlen_q, "max_seqlen_k": self.max_seqlen_k}
        return {
            "block_table": on_device(problem.table_raw)[:, :width],
            "cu_seqlens_q": on_device(problem.cu),
            "seqused_k": on_device(problem.lens),
            **{name: x for name, x in lengths.items() if x is not None},
        }

    def wrong(self, problem: Problem) -> set[str]:
        """The arguments that are."""
        names, (num_pages, page_size) = set(), problem.caches.shapes[0][:2]
        cu, lens, table = problem.cu.astype(np.int64), problem.lens, problem.table
        if cu[0] < 0 or cu[-1] > problem.rows or (np.diff(cu) < 0).any():
            names.add("cu_seqlens_q")
        if ((lens < 0) | (lens > table.shape[1] * page_size)).any():
            names.add("seqused_k")
        in_use = np.arange(table.shape[1]) < -(-lens[:, None] // page_size)
        if (in_use & ((table < 0) | (table >= num_pages))).any():
            names.add("block_table")
        bound = max(self.case.q_lens) if self.max_seqlen_q is None else self.max_seqlen_q
        if bound > 0 and np.diff(cu).max() > bound:  # 0 is unknown
            names.add("max_seqlen_q")
        if self.max_seqlen_k and lens.max() > self.max_seqlen_k:
            names.add("max_seqlen_k")
        return names

    def check_validate(self, problem: Problem, changes: dict) -> None:
        wrong = self.wrong(problem)
        try:
            problem.run(validate=True, **changes)
        except ValueError as error:
            assert wrong, f"refused, though nothing is wrong: {error}"
            assert str(error).startswith("paged_attention: "), error
            assert any(name in str(error) for name in wrong), f"{wrong}, but it says: {error}"
            problem.check_untouched(np.zeros(problem.rows, bool))
        else:
            assert not wrong, f"validate lets pass: {wrong}"

    def make_plan(self, problem: Problem, changes: dict):
        names = ("max_seqlen_q", "max_seqlen_k", "seqused_k", "cu_seqlens_q", "causal", "window",
                 "num_splits", "batch_invariant")  # fmt: skip
        call = {"max_seqlen_k": None, **problem.arguments, **changes}
        return pagetile.make_plan(
            num_q_heads=self.case.heads[0], num_kv_heads=self.case.heads[1],
            head_dim=self.case.head_dim[0], head_dim_v=self.case.head_dim[1],
            page_size=self.case.page_size, **{name: call[name] for name in names},
        )  # fmt: skip

    def check_results(self, problem: Problem, out, lse) -> None:
        lying = self.wrong(problem) & {"max_seqlen_q", "max_seqlen_k"}
        num_pages, page_size = problem.caches.shapes[0][:2]
        problem.cu = problem.cu.clip(0, problem.rows)
        problem.lens = problem.lens.clip(0, problem.table.shape[1] * page_size)
        exists = (problem.table >= 0) & (problem.table < num_pages)
        problem.table = np.where(exists, problem.table, num_pages)
        sharers = np.zeros(problem.rows, int)
        for begin, end in zip(problem.cu[:-1], problem.cu[1:], strict=True):
            sharers[begin:end] += 1
        problem.check_untouched(sharers > 0)
        if lying:
            return
        mine = sharers == 1
        pairs = ((out.double().cpu().numpy(), lse.double().cpu().numpy()), problem.expected,
                 problem.low_precision)  # fmt: skip
        own, expected, low = ((rows[mine], sums[:, mine]) for rows, sums in pairs)
        check_pair(*own, expected, low)


@st.composite
def garbages(draw, device: str) -> Garbage:
    case = draw(cases(device, first_row=0, spare_rows=0))
    batch, rows = len(case.q_lens), sum(case.q_lens)
    number = st.integers(-2, rows + 2) | st.integers(0, 100) | INT32
    numbers = lambda n: draw(st.none() | st.tuples(*[number] * n))  # noqa: E731
    pages = st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(-1, 100) | INT32)
    bound_k = st.integers(1, 100) | st.just(100_000)
    return Garbage(
        case, draw(kernels(device)), numbers(batch + 1), numbers(batch),
        tuple(draw(st.lists(pages, max_size=4))),
        draw(st.none() | st.integers(0, 20)),
        draw(bound_k if case.batch_invariant else bound_k | st.none()),  # a plan would need it
        draw(st.booleans()), draw(st.booleans()),
    )  # fmt: skip


# Writes


@dataclass(frozen=True)
class Write:
    """One cache_write."""

    case: WriteCase

    def check(self, device: str) -> None:
        problem = WriteProblem(self.case, device)
        problem.run()
        problem.check()


def writes(device: str):
    return write_cases().map(Write)


@dataclass(frozen=True)
class Copy:
    """One copy_pages. A side is (shape, strides, offsets of the caches), see Pools."""

    sides: tuple
    src_pages: tuple[int, ...]
    dst_pages: tuple[int, ...]
    dtype: str
    page_dtype: str
    seed: int = 0

    def check(self, device: str) -> None:
        src, dst = (Pools(self.dtype, *s, self.seed + i, device) for i, s in enumerate(self.sides))
        copy(src, dst, self.src_pages, self.dst_pages, device, self.page_dtype)


def copies(device: str):
    return st.builds(lambda problem, seed: Copy(*problem, seed), problems(), st.integers(0, 2**16))


# Merges


@dataclass(frozen=True)
class Merge:
    """One merge_states. The layouts are problem.rows_layout's; rows of lse have lse_pad more."""

    shape: tuple[int, int, int]
    dtype: str = "bfloat16"
    empty: float = 0.0  # of the rows of each side, so many saw no key
    layouts: tuple[str, str] = ("dense", "dense")
    lse_pad: int = 0
    out: str = "new"  # new, a (in place), b, or a layout
    seed: int = 0

    def check(self, device: str) -> None:
        rng = np.random.default_rng(self.seed)
        sides = [self.side(kind, rng) for kind in self.layouts]
        result = []  # (buffer, place) of out and lse
        if self.out in ("a", "b"):
            result = sides["ab".index(self.out)][:2]
        elif self.out != "new":
            result = self.memory(self.out, rng)
        buffers = [buffer for side in sides for buffer, _ in side[:2]]
        buffers += [buffer for buffer, _ in result if all(buffer is not b for b in buffers)]
        for buffer in buffers:
            buffer.send(device)
        tensors = [buffer.tensor(*place) for side in sides for buffer, place in side[:2]]
        names = zip(("out", "lse"), result, strict=False)
        given = {name: buffer.tensor(*place) for name, (buffer, place) in names}
        out, lse = pagetile.merge_states(*tensors, **given)

        values = [x for side in sides for x in side[2:]]
        expected, expected_lse = reference.merge(*values)
        out, lse = (x.double().cpu().numpy() for x in (out, lse))
        reference.assert_close(out, expected, reference.round_to(expected, self.dtype))
        reference.assert_close(lse, expected_lse, expected_lse, "lse", 1e-4)
        for buffer in buffers:
            kept = buffer.bits().copy()
            for written, place in result:
                if written is buffer:
                    mine = buffer.places(*place).ravel()
                    kept[mine] = buffer.raw[mine]
            assert (kept == buffer.raw).all(), "written outside the results"

    def memory(self, kind: str, rng):
        """((buffer, place) of values, (buffer, place) of their lse)"""
        tokens, heads, dim = self.shape
        size, strides, offset = rows_layout(kind, tokens, heads, dim)
        pitch = tokens + self.lse_pad
        return [
            (Buffer(max(size, 1), self.dtype, rng), (self.shape, strides, offset)),
            (Buffer(heads * pitch + 1, "float32", rng), ((heads, tokens), (pitch, 1), 0)),
        ]

    def side(self, kind: str, rng) -> list:
        """memory, and the numbers in it; rows that saw nothing hold poison."""
        places = self.memory(kind, rng)
        out, lse = (buffer.view(*place) for buffer, place in places)
        out[...] = reference.encode(rng.standard_normal(out.shape), self.dtype)
        numbers = 20 * rng.standard_normal(lse.shape)
        gone = rng.random(lse.shape) < self.empty
        numbers[gone] = rng.choice([-np.inf, np.inf], gone.sum())
        out[gone.T] = rng.choice(POISON[self.dtype], (gone.sum(), 1))
        lse[...] = numbers.astype(np.float32).view(np.uint32)
        values = reference.decode(out, self.dtype), reference.decode(lse, "float32")
        return [*places, *values]


def merges(device: str):
    layout = st.sampled_from(["dense", "fused_qkv", "heads_first", "strided", "offset"])
    return st.builds(
        Merge,
        st.tuples(st.integers(0, 40), st.integers(1, 6), st.integers(1, 140)),
        st.sampled_from(DTYPES),
        st.floats(0, 1),
        st.tuples(layout, layout),
        st.integers(0, 3),
        st.sampled_from(["new", "a", "b"]) | layout,
        st.integers(0, 2**16),
    )
