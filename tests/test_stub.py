"""The typed surface: the stub of the extension, the signatures, the docstrings."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pagetile
import pytest

PACKAGE = Path(pagetile.__file__).parent
FUNCTIONS = (
    "cache_write", "copy_pages", "make_plan", "workspace_size", "paged_attention", "merge_states",
)  # fmt: skip

SIGNATURES = {
    "cache_write": """(k, v, k_cache, v_cache, slot_mapping, *, k_scale=None, v_scale=None,
        kv_dtype='auto', layout='NHD', pdl=False, stream=None)""",
    "copy_pages": "(src_caches, dst_caches, src_pages, dst_pages, *, stream=None)",
    "paged_attention": """(q, k_cache, v_cache, *, block_table, seqused_k, cu_seqlens_q,
        max_seqlen_q, max_seqlen_k=None, softmax_scale=None, causal=True, window=(-1, -1),
        softcap=0.0, alibi_slopes=None, sinks=None, q_scale=None, k_scale=None, v_scale=None,
        kv_dtype='auto', layout='NHD', num_splits=0, batch_invariant=False, fp8_products=False,
        plan=None, workspace=None, pdl=False, out=None, return_softmax_lse=False, softmax_lse=None,
        validate=None, stream=None)""",
    "make_plan": """(*, seqused_k, cu_seqlens_q, max_seqlen_q, max_seqlen_k, num_q_heads,
        num_kv_heads, head_dim, page_size, head_dim_v=None, causal=True, window=(-1, -1),
        num_splits=0, batch_invariant=False, fp8_products=False, out=None, stream=None)""",
    "workspace_size": """(*, max_seqlen_q, max_seqlen_k, num_q_heads, num_kv_heads, head_dim,
        head_dim_v=None, batch_invariant=False, device=None)""",
    "merge_states": "(out_a, lse_a, out_b, lse_b, *, out=None, lse=None, stream=None)",
}


def parameters(text: str) -> dict[str, str]:
    """Name -> kind and default, whatever the order of keyword-only ones."""
    namespace: dict = {}
    exec(f"def f{text}: pass", namespace)
    return described(namespace["f"])


def described(function) -> dict[str, str]:
    found = inspect.signature(function).parameters.values()
    return {p.name: f"{p.kind.name} {p.default!r}" for p in found}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature(name):
    """Names, kinds and defaults are promises."""
    assert described(getattr(pagetile, name)) == parameters(SIGNATURES[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_positional_order(name):
    found = described(getattr(pagetile, name))
    positional = [n for n, text in found.items() if "POSITIONAL" in text]
    assert positional == re.findall(r"\w+", SIGNATURES[name].split("*")[0])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_annotated(name):
    signature = inspect.signature(getattr(pagetile, name))
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter.name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_gives_shapes_arguments_and_errors(name):
    text = inspect.getdoc(getattr(pagetile, name))
    letters = {"cache_write": "T Hkv D", "copy_pages": "P n", "paged_attention": "T B Hq Hkv D",
               "merge_states": "T Hq", "make_plan": "B Hq Hkv D Dv S",
               "workspace_size": "Hq Hkv D Dv"}[name].split()  # fmt: skip
    if name != "workspace_size":  # it takes no shapes
        assert re.search(rf"\[[^\]]*\b{letters[0]}\b[^\]]*\]", text), "no shape by letter"
    for letter in letters:
        assert re.search(rf"\b{letter}\b", text), f"no shape with {letter}"
    for argument in inspect.signature(getattr(pagetile, name)).parameters:
        assert re.search(rf"\b{argument}\b", text), f"{argument} is not described"
    assert "ValueError" in text
    assert "TypeError" in text


@pytest.mark.parametrize("name", [*FUNCTIONS, "BlockPool", "Plan", "show_config"])
def test_public_names(name):
    assert name in pagetile.__all__
    assert (getattr(pagetile, name).__doc__ or "").strip()
    assert getattr(pagetile, name).__module__.startswith("pagetile")


def test_all_is_what_is_there():
    for name in pagetile.__all__:
        assert hasattr(pagetile, name), name


def test_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_stub_describes_the_extension():
    """The stub parses, needs no library, and lists what the extension has."""
    stub = ast.parse((PACKAGE / "_C.pyi").read_text())
    listed = {node.name for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    present = {n for n, x in vars(pagetile._C).items() if callable(x) and not n.startswith("__")}
    assert listed == present
    assert {*FUNCTIONS, "build_info", "devices", "BlockPool", "Plan"} <= listed
    for node in ast.walk(stub):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert not re.search(r"numpy|torch|jax", ast.unparse(node))
    for node in ast.walk(stub):
        if isinstance(node, ast.FunctionDef):
            assert node.returns is not None, f"{node.name} has no return type"
            for argument in node.args.posonlyargs + node.args.args:
                named = argument.arg in ("self", "cls") or argument.annotation
                assert named, f"{node.name}: {argument.arg} has no type"
