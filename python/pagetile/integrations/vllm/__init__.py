"""An attention backend for vLLM: its plugin, which vLLM finds by itself once pagetile is installed.

    vllm serve MODEL --attention-backend CUSTOM

vLLM calls `register` in each of its processes, through the entry point ``vllm.general_plugins``.
With ``PAGETILE_VLLM_FLASH_ATTN=1`` in the environment, the backend takes FLASH_ATTN's place as
well, and vLLM's automatic choice finds it there.

Importing this module imports nothing of vLLM. The backend itself is in three files: `backend` says
what is supported, `metadata` makes a step's plan, `impl` writes and attends.

Letters in shapes: B sequences and T tokens of a step, P pages of S tokens, Hq query and Hkv KV
heads, D head_dim.
"""

from __future__ import annotations

import logging
import os

__all__ = ["OVERRIDE", "register"]

OVERRIDE = "PAGETILE_VLLM_FLASH_ATTN"

_BACKENDS = f"{__name__}.backend"
_log = logging.getLogger(__name__)


def register() -> None:
    """Register the backend with vLLM, as its plugin; again is harmless.

    CUSTOM is one place for all plugins. If another one has taken it, that stays, and a warning says
    so: ``VLLM_PLUGINS=pagetile`` keeps the other one out.

    Raises:
        ImportError: vLLM is not installed, or its registry lies elsewhere.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    ours = f"{_BACKENDS}.PagetileBackend"
    if custom.is_overridden() and custom.get_path() != ours:
        _log.warning("vLLM's backend CUSTOM is already %s, and stays it", custom.get_path())
    else:
        register_backend(custom, ours)
    if os.environ.get(OVERRIDE, "0") not in ("", "0"):
        register_backend(AttentionBackendEnum.FLASH_ATTN, f"{_BACKENDS}.PagetileFlashAttnBackend")
