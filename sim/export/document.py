"""The JSON documents that commands write: their version, and one form of them byte for byte."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

#: Of every document but published results, scenarios, profiles and samples. 2: the paths, switches and parts have the
#: words of the field, among them "megakernel" where 1 had "persistent".
SCHEMA_VERSION = 2


def dump_json(document: Mapping[str, Any] | Sequence[Any]) -> str:
    """Compact enough to travel, stable byte for byte. Raises ValueError for a number that JSON has no word for."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n"
