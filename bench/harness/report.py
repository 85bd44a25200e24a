"""What a benchmark prints and keeps: a line a case as it comes, everything in a JSON file."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import torch

Columns = tuple[tuple[str, str, str], ...]  # key, title, format; "peers.fa3.us": a key of a key


def width_of(form: str) -> int:
    return int(form.split(".")[0])


def lookup(row: dict[str, Any], key: str) -> Any:
    """What stands in a row under a dotted key, or None."""
    found: Any = row
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


class Progress:
    """A bar on stderr while cases run, where that is a terminal and tqdm is installed."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.bar: Any = None

    def say(self, text: str) -> None:
        """Print a line, above the bar."""
        if self.bar is None:
            print(text, flush=True)
        else:
            self.bar.write(text)

    def begin(self, label: str) -> None:
        if self.bar is None and sys.stderr.isatty() and importlib.util.find_spec("tqdm"):
            from tqdm import tqdm

            self.bar = tqdm(total=self.total, file=sys.stderr, leave=False, unit="case")
        if self.bar is not None:
            self.bar.set_description_str(label)

    def end(self) -> None:
        """Of a case; after the last one the bar goes."""
        if self.bar is not None:
            self.bar.update()
            if self.bar.n >= self.total:
                self.bar.close()


class Report:
    """`found` is what the JSON file holds besides the cases, of which there will be `total`."""

    def __init__(
        self,
        columns: Columns,
        name_width: int,
        found: dict[str, Any],
        json_file: pathlib.Path | None,
        total: int = 0,
    ) -> None:
        self.columns, self.name_width = columns, name_width
        self.found, self.json_file = found, json_file
        self.rows: list[dict[str, Any]] = []
        for line in found["machine"]:
            print(f"# {line}")
        self.progress = Progress(total)

    def titles(self, section: str = "") -> None:
        if section:
            self.progress.say(f"\n# {section}")
        titles = "".join(f"{title:>{width_of(form)}}" for _, title, form in self.columns)
        self.progress.say(f"{'case':<{self.name_width}}{titles}")

    def case(
        self, label: str, row: dict[str, Any], measure: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Measures a case, prints its line and saves all so far."""
        self.progress.begin(label)
        try:
            row |= measure()
            self.judge(row)
            text = "".join(self.cell(row, key, form) for key, _, form in self.columns)
        except Exception as error:  # the other cases may still work
            row["error"] = f"{type(error).__name__}: {error}"
            text = f" FAILED {row['error'].splitlines()[0][:200]}"
        verdict = {True: " ok", False: " MISS"}.get(row.get("ok"), "")
        self.progress.say(f"{label:<{self.name_width}}{text}{verdict}")
        for name, peer in row.get("peers", {}).items():
            if "error" in peer:
                self.progress.say(f"    {name}: {peer['error'].splitlines()[0][:150]}")
        self.progress.end()
        self.rows.append(row)
        self.save()
        return row

    def judge(self, row: dict[str, Any]) -> None:
        row["gbps"] = row["bytes"] / row["us"] / 1e3
        for peer in row.get("peers", {}).values():
            if "us" in peer:
                peer["ratio"] = peer["us"] / row["us"]
        if row.get("bar_us") and "H200" in torch.cuda.get_device_name():
            row["ok"] = row["us"] <= row["bar_us"]

    @staticmethod
    def cell(row: dict[str, Any], key: str, form: str) -> str:
        value = lookup(row, key)
        return f"{'-':>{width_of(form)}}" if value is None else f"{value:{form}}"

    def save(self) -> None:
        if self.json_file:
            text = json.dumps({**self.found, "cases": self.rows}, indent=1)
            self.json_file.write_text(text + "\n")
