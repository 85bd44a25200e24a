"""What a library needs to be timed beside others."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

Call = Callable[[], Any]


class Peer:
    """An adapter. None of them imports its library before it is asked whether it is there."""

    name: str

    def unavailable(self) -> str | None:
        """Why it cannot be timed here, or None."""
        raise NotImplementedError

    def supports(self, case: Any) -> bool:
        """Whether it computes the same, and has been seen to."""
        raise NotImplementedError

    def prepare(self, case: Any, tensors: Any) -> list[Call]:
        """A call for each set of tensors. What can be made once a step is made here."""
        raise NotImplementedError

    def result(self, returned: Any, tensors: Any) -> Any:
        """[T, Hq, D], from what a call of `prepare` returned."""
        return tensors.out


def is_plain(case: Any) -> bool:
    """Attention and nothing else, over pages of [P, S, Hkv, D]."""
    alone = not (case.writes or case.pdl or case.batch_invariant)
    return alone and case.layout == "NHD" and case.window < 0


def peers_folder() -> pathlib.Path:
    """Where bench/peers/fetch.sh puts the kernels of wheels that are not installed."""
    return pathlib.Path(os.environ.get("PEERS_DIR", ".peers/run"))
