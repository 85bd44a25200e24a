"""Random problems of every kind against the reference, until the time is up or one fails.

    python tests/fuzz.py --minutes 30 --device cuda
    python tests/fuzz.py --minutes 5 --only write --seed 1234

What is drawn is in drawn.py. The first failure is made as small as hypothesis can, and written to
OUT/fuzz-SEED.py: a program that fails in the same way. It is there as well when the process dies,
as after an access outside of memory, or is stopped because it hangs: then with the problem that
was under way, as it was drawn. --seed SEED begins with the round that failed.

Exit status: 0 nothing found, 1 a failure.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

import drawn
import hypothesis
import torch
from hypothesis import given, settings
from tqdm import tqdm

KINDS = {  # of --only: what is drawn, and how
    "attention": {"attention": drawn.attends, "garbage": drawn.garbages},
    "write": {"write": drawn.writes, "copy": drawn.copies},
    "merge": {"merge": drawn.merges},
}
# Problems that one seed makes; those of attention take the longest.
ROUND = {"attention": 25, "garbage": 50, "write": 50, "copy": 50, "merge": 50}

REPRODUCER = '''\
"""Found by tests/fuzz.py --device {device} --seed {seed}.

{what}
"""

import sys

sys.path.append({tests!r})

from cases import Case, WriteCase
from drawn import Attend, Copy, Garbage, Merge, Write

{draw}.check({device!r})
print("no difference")
'''


class TimeUp(BaseException):
    """Not an Exception: hypothesis lets it through."""


class DeviceLost(BaseException):
    """After a fault on a GPU every call of the process fails, so nothing can be made smaller."""


class Fuzzer:
    """Runs rounds; `failure` is the last draw that failed, and its error."""

    def __init__(self, device: str, out: Path, seconds: float) -> None:
        self.device, self.out = device, out
        self.begin = time.monotonic()
        self.end = self.begin + seconds
        self.counts: Counter[str] = Counter()
        self.told = self.begin  # when progress was printed, with the counts of then
        self.counts_told: Counter[str] = Counter()
        self.failure: tuple[object, Exception] | None = None
        self.bar = tqdm(total=round(seconds), unit="s", disable=None)

    def run(self, kinds, seed: int) -> Path | None:
        """The reproducer of the first failure, or None when the time is up."""
        self.out.mkdir(parents=True, exist_ok=True)
        while True:
            path = self.out / f"fuzz-{seed}.py"
            for kind in kinds:
                for name, strategy in KINDS[kind].items():
                    try:
                        self.round(name, strategy(self.device), seed, path)
                    except TimeUp:
                        path.unlink(missing_ok=True)
                        self.tell()
                        self.bar.close()
                        return None
                    except (Exception, DeviceLost) as error:
                        if self.failure is None:  # not of a problem: of a strategy
                            raise
                        self.bar.close()
                        self.write(path, seed, *self.failure, error)
                        return path
            path.unlink(missing_ok=True)
            seed += 1

    def round(self, name: str, strategy, seed: int, path: Path) -> None:
        @hypothesis.seed(seed)
        @settings(
            max_examples=ROUND[name],
            database=None,
            deadline=None,
            derandomize=False,
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
            print_blob=False,
            report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
            verbosity=hypothesis.Verbosity.quiet,
        )
        @given(draw=strategy)
        def problem(draw) -> None:
            if self.failure is None and time.monotonic() > self.end:
                raise TimeUp
            self.attempt(name, draw, seed, path)

        problem()

    def attempt(self, name: str, draw, seed: int, path: Path) -> None:
        path.write_text(self.reproducer(seed, draw, "It was under way when the process ended."))
        try:
            draw.check(self.device)
        except Exception as error:
            self.failure = draw, error
            if self.lost_device():
                raise DeviceLost from error
            raise
        self.counts[name] += 1
        if time.monotonic() > self.told + 60:
            self.tell()

    def lost_device(self) -> bool:
        try:
            if self.device == "cuda":
                torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False

    def tell(self) -> None:
        """Progress, in one line: problems a second since the last one."""
        now = time.monotonic()
        rates = (self.counts - self.counts_told).items()
        shown = ", ".join(f"{name} {n / (now - self.told):.1f}/s" for name, n in rates)
        tqdm.write(f"{(now - self.begin) / 60:.1f} min: {self.counts.total()} problems; {shown}")
        self.bar.update(round(now - self.begin) - self.bar.n)
        self.told, self.counts_told = now, self.counts.copy()

    def write(self, path: Path, seed: int, draw, error: Exception, raised: BaseException) -> None:
        what = f"{type(error).__name__}: {error}"
        if isinstance(raised, DeviceLost):
            what += "\n\nNot made smaller: the fault took the device away."
        if isinstance(raised, hypothesis.errors.Flaky):
            what += "\n\nNot every run of it fails."
        path.write_text(self.reproducer(seed, draw, what))

    def reproducer(self, seed: int, draw, what: str) -> str:
        tests = str(Path(__file__).resolve().parent)
        what = what.replace("\\", "\\\\").replace('"""', "'''")
        return REPRODUCER.format(
            device=self.device, seed=seed, what=what, tests=tests, draw=drawn.literal(draw)
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seed", type=int, help="of the first round; drawn if not given")
    parser.add_argument("--only", choices=list(KINDS))
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="for reproducers")
    chosen = parser.parse_args(arguments)
    seed = random.randrange(10**6) if chosen.seed is None else chosen.seed
    kinds = list(KINDS) if chosen.only is None else [chosen.only]
    fuzzer = Fuzzer(chosen.device, chosen.out, 60 * chosen.minutes)
    path = fuzzer.run(kinds, seed)
    if path is None:
        return 0
    print(f"{path}:\n\n{path.read_text()}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
