"""A curve as files: JSON, CSV, Parquet, and a page with the gain and the step over concurrency or context."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3sim.errors import UserError
from k3sim.sim.curve import Cliff, Point
from k3sim.sim.export.document import SCHEMA_VERSION, dump_json
from k3sim.sim.export.whole_file import whole_folder, write_whole_file
from k3sim.sim.intervals import gain_interval
from k3sim.sim.options import Options
from k3sim.sim.question import ask

if TYPE_CHECKING:
    import pandas

Place = tuple[int, int]  # concurrency and context


@dataclass(frozen=True, kw_only=True)
class PublishedGain:
    """A published gain of the fused path over stock, of one machine and layout."""

    concurrency: int
    context: int
    gain: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points by path, concurrency and context, the places where a step changes suddenly, and published gains."""

    options: Options
    points: tuple[Point, ...]
    cliffs: tuple[Cliff, ...]
    published: tuple[PublishedGain, ...] = ()

    @cached_property
    def by_place(self) -> dict[str, dict[Place, Point]]:
        """Points of each path."""
        found: dict[str, dict[Place, Point]] = {}
        for one in self.points:
            found.setdefault(one.path, {})[one.concurrency, one.context] = one
        return found

    @property
    def over(self) -> str:
        """What varies along the curve: concurrency, or context where there is one concurrency."""
        return "concurrency" if len({users for users, _ in self.places}) > 1 else "context"

    @property
    def places(self) -> tuple[Place, ...]:
        """Concurrency and context of the points, in order."""
        return tuple(dict.fromkeys((one.concurrency, one.context) for one in self.points))

    def gain(self, path: str, place: Place) -> float | None:
        """The gain of a path over stock; None where one of them has no step."""
        stock, one = (self.by_place.get(name, {}).get(place) for name in ("stock", path))
        if stock is None or one is None or stock.step_us is None or one.step_us is None:
            return None
        return stock.step_us / one.step_us

    def gain_bounds(self, path: str, place: Place) -> tuple[float, float] | None:
        """The middle 90 % of the gain over draws; None where none were drawn."""
        stock, one = (self.by_place.get(name, {}).get(place) for name in ("stock", path))
        if stock is None or one is None or not stock.drawn_us or not one.drawn_us:
            return None
        return gain_interval(stock.drawn_us, one.drawn_us)

    def rows(self) -> list[dict[str, Any]]:
        """One row a point."""
        found = []
        for one in self.points:
            place = (one.concurrency, one.context)
            low, high = self.gain_bounds(one.path, place) or (None, None)
            found.append(
                {**one.to_dict(), "gain": self.gain(one.path, place), "gain_low": low, "gain_high": high}
            )
        return found

    def frame(self) -> pandas.DataFrame:
        """One row a point. Raises UserError where pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise UserError("a DataFrame needs pandas; pip install pandas") from None
        return pandas.DataFrame(self.rows())

    def to_dict(self, files: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The JSON document; ``docs/json.md`` describes it."""
        question = ask(self.options)
        return {
            "schema_version": SCHEMA_VERSION,
            "model": question.architecture.name,
            "machine": question.machine.name,
            "layout": question.layout.tag,
            "num_gpus": question.layout.num_gpus,
            "points": self.rows(),
            "cliffs": [one.to_dict() for one in self.cliffs],
            "published_gains": [dict(one.__dict__) for one in self.published],
            "files": dict(files or {}),
        }

    def write(self, folder: Path, page: str) -> dict[str, str]:
        """Write curve.json, .csv, .html (``page``), and .parquet where pyarrow is installed; returns kind -> path.

        All of them are written, or none. Raises UserError when the folder cannot be written.
        """
        parquet = self._parquet()
        kinds = {"json": "json", "csv": "csv", "html": "html", **({"parquet": "parquet"} if parquet else {})}
        files = {kind: str(folder / f"curve.{ending}") for kind, ending in kinds.items()}
        with whole_folder(folder) as inside:
            write_whole_file(inside / "curve.csv", self._csv().encode())
            write_whole_file(inside / "curve.html", page.encode())
            if parquet:
                write_whole_file(inside / "curve.parquet", parquet)
            write_whole_file(inside / "curve.json", dump_json(self.to_dict(files)).encode())
        return files

    def _csv(self) -> str:
        rows, out = self.rows(), io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()

    def _parquet(self) -> bytes | None:
        """The rows as Parquet; None where pyarrow is not installed."""
        try:
            import pyarrow  # type: ignore[import-untyped]
            import pyarrow.parquet  # type: ignore[import-untyped]
        except ImportError:
            return None
        out = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(self.rows()), out)
        return out.getvalue()
