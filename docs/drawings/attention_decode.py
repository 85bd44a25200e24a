"""Draws the pictures of docs/kernels/attention_decode.md, as SVG files beside this one.

    python docs/drawings/attention_decode.py          # writes them
    python docs/drawings/attention_decode.py --check  # says whether they are up to date

plan.svg shows what the planner says, so pagetile must be installed. The others show the scheme.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from drawing import BLUE, COLOURS, GREEN, GREY, INK, ORANGE, PALE, RED, Drawing, write_or_check
from pagetile import _C

# The plan

UNIT = 32  # keys
WHOLE_TILE = 0x7FFFFFFF
PLANS: tuple[tuple[str, list[int], dict[str, Any]], ...] = (
    ("kWhole: 24 sequences of 4096. Tiles stay whole", [4096] * 24, {}),
    ("kDealt: 2048 and 1024 keys. Each tile has lanes of its own", [2048, 1024], {}),
    (
        "kEven: 65536, 512, 9000, 512, 20000, 3000, 512, 700, 512, 1500 keys. Cut where it is even",
        [65536, 512, 9000, 512, 20000, 3000, 512, 700, 512, 1500],
        {},
    ),
    (
        "kPieces: the same with batch_invariant. Cuts at multiples of 2048 keys",
        [65536, 512, 9000, 512, 20000, 3000, 512, 700, 512, 1500],
        {"batch_invariant": True, "max_seqlen_k": 65536},
    ),
)


def segments(lane: dict[str, Any], kv_lens: list[int]) -> list[tuple[int, int, int]]:
    """What a lane has: (sequence, first unit, unit behind the last)."""
    found = []
    (first, *_, begin), (last, *_, end) = lane["begin"], lane["end"]
    for b in range(first, min(last, len(kv_lens) - 1) + 1):
        units = -(-kv_lens[b] // UNIT)
        start = min(begin, units) if b == first else 0
        stop = min(end, units) if b == last else units
        if start < stop:
            found.append((b, start, stop))
    return found


def draw_plan() -> Drawing:
    """Four batches on a GPU of eight multiprocessors, one KV head."""
    lanes, row, gap, left, width = 8, 14, 3, 60, 860
    panel = 26 + lanes * (row + gap) + 22
    drawing = Drawing(left + width + 20, len(PLANS) * panel + 8)
    for p, (title, kv_lens, options) in enumerate(PLANS):
        top = 8 + p * panel
        drawing.text(8, top + 14, title, 13)
        work, shape = _C.attention_plan(
            np.arange(len(kv_lens) + 1, dtype=np.int32),
            np.array(kv_lens, np.int32),
            num_q_heads=4,
            num_kv_heads=1,
            max_seqlen_q=1,
            num_sms=lanes,
            **options,
        )
        parts = [segments(lane, kv_lens) for lane in work]
        cost = shape["tile_cost"]
        longest = max(sum(cost + end - begin for _, begin, end in x) for x in parts)
        for lane, its_parts in enumerate(parts):
            y = top + 24 + lane * (row + gap)
            drawing.text(left - 8, y + 11, f"lane {lane}", 11, "end")
            x = float(left)
            for b, begin, end in its_parts:
                drawing.rect(x, y, cost / longest * width, row, GREY, None)
                x += cost / longest * width
                length = (end - begin) / longest * width
                is_whole = begin == 0 and end == -(-kv_lens[b] // UNIT)
                name = f"{b}" if is_whole else f"{b}: {begin * UNIT}.."
                fits = len(name) * 6 < length
                drawing.rect(
                    x, y, length, row, COLOURS[b % len(COLOURS)], INK, name if fits else "", 10
                )
                x += length
    return drawing


# One tile of keys


def draw_warp() -> Drawing:
    """The two products of a warp."""
    d = Drawing(920, 430)
    d.text(10, 20, "Scores: 16 keys x 8 packed rows", 14)
    d.rect(10, 70, 200, 80, BLUE, text="K: 16 keys x D")
    d.text(110, 62, "shared memory", 11, "middle", GREY)
    d.line((210, 110), (268, 110))
    d.text(239, 102, "ldmatrix", 11, "middle")
    d.rect(270, 70, 120, 80, BLUE, text="A: 16 x 16, D/16 times", size=10)
    d.text(410, 116, "x", 16, "middle")
    d.rect(430, 30, 60, 160, ORANGE, text="Q^T")
    d.text(460, 206, "B: D x 8, registers", 11, "middle", GREY)
    d.text(520, 116, "=", 16, "middle")
    d.rect(545, 70, 60, 80, GREEN, text="S^T")
    d.text(575, 62, "16 x 8", 11, "middle", GREY)
    d.line((605, 110), (668, 110))
    d.text(637, 102, "softmax", 11, "middle")
    d.rect(670, 70, 60, 80, GREEN, text="P^T")
    d.text(745, 88, "lane 4g + t has keys g, g + 8", 11)
    d.text(745, 104, "of rows 2t, 2t + 1", 11)

    d.text(10, 250, "Output: D x 8 packed rows", 14)
    d.rect(10, 300, 200, 80, RED, text="V: 16 keys x D")
    d.text(110, 292, "shared memory", 11, "middle", GREY)
    d.line((210, 340), (268, 340))
    d.text(239, 332, "ldmatrix", 11, "middle")
    d.text(239, 356, ".trans", 11, "middle")
    d.rect(270, 270, 80, 140, RED, text="V^T: D x 16", size=11)
    d.text(370, 345, "x", 16, "middle")
    d.rect(395, 300, 60, 80, GREEN, text="P^T")
    d.text(425, 394, "B: 16 x 8", 11, "middle", GREY)
    d.line((700, 150), (700, 230), (425, 230), (425, 298))
    d.text(545, 224, "as fp16 or bf16, movmatrix: keys 2t, 2t + 1 of row g", 11, "middle")
    d.text(480, 345, "+=", 16, "middle")
    d.rect(505, 270, 60, 140, PALE, text="O^T")
    d.text(580, 330, "lane 4g + t has elements g, g + 8 of every 16", 11)
    d.text(580, 346, "of rows 2t, 2t + 1: the rows whose scores it had,", 11)
    d.text(580, 362, "so a lane rescales its output by its own factor", 11)
    return d


# The ring

STAGES = 2
ITEMS = (("A", 5, BLUE), ("B", 5, ORANGE))  # name, tiles of this warp, colour
MERGE = 2.0  # tiles' time


def draw_ring() -> Drawing:
    """One warp at two items: what each stage holds over time."""
    left, unit, row = 130, 58, 34
    tiles = [(f"{name}{i}", colour) for name, count, colour in ITEMS for i in range(count)]
    starts = []
    now = 3.0
    for name, count, _ in ITEMS:
        starts += [now + i for i in range(count)]
        now += count + (MERGE if name == ITEMS[0][0] else 0)
    d = Drawing(left + now * unit + 20, 240)

    def bar(y: float, begin: float, end: float, fill: str, text: str) -> None:
        d.rect(left + begin * unit, y, (end - begin) * unit, row - 8, fill, INK, text, 11)

    d.text(10, 34, "page lookups")
    bar(16, 0, 1, PALE, "A")
    bar(16, 1, 2, PALE, "B")
    d.text(left + 2 * unit + 8, 34, "a batch of up to 32 pages, ahead of the copies", 11, ink=GREY)
    for s in range(STAGES):
        d.text(10, 34 + (s + 1) * row, f"stage {s}")
    for n, (name, colour) in enumerate(tiles):
        y = 16 + (1 + n % STAGES) * row
        free = starts[n - STAGES] + 1 if n >= STAGES else 1.0
        bar(y, free, starts[n], "#ffffff", "in flight")
        bar(y, starts[n], starts[n] + 1, colour, name)
    y = 16 + (1 + STAGES) * row
    d.text(10, y + 18, "tensor cores")
    for n, (name, colour) in enumerate(tiles):
        bar(y, starts[n], starts[n] + 1, colour, name)
    first = starts[ITEMS[0][1] - 1] + 1
    bar(y + row, first, first + MERGE, PALE, "merge A")
    d.text(10, y + row + 18, "the CTA's warps")
    for x in (first, first + MERGE):
        at = left + x * unit
        d.line((at, 12), (at, y + 2 * row), dashed=True, arrow=False)
    middle = left + (first + MERGE / 2) * unit
    d.text(middle, y + 2 * row + 12, "B's first tiles are on their way", 11, "middle", GREY)
    return d


# The merge


def draw_merge() -> Drawing:
    """Three pieces of a tile meet."""
    d = Drawing(920, 350)
    for p in range(3):
        x = 10 + p * 305
        d.rect(x, 10, 290, 152, "#fafafa", GREY)
        d.text(x + 8, 27, f"CTA with piece {p}", 12)
        for w in range(8):
            d.rect(x + 10 + w * 34, 36, 30, 40, COLOURS[p], INK, f"w{w}", 11)
        d.text(x + 145, 92, "sums of 8 key warps in shared memory", 11, "middle", GREY)
        d.line((x + 145, 96), (x + 145, 116))
        d.rect(x + 45, 118, 200, 34, COLOURS[p], INK, "warp r: row r, w0 .. w7 in turn", 11)
        d.line((x + 145, 152), (x + 145, 206))
        d.rect(x + 45, 208, 200, 30, COLOURS[p], INK, f"slot of piece {p}: row r, fp32", 11)
    d.text(10, 200, "workspace", 11, ink=GREY)
    d.text(10, 268, "counter of warp r", 11, ink=GREY)
    for p, words in enumerate(("0 -> 1", "1 -> 2", "2 -> 0, the last")):
        order = (0, 2, 1)[p]  # piece 1 arrives last
        d.rect(145 + p * 260, 253, 200, 24, PALE, INK, f"piece {order} counts: {words}", 11)
    d.text(10, 318, "the warp that", 11, ink=GREY)
    d.text(10, 332, "counts last", 11, ink=GREY)
    d.rect(145, 304, 460, 34, "#ffffff", INK, "sum of the slots in the order 0, 1, 2")
    d.line((605, 321), (665, 321))
    d.rect(667, 304, 160, 34, GREEN, INK, "out, softmax_lse")
    return d


DRAWINGS = {"plan": draw_plan, "warp": draw_warp, "ring": draw_ring, "merge": draw_merge}

if __name__ == "__main__":
    sys.exit(write_or_check("attention_decode", DRAWINGS))
