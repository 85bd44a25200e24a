"""merge_states against the reference: shapes, empty sides, infinities, in place, strides."""

from __future__ import annotations

import numpy as np
import pagetile
import pytest
import reference
import torch
from cases import Case
from problem import Problem, same_bits, to_numpy

USES = ("merge_states",)
DTYPES = ("float32", "float16", "bfloat16")
SHAPES = [(1, 1, 8), (5, 4, 64), (39, 16, 128), (7, 3, 46), (3, 2, 1), (513, 5, 40), (2, 64, 256)]


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
@pytest.mark.parametrize("empty", [-np.inf, np.inf], ids=["minus_inf", "plus_inf"])
@pytest.mark.parametrize("junk", [0.0, np.nan, np.inf], ids=["zeros", "nan", "inf"])
def test_empty_sides(junk, empty, dtype, device):
    """Token 0: a empty; 1: b empty; 2: both; 3: none. An empty side's values are no matter."""
    sides = states((4, 3, 16), dtype, device)
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


def test_huge_lse_do_not_overflow(device):
    sides = states((3, 2, 8), "float32", device)
    sides[1][:] = torch.tensor([3e38, -3e38, 89.0], device=device)
    sides[3][:] = torch.tensor([3e38, -3e38, -1e30], device=device)
    check(pagetile.merge_states(*sides), sides, "float32")


@pytest.mark.parametrize("place", ["a", "b", "new"])
def test_out_given(place, device):
    """out= may be one of the inputs, and so may lse=."""
    sides = states((9, 4, 64), "bfloat16", device)
    expected = pagetile.merge_states(*sides)
    given = {
        "a": (sides[0], sides[1]),
        "b": (sides[2], sides[3]),
        "new": (torch.empty_like(sides[0]), torch.empty_like(sides[1])),
    }[place]
    actual = pagetile.merge_states(*sides, out=given[0], lse=given[1])
    assert actual[0] is given[0]
    assert actual[1] is given[1]
    assert all(map(same_bits, actual, expected))


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


def test_strides(device):
    """out rows and heads apart, lse transposed and padded; nothing between them is touched."""
    sides = states((6, 3, 40), "bfloat16", device)
    expected = pagetile.merge_states(*sides)

    def apart(x):
        wide = torch.full((x.shape[0] * 2, x.shape[1] + 1, x.shape[2] + 8), torch.nan).to(x)
        view = wide[::2, :-1, : x.shape[2]]
        view.copy_(x)
        return wide, view

    def transposed(x):
        wide = torch.full((x.shape[1] + 2, x.shape[0]), torch.nan).to(x)
        view = wide[: x.shape[1]].T
        view.copy_(x)
        return wide, view

    wide, views = zip(apart(sides[0]), transposed(sides[1]), apart(sides[2]), transposed(sides[3]),
                      apart(torch.zeros_like(sides[0])), transposed(torch.zeros_like(sides[1])),
                      strict=True)  # fmt: skip
    out, lse = pagetile.merge_states(*views[:4], out=views[4], lse=views[5])
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])
    for whole, view in zip(wide, views, strict=True):
        kept = whole.clone()
        kept.as_strided(view.shape, view.stride()).fill_(torch.nan)
        assert kept.isnan().all()


def test_no_tokens(device):
    out, lse = pagetile.merge_states(*states((0, 3, 8), "bfloat16", device))
    assert tuple(out.shape) == (0, 3, 8)
    assert tuple(lse.shape) == (3, 0)


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
