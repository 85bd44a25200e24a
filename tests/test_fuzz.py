"""The fuzz driver: it passes where nothing is wrong, and what it finds it writes down."""

from __future__ import annotations

import runpy
import subprocess
import sys

import drawn
import fuzz
import hypothesis
import pagetile
import pytest
from cases import Case
from drawn import Attend, Copy, Garbage, Merge, Write
from hypothesis import Phase, given, settings

MADE_OF = {"Case": Case, "WriteCase": drawn.WriteCase} | {
    kind.__name__: kind for kind in (Attend, Copy, Garbage, Merge, Write)
}
KINDS = {name: draw for kinds in fuzz.KINDS.values() for name, draw in kinds.items()}


@pytest.mark.parametrize("only", fuzz.KINDS)
def test_nothing_is_wrong(only, tmp_path, capsys):
    assert fuzz.main(["--minutes", "0.05", "--only", only, "--out", str(tmp_path)]) == 0
    assert list(tmp_path.iterdir()) == []
    printed = capsys.readouterr().out
    assert next(iter(fuzz.KINDS[only])) + " " in printed


@pytest.mark.parametrize("name", KINDS)
def test_a_draw_prints_as_what_makes_it(name):
    @settings(max_examples=20, phases=[Phase.generate], database=None)
    @hypothesis.seed(0)
    @given(draw=KINDS[name]("cpu"))
    def check(draw):
        assert eval(drawn.literal(draw), dict(MADE_OF)) == draw

    check()


def test_scores_beyond_a_hundred():
    """A score of 123 is rounded by up to 1e-5 in fp32, and its weight by as much (seed 205)."""
    case = Case(
        "drawn",
        (0, 0, 4, 0),
        (0, 1, 8, 0),
        heads=(3, 1),
        head_dim=(224, 128),
        page_size=1,
        dtype="float32",
        cache_dtype="float8_e4m3fn",
        scales="one",
        causal=False,
        window=(-1, 0),
        softmax_scale=1.0,
        seed=11,
    )
    Attend(case=case).check("cpu")


def wrong_attention(kernel):
    """A number is off where a sequence has more than 16 keys."""

    def call(*tensors, seqused_k, **options):
        results = kernel(*tensors, seqused_k=seqused_k, **options)
        if seqused_k.max() > 16:
            results[1].add_(1)
        return results

    return call


def wrong_write(kernel):
    """The last row of k is not stored."""

    def call(k, v, k_cache, v_cache, slot_mapping, **options):
        if len(slot_mapping):
            slot_mapping[-1] = -1
        kernel(k, v, k_cache, v_cache, slot_mapping, **options)

    return call


def wrong_merge(kernel):
    """A side is written."""

    def call(*sides, **options):
        if sides[0].numel():
            sides[0][0, 0, 0] += 1
        return kernel(*sides, **options)

    return call


FAULTS = {
    "attention": ("paged_attention", wrong_attention),
    "write": ("cache_write", wrong_write),
    "merge": ("merge_states", wrong_merge),
}


@pytest.mark.parametrize("only", FAULTS)
def test_a_planted_fault(only, tmp_path, monkeypatch, capsys):
    function, fault = FAULTS[only]
    kernel = getattr(pagetile, function)
    monkeypatch.setattr(pagetile, function, fault(kernel))
    assert fuzz.main(["--minutes", "1", "--only", only, "--seed", "5", "--out", str(tmp_path)]) == 1
    (reproducer,) = tmp_path.iterdir()
    assert str(reproducer) in capsys.readouterr().out
    with pytest.raises(AssertionError) as caught:
        runpy.run_path(str(reproducer))
    assert str(caught.value).splitlines()[0] in reproducer.read_text()
    if only == "attention":
        assert "kv_lens=(17,)" in reproducer.read_text(), "not the smallest"

    # A process of its own has no such fault.
    done = subprocess.run(
        [sys.executable, reproducer], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "no difference\n"), done.stderr


def test_garbage_that_validate_lets_pass(tmp_path, monkeypatch):
    kernel = pagetile.paged_attention

    def call(*tensors, validate=None, **options):
        return kernel(*tensors, validate=False, **options)

    monkeypatch.setattr(pagetile, "paged_attention", call)
    assert fuzz.main(["--only", "attention", "--seed", "5", "--out", str(tmp_path)]) == 1
    assert "validate lets pass: {" in next(tmp_path.iterdir()).read_text()


def test_what_was_under_way_is_kept(tmp_path, monkeypatch):
    """As if the process had died: the reproducer is there before the call."""

    def stop(*tensors, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(pagetile, "merge_states", stop)
    with pytest.raises(KeyboardInterrupt):
        fuzz.main(["--only", "merge", "--seed", "7", "--out", str(tmp_path)])
    text = (tmp_path / "fuzz-7.py").read_text()
    assert "under way" in text
    monkeypatch.undo()
    runpy.run_path(str(tmp_path / "fuzz-7.py"))


def test_a_lost_device_ends_it(tmp_path, monkeypatch):
    """The draw is kept as it was: afterwards every call would fail, the smallest one too."""
    kernel, calls = pagetile.merge_states, []

    def call(*sides, **options):
        calls.append(sides)
        if len(calls) > 4:
            raise RuntimeError("an illegal memory access")
        return kernel(*sides, **options)

    monkeypatch.setattr(pagetile, "merge_states", call)
    monkeypatch.setattr(fuzz.Fuzzer, "lost_device", lambda self: True)
    assert fuzz.main(["--only", "merge", "--seed", "7", "--out", str(tmp_path)]) == 1
    assert len(calls) == 5
    assert "took the device away" in (tmp_path / "fuzz-7.py").read_text()
