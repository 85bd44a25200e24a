"""What pagetile.integrations.vllm imports of vLLM 0.26, as small as can be, for want of vLLM.

Names and signatures are vLLM's; what they do is only what the backend relies on.
"""

from __future__ import annotations

import contextlib
import enum
import os
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import torch

OVERRIDDEN: dict[BackendEnum, str] = {}


class BackendEnum(enum.Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    def is_overridden(self) -> bool:
        return self in OVERRIDDEN

    def get_path(self) -> str:
        return OVERRIDDEN.get(self, self.value)


def register_backend(backend: BackendEnum, class_path: str) -> None:
    OVERRIDDEN[backend] = class_path


class MultipleOf:
    def __init__(self, base: int) -> None:
        self.base = base


class AttentionBackend:
    pass


class AttentionMetadata:
    pass


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    NEVER = 0


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device


class AttentionImpl:
    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        group = sys.modules["vllm.distributed.parallel_state"]
        try:
            self.dcp_world_size = group.get_dcp_group().world_size
        except AssertionError:
            self.dcp_world_size = 1
        return self


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    rswa_prefix_lens: torch.Tensor | None = None


def get_dcp_group():
    raise AssertionError("no groups have been made")


def get_dcp_local_seq_lens(seq_lens, dcp_size, dcp_rank, interleave):
    """Runs of `interleave` tokens go round the ranks."""
    rounds, rest = seq_lens // (dcp_size * interleave), seq_lens % (dcp_size * interleave)
    return (rounds * interleave + (rest - dcp_rank * interleave).clamp(0, interleave)).int()


class Envs(ModuleType):
    @property
    def VLLM_BATCH_INVARIANT(self) -> bool:
        return os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1"


MODULES = {
    "vllm": {},
    "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
    "vllm.distributed": {},
    "vllm.distributed.parallel_state": {"get_dcp_group": get_dcp_group},
    "vllm.v1": {},
    "vllm.v1.attention": {},
    "vllm.v1.attention.backend": {
        c.__name__: c
        for c in (
            AttentionBackend, AttentionCGSupport, AttentionImpl, AttentionMetadata,
            AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf,
        )
    },
    "vllm.v1.attention.backends": {},
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum": BackendEnum, "register_backend": register_backend,
        "_ATTN_OVERRIDES": OVERRIDDEN,
    },
    "vllm.v1.attention.backends.utils": {
        "get_dcp_local_seq_lens": get_dcp_local_seq_lens,
        "get_kv_cache_layout": lambda: os.environ.get("VLLM_KV_CACHE_LAYOUT", "NHD"),
    },
    "vllm.v1.attention.ops": {},
    "vllm.v1.attention.ops.common": {"cp_lse_ag_out_rs": SimpleNamespace(name="ag_rs")},
    "vllm.v1.attention.ops.dcp_alltoall": {"dcp_a2a_lse_reduce": SimpleNamespace(name="a2a")},
}  # fmt: skip


@contextlib.contextmanager
def installed():
    """In sys.modules, and out again: other tests must not take them for vLLM."""
    try:
        for name, contents in MODULES.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(contents)
        sys.modules["vllm.envs"] = sys.modules["vllm"].envs = Envs("vllm.envs")
        yield
    finally:
        for name in list(sys.modules):
            if f"{name}.".startswith(("vllm.", "pagetile.integrations.vllm.")):
                del sys.modules[name]
