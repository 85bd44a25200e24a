"""What the drawings of docs/ are made with: marks on paper, and files that can be checked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

HERE = Path(__file__).parent
INK, GREY, PALE = "#222222", "#8a8a8a", "#efefef"
BLUE, GREEN, ORANGE, RED = "#9ecae9", "#a8d5a2", "#f7c68b", "#f2a7a0"
COLOURS = (BLUE, ORANGE, GREEN, RED, "#cdb7e0", "#d9c5b2", "#bfe3df", "#f0e08f")


class Drawing:
    """A few kinds of marks on white paper, in pixels."""

    def __init__(self, width: float, height: float) -> None:
        """Start with nothing on it."""
        self.size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
        self.marks: list[str] = []
        self.rect(0, 0, width, height, "#ffffff", None)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        edge: str | None = INK,
        text: str = "",
        size: float = 12,
    ) -> None:
        """Draw a box with a word in its middle."""
        stroke = f' stroke="{edge}"' if edge else ""
        self.marks.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{fill}"{stroke}/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + size * 0.36, text, size, "middle")

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 12,
        anchor: str = "start",
        ink: str = INK,
    ) -> None:
        """Write a line; y is its base."""
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        self.marks.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}" '
            f'fill="{ink}">{words}</text>'
        )

    def line(self, *points: tuple[float, float], dashed: bool = False, arrow: bool = True) -> None:
        """Draw a line through points, by default with an arrow at its end."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        head = ' marker-end="url(#head)"' if arrow else ""
        self.marks.append(f'<polyline points="{path}" fill="none" stroke="{INK}"{dash}{head}/>')

    def svg(self) -> str:
        """Return the file."""
        head = (
            '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" '
            f'orient="auto"><path d="M0,1 L8,4 L0,7 z" fill="{INK}"/></marker></defs>'
        )
        font = 'font-family="Helvetica, Arial, sans-serif"'
        start = f'<svg xmlns="http://www.w3.org/2000/svg" {self.size} {font}>'
        return "\n".join([start, head, *self.marks, "</svg>"]) + "\n"


def write_or_check(page: str, drawings: Mapping[str, Callable[[], Drawing]]) -> int:
    """Write a page's drawings; with --check, say which of them are out of date."""
    check = sys.argv[1:] == ["--check"]
    stale = []
    for name, draw in drawings.items():
        file, text = HERE / f"{page}_{name}.svg", draw().svg()
        if check:
            stale += [file.name] if not file.exists() or file.read_text() != text else []
        else:
            file.write_text(text)
    if stale:
        print(f"not as the script draws them: {', '.join(stale)}")
    return 1 if stale else 0
