"""The CPU backend's threads and instruction sets: every mix of them gives the same answer."""

from __future__ import annotations

import concurrent.futures
import io
import os
import subprocess
import sys

import numpy as np
import pagetile
import pytest
from pagetile import _C

LENGTHS = (700, 1, 0, 2049)


def problem() -> dict[str, object]:
    """Enough work for several threads: 4 sequences, GQA 8/2, 3 queries each."""
    rng = np.random.default_rng(7)
    pages = [-(-length // 16) for length in LENGTHS]
    table = np.zeros((len(LENGTHS), max(pages)), np.int32)
    order = iter(rng.permutation(sum(pages)))
    for row, count in zip(table, pages, strict=True):
        row[:count] = [next(order) for _ in range(count)]
    k_cache, v_cache = rng.standard_normal((2, sum(pages), 16, 2, 64), np.float32)
    return {
        "q": rng.standard_normal((3 * len(LENGTHS), 8, 64), np.float32),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": table,
        "seqused_k": np.array(LENGTHS, np.int32),
        "cu_seqlens_q": np.arange(len(LENGTHS) + 1, dtype=np.int32) * 3,
        "max_seqlen_q": 3,
    }


def attend(**options: object) -> np.ndarray:
    return pagetile.paged_attention(**problem(), **options)


def run(code: str, **environment: str) -> bytes:
    """What Python prints, in a process of its own. The number of threads is fixed at its start."""
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, **environment, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, timeout=120, env=env
    ).stdout


def test_calls_from_several_python_threads():
    """The GIL is released during a call, so calls do run at the same time."""
    expected = attend()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for out in pool.map(lambda _: attend(), range(16)):
            np.testing.assert_array_equal(out, expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")
def test_child_of_fork_after_a_parallel_call():
    """A forked child has no OpenMP threads and cannot start any: it works on one."""
    code = """
import os, sys, numpy as np
from test_threads import attend
expected = attend()
child = os.fork()
if child == 0:
    os._exit(0 if np.allclose(attend(), expected, atol=1e-6) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(code, OMP_NUM_THREADS="4") == b"0\n"


HASH = """
import hashlib
from test_threads import attend
print(hashlib.sha256(attend({}).tobytes()).hexdigest())
"""


def test_bits_do_not_depend_on_the_number_of_threads():
    bits = {run(HASH.format("batch_invariant=True"), OMP_NUM_THREADS=str(n)) for n in (1, 2, 5)}
    assert len(bits) == 1
    # With one split the schedule is the only thing that threads change.
    bits = {run(HASH.format("num_splits=1"), OMP_NUM_THREADS=str(n)) for n in (1, 3)}
    assert len(bits) == 1


@pytest.mark.parametrize("isa", _C.build_info()["families"]["cpu"]["targets"])
def test_every_instruction_set_agrees(isa: str):
    """PAGETILE_CPU_ISA asks for lesser kernels; what this machine cannot run is not taken."""
    code = """
import sys, numpy as np
from pagetile import _C
from test_threads import attend
print(_C.build_info()["cpu_isa"], flush=True)
np.save(sys.stdout.buffer, attend())
"""
    chosen, _, array = run(code, PAGETILE_CPU_ISA=isa).partition(b"\n")
    targets = _C.build_info()["families"]["cpu"]["targets"]  # least first
    best = run("from pagetile import _C; print(_C.build_info()['cpu_isa'])", PAGETILE_CPU_ISA="")
    highest = targets.index(best.decode().strip())
    assert chosen.decode() == targets[min(targets.index(isa), highest)]
    np.testing.assert_allclose(np.load(io.BytesIO(array)), attend(), atol=2e-6)


def test_unknown_instruction_set_is_ignored():
    code = "from pagetile import _C; print(_C.build_info()['cpu_isa'])"
    assert run(code, PAGETILE_CPU_ISA="z80") == run(code, PAGETILE_CPU_ISA="")
