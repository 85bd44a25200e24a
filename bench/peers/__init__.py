"""What benchmarks time beside pagetile: one adapter a library, each of them optional."""

from __future__ import annotations

from collections.abc import Sequence

from peers import fa3, flashinfer, legacy, pagetile, sdpa
from peers.peer import Peer

ATTENTION: dict[str, Peer] = {
    peer.name: peer
    for module in (fa3, flashinfer, sdpa, legacy, pagetile)
    for peer in module.PEERS
    if peer.name != "pagetile"
}
SETS = {"legacy": ("legacy_v1", "legacy_v2"), "all": tuple(ATTENTION)}


def pick(text: str) -> list[Peer]:
    """The peers that "fa3,sdpa" names. Raises ValueError for others."""
    names = [name for word in text.split(",") if word for name in SETS.get(word, (word,))]
    if unknown := [name for name in names if name not in ATTENTION]:
        known = ", ".join([*ATTENTION, *SETS])
        raise ValueError(f"no peer {', '.join(unknown)}; there are: {known}")
    return [ATTENTION[name] for name in dict.fromkeys(names)]


def present(peers: Sequence[Peer]) -> tuple[list[Peer], list[str]]:
    """Those that can be timed here, and a line for each reason why others cannot."""
    here, absent = [], {}
    for peer in peers:
        reason = peer.unavailable()
        if reason is None:
            here.append(peer)
        else:
            absent.setdefault(reason, []).append(peer.name)
    return here, [f"not here: {', '.join(names)} ({reason})" for reason, names in absent.items()]
