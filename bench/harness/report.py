"""What a benchmark prints and keeps: a line a case as it comes, everything in a JSON file."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import torch

Columns = tuple[tuple[str, str, str], ...]  # key, title, format
PEER_LIBRARY = "_C_stable_libtorch.abi3.so"


def load_peer(folder: str) -> bool:
    """vLLM's operators, if its library is there."""
    try:
        if folder != "none":
            torch.ops.load_library(str(pathlib.Path(folder, PEER_LIBRARY)))
            return True
    except OSError as error:
        print(f"# vLLM's columns stay empty: {error}")
    return False


def width_of(form: str) -> int:
    return int(form.split(".")[0])


class Report:
    """`found` is what the JSON file holds besides the cases."""

    def __init__(
        self,
        columns: Columns,
        name_width: int,
        found: dict[str, Any],
        json_file: pathlib.Path | None,
    ) -> None:
        self.columns, self.name_width = columns, name_width
        self.found, self.json_file = found, json_file
        self.rows: list[dict[str, Any]] = []
        for line in found["machine"]:
            print(f"# {line}")

    def titles(self) -> None:
        titles = "".join(f"{title:>{width_of(form)}}" for _, title, form in self.columns)
        print(f"{'case':<{self.name_width}}{titles}", flush=True)

    def case(
        self, label: str, row: dict[str, Any], measure: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Measures a case, prints its line and saves all so far."""
        try:
            row |= measure()
            self.judge(row)
            text = "".join(self.cell(row, key, form) for key, _, form in self.columns)
        except Exception as error:  # the other cases may still work
            row["error"] = f"{type(error).__name__}: {error}"
            text = f" FAILED {row['error'].splitlines()[0][:200]}"
        verdict = {True: " ok", False: " MISS"}.get(row.get("ok"), "")
        print(f"{label:<{self.name_width}}{text}{verdict}", flush=True)
        self.rows.append(row)
        self.save()
        return row

    def judge(self, row: dict[str, Any]) -> None:
        row["gbps"] = row["bytes"] / row["us"] / 1e3
        if row.get("bar_us") and "H200" in torch.cuda.get_device_name():
            row["ok"] = row["us"] <= row["bar_us"]

    @staticmethod
    def cell(row: dict[str, Any], key: str, form: str) -> str:
        if row.get(key) is None:
            return f"{'-':>{width_of(form)}}"
        return f"{row[key]:{form}}"

    def save(self) -> None:
        if self.json_file:
            text = json.dumps({**self.found, "cases": self.rows}, indent=1)
            self.json_file.write_text(text + "\n")
