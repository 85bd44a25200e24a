"""merge_states against the reference: shapes, empty sides, infinities, in place, strides, sizes."""

from __future__ import annotations

import numpy as np
import pagetile
import pytest
import reference
import torch
from cases import Case
from gpu import captured, needs_gpus
from memory import huge_tensor
from pagetile.compat import vllm
from problem import Problem, same_bits, to_numpy

USES = ("merge_states",)
ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DTYPES = ("float32", "float16", "bfloat16")
SHAPES = [(1, 1, 8), (5, 4, 64), (39, 16, 128), (7, 3, 46), (3, 2, 1), (513, 5, 40), (2, 64, 256)]
HEAD_DIMS = [8, 16, 24, 48, 72, 80, 96, 112, 192, 264, 512, 576]
ODD_HEAD_DIMS = [2, 3, 7, 33, 100, 127, 255, 257, 575]  # rows that are no whole 16-byte vectors


def states(shape, dtype, device, seed=0):
    """out_a, lse_a, out_b, lse_b; the lse far apart at times, so that one side decides."""
    rng = np.random.default_rng(seed)
    tokens, heads, _ = shape
    sides = []
    for _ in "ab":
        out = torch.from_numpy(rng.standard_normal(shape)).to(getattr(torch, dtype)).to(device)
        lse = rng.standard_normal((heads, tokens)) * rng.choice([0.1, 3, 100], (heads, tokens))
        sides += [out, torch.from_numpy(lse.astype(np.float32)).to(device)]
    return sides


def check(actual, sides, dtype):
    out, lse = reference.merge(*map(to_numpy, sides))
    floor = 1e-5 * max(1.0, np.abs(lse[np.isfinite(lse)]).max(initial=0))
    reference.assert_close(to_numpy(actual[0]), out, reference.round_to(out, dtype))
    reference.assert_close(to_numpy(actual[1]), lse, lse, "lse", floor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_merge(shape, dtype, device):
    sides = states(shape, dtype, device)
    before = [x.clone() for x in sides]
    out, lse = pagetile.merge_states(*sides)
    assert out.dtype == getattr(torch, dtype)
    assert lse.dtype == torch.float32
    check((out, lse), sides, dtype)
    assert all(map(same_bits, sides, before))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS + ODD_HEAD_DIMS)
def test_head_dims(head_dim, dtype, device):
    sides = states((5, 7, head_dim), dtype, device)
    check(pagetile.merge_states(*sides), sides, dtype)


@pytest.mark.parametrize("head_dim", [8, 24, 46, 128])
def test_a_row_does_not_depend_on_the_others(head_dim, device):
    """However many there are: a few fill no warp, more no whole number of CTAs."""
    sides = states((130, 3, head_dim), "bfloat16", device)
    out, lse = pagetile.merge_states(*sides)
    for tokens in (1, 2, 11, 31, 43, 127, 129):
        some = [x[:tokens] if x.ndim == 3 else x[:, :tokens] for x in sides]
        some_out, some_lse = pagetile.merge_states(*some)
        assert same_bits(some_out, out[:tokens])
        assert same_bits(some_lse, lse[:, :tokens])


@needs_gpus(1)
@pytest.mark.parametrize("head_dim", [46, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_rounds_like_the_cpu(dtype, head_dim):
    """A step of a 16-bit type apart at most. Values of one sign, since sums may not cancel."""
    sides = states((1031, 8, head_dim), dtype, "cpu")
    sides[0].abs_()
    sides[2].abs_()
    expected_out, expected_lse = pagetile.merge_states(*sides)
    out, lse = (x.cpu() for x in pagetile.merge_states(*(x.cuda() for x in sides)))
    bits = torch.int32 if dtype == "float32" else torch.int16
    steps = (out.view(bits).long() - expected_out.view(bits).long()).abs().max().item()
    assert steps <= (16 if dtype == "float32" else 1)
    bound = 2**-20 * expected_lse.abs().clamp(min=1)
    assert ((lse - expected_lse).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 46, 576])
@pytest.mark.parametrize("empty", [-np.inf, np.inf], ids=["minus_inf", "plus_inf"])
@pytest.mark.parametrize("junk", [0.0, np.nan, np.inf], ids=["zeros", "nan", "inf"])
def test_empty_sides(junk, empty, head_dim, dtype, device):
    """Token 0: a empty; 1: b empty; 2: both; 3: none. An empty side's values are no matter."""
    sides = states((4, 3, head_dim), dtype, device)
    for out, lse, tokens in ((*sides[:2], (0, 2)), (*sides[2:], (1, 2))):
        for token in tokens:
            out[token] = junk
            lse[:, token] = empty
    out, lse = pagetile.merge_states(*sides)
    assert torch.equal(out[0], sides[2][0])
    assert torch.equal(lse[:, 0], sides[3][:, 0])
    assert torch.equal(out[1], sides[0][1])
    assert torch.equal(lse[:, 1], sides[1][:, 1])
    assert (out[2] == 0).all()
    assert (lse[:, 2] == -torch.inf).all()
    check((out, lse), sides, dtype)


def test_opposite_infinities_are_both_empty(device):
    sides = states((2, 2, 8), "float32", device)
    sides[1][:], sides[3][:] = torch.inf, -torch.inf
    out, lse = pagetile.merge_states(*sides)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("head_dim", [46, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_lse_stays_nan(dtype, head_dim, device):
    """Against a number, an empty side and another NaN; and it stays in its row."""
    sides = states((8, 2, head_dim), dtype, device)
    expected = pagetile.merge_states(*sides)
    nan, none = torch.nan, -torch.inf
    pairs = ((nan, 1), (1, nan), (nan, none), (none, nan), (nan, nan))
    for token, (lse_a, lse_b) in enumerate(pairs):
        sides[1][1, token], sides[3][1, token] = lse_a, lse_b
    out, lse = pagetile.merge_states(*sides)
    assert out[:5, 1].isnan().all()
    assert lse[1, :5].isnan().all()
    assert same_bits(out[:, 0], expected[0][:, 0])
    assert same_bits(out[5:], expected[0][5:])
    assert same_bits(lse[0], expected[1][0])
    assert same_bits(lse[:, 5:], expected[1][:, 5:])


def test_huge_lse_do_not_overflow(device):
    sides = states((3, 2, 8), "float32", device)
    sides[1][:] = torch.tensor([3e38, -3e38, 89.0], device=device)
    sides[3][:] = torch.tensor([3e38, -3e38, -1e30], device=device)
    check(pagetile.merge_states(*sides), sides, "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape", [(9, 4, 64), (1031, 5, 46), (513, 16, 128), (129, 3, 576), (9, 1, 1)], ids=str
)
@pytest.mark.parametrize("place", ["aa", "bb", "ab", "ba", "an", "nb", "nn"])
def test_out_given(place, shape, dtype, device):
    """out and lse may each be an input: a's, b's, or new; the others stay as they are."""
    sides = states(shape, dtype, device)
    before = [x.clone() for x in sides]
    expected = pagetile.merge_states(*sides)
    outs = {"a": sides[0], "b": sides[2], "n": torch.full_like(sides[0], torch.nan)}
    lses = {"a": sides[1], "b": sides[3], "n": torch.full_like(sides[1], torch.nan)}
    given = outs[place[0]], lses[place[1]]
    actual = pagetile.merge_states(*sides, out=given[0], lse=given[1])
    assert actual[0] is given[0]
    assert actual[1] is given[1]
    assert all(map(same_bits, actual, expected))
    for side, old in zip(sides, before, strict=True):
        assert side is given[0] or side is given[1] or same_bits(side, old)


def test_only_out_or_only_lse_given(device):
    sides = states((9, 4, 64), "float16", device)
    expected = pagetile.merge_states(*sides)
    given = torch.empty_like(sides[0])
    actual = pagetile.merge_states(*sides, out=given)
    assert actual[0] is given
    assert all(map(same_bits, actual, expected))
    given = torch.empty_like(sides[1])
    actual = pagetile.merge_states(*sides, lse=given)
    assert actual[1] is given
    assert all(map(same_bits, actual, expected))


def memory_of(x, strides, offset=0):
    """Memory of NaN, and a copy of x in it with the given strides."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
    whole = torch.full((offset + last + 9,), torch.nan, dtype=x.dtype, device=x.device)
    view = whole.as_strided(x.shape, strides, offset)
    view.copy_(x)
    return whole, view


def assert_nothing_around(whole, view):
    kept = whole.clone()
    kept.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(torch.nan)
    assert kept.isnan().all()


LAYOUTS = {  # strides of tokens and heads, and where the first element is, for [T, H, D]
    "dense": lambda t, h, d: (h * d, d, 0),
    "offset_1": lambda t, h, d: (h * d, d, 1),
    "offset_4": lambda t, h, d: (h * d, d, 4),
    "apart": lambda t, h, d: (2 * h * (d + 8), d + 8, 16),
    "odd_heads": lambda t, h, d: (h * (d + 1) + 7, d + 1, 0),
    "odd_rows": lambda t, h, d: (h * d + 1, d, 0),
    "heads_first": lambda t, h, d: (d, t * d, 0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [40, 46, 128])
@pytest.mark.parametrize("where", ["a", "b", "out", "everywhere"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "dense"])
def test_strides(layout, where, head_dim, dtype, device):
    """Rows that allow 16-byte vectors or not: the same bits, and nothing between rows changes."""
    shape = (6, 3, head_dim)
    sides = states(shape, dtype, device)
    expected = pagetile.merge_states(*sides)
    wide, views = {}, {}
    for name, x in (("a", sides[0]), ("b", sides[2]), ("out", torch.zeros_like(sides[0]))):
        *strides, offset = LAYOUTS[layout if where in (name, "everywhere") else "dense"](*shape)
        wide[name], views[name] = memory_of(x, (*strides, 1), offset)
    for name, x in (("lse_a", sides[1]), ("lse_b", sides[3]), ("lse", torch.zeros_like(sides[1]))):
        transposed = where == "everywhere"  # [T, H] in memory, and padded
        strides = (1, shape[1] + 2) if transposed else (shape[0], 1)
        wide[name], views[name] = memory_of(x, strides, 3)
    out, lse = pagetile.merge_states(
        views["a"], views["lse_a"], views["b"], views["lse_b"], out=views["out"], lse=views["lse"]
    )
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])
    for name, view in views.items():
        assert_nothing_around(wide[name], view)


@pytest.mark.parametrize("head_dim", [46, 64])
def test_one_token_or_one_head_may_have_any_stride(head_dim, device):
    """A stride that is never stepped says nothing about alignment, and moves nothing."""
    for shape, strides in (
        ((1, 3, head_dim), (1, head_dim, 1)),
        ((3, 1, head_dim), (head_dim, 1, 1)),
    ):
        sides = states(shape, "float16", device)
        expected = pagetile.merge_states(*sides)
        odd = [x.as_strided(shape, strides) if x.ndim == 3 else x for x in sides]
        assert all(map(same_bits, pagetile.merge_states(*odd), expected))


@pytest.mark.parametrize("head_dim", [46, 64])
def test_one_row_for_all_tokens_or_heads(head_dim, device):
    """Inputs of stride 0."""
    sides = states((5, 4, head_dim), "float16", device)
    same = [
        sides[0][:1].expand(5, -1, -1),
        sides[1],
        sides[2][:, :1].expand(-1, 4, -1),
        sides[3][:1, :1].expand(4, 5),
    ]
    expected = pagetile.merge_states(*(x.contiguous() for x in same))
    assert all(map(same_bits, pagetile.merge_states(*same), expected))


@pytest.mark.parametrize("name", ["numpy", pytest.param("cupy", marks=ON_A_GPU)])
def test_views_that_run_backwards(name):
    library = pytest.importorskip(name)
    rng = np.random.default_rng(5)
    outs = rng.standard_normal((3, 6, 4, 64)).astype(np.float16)
    lses = rng.standard_normal((3, 4, 6)).astype(np.float32)
    plain = [library.asarray(x) for i in (0, 1) for x in (outs[i], lses[i])]
    expected = pagetile.merge_states(*plain)

    def backwards(x):
        """The same values; every stride but a row's own is negative."""
        return library.asarray(x[::-1, ::-1].copy())[::-1, ::-1]

    out, lse = backwards(outs[2]), backwards(lses[2])
    pagetile.merge_states(
        backwards(outs[0]), backwards(lses[0]), backwards(outs[1]), backwards(lses[1]),
        out=out, lse=lse,
    )  # fmt: skip
    assert (out == expected[0]).all()
    assert (lse == expected[1]).all()


# Tokens without a


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [46, 64, 576])
@pytest.mark.parametrize("place", ["new", "a", "b", "no_lse"])
@pytest.mark.parametrize("context", [0, 1, 5, 9, 1000])
def test_tokens_with_a(context, place, head_dim, dtype, device):
    """Tokens from there on are b's rows bit for bit; what a holds there is never looked at."""
    sides = states((9, 4, head_dim), dtype, device)
    sides[0][context:], sides[1][:, context:] = torch.nan, torch.nan
    sides[2][-1], sides[3][:, -1] = torch.nan, torch.inf  # b saw no key there
    sides[0][-1], sides[1][:, -1] = torch.nan, -torch.inf  # nor did a
    out, lse = pagetile.merge_states(*sides)
    if context < 9:
        out[context:], lse[:, context:] = sides[2][context:], sides[3][:, context:]
        out[-1], lse[:, -1] = 0, -torch.inf
    given = {
        "new": (torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)),
        "a": (sides[0], sides[1]),
        "b": (sides[2], sides[3]),
        "no_lse": (torch.full_like(out, torch.nan), None),
    }[place]
    vllm.merge_attn_states(given[0], *sides, given[1], context)
    assert same_bits(given[0], out)
    assert given[1] is None or same_bits(given[1], lse)


# Sizes


@pytest.mark.parametrize("shape", [(0, 3, 8), (3, 0, 8), (0, 0, 46)], ids=str)
def test_nothing_to_merge(shape, device):
    out, lse = pagetile.merge_states(*states(shape, "bfloat16", device))
    assert tuple(out.shape) == shape
    assert tuple(lse.shape) == (shape[1], shape[0])


@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim"),
    [(70_000, 1, 8), (2, 70_000, 8), (400, 300, 16), (270_000, 1, 33)],
    ids=str,
)
def test_many_rows(tokens, heads, head_dim, device):
    """More than 65,535 of tokens, heads or CTAs: copies of a small batch, and the same bits."""
    times = (tokens // 70, 1) if tokens >= 70 else (1, heads // 70)
    small = (tokens // times[0], heads // times[1], head_dim)
    sides = states(small, "bfloat16", device)

    def repeated(x):
        return x.repeat(*times, 1) if x.ndim == 3 else x.repeat(times[1], times[0])

    expected = map(repeated, pagetile.merge_states(*sides))
    assert all(map(same_bits, pagetile.merge_states(*map(repeated, sides)), expected))


@pytest.mark.parametrize("head_dim", [46, 64])
def test_rows_beyond_two_to_the_32_elements(head_dim, device):
    """a, b and out are columns of rows of 2^30 elements; the lse lies as far apart."""
    shape = (5, 3, head_dim)
    sides = states(shape, "float16", device)
    expected = pagetile.merge_states(*sides)
    rows = huge_tensor((5, 2**30), torch.float16, device)
    heads = huge_tensor((3, 2**31 + 16), torch.float32, device)
    width = 3 * head_dim

    def column(i):
        return rows[:, i * width : (i + 1) * width].unflatten(1, shape[1:])

    views = [column(0), heads[:, :5], column(1), heads[:, 5:10]]
    for view, side in zip(views, sides, strict=True):
        view.copy_(side)
    out, lse = pagetile.merge_states(*views, out=column(2), lse=heads[:, 10:15])
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])
    assert all(map(same_bits, views, sides))
    assert not rows[:, 3 * width : 3 * width + 64].any()


@needs_gpus(1)
def test_more_rows_than_one_launch_counts():
    """2^31 rows and some more; the last tokens take b alone."""
    heads, tokens = 3, 2**31 // 3 + 1000
    context = tokens - 500
    a, lse_a, b, lse_b = states((1, heads, 1), "float16", "cuda")
    merged = torch.empty_like(a)
    vllm.merge_attn_states(merged, a, lse_a, b, lse_b)
    assert not torch.equal(merged, b)
    out = huge_tensor((tokens, heads, 1), torch.float16, "cuda").fill_(torch.nan)
    wide = [x.expand(tokens, -1, -1) if x.ndim == 3 else x.expand(-1, tokens)
            for x in (a, lse_a, b, lse_b)]  # fmt: skip
    vllm.merge_attn_states(out, *wide, None, context)
    assert (out[:context] == merged).all()
    assert (out[context:] == b).all()


@needs_gpus(1)
def test_in_a_graph():
    """Replays read what the tensors hold by then."""
    sides = states((65, 4, 128), "bfloat16", "cuda")
    out, lse = torch.empty_like(sides[0]), torch.empty_like(sides[1])
    graph = captured(lambda: pagetile.merge_states(*sides, out=out, lse=lse))
    for side, new in zip(sides, states((65, 4, 128), "bfloat16", "cuda", seed=1), strict=True):
        side.copy_(new)
    graph.replay()
    assert all(map(same_bits, (out, lse), pagetile.merge_states(*sides)))


def test_two_runs_agree(device):
    sides = states((513, 5, 40), "float16", device)
    assert all(map(same_bits, pagetile.merge_states(*sides), pagetile.merge_states(*sides)))


def test_prefix_and_suffix_are_the_whole(device):
    """Attention over the first 32 keys merged with the rest is attention over all of them."""
    case = Case("prefix_suffix", (3, 1), (60, 41), heads=(6, 2))
    problem = Problem(case, device)
    table = problem.arguments["block_table"]
    lens = problem.arguments["seqused_k"]
    prefix = problem.run(block_table=table[:, :2], seqused_k=lens * 0 + 32, causal=False)
    suffix = problem.run(block_table=table[:, 2:], seqused_k=lens - 32)
    problem.check_merged(*pagetile.merge_states(*prefix, *suffix), (32, 32))
