"""Draws the pictures of docs/architecture.md, as SVG files beside this one.

python docs/drawings/architecture.py          # writes them
python docs/drawings/architecture.py --check  # says whether they are up to date
"""

from __future__ import annotations

import sys

from drawing import BLUE, COLOURS, GREEN, GREY, INK, ORANGE, PALE, RED, Drawing, write_or_check

SMALL = 11

# A step


def draw_step() -> Drawing:
    """What a decode step launches, and what each kernel reads and writes."""
    d = Drawing(940, 452)
    d.rect(10, 10, 920, 78, "#fafafa", GREY)
    d.text(20, 28, "host", SMALL, ink=GREY)
    d.rect(70, 34, 120, 40, PALE, text="BlockPool.append")
    d.line((190, 54), (228, 54))
    d.rect(230, 34, 260, 40, PALE, text="slot_mapping, block_table, lengths: NumPy", size=SMALL)
    d.line((360, 74), (360, 116))
    d.text(368, 102, "one copy each, ahead of the step's kernels", SMALL, ink=GREY)
    d.rect(
        540, 34, 370, 40, PALE, text="launches; knows sizes, strides, addresses, bounds", size=SMALL
    )

    d.rect(10, 116, 920, 326, "#fafafa", GREY)
    d.text(20, 134, "device", SMALL, ink=GREY)
    reads = (
        (30, 95, "seqused_k"), (135, 95, "cu_seqlens_q"),
        (270, 95, "k, v"), (375, 95, "slot_mapping"),
        (540, 80, "q"), (630, 110, "block_table"), (750, 150, "seqused_k, cu_seqlens_q"),
    )  # fmt: skip
    for x, width, name in reads:
        d.rect(x, 150, width, 30, BLUE, text=name, size=SMALL)
        d.line((x + width / 2, 180), (x + width / 2, 216))
    d.rect(252, 140, 668, 190, "none", GREY)
    d.text(262, 324, "each layer, after the model's projections", SMALL, ink=GREY)
    for x, width, name in (
        (30, 200, "make_plan"),
        (270, 200, "cache_write"),
        (540, 360, "paged_attention"),
    ):
        d.rect(x, 218, width, 44, ORANGE, text=name, size=13)
    d.text(30, 212, "once", SMALL, ink=GREY)
    d.line((230, 240), (268, 240))
    d.line((470, 240), (538, 240))
    d.text(480, 234, "stream", SMALL, ink=GREY)

    d.rect(270, 354, 200, 34, BLUE, text="pages of K and V")
    d.line((370, 262), (370, 352))
    d.line((470, 371), (580, 371), (580, 264))
    d.rect(30, 400, 200, 34, BLUE, text="plan")
    d.line((130, 262), (130, 398))
    d.line((230, 417), (610, 417), (610, 264))
    d.rect(640, 354, 110, 34, COLOURS[4], text="workspace")
    d.line((680, 352), (680, 264))
    d.line((710, 262), (710, 352))
    d.rect(770, 354, 140, 34, GREEN, text="out, softmax_lse")
    d.line((840, 262), (840, 352))
    for x, fill, words in (
        (640, BLUE, "the caller's"),
        (740, COLOURS[4], "the library's, or"),
        (850, GREEN, "result"),
    ):
        d.rect(x, 411, 12, 12, fill)
        d.text(x + 17, 421, words, SMALL)
    d.text(757, 435, "the caller's", SMALL)
    return d


# From pages to a row


def draw_keys() -> Drawing:
    """One sequence's keys: its pages, tiles of them, the pieces of two lanes, and their sum."""
    d = Drawing(940, 420)
    left, page = 150, 176
    table, colours = (7, 2, 5), (BLUE, ORANGE, GREEN)
    d.text(10, 32, "block_table[b]")
    for i, number in enumerate((*table, 61)):
        used = i < len(table)
        d.rect(left + i * 60, 12, 60, 30, colours[i] if used else "#ffffff", INK if used else GREY)
        d.text(left + i * 60 + 30, 32, str(number), 12, "middle", INK if used else GREY)
    d.text(left + 252, 32, "never looked at: behind ceil(seqused_k / page_size)", SMALL, ink=GREY)

    d.text(10, 92, "the pool")
    for number in range(10):
        fill = colours[table.index(number)] if number in table else "#ffffff"
        d.rect(left + number * 70, 72, 64, 30, fill, INK if number in table else GREY)
        d.text(
            left + number * 70 + 32,
            92,
            f"page {number}",
            SMALL,
            "middle",
            INK if number in table else GREY,
        )

    d.text(10, 152, "keys of b, in order")
    y = 132
    for i, number in enumerate(table):
        width = page if i < 2 else page * 0.6
        d.rect(left + i * page, y, width, 30, colours[i], text=f"page {number}")
    end = left + 2.6 * page
    d.rect(end, y, left + 3 * page - end, 30, "#ffffff", GREY)
    d.text(end + 8, y + 20, "its tail", SMALL, ink=GREY)
    d.line((end, y - 8), (end, y + 74), dashed=True, arrow=False)
    d.text(end + 80, y + 20, "seqused_k ends here; the tail may hold NaN", SMALL, ink=GREY)

    d.text(10, 198, "tiles of keys")
    tile, count = 74, 7
    for n in range(count):
        x = left + n * tile
        d.rect(x, 178, min(tile, end - x), 30, PALE, text=f"{n}")
    d.text(end + 80, 198, "a tile does not care where pages end", SMALL, ink=GREY)

    d.text(10, 258, "lanes of the plan")
    for piece, (first, behind, fill) in enumerate(((0, 4, BLUE), (4, count, RED))):
        x, stop = left + first * tile, min(left + behind * tile, end)
        middle = (x + stop) / 2
        d.line((middle, 208), (middle, 234))
        words = f"CTA: tiles {first} to {behind - 1}"
        d.rect(x + 4, 236, stop - x - 8, 34, fill, text=words, size=SMALL)
        d.line((middle, 270), (middle, 302))
        words = f"piece {piece}: sums, maxima"
        d.rect(x + 4, 304, stop - x - 8, 34, fill, text=words, size=SMALL)
        d.line((middle, 338), (middle, 368))
    d.text(10, 324, "workspace")
    d.rect(
        left + 4,
        370,
        end - left - 8,
        34,
        "#ffffff",
        text="who counts last adds the pieces, in their order",
    )
    d.line((end, 387), (end + 76, 387))
    d.rect(end + 78, 370, 150, 34, GREEN, text="8 rows of out")
    d.text(end + 80, 258, "lanes are cut where work is even", SMALL, ink=GREY)
    return d


# The layers


def draw_layers() -> Drawing:
    """Folders, and who calls whom."""
    d = Drawing(940, 506)
    layers = (
        (10, 116, "python/pagetile: names, types, words; no maths, no copies"),
        (142, 70, "cpp/bindings: a tensor becomes an address with sizes and strides"),
        (228, 70, "cpp/include/pagetile: the C++ API, plain structs; a C++ program begins here"),
        (314, 182, "cpp/src"),
    )
    for y, height, name in layers:
        d.rect(10, y, 920, height, "#fafafa", GREY)
        d.text(20, y + 18, name, SMALL, ink=GREY)
    boxes = (
        (36, 400, 130, "compat/vllm.py", PALE),
        (36, 540, 170, "integrations/", PALE),
        (36, 720, 90, "torch.py", PALE),
        (36, 820, 100, "jax.py", PALE),
        (86, 20, 790, "attention.py, cache_write.py, plan.py, block_pool.py, config.py", BLUE),
        (
            170,
            20,
            790,
            "tensor.cpp, attention.cpp, cache_write.cpp, copy_pages.cpp, plan.cpp",
            BLUE,
        ),
        (170, 820, 100, "xla_ffi.cpp", BLUE),
        (256, 20, 900, "attention.h, cache_write.h, copy_pages.h, block_pool.h, config.h", GREEN),
        (340, 20, 560, "attention/paged_attention.cpp: checks, picks the backend", ORANGE),
        (340, 610, 310, "cache_write/cache_write.cpp: likewise", ORANGE),
        (392, 20, 150, "attention/cpu/", PALE),
        (392, 190, 390, "attention/cuda/, dispatch, plan: which kernel, who does what", ORANGE),
        (392, 610, 130, "cache_write/cpu/", PALE),
        (392, 760, 160, "cache_write/cuda/", PALE),
        (444, 20, 150, "common/: for all", PALE),
        (444, 190, 190, "attention/sm80/: mma.sync", RED),
        (444, 390, 190, "attention/sm90/: TMA, WGMMA", RED),
    )
    for y, x, width, text, fill in boxes:
        d.rect(x, y, width, 34, fill, text=text, size=SMALL)
    calls = (
        (465, 70, 84), (625, 70, 84), (765, 70, 84),
        (560, 120, 168), (870, 70, 168), (560, 204, 254), (870, 204, 254),
        (300, 290, 338), (765, 290, 338),
        (95, 374, 390), (385, 374, 390), (675, 374, 390), (840, 374, 390),
        (285, 426, 442), (485, 426, 442),
    )  # fmt: skip
    for x, begin, end in calls:
        d.line((x, begin), (x, end))
    return d


DRAWINGS = {"step": draw_step, "keys": draw_keys, "layers": draw_layers}

if __name__ == "__main__":
    sys.exit(write_or_check("architecture", DRAWINGS))
