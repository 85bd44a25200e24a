"""vLLM's kernels for the write and the merge, of an installed vLLM or of a library of its wheel."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from peers.peer import Call, Peer, peers_folder

LIBRARY = "_C_stable_libtorch.abi3.so"
DTYPES = {"auto": "auto", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8_e5m2"}


@functools.cache
def why_not() -> str | None:
    """Loads the operators of torch.ops._C and _C_cache_ops. Returns why that failed, or None."""
    file = peers_folder() / LIBRARY
    try:
        if file.is_file():
            torch.ops.load_library(str(file))
        elif importlib.util.find_spec("vllm"):
            importlib.import_module("vllm._custom_ops")
        else:
            return f"no {LIBRARY} in PEERS_DIR, and no vLLM"
    except (ImportError, OSError) as error:
        return str(error)
    return None


class VllmWrite(Peer):
    name = "vllm_write"

    def unavailable(self) -> str | None:
        return why_not()

    def supports(self, case: Any) -> bool:
        return True  # what it refuses raises

    def prepare(self, case: Any, tensors: Any) -> list[Call]:
        """For a bench/cache_write.py problem: rows and slots are its sets."""
        write, caches = torch.ops._C_cache_ops.reshape_and_cache_flash, tensors.tokens_first()
        end = (DTYPES[case.kv_dtype], *tensors.scales)
        return [functools.partial(write, k, v, *caches, s, *end) for k, v, s in tensors.inputs]


PEERS = (VllmWrite(),)
