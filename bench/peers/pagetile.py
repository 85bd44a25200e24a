"""pagetile itself, by each kernel family that a GPU can run, and without a plan."""

from __future__ import annotations

import functools
from typing import Any

import pagetile
import torch

from peers.peer import Call, Peer

# Families differ in the kernel for long queries; the split-KV kernel for short ones is the same.
# What bindings call "portable" is the sm80 family's; "none" leaves all queries to split-KV.
KERNELS = {"best": "best", "sm90a": "best", "sm80": "portable", "split_kv": "none"}
_family = "best"


def family_unavailable(family: str) -> str | None:
    """Why a family's kernels cannot be timed on this GPU, or None."""
    config = pagetile.show_config("dicts")
    if not config["devices"]:
        return config["no_devices_reason"]
    device = config["devices"][0]
    # What the sm80 family has is compiled for every architecture of a build, 9.0a too.
    if not device["families"] or (family == "sm90a" and "sm90" not in device["families"]):
        built = ", ".join(config["build"]["families"])
        return f"no such kernels for {device['name']} in this build, which has {built}"
    return None


def choose(family: str) -> None:
    """For all calls that do not say otherwise."""
    global _family
    pagetile._C.choose_prefill(KERNELS[family])
    _family = family


def by_family(family: str, call: Call) -> Call:
    def chosen() -> Any:
        pagetile._C.choose_prefill(KERNELS[family])
        try:
            return call()
        finally:
            pagetile._C.choose_prefill(KERNELS[_family])

    return chosen


class Pagetile(Peer):
    """`family`: None is the one that the benchmark chose, without the cost of a choice."""

    def __init__(self, name: str, family: str | None = None, planned: bool = True) -> None:
        self.name, self.family, self.planned = name, family, planned

    def unavailable(self) -> str | None:
        return family_unavailable(self.family) if self.family else None

    def supports(self, case: Any) -> bool:
        return True

    def prepare(self, case: Any, tensors: Any) -> list[Call]:
        plan = self.make_plan(case, tensors)() if self.planned else None
        calls = []
        for table in tensors.tables:
            calls += [self._wrap(self._write(case, tensors, table))] if case.writes else []
            calls.append(self._wrap(self._attention(case, tensors, table, plan)))
        return calls

    def make_plan(self, case: Any, tensors: Any) -> Call:
        plan = functools.partial(
            pagetile.make_plan,
            num_q_heads=case.heads[0],
            num_kv_heads=case.heads[1],
            head_dim=case.head_dim,
            page_size=case.page_size,
            **self._step(case, tensors),
        )
        return self._wrap(plan)

    def _wrap(self, call: Call) -> Call:
        return by_family(self.family, call) if self.family else call

    @staticmethod
    def _step(case: Any, tensors: Any) -> dict[str, Any]:
        return {
            "seqused_k": tensors.seqused_k,
            "cu_seqlens_q": tensors.cu_seqlens_q,
            "max_seqlen_q": max(case.q_lens),
            "max_seqlen_k": max(case.kv_lens),
            "window": (case.window, 0 if case.window >= 0 else -1),
            "batch_invariant": case.batch_invariant,
        }

    def _attention(
        self, case: Any, tensors: Any, table: torch.Tensor, plan: Any
    ) -> functools.partial[Any]:
        return functools.partial(
            pagetile.paged_attention,
            tensors.q,
            *tensors.caches,
            block_table=table,
            out=tensors.out,
            layout=tensors.layout,
            **self._step(case, tensors),
            **tensors.scales,
            **({"plan": plan} if plan is not None else {}),
            **({"pdl": True} if case.pdl else {}),
        )

    @staticmethod
    def _write(case: Any, tensors: Any, table: torch.Tensor) -> Call:
        """The last tokens of each sequence, as many as it has queries."""
        slots = []
        for b, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
            keys = torch.arange(kv_len - q_len, kv_len, device=table.device)
            pages = table[b, keys // case.page_size].long()
            slots.append(pages * case.page_size + keys % case.page_size)
        shape = (2, len(tensors.q), case.heads[1], case.head_dim)
        rows = torch.randn(shape, device=table.device)
        return functools.partial(
            pagetile.cache_write,
            *rows.to(case.dtype),
            *tensors.caches,
            torch.cat(slots),
            layout=tensors.layout,
            pdl=case.pdl,
            **tensors.scales,
        )


class Fp8Products(Pagetile):
    """Queries rounded to e4m3 before, and multiplied with e4m3 where a kernel does that."""

    def supports(self, case: Any) -> bool:
        return case.stored == torch.float8_e4m3fn != case.dtype

    @staticmethod
    def _step(case: Any, tensors: Any) -> dict[str, Any]:
        return {**Pagetile._step(case, tensors), "fp8_products": True}

    def _attention(
        self, case: Any, tensors: Any, table: torch.Tensor, plan: Any
    ) -> functools.partial[Any]:
        call = super()._attention(case, tensors, table, plan)
        _, *caches = call.args
        q = tensors.q.to(case.stored)
        return functools.partial(pagetile.paged_attention, q, *caches, **call.keywords)


PEERS = (
    Pagetile("pagetile"),
    Pagetile("no_plan", planned=False),
    Pagetile("sm80", "sm80"),
    Pagetile("sm90a", "sm90a"),
    Pagetile("split_kv", "split_kv"),
    Fp8Products("fp8_products"),
)
