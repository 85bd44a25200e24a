"""tools/price_list.py on a build of two kernels, made up of bytes."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "price_list.py"
SPLIT_KV = (
    "_ZN8pagetile4sm8015split_kv_kernelIN7cutlass10bfloat16_tES3_Li128ELi128ELi{}EEE"
    "vNS_3gpu12KernelParamsE"
)
EIGHT, SIXTEEN = SPLIT_KV.format(8), SPLIT_KV.format(16)
LOG = """
ptxas info    : Compiling entry function '{0}' for 'sm_{1}'
ptxas info    : Function properties for {0}
    0 bytes stack frame, {2} bytes spill stores, 8 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers
ptxas info    : Compile time = {3} ms
"""
CALM = LOG.replace("8 bytes spill loads", "0 bytes spill loads")


@pytest.fixture(scope="module")
def tool():
    if not TOOL.exists():
        pytest.skip("no source tree beside the tests")
    spec = importlib.util.spec_from_file_location("price_list", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["price_list"] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


def elf(sections: list[tuple[str, int, int]]) -> bytes:
    """A 64-bit ELF file of nothing but a table of sections: names, types and sizes."""
    sections = [("", 0, 0), *sections, (".shstrtab", 3, 0)]
    names, headers = b"", b""
    for name, kind, size in sections:
        headers += struct.pack("<IIQQQQIIQQ", len(names), kind, 0, 0, 64, size, 0, 0, 1, 0)
        names += name.encode() + b"\0"
    head = bytearray(64)
    head[:4] = b"\x7fELF"
    struct.pack_into("<Q", head, 0x28, 64 + len(names))
    struct.pack_into("<HHH", head, 0x3A, 64, len(sections), len(sections) - 1)
    return bytes(head) + names + headers


CUBINS = {
    "m.1.sm_80.cubin": elf([(f".text.{EIGHT}", 1, 4000), (f".nv.info.{EIGHT}", 1, 500)]),
    "m.2.sm_100.cubin": elf([(f".text.{EIGHT}", 1, 5000), (f".nv.shared.{EIGHT}", 8, 99999)]),
    "m.3.sm_100.cubin": elf([(f".text.{SIXTEEN}", 1, 7000), (".debug_frame", 1, 300)]),
}
FILES = {
    "object": "cpp/a.cu.o",
    "cpu_s": 9.5,
    "wall_s": 20.0,
    "peak_mb": 640,
}


@pytest.fixture
def build(tool, tmp_path, monkeypatch):
    """The arguments for a build of one kernel for 80 and 100f, and another for 100f."""

    def take_out(command, **options):
        for name, data in CUBINS.items():
            (Path(options["cwd"]) / name).write_bytes(data)
        return ""

    monkeypatch.setattr(tool, "tool", lambda name: name)
    monkeypatch.setattr(tool, "run", take_out)
    log, compiles, page = tmp_path / "log", tmp_path / "compiles", tmp_path / "build.md"
    log.write_text(
        CALM.format(EIGHT, 80, 0, 1500)
        + LOG.format(EIGHT, "100f", 12, 2500)
        + CALM.format(SIXTEEN, "100f", 0, 700)
    )
    others = {**FILES, "object": "cpp/b.cpp.o", "cpu_s": 0.5, "peak_mb": 90}
    compiles.write_text("".join(json.dumps(line) + "\n" for line in (FILES, others)))
    page.write_text(f"before\n{tool.BEGIN}\nold\n{tool.END}\nafter\n")
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("pagetile/_C.abi3.so", bytes(2_000_000))
    options = ["--log", log, "--compiles", compiles, "--page", page, wheel]
    return [str(option) for option in options], log, compiles, page


def test_prices_are_written_between_the_marks(tool, build):
    arguments, _, _, page = build
    tool.main(arguments)
    text = page.read_text()
    assert text.startswith(f"before\n{tool.BEGIN}\n") and text.endswith(f"\n{tool.END}\nafter\n")
    assert "old" not in text
    for row in (
        "The wheel has 2.0 MB, its machine code 16 KB before it",
        "| 80 | 1 | 4 | 1.5 |",
        "| 100 | 2 | 12 | 3.2 |",
        "| all | 2 | 16 | 4.7 |",
        "| `a.cu` | 9.5 | 640 |",
        "| 1 others, in C++ | 0.5 | 90 |",
        "| `sm80::split_kv_kernel` | rows | 8 | 1 | 10 | 4.0 |",
        "| `sm80::split_kv_kernel` | rows | 16 | 1 | 7 | 0.7 |",
        "| `sm80::split_kv_kernel<bf16, bf16, 128, 128, 8>` | 10 | 4.0 | 20 on 100 |",
        "| `sm80::split_kv_kernel<bf16, bf16, 128, 128, 16>` | 7 | 0.7 |  |",
    ):
        assert row in text, row
    assert "head_dim |" not in text  # both have 128


def test_answers_of_ccache_are_no_seconds(tool, build):
    arguments, _, compiles, _ = build
    compiles.write_text(json.dumps({**FILES, "cpu_s": 0.1}) + "\n")
    with pytest.raises(SystemExit, match="CCACHE_RECACHE=1"):
        tool.main(arguments)


def test_another_wheel_than_the_logs(tool, build):
    arguments, log, _, _ = build
    log.write_text(log.read_text() + CALM.format(SIXTEEN, 90, 0, 1))
    with pytest.raises(SystemExit, match="differ"):
        tool.main(arguments)


def test_a_parameter_without_a_word(tool, build, monkeypatch):
    monkeypatch.setitem(tool.AXES, "sm80::split_kv_kernel", ("computed type",))
    with pytest.raises(SystemExit, match="AXES has no words"):
        tool.main(build[0])


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void pagetile::gpu::cache_write_kernel<(pagetile::DType)2, (pagetile::DType)3, 8,"
            " true, false, 1>(pagetile::gpu::CacheWriteKernelParams<true>)",
            "gpu::cache_write_kernel<bf16, e4m3, 8, true, false, 1>",
        ),
        (
            "void pagetile::sm80::prefill_kernel<pagetile::sm80::PrefillInstance<cutlass::half_t,"
            " cutlass::float_e5m2_t, 192, 128> >(pagetile::gpu::KernelParams)",
            "sm80::prefill_kernel<fp16, e5m2, 192, 128>",
        ),
        (
            "void pagetile::sm90::prefill_kernel<cutlass::bfloat16_t, 64, 64, false,"
            " (pagetile::sm90::Loading)2>(pagetile::sm90::PrefillParams)",
            "sm90::prefill_kernel<bf16, 64, 64, false, 2>",
        ),
        (
            "pagetile::gpu::(anonymous namespace)::plan_kernel(pagetile::gpu::PlanKernelParams)",
            "gpu::plan_kernel",
        ),
    ],
)
def test_names(tool, name, short):
    assert tool.shorten(name) == short


def test_a_compile_is_measured(tmp_path):
    """The launcher passes on what the compiler does, and notes the compiles that succeed."""
    launcher, log = TOOL.parent / "measure_compile.py", tmp_path / "log"
    if not launcher.exists():
        pytest.skip("no source tree beside the tests")
    work = "import sys; sum(range(3_000_000)); print('done'); sys.exit(sys.argv[1] == 'bad.cpp')"
    for source, status in (("good.cpp", 0), ("bad.cpp", 1)):
        compiler = [sys.executable, "-c", work, source, "-o", f"{source}.o"]
        done = subprocess.run(
            [sys.executable, launcher, *compiler],
            env={**os.environ, "PAGETILE_COMPILES": str(log)},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (status, "done\n")
    (entry,) = map(json.loads, log.read_text().splitlines())
    assert entry["object"] == "good.cpp.o"
    assert 0 < entry["cpu_s"] <= 2 * entry["wall_s"] + 0.1 and entry["peak_mb"] > 0
