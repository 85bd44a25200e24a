"""The table of kernels is true, and tools/support_table.py finds it out where it is not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SPLIT_KV = "_ZN8pagetile4sm8015split_kv_kernelIN7cutlass{types}{dims}ELi8EEEvNS_3gpu12KernelParamsE"
WGMMA = "_ZN8pagetile4sm9014prefill_kernelIN7cutlass10bfloat16_tELi64ELi64ELb{}ELNS0_7LoadingE{}EEE"


@pytest.fixture(scope="module")
def tool():
    path = ROOT / "tools" / "support_table.py"
    spec = importlib.util.spec_from_file_location("support_table", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["support_table"] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_the_table_is_true(tool, capsys):
    """A CPU build checks the CPU's rows; CI checks all of them with its wheel."""
    targets = tool.pagetile.show_config("dicts")["build"]["families"]["cpu"]["targets"]
    if targets == ["generic"]:
        pytest.skip("the table is that of x86-64")
    assert tool.main(["--check"]) == 0, capsys.readouterr().out


def test_types_that_there_are_not(tool):
    with pytest.raises(ValueError, match="paged_attention: no such type: float64"):
        tool._C.check_attention_types("float64", "float64", 64, 64, False)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("| fp32, fp16, bf16 | the same | any |", "| fp32, fp16 | the same | any |"),
        ("multiples of 8 up to 256", "multiples of 8 up to 512"),
        ("x86_64_v4", "x86_64_v5"),
    ],
)
def test_other_rows_are_found(tool, tmp_path, capsys, old, new):
    text = (ROOT / "README.md").read_text()
    if old not in text:
        pytest.skip(f"the table has no {old}")
    (tmp_path / "README.md").write_text(text.replace(old, new))
    assert tool.main(["--check", str(tmp_path / "README.md")]) == 1
    out = capsys.readouterr().out
    assert f"-{next(line for line in text.replace(old, new).splitlines() if new in line)}" in out


def test_missing_and_added_rows_are_found(tool, tmp_path):
    text = (ROOT / "README.md").read_text()
    page = tmp_path / "README.md"
    row = tool.rows_in(text)[0]
    page.write_text(text.replace(f"{row}\n", ""))
    assert tool.main(["--check", str(page)]) == 1
    page.write_text(text.replace(f"{row}\n", f"{row}\n{row}\n"))
    assert tool.main(["--check", str(page)]) == 1


def test_writing_changes_nothing_but_the_rows(tool):
    text = (ROOT / "README.md").read_text()
    assert tool.with_rows(text, tool.rows_in(text)) == text
    assert tool.rows_in(tool.with_rows(text, ["| a |"])) == ["| a |"]


def test_names_of_kernels(tool):
    names = [
        SPLIT_KV.format(types="10bfloat16_tES3_", dims="Li128ELi128"),
        SPLIT_KV.format(types="6half_tENS2_12float_e4m3_tE", dims="Li192ELi128"),
        WGMMA.format(0, 0),
        WGMMA.format(1, 0),  # the same call with a softcap
        WGMMA.format(0, 2),  # over fp8
        WGMMA.format(0, 3),  # products of e4m3
        "_ZN8pagetile4sm8022split_kv_beside_kernelIN7cutlass6half_tELi64EEEvNS_3gpu12KernelParamsE",
    ]
    bf16, fp16, e4m3 = "bfloat16", "float16", "float8_e4m3fn"
    wgmma = {
        tool.Instance("wgmma", bf16, stored, (64, 64)) for stored in (bf16, e4m3, "float8_e5m2")
    }
    assert tool.instances_in("\n".join(names)) == wgmma | {
        tool.Instance("split_kv", bf16, bf16, (128, 128)),
        tool.Instance("split_kv", fp16, e4m3, (192, 128)),
        tool.Instance("fp8", e4m3, e4m3, (64, 64)),
    }


def test_a_type_without_a_kernel_is_an_error(tool, monkeypatch):
    build = {"families": {"sm80": {"targets": ["80"]}, "sm90": {"targets": ["90a-real"]}}}
    monkeypatch.setattr(tool, "attention_pairs", lambda on_gpu: [("float16", "float8_e4m3fn")])
    monkeypatch.setattr(tool, "write_pairs", lambda on_gpu: [])
    monkeypatch.setattr(tool, "head_dims_text", lambda takes: "any")
    name = SPLIT_KV.format(types="6half_tES3_", dims="Li64ELi64")
    with pytest.raises(SystemExit, match=r"split_kv is not compiled for .*float8_e4m3fn"):
        tool.gpu_rows(build, name)
