"""Write K/V into a paged cache and attend over it tile by tile, without gathering the pages.

Tensors are any DLPack object: PyTorch, JAX, CuPy, NumPy. The tensors' device decides the backend.
"""

from pagetile import compat
from pagetile._C import build_info as _build_info
from pagetile.attention import merge_states, paged_attention
from pagetile.block_pool import BlockPool, OutOfPagesError, Step
from pagetile.cache_write import cache_write, copy_pages
from pagetile.config import show_config
from pagetile.plan import Plan, make_plan, workspace_size

__all__ = [
    "BlockPool",
    "OutOfPagesError",
    "Plan",
    "Step",
    "cache_write",
    "compat",
    "copy_pages",
    "make_plan",
    "merge_states",
    "paged_attention",
    "show_config",
    "workspace_size",
]

__version__ = str(_build_info()["version"])
