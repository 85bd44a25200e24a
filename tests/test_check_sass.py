"""tools/check_sass.sh finds what it is there to find, in listings that are doctored."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "check_sass.sh"

LAUNCH = "_ZN8pagetile4sm{}{}E"
FUNCTIONS = {
    "split_kv": "15split_kv_kernel",
    "beside": "22split_kv_beside_kernel",
    "wgmma_128": "14prefill_kernelIN7cutlass10bfloat16_tELi128ELi128ELb0EE",
    "wgmma_fp8": "14prefill_kernelIN7cutlass10bfloat16_tELi128ELi128ELb0ELNS0_7LoadingE3EEE",
}
KEYS = 16
SCORES = [f"HGMMA.64x{KEYS}x16.F32.BF16 R24, gdesc[UR4], R24, gsb0"]
VALUES = ["HGMMA.64x128x16.F32.BF16 R104, R20, gdesc[UR8].tnspB, R104, gsb0"]
WAIT_FOR_SCORES = ["WARPGROUP.DEPBAR.LE gsb0, 0x1"]
WAIT_FOR_ALL = ["WARPGROUP.DEPBAR.LE gsb0, 0x0"]
WEIGHTS = ["MUFU.EX2 R4, R4"] * (KEYS // 2 + 2)
SINKS = [*["@P0 MUFU.EX2 R6, R6"] * 4, *["MUFU.EX2 R8, R8"] * 2]  # and of pieces
BEGIN = ["UTMALDG.4D [UR8], [UR4]", *SCORES, *WAIT_FOR_ALL, *WEIGHTS]
TURN = [*SCORES, *VALUES, *WAIT_FOR_SCORES, *WEIGHTS, *WAIT_FOR_ALL, *SINKS]
TOGETHER = [*SCORES, *VALUES, *WAIT_FOR_ALL, *WEIGHTS]
END = [*VALUES, *WAIT_FOR_ALL]
WGMMA = [*BEGIN, *TURN, *END]
PORTABLE = ["LDGSTS.E.BYPASS.128 [R2], desc[UR4][R4.64]", "HMMA.16816.F32 R4, R8, R2, R4"]
BESIDE = [*PORTABLE, *BEGIN[:1]]
QGMMA = "QGMMA.64x64x32.F32.E4M3.E4M3 R24, R56, gdesc[UR4], R24"
PRODUCT = [*[QGMMA] * 3, f"{QGMMA}, gsb0", *WAIT_FOR_ALL]
TRANSPOSED = ["LDSM.16.MT88.4 R8, [R17]", "STSM.16.M88.4 [R21], R4"]
FP8 = [*BEGIN[:1], *PRODUCT, *WEIGHTS, *PRODUCT, *PRODUCT, *TRANSPOSED]


def listing(arch: str, **kernels: list[str]) -> str:
    """As cuobjdump -sass prints it."""
    lines = [f"\tcode for {arch}", f"\t.target\t{arch}"]
    for name, codes in kernels.items():
        family = "90" if name.startswith("wgmma") else "80"
        function = FUNCTIONS.get(name, "14prefill_kernel")
        lines += ["", f"\t\tFunction : {LAUNCH.format(family, function)}"]
        for i, code in enumerate(codes):
            lines += [f"\t/*{16 * i:04x}*/ {code} ; /* 0x00000a00ff017b82 */"]
            lines += ["\t/* 0x000fe20000000800 */"]
    return "\n".join(lines) + "\n"


def check(text: str, folder: Path) -> subprocess.CompletedProcess:
    file = folder / "code.sass"
    file.write_text(text)
    return subprocess.run([TOOL, file], capture_output=True, text=True, check=False)


def hopper(
    wgmma: list[str] = WGMMA,
    portable: list[str] = PORTABLE,
    beside: list[str] = BESIDE,
    fp8: list[str] = FP8,
    **more: list[str],
) -> str:
    kernels = {
        "wgmma": wgmma, "wgmma_fp8": fp8, "portable": portable, "split_kv": PORTABLE,
        "beside": beside,
    }  # fmt: skip
    return listing("sm_90a", **kernels, **more)


def test_right_code_passes(tmp_path):
    text = listing("sm_80", portable=PORTABLE, split_kv=PORTABLE, beside=["EXIT"]) + hopper()
    done = check(text, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "7 attention kernels" in done.stdout


def test_one_turn_waits_for_both_products_at_head_dim_128(tmp_path):
    done = check(hopper(wgmma_128=[*BEGIN, *TURN, *TOGETHER, *END]), tmp_path)
    assert done.returncode == 0, done.stderr


HOISTED = [*SCORES, *VALUES, *WAIT_FOR_SCORES, *WAIT_FOR_ALL, *WEIGHTS]
HALF_HOISTED = [*SCORES, *VALUES, *WAIT_FOR_SCORES, *WEIGHTS, *WAIT_FOR_ALL, *SINKS, *WEIGHTS[:1]]
SERIAL = [*SCORES, *WAIT_FOR_ALL, *VALUES, *WEIGHTS, *WAIT_FOR_ALL]


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        (hopper([*BEGIN, *HOISTED, *END]), "only 0 exponentials of 8 before the wait"),
        (hopper([*BEGIN, *TURN, *HOISTED, *END]), "10 exponentials behind the wait"),
        (hopper([*BEGIN, *HALF_HOISTED, *END]), "7 exponentials behind the wait"),
        (hopper([*BEGIN, *SERIAL, *END]), "scores 2 times, with values under way 0 times"),
        (hopper([*BEGIN, *TURN, *SERIAL, *END]), "scores 3 times, with values under way 1 times"),
        (hopper([*BEGIN, *TURN, *TOGETHER, *END]), "1 turns wait for scores and values at once"),
        (
            hopper(wgmma_128=[*BEGIN, *TURN, *TOGETHER, *TOGETHER, *END]),
            "2 turns wait for scores and values at once",
        ),
        (hopper(WGMMA[1:]), "no UTMALDG"),
        (hopper(PORTABLE), "no HGMMA"),
        (hopper([*WGMMA, "@!P1 STL.64 [R1], R2"]), "1 accesses to local memory"),
        (hopper(portable=[*PORTABLE, "LDL R2, [R1]"]), "1 accesses to local memory"),
        (hopper(beside=PORTABLE), "no UTMALDG"),
        (hopper(beside=[*BESIDE, "LDL R2, [R1]"]), "1 accesses to local memory"),
        (hopper(portable=PORTABLE[1:]), "no LDGSTS"),
        (hopper(portable=PORTABLE[:1]), "no HMMA"),
        (hopper(fp8=FP8[1:]), "no UTMALDG"),
        (hopper(fp8=[*FP8[:1], *TRANSPOSED]), "no QGMMA"),
        (hopper(fp8=FP8[:-1]), "no STSM"),
        (hopper(fp8=[*FP8, f"{QGMMA}, gsb0"]), "4 products of 13 QGMMA in all, not of four each"),
        (hopper(fp8=[*FP8, "STL [R1], R2"]), "1 accesses to local memory"),
        (listing("sm_90a", portable=PORTABLE, split_kv=PORTABLE), "sm_90a: no wgmma kernel"),
        (listing("sm_90a", portable=PORTABLE, split_kv=PORTABLE), "sm_90a: no fp8 kernel"),
        (listing("sm_80", portable=PORTABLE) + hopper(), "sm_80: no split-KV kernel"),
        (listing("sm_80", split_kv=PORTABLE) + hopper(), "sm_80: no portable kernel"),
        ("", "no attention kernel at all"),
    ],
    ids=lambda value: value if len(value) < 60 else "",
)
def test_doctored_code_does_not(text, finding, tmp_path):
    done = check(text, tmp_path)
    assert done.returncode == 1
    assert finding in done.stderr
