"""Errors in the words of the caller."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_FUNCTIONS = ("cache_write", "paged_attention", "merge_states")


@contextmanager
def renamed(function: str, names: Mapping[str, str]) -> Iterator[None]:
    """Let errors of a kernel name this function, and its arguments as the caller wrote them."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        name, _, text = str(error).partition(": ")
        if name not in _FUNCTIONS:
            raise
        text = re.sub(r"\b[a-z_]+\b", lambda word: names.get(word[0], word[0]), text)
        raise type(error)(f"{function}: {text}") from None
