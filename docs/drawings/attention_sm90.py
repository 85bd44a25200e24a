"""Draws the pictures of docs/kernels/attention_sm90.md, as SVG files beside this one.

    python docs/drawings/attention_sm90.py          # writes them
    python docs/drawings/attention_sm90.py --check  # says whether they are up to date

shared.svg is to scale, for head_dim 128. turn.svg shows the scheme.
"""

from __future__ import annotations

import sys

from drawing import BLUE, GREEN, GREY, INK, ORANGE, PALE, RED, Drawing, write_or_check

# A turn. Time is in products of a warpgroup: its scores of a tile take one, its values another.

TURNS = 3
GROUPS = 3
TURN = 2.0 * GROUPS  # two products each
SOFTMAX = 3.0
LEFT, UNIT, ROW, BAR = 118, 48, 34, 26


class Clock:
    """Bars on rows, over time."""

    def __init__(self, end: float) -> None:
        """Show the time from 0 to `end`."""
        self.end = end
        self.drawing = Drawing(LEFT + end * UNIT + 16, 368)

    def name(self, row: int, words: str) -> None:
        """Write what a row is."""
        self.drawing.text(8, 18 + row * ROW + BAR - 8, words)

    def bar(self, row: int, begin: float, end: float, fill: str, text: str = "") -> None:
        """Show what a row does from `begin` to `end`, as far as it is in sight."""
        begin, end = max(begin, 0.0), min(end, self.end)
        if begin < end:
            x, width = LEFT + begin * UNIT, (end - begin) * UNIT
            fits = text if len(text) * 5.6 < width else ""
            self.drawing.rect(x, 18 + row * ROW, width, BAR, fill, INK, fits, 10.5)

    def mark(self, at: float, first_row: int, last_row: int) -> None:
        """Draw a dashed line through rows."""
        x = LEFT + at * UNIT
        top, bottom = 14 + first_row * ROW, 18 + last_row * ROW + BAR + 4
        self.drawing.line((x, top), (x, bottom), dashed=True, arrow=False)


def tile(n: int) -> str:
    """Name the tile of keys that is gone through n turns after this one."""
    return f"n + {n}" if n > 0 else "n" if n == 0 else f"n - {-n}"


def draw_turn() -> Drawing:
    """Three warpgroups, a third of a turn apart, share the tensor cores."""
    clock = Clock(TURNS * TURN - 1)
    for row, words in enumerate(
        ("K stage 0", "K stage 1", "V stage 0", "V stage 1", "tensor cores")
    ):
        clock.name(row, words)
    for group in range(GROUPS):
        clock.name(5 + group, f"warpgroup {group}")
    for turn in range(-2, TURNS + 1):
        start = turn * TURN
        for group in range(GROUPS):
            begin = start + group * TURN / GROUPS
            colour = (BLUE, ORANGE, PALE)[group]
            clock.bar(4, begin, begin + 1, colour, f"S {tile(turn + 1)}")
            clock.bar(4, begin + 1, begin + 2, colour, f"O {tile(turn)}")
            row = 5 + group
            clock.bar(row, begin, begin + 1.8, colour, "issue")
            clock.bar(row, begin + 1.8, begin + 1.8 + SOFTMAX, GREEN, f"softmax {tile(turn + 1)}")
            clock.bar(row, begin + 1.8 + SOFTMAX, begin + 5.5, PALE, "scale")
        # The last warpgroup frees a place of K with its scores, one of V behind its exponentials.
        last = start + TURN * (GROUPS - 1) / GROUPS
        scores_read, values_read = last + 1, last + 1.8 + SOFTMAX
        k, v = (turn + 1) % 2, 2 + turn % 2
        clock.bar(k, start, scores_read, RED, f"K {tile(turn + 1)} is read")
        clock.bar(k, scores_read, scores_read + 1.8, "#ffffff", f"K {tile(turn + 3)} comes")
        clock.bar(v, start + 1, values_read, RED, f"V {tile(turn)} is read")
        clock.bar(v, values_read, values_read + 1.8, "#ffffff", f"V {tile(turn + 2)} comes")
    for at in (0.0, TURN, 2 * TURN):
        clock.mark(at, 0, 4 + GROUPS)
    d = clock.drawing
    y = 18 + (5 + GROUPS) * ROW + 14
    d.line((LEFT, y), (LEFT + TURN * UNIT, y))
    d.line((LEFT + TURN * UNIT, y), (LEFT, y))
    d.text(LEFT + TURN / 2 * UNIT, y + 16, "a turn of warpgroup 0", 11, "middle", GREY)
    notes = (
        "Issue: S n + 1 = Q K^T, then O += P V of tile n. The warps stand there until the tensor "
        "cores have taken nearly all of it. Behind an",
        "item's last tile, S is the next item's. Scale: the wait for O, the rescaling if a row "
        "asks for it (or an item's results), P packed to 16 bits.",
    )
    for i, words in enumerate(notes):
        d.text(8, y + 38 + 15 * i, words, 11)
    return d


# Shared memory

KB = 1024
ROWS, KEYS, HEAD_DIM, STAGES, BUFFERS = 192, 80, 128, 3, 2
LIMIT = 227 * KB
SLAB = 64  # elements
BOX = 16  # keys


def draw_shared() -> Drawing:
    """What lies where, and the inside of one stage of K and of V."""
    query_bytes, tile_bytes = ROWS * HEAD_DIM * 2, KEYS * HEAD_DIM * 2
    left, width, top = 10.0, 920.0, 40.0
    d = Drawing(left + width + 10, 376)
    places = [(f"Q {i}", query_bytes, GREEN) for i in range(BUFFERS)]
    places += [(f"K {i}", tile_bytes, BLUE) for i in range(STAGES)]
    places += [(f"V {i}", tile_bytes, RED) for i in range(STAGES)]
    d.text(left, 22, "head_dim 128: 227 KB of shared memory, to scale", 13)
    x, starts = left, {}
    for name, size, colour in places:
        starts[name] = x
        d.rect(x, top, size / LIMIT * width, 40, colour, INK, f"{name}: {size // KB} KB")
        x += size / LIMIT * width
    d.rect(x, top, 6, 40, GREY, INK)
    d.rect(x + 6, top, left + width - x - 6, 40, "#ffffff", INK, "", 11)
    d.text(x, top + 54, "barriers, 4 items", 11, "start", GREY)

    boxes, box = KEYS // BOX, 26.0
    k_left, k_top = 40.0, 158.0
    k_right = k_left + 2 * (boxes * box + 20)
    k_end = starts["K 0"] + tile_bytes / LIMIT * width
    d.line((starts["K 0"], top + 40), (k_left, k_top - 24), dashed=True, arrow=False)
    d.line((k_end, top + 40), (k_right, k_top - 24), dashed=True, arrow=False)
    d.text(k_left, k_top - 8, f"a stage of K: two slabs of {KEYS} keys x 64 elements", 12)
    for s in range(HEAD_DIM // SLAB):
        start = k_left + s * (boxes * box + 20)
        for b in range(boxes):
            fill = BLUE if b % 2 == 0 else "#dbe9f6"
            d.rect(start + b * box, k_top, box, 34, fill, INK, f"{b * BOX}", 10)
        words = f"elements {s * SLAB} .. {s * SLAB + SLAB - 1}"
        d.text(start + boxes * box / 2, k_top + 48, words, 11, "middle", GREY)
    d.text(k_right, k_top + 14, "a box: 16 keys x 128 bytes;", 11)
    d.text(k_right, k_top + 28, "dark: warp 0, light: warp 3", 11)

    v_top = 270.0
    d.text(k_left, v_top - 8, "a stage of V: five granules of 16 keys, all elements of each", 12)
    for b in range(boxes):
        for s in range(HEAD_DIM // SLAB):
            fill = RED if s == 0 else "#fadcd9"
            at = k_left + (2 * b + s) * box
            d.rect(at, v_top, box, 34, fill, INK, f"{b * BOX}", 10)
    d.text(k_left + 2 * boxes * box + 40, v_top + 14, "a box: two neighbours;", 11)
    d.text(k_left + 2 * boxes * box + 40, v_top + 28, "warp 1 copies them all", 11)
    d.text(
        k_left,
        v_top + 54,
        "A product with V takes one granule (16 keys x 128 elements), one of scores takes 16 "
        f"elements of all {KEYS} keys.",
        11,
    )
    d.text(
        k_left,
        v_top + 70,
        "Rows of 128 bytes are swizzled in groups of eight, as TMA writes them and WGMMA reads "
        "them. Q is laid out as K is.",
        11,
    )
    return d


DRAWINGS = {"turn": draw_turn, "shared": draw_shared}

if __name__ == "__main__":
    sys.exit(write_or_check("attention_sm90", DRAWINGS))
