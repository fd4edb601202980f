"""Tables of published results, and scenarios of claims, as a user would write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCENARIO: dict[str, Any] = {
    "schema_version": 1, "id": "mine", "title": "t", "claim": "c", "source": "s", "date": "2026-10", "found": "f",
    "boundary": "b", "would_hold": "w",
    "figures": [{"label": "gain", "value": 1.5, "unit": "x", "command": "k3sim timeline",
                 "against": "k3sim timeline --path stock"}],
}  # fmt: skip


def step(**changes: Any) -> dict[str, Any]:
    """A record of a whole step; fields that are None are left out."""
    record: dict[str, Any] = {
        "id": "mine", "kind": "step", "title": "t", "source": "https://example.org", "date": "2026-10",
        "hardware": "gb300", "num_gpus": 8, "layout": "TP8", "engine": "e", "flags": "f", "workload": "w",
        "value": 8.0, "unit": "ms",
        "unknown": "u", "command": "k3sim timeline --tp 8 --path stock",
    }  # fmt: skip
    return {name: value for name, value in {**record, **changes}.items() if value is not None}


def write(path: Path, *records: Any) -> Path:
    """One field a line: schema_version stands on line 2, the first record's fields from line 5 on."""
    path.write_text(json.dumps({"schema_version": 1, "records": list(records)}, indent=1), encoding="utf-8")
    return path


def scenario(tmp_path: Path, **figure: Any) -> Path:
    """File of a claim with one figure; fields that are None are left out."""
    path = tmp_path / "mine.json"
    kept = {key: value for key, value in {**SCENARIO["figures"][0], **figure}.items() if value is not None}
    path.write_text(json.dumps({**SCENARIO, "figures": [kept]}, indent=1), encoding="utf-8")
    return path
