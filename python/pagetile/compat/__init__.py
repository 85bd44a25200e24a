"""The same kernels under other libraries' names, orders and defaults of arguments."""

from pagetile.compat import vllm

__all__ = ["vllm"]
