"""Turns a case into tensors in poisoned memory, the call, and what it must leave behind."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pagetile
import reference
import torch
from cases import Case, WriteCase
from numpy.lib.stride_tricks import as_strided

DEAD_PAGES = (2**31 - 1, -1, -(2**31))  # what a table holds where nobody may look
POISON = {  # NaN, a negative NaN of all ones, infinities, the largest number
    "float32": (0x7FC00000, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF),
    "float16": (0x7E00, 0xFFFF, 0x7C00, 0xFC00, 0x7BFF),
    "bfloat16": (0x7FC0, 0xFFFF, 0x7F80, 0xFF80, 0x7F7F),
    "float8_e4m3fn": (0x7F, 0xFF, 0x7E, 0xFE),
    "float8_e5m2": (0x7F, 0xFF, 0x7C, 0xFC, 0x7B),
}


class Buffer:
    """Poisoned raw memory with its twin on the device; views are by shape, strides, offset."""

    def __init__(self, size: int, dtype: str, rng) -> None:
        codes = np.array(POISON[dtype], reference.FORMATS[dtype].raw)
        self.dtype = dtype
        self.raw = codes[rng.integers(0, codes.size, size)]
        self.storage = None

    def view(self, shape, strides, offset=0) -> np.ndarray:
        """Raw host bits. The extent is checked here, so that a case cannot be wrong by itself."""
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        assert 0 in shape or last < self.raw.size
        step = self.raw.itemsize
        return as_strided(self.raw[offset:], shape, [s * step for s in strides])

    def places(self, shape, strides, offset=0) -> np.ndarray:
        """Where in the raw memory each element of a view stands."""
        indices = np.arange(self.raw.size)
        return as_strided(indices[offset:], shape, [s * indices.itemsize for s in strides])

    def send(self, device: str) -> None:
        self.storage = torch.from_numpy(self.raw.copy()).to(device)

    def tensor(self, shape, strides, offset=0, uint8=False) -> torch.Tensor:
        dtype = torch.uint8 if uint8 else getattr(torch, self.dtype)
        return self.storage.view(dtype).as_strided(shape, strides, offset)

    def bits(self) -> np.ndarray:
        """What the device holds now."""
        return self.storage.cpu().numpy()

    def assert_bits(self, expected, what: str) -> None:
        changed = np.flatnonzero(self.bits() != expected)
        assert changed.size == 0, f"{what}: {changed.size} elements differ, first {changed[:5]}"


def dense(shape) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))


@dataclass(frozen=True)
class CacheLayout:
    """Strides of K and V in the order page, slot, head, dim; both live in one buffer."""

    size: int
    k: tuple[tuple[int, ...], int]  # strides, offset
    v: tuple[tuple[int, ...], int]
    hnd: bool


def cache_layout(storage: str, pages: int, slots: int, heads: int, k_dim: int, v_dim: int):
    """See cases.STORAGES."""
    both = k_dim + v_dim
    gap = 64  # a multiple of every alignment, poisoned, between K and V
    if storage in ("nhd", "offset", "padded"):
        pad, start = (3 if storage == "padded" else 0), (1 if storage == "offset" else 0)
        k = dense((pages, slots, heads, k_dim + pad))
        v = dense((pages, slots, heads, v_dim + pad))
        v_start = start + -(-(pages * k[0] + gap) // gap) * gap
        return CacheLayout(v_start + pages * v[0] + gap, (k, start), (v, v_start), False)
    if storage in ("hnd", "transposed"):
        k = (heads * slots * k_dim, k_dim, slots * k_dim, 1)
        v = (heads * slots * v_dim, v_dim, slots * v_dim, 1)
        v_start = -(-(pages * k[0] + gap) // gap) * gap
        return CacheLayout(v_start + pages * v[0] + gap, (k, 0), (v, v_start), storage == "hnd")
    if storage == "packed":
        strides = dense((pages, slots, heads, both))
        return CacheLayout(pages * strides[0], (strides, 0), (strides, k_dim), False)
    if storage == "packed_hnd":
        strides = (heads * slots * both, both, slots * both, 1)
        return CacheLayout(pages * strides[0], (strides, 0), (strides, k_dim), True)
    if storage == "interleaved":
        assert k_dim == v_dim
        half = slots * heads * k_dim
        strides = (2 * half, heads * k_dim, k_dim, 1)
        return CacheLayout(pages * 2 * half, (strides, 0), (strides, half), False)
    if storage == "halves":
        assert k_dim == v_dim
        strides = dense((pages, slots, heads, k_dim))
        half = pages * strides[0]
        return CacheLayout(2 * half, (strides, 0), (strides, half), False)
    assert storage == "layers"
    k_size, v_size = slots * heads * k_dim, slots * heads * v_dim
    layer = k_size + v_size
    k = (3 * layer, heads * k_dim, k_dim, 1)
    v = (3 * layer, heads * v_dim, v_dim, 1)
    return CacheLayout(pages * 3 * layer, (k, layer), (v, layer + k_size), False)


class Caches:
    """A K and a V cache of one storage, poisoned all over."""

    def __init__(self, storage, pages, slots, heads, head_dim, dtype, uint8, rng) -> None:
        self.layout = cache_layout(storage, pages, slots, heads, *head_dim)
        self.buffer = Buffer(self.layout.size, dtype, rng)
        self.shapes = [(pages, slots, heads, dim) for dim in head_dim]
        self.uint8 = uint8
        self.k_raw, self.v_raw = self._views(self.buffer.view)

    def _views(self, view):
        (k_shape, v_shape), layout = self.shapes, self.layout
        return view(k_shape, *layout.k), view(v_shape, *layout.v)

    def refill_unused(self, codes, used_places) -> None:
        """Other poison: every element that is not in use takes one of the raw codes."""
        unused = np.ones(self.buffer.raw.size, bool)
        for places in self._views(self.buffer.places):
            unused[places[used_places]] = False
        codes = np.asarray(codes, self.buffer.raw.dtype)
        self.buffer.raw[unused] = np.resize(codes, unused.sum())

    def tensors(self):
        """k_cache and v_cache as the caller passes them."""
        views = self._views(functools.partial(self.buffer.tensor, uint8=self.uint8))
        return [view.permute(0, 2, 1, 3) if self.layout.hnd else view for view in views]

    def arguments(self) -> dict:
        kv_dtype = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}.get(self.buffer.dtype)
        return {
            "layout": "HND" if self.layout.hnd else "NHD",
            "kv_dtype": kv_dtype if self.uint8 else "auto",
        }


def rows_layout(kind: str, rows: int, heads: int, dim: int):
    """(buffer size, strides, offset) of q, k, v or out rows [rows, heads, dim]."""
    if kind == "fused_qkv":  # a slice of a wider row
        pitch = heads * dim + 24
        return rows * pitch + 24, (pitch, dim, 1), 8
    if kind == "heads_first":
        return heads * rows * dim, (dim, rows * dim, 1), 0
    if kind == "strided":
        pitch = heads * (dim + 8) + 16
        return rows * pitch, (pitch, dim + 8, 1), 0
    return rows * heads * dim + 1, (heads * dim, dim, 1), 1 if kind == "offset" else 0


def scale_values(kind, batch: int, heads: int, rng):
    """The tensor to pass (float32 NumPy, or None) and its values as [B, Hkv]."""
    if kind is None:
        return None, np.ones((batch, heads))
    shape = {"one": (1,), "scalar": (), "heads": (heads,), "batch_heads": (batch, heads)}
    value = rng.uniform(0.2, 3.0, shape.get(kind, (1, 1))).astype(np.float32)
    if kind == "expanded":
        return np.broadcast_to(value, (batch, heads)), np.broadcast_to(value, (batch, heads))
    full = value if kind == "batch_heads" else np.broadcast_to(value, (batch, heads))
    return value, full.astype(np.float64)


def send(array, device: str):
    if array is None:
        return None
    if 0 in array.strides and array.size > 1:  # keep an expanded tensor expanded
        return torch.tensor(array.flat[0]).to(device).expand(array.shape)
    return torch.from_numpy(np.array(array)).to(device)


class Problem:
    """A case as tensors on a device. `run` calls pagetile, `check` compares and seeks damage."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        rng = case.rng("memory")
        batch, (num_q_heads, num_kv_heads) = len(case.q_lens), case.heads
        k_dim, v_dim = case.head_dim
        self.lens = np.array(case.kv_lens, np.int64)
        self.cu = np.cumsum([case.first_row, *case.q_lens]).astype(np.int32)
        self.rows = int(self.cu[-1]) + case.spare_rows

        # Pages, each sequence's scattered over the pool
        pages_of = [-(-n // case.page_size) for n in case.kv_lens]
        num_pages = sum(pages_of) + 3
        pool = rng.permutation(num_pages).tolist()
        pool = pool if case.page_order == "shuffled" else sorted(pool)  # taken from the end
        width = max(pages_of, default=0) + 2
        junk = [*DEAD_PAGES, *range(num_pages)]
        self.table_raw = rng.choice(junk, (batch, width + case.table_pad)).astype(np.int32)
        self.table = self.table_raw[:, :width]
        self.caches = Caches(case.storage, num_pages, case.page_size, num_kv_heads, case.head_dim,
                             case.kv, case.uint8, rng)  # fmt: skip
        for b, count in enumerate(pages_of):
            self.table[b, :count] = [pool.pop() for _ in range(count)]
        self._fill_caches(case.rng("kv"))

        # Queries and out
        size, self.q_strides, self.q_offset = rows_layout(
            case.q_layout, self.rows, num_q_heads, k_dim
        )
        self.q_shape = (self.rows, num_q_heads, k_dim)
        self.q_buffer = Buffer(max(size, 1), case.dtype, rng)
        self.q_raw = self.q_buffer.view(self.q_shape, self.q_strides, self.q_offset)
        used = slice(self.cu[0], self.cu[-1])
        self.q_raw[used] = reference.encode(
            1.5 * case.rng("q").standard_normal(self.q_raw[used].shape), case.dtype
        )
        self.out_shape = (self.rows, num_q_heads, v_dim)
        size, self.out_strides, _ = rows_layout(case.out, self.rows, num_q_heads, v_dim)
        self.out_buffer = Buffer(max(size, 1), case.out_dtype, rng)
        lse_pad = 7 if case.out == "strided" else 0
        self.lse_strides = (self.rows + lse_pad, 1)
        self.lse_buffer = Buffer(num_q_heads * self.lse_strides[0] + 1, "float32", rng)

        # The small ones
        rng = case.rng("small")
        self.scales = {
            name: scale_values(case.scales, batch, num_kv_heads, rng) for name in ("k", "v", "q")
        }
        if not reference.is_fp8(case.dtype):
            self.scales["q"] = (None, np.ones((batch, num_kv_heads)))
        slopes = 2.0 ** -rng.uniform(1, 6, (batch, num_q_heads)).astype(np.float32)
        slopes = slopes[:1].repeat(batch, 0) if case.alibi == "heads" else slopes
        self.slopes = slopes if case.alibi else None
        self.sinks_raw = None
        if case.sinks:
            self.sinks_raw = reference.encode(2 * rng.standard_normal(num_q_heads), case.sinks)
        self.send()

    def _fill_caches(self, rng) -> None:
        """The same values for the same lengths and heads, wherever they lie."""
        for b, length in enumerate(self.case.kv_lens):
            for raw in (self.caches.k_raw, self.caches.v_raw):
                values = rng.standard_normal((length, *raw.shape[2:]))
                raw[self.places_of(b)] = reference.encode(values, self.case.kv)

    def places_of(self, b: int):
        """(pages, slots in them) of a sequence's keys."""
        index = np.arange(self.case.kv_lens[b])
        return self.table[b, index // self.case.page_size], index % self.case.page_size

    def refill_unused(self, codes) -> None:
        """Every element of the caches that no sequence uses takes one of the raw codes."""
        places = [self.places_of(b) for b in range(len(self.case.kv_lens))]
        pages, slots = (np.concatenate(x) for x in zip(*places, strict=True))
        self.caches.refill_unused(codes, (pages, slots))
        self.send()

    def send(self) -> None:
        """Copies the host's raw memory to the device and builds the arguments."""
        case, device = self.case, self.device
        for buffer in (self.caches.buffer, self.q_buffer, self.out_buffer, self.lse_buffer):
            buffer.send(device)
        k_cache, v_cache = self.caches.tensors()
        table = torch.from_numpy(self.table_raw).to(device)[:, : self.table.shape[1]]
        slopes = self.slopes
        if case.alibi == "heads":
            slopes = slopes[0] if len(slopes) else np.ones(case.heads[0], np.float32)
        sinks = None
        if case.sinks:
            sinks = torch.from_numpy(self.sinks_raw.copy()).to(device)
            sinks = sinks.view(getattr(torch, case.sinks))
        self.arguments = {
            "q": self.q_buffer.tensor(self.q_shape, self.q_strides, self.q_offset),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "block_table": table,
            "seqused_k": torch.from_numpy(self.lens.astype(np.int32)).to(device),
            "cu_seqlens_q": torch.from_numpy(self.cu).to(device),
            "max_seqlen_q": max(case.q_lens, default=0),
            "softmax_scale": case.softmax_scale,
            "causal": case.causal,
            "window": case.window,
            "softcap": case.softcap,
            "alibi_slopes": send(slopes, device),
            "sinks": sinks,
            "q_scale": send(self.scales["q"][0], device),
            "k_scale": send(self.scales["k"][0], device),
            "v_scale": send(self.scales["v"][0], device),
            "num_splits": case.num_splits,
            "batch_invariant": case.batch_invariant,
            **self.caches.arguments(),
        }

    # The call

    def run(self, **changes):
        """(out, softmax_lse), with the arguments of the case but for `changes`."""
        arguments = {**self.arguments, "return_softmax_lse": True, **changes}
        if self.case.out != "new" and "out" not in changes:
            arguments["out"] = self.out_buffer.tensor(self.out_shape, self.out_strides)
            lse_shape = (self.case.heads[0], self.rows)
            arguments["softmax_lse"] = self.lse_buffer.tensor(lse_shape, self.lse_strides)
        return pagetile.paged_attention(
            arguments.pop("q"), arguments.pop("k_cache"), arguments.pop("v_cache"), **arguments
        )

    # What is right

    @functools.cached_property
    def expected(self):
        return self._reference(None)

    @functools.cached_property
    def low_precision(self):
        return self._reference(self.case.out_dtype)

    def _reference(self, round_dtype, key_ranges=None):
        """Sequence by sequence, since scales may differ between sequences."""
        case = self.case
        group = case.heads[0] // case.heads[1]
        q = reference.decode(self.q_raw, case.dtype)
        k = reference.decode(self.caches.k_raw, case.kv)
        v = reference.decode(self.caches.v_raw, case.kv)
        out = np.full(self.out_shape, np.nan)
        lse = np.full((case.heads[0], self.rows), np.nan)
        # The page after the last is what one that does not exist reads as.
        k, v = (np.concatenate([x, np.zeros_like(x[:1])]) for x in (k, v))
        for b in range(len(case.q_lens)):
            rows = slice(self.cu[b], max(self.cu[b], self.cu[b + 1]))
            scale = {name: full[b] for name, (_, full) in self.scales.items()}
            out[rows], lse[:, rows] = reference.attention(
                q[rows] * scale["q"].repeat(group)[:, None],
                k * scale["k"][:, None],
                v * scale["v"][:, None],
                block_table=self.table[b : b + 1],
                seqused_k=self.lens[b : b + 1],
                cu_seqlens_q=[0, rows.stop - rows.start],
                softmax_scale=case.softmax_scale,
                causal=case.causal,
                window=case.window,
                softcap=case.softcap,
                alibi_slopes=None if self.slopes is None else self.slopes[b : b + 1].astype(float),
                sinks=reference.decode(self.sinks_raw, case.sinks) if case.sinks else None,
                key_range=key_ranges[b] if key_ranges else None,
                round_dtype=round_dtype,
            )
        return out, lse

    def check_merged(self, out, lse, cuts) -> None:
        """As check, where the keys before and after a cut were each rounded, then merged."""
        dtype = self.case.out_dtype
        parts = [
            self.used(*self._reference(dtype, [(0, cut) for cut in cuts])),
            self.used(*self._reference(dtype, [(cut, None) for cut in cuts])),
        ]
        low_out, low_lse = reference.merge(*parts[0], *parts[1])
        low = reference.round_to(low_out, dtype), low_lse
        check_pair(*self.used(out, lse), self.used(*self.expected), low)

    def used(self, out, lse):
        """The rows of the batch, as float64 NumPy."""
        rows = slice(int(self.cu[0]), int(self.cu[-1]))
        return to_numpy(out)[rows], to_numpy(lse)[:, rows]

    def check(self, out, lse) -> None:
        """Values within the tolerance rule, masked rows exact, and nothing else touched."""
        case = self.case
        assert out.dtype == getattr(torch, case.out_dtype)
        assert lse.dtype == torch.float32
        assert tuple(out.shape) == self.out_shape
        assert tuple(lse.shape) == (case.heads[0], self.rows)
        check_pair(*self.used(out, lse), self.used(*self.expected), self.used(*self.low_precision))
        self.check_untouched()

    def check_untouched(self, rows=None) -> None:
        """Inputs bit for bit as they were; of the results, only `rows`, the batch's, written."""
        self.caches.buffer.assert_bits(self.caches.buffer.raw, "cache")
        self.q_buffer.assert_bits(self.q_buffer.raw, "q")
        lse_shape = (self.case.heads[0], self.rows)
        rows = slice(self.cu[0], self.cu[-1]) if rows is None else rows
        for buffer, shape, strides, index, what in (
            (self.out_buffer, self.out_shape, self.out_strides, rows, "out"),
            (self.lse_buffer, lse_shape, self.lse_strides, (slice(None), rows), "softmax_lse"),
        ):
            mine = buffer.places(shape, strides)[index].ravel()
            kept = buffer.bits().copy()
            kept[mine] = buffer.raw[mine]
            changed = np.flatnonzero(kept != buffer.raw)
            assert changed.size == 0, f"{what}: {changed.size} written outside the batch's rows"


def check_pair(out, lse, expected, low) -> None:
    """The tolerance rule for out and softmax_lse; rows that see nothing are exactly 0.

    A score in base 2 is rounded to fp32, and its weight is off by as much: out's floor grows with
    the largest score, where that is above 1e-5 (a score of 123 with values of 7: 1.6e-4).
    """
    most = np.abs(expected[1][np.isfinite(expected[1])]).max(initial=0.0)
    rounding = 2.0**-23 * most / np.log(2) * np.abs(expected[0]).max(initial=0.0)
    reference.assert_close(out, expected[0], low[0], "out", max(1e-5, rounding))
    floor = 1e-5 * max(1.0, most)
    reference.assert_close(lse, expected[1], low[1], "softmax_lse", floor)
    zero_rows = (expected[0] == 0).all(-1)
    assert (out[zero_rows] == 0).all(), "out: a row that sees no key is not 0"


def to_numpy(x) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.detach().cpu().double().numpy()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, NaN and -0 included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    dense = (torch.empty(x.shape, dtype=x.dtype).copy_(x).view(-1) for x in (a, b))
    return torch.equal(*(x.view(torch.uint8) for x in dense))


def pasted(whole, part, begin: int):
    """(out, softmax_lse) of `whole`, the rows from `begin` on replaced by those of `part`."""
    out, lse = (x.clone() for x in whole)
    out[begin : begin + len(part[0])] = part[0]
    lse[:, begin : begin + len(part[0])] = part[1]
    return out, lse


class WriteProblem:
    """A cache_write case as tensors on a device; every element of the memory is compared."""

    def __init__(self, case: WriteCase, device: str) -> None:
        self.case, self.device = case, device
        rng = case.rng()
        self.caches = Caches(case.storage, case.num_pages, case.page_size, case.heads,
                             case.head_dim, case.kv, case.uint8, rng)  # fmt: skip
        capacity = case.num_pages * case.page_size
        self.slots = rng.permutation(capacity)[: case.tokens].astype(np.int64)
        wrong = [-1, -2, -capacity, -(2**31), capacity, capacity + 1, 2**31 - 1]
        if case.slot_dtype == "int64":
            wrong += [-(2**63), 2**63 - 1, 2**40]
        skipped = rng.permutation(case.tokens)[: case.skipped]
        self.slots[skipped] = np.resize(np.array(wrong, np.int64), case.skipped)
        self.sources = [self._source(dim, rng) for dim in case.head_dim]
        self.scales = {n: scale_values(case.scales, 1, case.heads, rng)[0] for n in ("k", "v")}

    def _source(self, dim: int, rng):
        rows = self.case.tokens + self.case.extra_rows
        shape = (rows, self.case.heads, dim)
        size, strides, offset = rows_layout(self.case.source, rows, self.case.heads, dim)
        buffer = Buffer(max(size, 1), self.case.dtype, rng)
        raw = buffer.view(shape, strides, offset)
        raw[: self.case.tokens] = reference.encode(
            4 * rng.standard_normal(raw[: self.case.tokens].shape), self.case.dtype
        )
        return buffer, raw, (shape, strides, offset)

    def send(self) -> dict:
        """All arguments of cache_write."""
        self.caches.buffer.send(self.device)
        for buffer, _, _ in self.sources:
            buffer.send(self.device)
        k, v = (buffer.tensor(*place) for buffer, _, place in self.sources)
        k_cache, v_cache = self.caches.tensors()
        slots = torch.from_numpy(self.slots.astype(self.case.slot_dtype)).to(self.device)
        return {
            "k": k,
            "v": v,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "slot_mapping": slots,
            "k_scale": send(self.scales["k"], self.device),
            "v_scale": send(self.scales["v"], self.device),
            **self.caches.arguments(),
        }

    def run(self) -> None:
        assert pagetile.cache_write(**self.send()) is None

    def check(self) -> None:
        """The whole buffer, written or not, against the reference's."""
        before = self.caches.buffer.raw.copy()
        views = (self.caches.k_raw, self.caches.v_raw)
        for (_, raw, _), view, scale in zip(self.sources, views, self.scales.values(), strict=True):
            reference.cache_write(
                view, raw, self.slots,
                dtype=self.case.dtype, cache_dtype=self.case.kv, scale=scale,
            )  # fmt: skip
        expected, self.caches.buffer.raw[:] = self.caches.buffer.raw.copy(), before
        self.caches.buffer.assert_bits(expected, "cache")
        for buffer, _, _ in self.sources:
            buffer.assert_bits(buffer.raw, "k or v")
