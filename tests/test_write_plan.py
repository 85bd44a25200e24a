"""What a GPU would launch for a cache write: a pure function of sizes, strides and addresses.

_C.cache_write_plan launches nothing and reads no element, so the tensors lie on the CPU, and most
of them are address space alone.
"""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import huge_tensor
from pagetile import _C

KERNELS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
DTYPES = ("float32", "float16", "bfloat16")


def plan(k, v, k_cache, v_cache, tokens=None, layout="NHD", kv_dtype="auto", slots=None):
    if slots is None:
        slots = torch.empty(k.shape[0] if tokens is None else tokens, dtype=torch.int64)
    return _C.cache_write_plan(k, v, k_cache, v_cache, slots, kv_dtype, layout)


@functools.cache
def memory() -> torch.Tensor:
    """A gigabyte of address space, from a page boundary on."""
    return huge_tensor((1 << 30,), torch.uint8, "cpu")


def place(address: int, dtype: str, shape, strides=None) -> torch.Tensor:
    """A tensor whose data start at this byte of the memory; strides in elements."""
    data = memory().view(getattr(torch, dtype))
    assert address % data.itemsize == 0
    if strides is None:
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return data.as_strided(shape, strides, address // data.itemsize)


def dense_problem(tokens, heads, dims, dtype, cache_dtype=None, pages=4, page_size=16):
    """Rows and caches as a framework allocates them."""
    rows = [torch.empty(tokens, heads, d, dtype=getattr(torch, dtype)) for d in dims]
    kind = getattr(torch, cache_dtype or dtype)
    caches = [torch.empty(pages, page_size, heads, d, dtype=kind) for d in dims]
    return [*rows, *caches]


def only(launches) -> dict:
    (launch,) = launches
    return launch


def shape_of(launch) -> tuple:
    return tuple(launch[n] for n in ("kernel", "sides", "vector", "load_bytes", "store_bytes"))


def test_fields():
    """All that a launch is, for a bf16 copy of 33 tokens of 8 heads of 128."""
    assert plan(*dense_problem(33, 8, (128, 128), "bfloat16")) == [
        {
            "kernel": "copy",
            "sides": "kv",
            "vector": 8,
            "load_bytes": 16,
            "store_bytes": 16,
            "tokens": 33,
            "threads": 256,
            "grid": math.ceil(33 * 8 * 128 / 8 / 256),
        }
    ]


# fmt: off
WIDEST = [
    # source, cache, (vector, load_bytes, store_bytes)
    ("bfloat16", None, (8, 16, 16)),
    ("float16", None, (8, 16, 16)),
    ("float32", None, (4, 16, 16)),
    ("bfloat16", "float8_e4m3fn", (8, 16, 8)),
    ("float16", "float8_e5m2", (8, 16, 8)),
    ("float32", "float8_e4m3fn", (8, 16, 8)),  # two loads
    ("float32", "float8_e5m2", (8, 16, 8)),
]
# fmt: on


@pytest.mark.parametrize("tokens", [1, 2, 255, 256, 257, 8192, 65_535, 65_536, 65_537])
@pytest.mark.parametrize(("dtype", "cache_dtype", "widths"), WIDEST)
def test_dense_tensors_take_the_widest_vector(dtype, cache_dtype, widths, tokens):
    launch = only(plan(*dense_problem(tokens, 8, (128, 128), dtype, cache_dtype)))
    assert shape_of(launch) == (KERNELS.get(cache_dtype, "copy"), "kv", *widths)
    assert launch["tokens"] == tokens
    assert launch["grid"] == math.ceil(tokens * 8 * 128 / widths[0] / launch["threads"])


@pytest.mark.parametrize(("kv_dtype", "kernel"), [("fp8", "e4m3"), ("fp8_e4m3", "e4m3"),
                                                  ("fp8_e5m2", "e5m2")])  # fmt: skip
def test_uint8_caches_are_what_kv_dtype_says(kv_dtype, kernel):
    problem = dense_problem(5, 2, (64, 64), "bfloat16", "uint8")
    assert only(plan(*problem, kv_dtype=kv_dtype))["kernel"] == kernel


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_slots_of_either_size(slot_dtype):
    problem = dense_problem(7, 2, (64, 64), "float16")
    launch = only(plan(*problem, slots=torch.empty(7, dtype=slot_dtype)))
    assert (launch["tokens"], launch["vector"]) == (7, 8)


def test_tokens_are_the_slots():
    """Rows past the slots are padding."""
    launch = only(plan(*dense_problem(16, 2, (64, 64), "float16"), tokens=11))
    assert launch["tokens"] == 11
    assert launch["grid"] == 1


@pytest.mark.parametrize("rows", [0, 3])
def test_no_tokens_no_launch(rows):
    assert plan(*dense_problem(rows, 2, (64, 64), "float16"), tokens=0) == []


def test_no_pages_no_launch():
    """Every slot is outside of a pool of nothing; a launch would be of no use."""
    assert plan(*dense_problem(3, 2, (64, 64), "float16", pages=0)) == []


# Strides and addresses


@pytest.mark.parametrize("dims", [(192, 128), (512, 64), (64, 512), (128, 96)], ids=str)
def test_unequal_dims_share_a_launch(dims):
    launch = only(plan(*dense_problem(100, 4, dims, "bfloat16")))
    assert shape_of(launch) == ("copy", "kv", 8, 16, 16)
    assert launch["grid"] == math.ceil(100 * 4 * max(dims) / 8 / 256)


@pytest.mark.parametrize(
    ("dim", "vector"), [(128, 8), (120, 8), (100, 4), (46, 2), (50, 2), (33, 1)]
)
def test_head_dim_sets_the_strides(dim, vector):
    """Rows of 92 bytes start at multiples of 4, no more: 2 elements of bf16."""
    launch = only(plan(*dense_problem(9, 3, (dim, dim), "bfloat16")))
    assert shape_of(launch) == ("copy", "kv", vector, 2 * vector, 2 * vector)
    assert launch["grid"] == math.ceil(9 * 3 * (dim // vector) / 256)


@pytest.mark.parametrize(("dim", "vector"), [(128, 8), (120, 8), (100, 4), (46, 2), (121, 1)])
def test_padded_rows_of_any_head_dim(dim, vector):
    """Rows start at multiples of 16 bytes, yet a vector divides head_dim: no row has a tail."""
    rows = [place(1 << 20, "bfloat16", (9, 3, dim), (3 * 128, 128, 1)) for _ in "kv"]
    caches = [place(i << 21, "bfloat16", (4, 16, 3, dim), (6144, 384, 128, 1)) for i in (1, 2)]
    launch = only(plan(*rows, *caches))
    assert shape_of(launch) == ("copy", "kv", vector, 2 * vector, 2 * vector)
    assert launch["grid"] == math.ceil(9 * 3 * dim // vector / 256)


@pytest.mark.parametrize("which", ["k", "v", "k_cache", "v_cache"])
@pytest.mark.parametrize(("address", "vector"), [(16, 8), (8, 4), (4, 2), (2, 1), (48, 8), (6, 1)])
def test_base_addresses(address, vector, which):
    """The narrowest of a side's two addresses decides, for this side alone."""
    tensors = [
        place((i << 20) + (address if name == which else 0), "bfloat16", shape)
        for i, (name, shape) in enumerate([
            ("k", (9, 2, 64)), ("v", (9, 2, 64)),
            ("k_cache", (4, 16, 2, 64)), ("v_cache", (4, 16, 2, 64)),
        ])
    ]  # fmt: skip
    launches = plan(*tensors)
    if vector == 8:
        assert shape_of(only(launches)) == ("copy", "kv", 8, 16, 16)
        return
    by_side = {launch["sides"]: launch for launch in launches}
    narrow, wide = ("k", "v") if which[0] == "k" else ("v", "k")
    assert shape_of(by_side[narrow]) == ("copy", narrow, vector, 2 * vector, 2 * vector)
    assert shape_of(by_side[wide]) == ("copy", wide, 8, 16, 16)
    assert len(launches) == 2


@pytest.mark.parametrize("address", [1, 3, 7])
def test_fp8_caches_at_odd_bytes(address):
    rows = [place(i << 20, "bfloat16", (9, 2, 64)) for i in (1, 2)]
    caches = [place((i << 20) + address, "float8_e4m3fn", (4, 16, 2, 64)) for i in (3, 4)]
    assert shape_of(only(plan(*rows, *caches))) == ("e4m3", "kv", 1, 2, 1)


@pytest.mark.parametrize(("address", "vector"), [(8, 8), (4, 4), (2, 2)])
def test_an_fp8_store_needs_no_more_alignment_than_its_bytes(address, vector):
    rows = [place(i << 20, "bfloat16", (9, 2, 64)) for i in (1, 2)]
    caches = [place((i << 20) + address, "float8_e5m2", (4, 16, 2, 64)) for i in (3, 4)]
    assert shape_of(only(plan(*rows, *caches))) == ("e5m2", "kv", vector, 2 * vector, vector)


def test_a_slice_of_fused_qkv_rows():
    """K and V begin inside a row of 4 query heads, 2 keys, 2 values of 64, with its stride."""
    fused = torch.empty(33, 8, 64, dtype=torch.bfloat16)
    _, _, k_cache, v_cache = dense_problem(33, 2, (64, 64), "bfloat16")
    launch = only(plan(fused[:, 4:6], fused[:, 6:8], k_cache, v_cache))
    assert shape_of(launch) == ("copy", "kv", 8, 16, 16)
    uneven = torch.empty(33, 8 * 64 + 4, dtype=torch.bfloat16)  # rows start at multiples of 8 bytes
    k, v = (uneven[:, i : i + 128].unflatten(1, (2, 64)) for i in (256, 384))
    assert only(plan(k, v, k_cache, v_cache))["vector"] == 4


@pytest.mark.parametrize("heads_first", [False, True], ids=["nhd", "hnd"])
def test_packed_caches(heads_first):
    """[.., 2 * head_dim], K and V its halves."""
    packed = torch.empty((4, 3, 16, 128) if heads_first else (4, 16, 3, 128), dtype=torch.bfloat16)
    k, v, _, _ = dense_problem(33, 3, (64, 64), "bfloat16")
    launch = only(plan(k, v, packed[..., :64], packed[..., 64:],
                       layout="HND" if heads_first else "NHD"))  # fmt: skip
    assert shape_of(launch) == ("copy", "kv", 8, 16, 16)
    assert launch["grid"] == math.ceil(33 * 3 * 8 / 256)


def test_packed_caches_of_unequal_dims():
    """V starts where K ends, at element 60: a multiple of 8 bytes."""
    packed = torch.empty(4, 16, 3, 60 + 4 + 60, dtype=torch.bfloat16)
    k, v, _, _ = dense_problem(33, 3, (60, 64), "bfloat16")
    assert only(plan(k, v, packed[..., :60], packed[..., 60:]))["vector"] == 4


def test_hnd_is_nhd_permuted():
    """A view with other strides, and the layout that means the same memory: one plan."""
    k, v, _, _ = dense_problem(33, 3, (64, 64), "float16", "float8_e4m3fn")
    caches = [torch.empty(4, 3, 16, 64, dtype=torch.float8_e4m3fn) for _ in "kv"]
    assert plan(k, v, *caches, layout="HND") == plan(k, v, *(x.transpose(1, 2) for x in caches))


def test_k_and_v_of_one_tensor():
    for cache in (torch.empty(2, 4, 16, 3, 64), torch.empty(4, 2, 16, 3, 64).transpose(0, 1)):
        k, v, _, _ = dense_problem(33, 3, (64, 64), "float32")
        assert shape_of(only(plan(k, v, *cache))) == ("copy", "kv", 4, 16, 16)


def test_a_size_of_1_has_no_stride():
    """Odd strides that are never stepped over narrow nothing; the same strides stepped over do."""
    odd = (9973, 77, 1)
    k, v = (place(i << 20, "bfloat16", (1, 1, 64), odd) for i in (1, 2))
    strides = (9973, 131, 77, 1)
    caches = [place(i << 20, "bfloat16", (1, 1, 1, 64), strides) for i in (3, 4)]
    assert shape_of(only(plan(k, v, *caches))) == ("copy", "kv", 8, 16, 16)
    for dim in range(2):
        shape = [1, 1, 64]
        shape[dim] = 2
        rows = [place(i << 20, "bfloat16", shape, odd) for i in (1, 2)]
        cache_shape = (1, 1, shape[1], 64)
        flat = [place(i << 20, "bfloat16", cache_shape, (64, 64, 64, 1)) for i in (3, 4)]
        assert only(plan(*rows, *flat))["vector"] == 1
    for dim in range(2):
        shape = [1, 1, 1, 64]
        shape[dim] = 2
        wide = [place(i << 20, "bfloat16", shape, strides) for i in (3, 4)]
        assert only(plan(k, v, *wide))["vector"] == 1


def test_padding_rows_count_for_nothing():
    """One slot: the second row is never read, whatever its stride."""
    rows = [place(i << 20, "bfloat16", (2, 1, 64), (77, 64, 1)) for i in (1, 2)]
    caches = [place(i << 20, "bfloat16", (4, 16, 1, 64)) for i in (3, 4)]
    assert only(plan(*rows, *caches, tokens=1))["vector"] == 8
    assert only(plan(*rows, *caches, tokens=2))["vector"] == 1


def test_broadcast_rows():
    """Stride 0 is aligned."""
    k, v = (torch.empty(1, 1, 64, dtype=torch.bfloat16).expand(9, 2, 64) for _ in "kv")
    _, _, *caches = dense_problem(9, 2, (64, 64), "bfloat16")
    assert only(plan(k, v, *caches))["vector"] == 8


# The legacy layout


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "x", "widths"),
    [
        ("bfloat16", None, 8, (8, 16, 16)),
        ("float32", None, 4, (4, 16, 16)),
        ("bfloat16", "float8_e4m3fn", 16, (8, 16, 8)),
        ("float32", "float8_e5m2", 16, (8, 16, 8)),
        ("bfloat16", None, 4, (4, 8, 8)),
        ("bfloat16", None, 2, (2, 4, 4)),
    ],
)
def test_legacy_layout(dtype, cache_dtype, x, widths):
    """K goes by its chunks, V element by element: a launch for each."""
    kind = getattr(torch, cache_dtype or dtype)
    k, v, _, _ = dense_problem(33, 3, (64, 64), dtype)
    k_cache = torch.empty(4, 3, 64 // x, 16, x, dtype=kind)
    v_cache = torch.empty(4, 3, 64, 16, dtype=kind)
    launches = {p["sides"]: p for p in plan(k, v, k_cache, v_cache, layout="legacy")}
    assert launches.keys() == {"k", "v"}
    kernel = KERNELS.get(cache_dtype, "copy")
    assert shape_of(launches["k"]) == (kernel, "k", *widths)
    assert shape_of(launches["v"]) == (kernel, "v", 1, k.itemsize, kind.itemsize)
    assert launches["k"]["grid"] == math.ceil(33 * 3 * 64 / widths[0] / 256)
    assert launches["v"]["grid"] == math.ceil(33 * 3 * 64 / 256)


def test_legacy_layout_of_single_elements():
    """x = 1: K is as narrow as V."""
    k, v, _, _ = dense_problem(33, 3, (64, 64), "bfloat16")
    caches = torch.empty(4, 3, 64, 16, 1).bfloat16(), torch.empty(4, 3, 64, 16).bfloat16()
    launches = plan(k, v, *caches, layout="legacy")
    assert [shape_of(p) for p in launches] == [("copy", side, 1, 2, 2) for side in "kv"]
    assert {p["grid"] for p in launches} == {math.ceil(33 * 3 * 64 / 256)}


def test_legacy_layout_of_scattered_heads():
    """Heads that do not follow on each other, in rows or cache, go one by one."""
    dense_rows = place(1 << 20, "bfloat16", (33, 3, 64))
    padded_rows = place(1 << 20, "bfloat16", (33, 3, 64), (240, 80, 1))
    caches = {
        "dense": (place(1 << 22, "bfloat16", (4, 3, 8, 16, 8)),
                  place(1 << 24, "bfloat16", (4, 3, 64, 16))),
        "padded": (place(1 << 22, "bfloat16", (4, 3, 8, 16, 8), (4096, 1040, 128, 8, 1)),
                   place(1 << 24, "bfloat16", (4, 3, 64, 16), (4096, 1040, 16, 1))),
    }  # fmt: skip
    for rows, pages, count in (
        (dense_rows, "dense", 1), (dense_rows, "padded", 3), (padded_rows, "dense", 3),
    ):  # fmt: skip
        launches = plan(rows, rows, *caches[pages], layout="legacy")
        assert [p["sides"] for p in launches] == ["k"] * count + ["v"] * count
        for p in launches:
            assert p["tokens"] == 33
            assert p["grid"] == math.ceil(33 * 3 // count * 64 // p["vector"] / 256)


# Many tokens


def check_cut(launches, tokens, items_per_token):
    """Every token once on each side, no number of a thread beyond 31 bits."""
    for side in "kv":
        mine = [launch for launch in launches if side in launch["sides"]]
        assert sum(launch["tokens"] for launch in mine) == tokens
    for launch in launches:
        items = launch["tokens"] * items_per_token
        assert launch["tokens"] > 0
        assert launch["grid"] == math.ceil(items / launch["threads"])
        assert launch["grid"] * launch["threads"] < 2**31


@pytest.mark.parametrize("tokens", [1 << 20, (1 << 24) - 1, (1 << 27) + 5])
@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (64, 8), (40, 576), (128, 4096)], ids=str)
def test_many_tokens_are_cut_into_launches(heads, dim, tokens):
    slots = huge_tensor((tokens,), torch.int64, "cpu")
    caches = [torch.empty(1, 1, heads, dim).bfloat16() for _ in "kv"]
    aligned = [torch.empty(1, heads, dim).bfloat16().expand(tokens, heads, dim) for _ in "kv"]
    items = heads * dim // 8
    launches = plan(*aligned, *caches, slots=slots)
    check_cut(launches, tokens, items)
    assert len(launches) <= tokens * items // 2**31 * 2 + 1  # no more than a cut asks for

    odd = [place(2, "bfloat16", (tokens, heads, dim), (0, dim, 1)) for _ in "kv"]
    launches = plan(*odd, *caches, slots=slots)
    assert {launch["vector"] for launch in launches} == {1}
    check_cut(launches, tokens, heads * dim)


def test_both_sides_are_cut_alone():
    tokens, heads, dim = 1 << 22, 8, 256
    slots = huge_tensor((tokens,), torch.int32, "cpu")
    caches = [torch.empty(1, 1, heads, dim).bfloat16() for _ in "kv"]
    k = torch.empty(1, heads, dim).bfloat16().expand(tokens, heads, dim)
    v = place(2, "bfloat16", (tokens, heads, dim), (0, dim, 1))
    launches = plan(k, v, *caches, slots=slots)
    by_side = {s: [p for p in launches if p["sides"] == s] for s in "kv"}
    assert len(by_side["k"]) == 1
    assert len(by_side["v"]) in (4, 5)
    for side, vector in (("k", 8), ("v", 1)):
        assert {p["vector"] for p in by_side[side]} == {vector}
        assert sum(p["tokens"] for p in by_side[side]) == tokens
        for p in by_side[side]:
            assert p["grid"] * 256 < 2**31
            assert p["grid"] == math.ceil(p["tokens"] * heads * dim // vector / 256)


# Errors


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"k": torch.empty(1, 5, 2, 64)}, "k must have 3 dimensions"),
        ({"v": torch.empty(5, 2, 64).double()}, "v must be .*float64"),
        ({"k_cache": torch.empty(4, 16, 3, 64)}, "v_cache .*3 heads"),
        ({"layout": "nhd"}, "layout must be"),
        ({"kv_dtype": "fp8"}, "kv_dtype 'fp8'"),
        ({"slots": torch.empty(5)}, "slot_mapping must be int64 or int32, got float32"),
    ],
    ids=["rank", "dtype", "heads", "layout", "kv_dtype", "slots"],
)
def test_wrong_arguments_are_refused_as_in_a_write(change, match):
    problem = dense_problem(5, 2, (64, 64), "float32")
    arguments = {**dict(zip(("k", "v", "k_cache", "v_cache"), problem, strict=True)), **change}
    with pytest.raises(ValueError, match=match):
        plan(**arguments)


# Any problem


class Drawn:
    """One side: rows and cache of any strides and addresses."""

    def __init__(
        self, draw, unit, tokens, heads, pages, page_size, dtype, cache_dtype, legacy, is_key
    ):
        pick = lambda *options: draw(st.sampled_from(options))  # noqa: E731

        def padded(least):
            """Most strides and addresses are multiples of the unit."""
            step = pick(*[unit] * 15, 1)
            return math.ceil(least / step) * step + draw(st.integers(0, 2)) * step

        self.dim = pick(1, 2, 3, 5, 7, 8, 16, 24, 33, 46, 48, 64, 100, 128)
        self.source = getattr(torch, dtype).itemsize
        self.target = getattr(torch, cache_dtype or dtype).itemsize
        divisors = [x for x in (1, 2, 3, 4, 8, 16) if self.dim % x == 0]
        self.chunk = (pick(*divisors) if is_key else 1) if legacy else self.dim

        if pick(True, True, False):
            head = padded(self.dim)
            strides = (padded(heads * head) * pick(0, 1, 1, 1), head, 1)  # 0: one row for all
        else:  # heads outside
            row = padded(self.dim)
            strides = (row, padded(tokens * row), 1)
        start = (1 if is_key else 2) << 26
        address = start + padded(0) * self.source
        self.rows = place(address, dtype, (tokens, heads, self.dim), strides)

        # Strides from the inside out, each at least what is inside
        count = self.dim // self.chunk
        self.sizes = {"page": pages, "slot": page_size, "head": heads, "chunk": count}
        inner = pick(["slot", "head"], ["head", "slot"])
        inner = ["head", "chunk", "slot"] if legacy else inner
        self.stride, extent = {"chunk": 0}, self.chunk
        for axis in [*reversed(inner), "page"]:
            self.stride[axis] = padded(extent)
            extent = self.stride[axis] * self.sizes[axis]
        axes = ("page", "head", "chunk", "slot") if legacy else ("page", "slot", "head")
        shape, strides = ([x[axis] for axis in axes] for x in (self.sizes, self.stride))
        if is_key or not legacy:
            shape, strides = [*shape, self.chunk], [*strides, 1]
        start = (3 if is_key else 4) << 26
        address = start + padded(0) * self.target
        self.cache = place(address, cache_dtype or dtype, shape, strides)

    def row_address(self, token, head, d) -> int:
        steps = zip(self.rows.stride(), (token, head, d), strict=True)
        return self.rows.data_ptr() + self.source * sum(s * i for s, i in steps)

    def cache_address(self, page, slot, head, d) -> int:
        element = page * self.stride["page"] + slot * self.stride["slot"]
        element += head * self.stride["head"] + d // self.chunk * self.stride["chunk"]
        return self.cache.data_ptr() + self.target * (element + d % self.chunk)

    def addresses(self, vector, tokens, points):
        """(of the row, of the cache) of the elements of vectors."""
        whole = self.dim // vector
        for point in points if whole else ():
            head, d = point[0] % self.sizes["head"], point[1] % whole * vector
            token = point[2] % tokens
            page, slot = point[3] % self.sizes["page"], point[4] % self.sizes["slot"]
            yield (
                [self.row_address(token, head, d + i) for i in range(vector)],
                [self.cache_address(page, slot, head, d + i) for i in range(vector)],
            )

    def takes(self, vector, tokens, points) -> bool:
        """Whether every vector might be moved at once: asked of addresses alone."""
        load, store = min(16, vector * self.source), vector * self.target
        return self.chunk % vector == 0 and all(
            row[0] % load == 0 and cache[0] % store == 0
            for row, cache in self.addresses(vector, tokens, points)
        )


@st.composite
def problems(draw):
    pick = lambda *options: draw(st.sampled_from(options))  # noqa: E731
    dtype, cache_dtype = pick(*DTYPES), pick(None, None, *KERNELS)
    tokens, heads = draw(st.integers(0, 40)), draw(st.integers(1, 5))
    pages, page_size = draw(st.integers(1, 5)), draw(st.integers(1, 17))
    legacy, unit = pick(False, False, False, True), pick(1, 2, 4, 8, 16)
    sides = [
        Drawn(
            draw,
            pick(unit, unit, 1, 8),
            tokens,
            heads,
            pages,
            page_size,
            dtype,
            cache_dtype,
            legacy,
            is_key,
        )
        for is_key in (True, False)
    ]
    return tokens, heads, cache_dtype, "legacy" if legacy else "NHD", sides


@given(
    problem=problems(),
    points=st.lists(st.tuples(*[st.integers(0, 10**6)] * 5), min_size=20, max_size=20),
)
@settings(max_examples=5 * settings().max_examples)
def test_every_access_of_any_plan(problem, points):
    """Aligned, inside one chunk, as wide as may be, and every element has a thread."""
    tokens, heads, cache_dtype, layout, sides = problem
    launches = plan(*(s.rows for s in sides), *(s.cache for s in sides), tokens, layout)
    if tokens == 0:
        assert launches == []
        return
    for name, side in zip("kv", sides, strict=True):
        mine = [launch for launch in launches if name in launch["sides"]]
        assert len(mine) == 1 or (len(mine) == heads and side.chunk < side.dim)
    corners = [*itertools.product((0, 1), repeat=5)]
    for launch in launches:
        assert launch["kernel"] == KERNELS.get(cache_dtype, "copy")
        assert (launch["tokens"], launch["threads"]) == (tokens, 256)
        vector, of_launch = launch["vector"], launch["sides"]
        mine = [side for name, side in zip("kv", sides, strict=True) if name in of_launch]
        assert launch["load_bytes"] == min(16, vector * mine[0].source)
        assert launch["store_bytes"] == vector * mine[0].target <= 16

        parts = sum(p["sides"] == of_launch for p in launches)  # 1, or a launch for each head
        items = tokens * heads // parts * max(side.dim // vector for side in mine)
        assert launch["grid"] == math.ceil(items / 256)
        for side in mine:
            assert side.chunk % vector == 0
            for row, cache in side.addresses(vector, tokens, points):
                assert row[0] % launch["load_bytes"] == 0
                assert cache[0] % launch["store_bytes"] == 0
                assert row == list(range(row[0], row[0] + vector * side.source, side.source))
                assert cache == list(range(cache[0], cache[0] + vector * side.target, side.target))
            widest = 16 // side.source if cache_dtype is None else 8
            if 2 * vector <= widest:
                assert not side.takes(2 * vector, tokens, corners), "twice as much would do"
