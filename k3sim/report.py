"""The report of one question: predictions of every path, and the forms in which a reader gets them.

``Report`` is what ``k3sim.predict`` returns; the command line prints it and writes its files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3sim.charts import card, waterfall
from k3sim.errors import UserError
from k3sim.model.paths import SWITCHES
from k3sim.sim.clock import without_collection
from k3sim.sim.draws import NUM_DRAWS, check_draws
from k3sim.sim.export.document import SCHEMA_VERSION, dump_json
from k3sim.sim.export.whole_file import whole_folder, write_whole_file
from k3sim.sim.intervals import drawn_steps_us, gain_interval, interval_around
from k3sim.sim.machine import describe
from k3sim.sim.machine_share import described_shares
from k3sim.sim.options import Options
from k3sim.sim.predict import Answer, Prediction, difference_us, ladder, leave_one_out, on_path, predict, program_of
from k3sim.sim.progress import OnDone, ignore_progress
from k3sim.sim.question import Question, ask
from k3sim.sim.timeline.critical_path import Part
from k3sim.sim.timeline.file import stage_rows
from k3sim.version import VERSION

if TYPE_CHECKING:
    import pandas

NOT_MODELLED = (
    "prefill, scheduling and everything outside one decode step",
    "speculative decoding (a step yields one token a user)",
    "experts shared across data-parallel replicas, and dispatch and combine over them",
    "power and clock changes during a step",
    "bank and channel conflicts of HBM, refresh, and ECC beyond the measured read ceiling",
    "placement of blocks on dies and GPCs: L2 latency is the mean of its two partitions",
    "a rank that is slow for the whole step (paces vary kernel by kernel)",
    "congestion by other jobs in the NVLink domain",
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Predictions for one question.

    main
        the path that was asked for
    stock, fused, megakernel
        the paths beside it; None where a path has not the kernels that the model needs
    refused
        by the name of such a path, why
    ladder, leave_one_out
        the fused path with switches added in turn, and with each taken away; with sampled skew these are
        predicted with its mean, so that a switch is compared with itself and not with a draw
    command
        the command line that reproduces it
    intervals
        by label of ``labelled``, the middle 90 % of the step over draws (``with_intervals``); else empty
    gain_intervals
        likewise, of the gain over stock, draw by draw
    """

    main: Prediction
    stock: Prediction
    fused: Prediction | None
    megakernel: Prediction | None
    ladder: tuple[tuple[str, Prediction], ...]
    leave_one_out: tuple[tuple[str, Prediction], ...]
    command: str
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    gain_intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def with_intervals(self, num_draws: int = NUM_DRAWS, on_done: OnDone = ignore_progress) -> Report:
        """The same report with an interval for each path: the machine's values drawn ``num_draws`` times, and with
        each of them errors of kernels.

        Draws follow the question's seed and are the same for all paths. ``on_done`` is told how many predictions are
        done, and of how many. Raises UserError for fewer than two draws or more than ``MAX_DRAWS``.
        """
        check_draws(num_draws)
        answer = _counted(len(self.labelled) * (num_draws + 1), on_done)
        drawn = {
            label: drawn_steps_us(prediction.question, num_draws=num_draws, seed=self.question.seed, answer=answer)
            for label, prediction in self.labelled.items()
        }
        draws = "" if num_draws == NUM_DRAWS else f" --draws {num_draws}"
        return replace(
            self,
            intervals={label: interval_around(steps[0], steps[1:]) for label, steps in drawn.items()},
            gain_intervals={label: gain_interval(drawn["stock"], steps) for label, steps in drawn.items()},
            command=f"{self.command} --intervals{draws}",
        )

    def _interval(self, prediction: Prediction) -> dict[str, Any]:
        """The interval of a path as an entry of JSON; nothing where none was asked for."""
        for label, one in self.labelled.items():
            if one is prediction and label in self.intervals:
                return {"step_us_interval": list(self.intervals[label])}
        return {}

    @property
    def question(self) -> Question:
        return self.main.question

    @property
    def reference(self) -> Prediction:
        """The full fused path that the ladder ends with and a removed switch is compared with."""
        return self.ladder[-1][1]

    @cached_property
    def labelled(self) -> dict[str, Prediction]:
        """Predictions by the label they have in reports, the main one first."""
        name = self.main.path.name
        if name == "fused" and self.fused is not None and self.main.path.switches != self.fused.path.switches:
            name = "fused (" + (" + ".join(sorted(self.main.path.switches)) or "no switches") + ")"
        paths = {name: self.main}
        for label, prediction in (("stock", self.stock), ("fused", self.fused), ("megakernel", self.megakernel)):
            if prediction is not None:
                paths.setdefault(label, prediction)
        return paths

    @property
    def warnings(self) -> list[str]:
        """What a reader must know: of the question, and which paths are not there."""
        absent = [f"path {name} is not predicted: {why}" for name, why in self.refused.items()]
        return [*self.question.warnings, *absent]

    @property
    def _not_modelled(self) -> list[str]:
        speculates = self.question.architecture.draft is not None
        return [one for one in NOT_MODELLED if not (speculates and one.startswith("speculative"))]

    def _summary(self, prediction: Prediction | None) -> dict[str, Any] | None:
        return None if prediction is None else {**summary(prediction), **self._interval(prediction)}

    def frame(self) -> pandas.DataFrame:
        """One row a kernel of the main path: rank, layer, kind, stage, stream, start_us, end_us, duration_us.

        Raises UserError where pandas is not installed.
        """
        frame = _frame(stage_rows(self.main.full))
        frame["duration_us"] = frame["end_us"] - frame["start_us"]
        return frame

    def waits_frame(self) -> pandas.DataFrame:
        """Microseconds of each part (rows) on each path (columns). Raises UserError where pandas is not installed."""
        columns = {label: prediction.waits_us for label, prediction in self.labelled.items()}
        return _frame(columns, index=[part.value for part in Part]).dropna(how="all").fillna(0.0)

    def to_dict(self, files: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The JSON document; ``docs/json.md`` describes it."""
        question, main = self.question, self.main
        return {
            "schema_version": SCHEMA_VERSION,
            "model": question.architecture.name,
            "machine": question.machine.name,
            "layout": question.layout.tag,
            "num_gpus": question.layout.num_gpus,
            "path": main.path.name,
            "switches": list(main.path.switch_names),
            "concurrency": question.workload.concurrency,
            "context": question.workload.context,
            "kv_dtype": question.workload.kv_dtype,
            "seed": question.seed,
            "skew": question.skew.value,
            "routing": question.routing.name,
            **summary(main),
            **self._interval(main),
            "memory": question.room().to_dict(),
            "speedup_over_stock": self.stock.step_us / main.step_us,
            "stock": self._summary(self.stock),
            "fused": self._summary(self.fused),
            "megakernel": self._summary(self.megakernel),
            "switches_added": [
                {
                    "label": label,
                    "step_us": prediction.step_us,
                    "waits_delta_us": difference_us(before, prediction),
                }
                for (label, prediction), (_, before) in zip(self.ladder, (self.ladder[0], *self.ladder), strict=False)
            ],
            "switches_removed": [
                {
                    "without": switch,
                    "step_us": prediction.step_us,
                    "cost_us": prediction.step_us - self.reference.step_us,
                    "waits_delta_us": difference_us(self.reference, prediction),
                }
                for switch, prediction in self.leave_one_out
            ],
            "critical_path": [
                {"stage": stage, "part": part.value, "us": duration_us}
                for stage, part, duration_us in main.contributions()
            ],
            "stages": stage_rows(main.full),
            "command": self.command,
            "machine_values": describe(question.machine),
            "not_modelled": self._not_modelled,
            "warnings": self.warnings,
            "files": dict(files or {}),
        }

    @without_collection()
    def write(self, folder: Path) -> dict[str, str]:
        """Write timeline.json, timeline.html, timeline.pftrace and stages.csv; returns kind -> path.

        All of them are written, or none. Raises UserError when the folder cannot be written.
        """
        from k3sim.sim.export.html import write_html_report
        from k3sim.sim.export.perfetto import write_perfetto_trace

        files = {
            "json": str(folder / "timeline.json"),
            "html": str(folder / "timeline.html"),
            "perfetto": str(folder / "timeline.pftrace"),
            "stages": str(folder / "stages.csv"),
        }
        check_writable(files)
        timelines = {label: prediction.full for label, prediction in self.labelled.items()}
        with whole_folder(folder) as inside:
            write_whole_file(inside / "timeline.json", dump_json(self.to_dict(files)).encode())
            write_html_report(self.html_data(), timelines, inside / "timeline.html")
            write_perfetto_trace(timelines, inside / "timeline.pftrace")
            write_whole_file(inside / "stages.csv", _csv(stage_rows(self.main.full)).encode())
        return files

    def html_data(self) -> dict[str, Any]:
        """What ``write_html_report`` draws."""
        question = self.question
        mixers = [question.architecture.mixer(layer) for layer in range(question.architecture.num_layers)]
        middle = len(mixers) // 2
        return {
            "model": question.architecture.name,
            "machine": question.machine.title,
            "layout": question.layout.tag,
            "num_gpus": question.layout.num_gpus,
            "memory": question.room().to_dict(),
            "can_draw": True,
            "concurrency": question.workload.concurrency,
            "context": question.workload.context,
            "main_path": next(iter(self.labelled)),
            "paths": {
                label: {
                    **card(prediction, self.stock),
                    **self._interval(prediction),
                    "speedup_interval": self.gain_intervals.get(label),
                }
                for label, prediction in self.labelled.items()
            },
            "waterfall": waterfall(self.ladder, self.megakernel),
            "leave_one_out": [
                {
                    "without": switch,
                    "step_us": prediction.step_us,
                    "cost_us": prediction.step_us - self.reference.step_us,
                }
                for switch, prediction in self.leave_one_out
            ],
            "example_layers": {
                mixer: next((layer for layer in range(middle, len(mixers)) if mixers[layer] == mixer), 0)
                for mixer in ("kda", "mla")
                if mixer in mixers
            },
            "critical_path": [
                {"stage": stage, "part": part.word, "us": duration_us}
                for stage, part, duration_us in self.main.contributions()[:20]
            ],
            "glossary": {part.word: part.meaning for part in Part},
            "command": self.command,
            "versions": {"k3sim": VERSION},
            "machine_values": described_shares(self.main),
            "not_modelled": [*self.warnings, *self._not_modelled],
        }


@without_collection()
def report_of(options: Options, on_done: OnDone = ignore_progress) -> Report:
    """Predict what is asked for, and the paths and switches beside it.

    ``on_done`` is told how many predictions are done, and of how many. Raises UserError for what cannot be honoured.
    """
    question = ask(options)
    path, switches = question.path, frozenset(SWITCHES)
    of_its_own = path.name == "fused" and path.switches != switches
    # The ladder; each switch taken away, but the last, which the ladder has; the megakernel; where ranks are sampled,
    # stock and fused once more.
    num_predictions = (1 + len(switches)) + (len(switches) - 1) + 1 + (0 if question.folded else 2) + of_its_own
    answer = _counted(num_predictions, on_done)
    refused = _refused(question)
    if path.name in refused:
        raise UserError(refused[path.name])
    if "fused" in refused:
        return _stock_alone(question, refused, options.command())
    steps = ladder(question.expected(), answer)
    expected = {step.path.switches: step for _, step in steps}
    known = expected if question.folded else {}
    stock = known.get(frozenset()) or answer(on_path(question, "stock"))
    fused = known.get(switches) or answer(on_path(question, "fused"))
    megakernel = None if refused else answer(on_path(question, "megakernel"))
    named = {"stock": stock, "fused": fused, **({} if megakernel is None else {"megakernel": megakernel})}
    return Report(
        main=answer(question) if of_its_own else named[path.name],
        stock=stock,
        fused=fused,
        megakernel=megakernel,
        ladder=tuple(steps),
        leave_one_out=tuple(leave_one_out(question.expected(), answer, expected)),
        command=options.command(),
        refused=refused,
    )


def _refused(question: Question) -> dict[str, str]:
    """Paths beside the stock one that have not the kernels that the model needs, and why; K3 has all."""
    found = {}
    for name in ("fused", "megakernel"):
        try:
            program_of(on_path(question, name).expected())
        except UserError as refusal:
            found[name] = str(refusal)
    return found


def _stock_alone(question: Question, refused: Mapping[str, str], command: str) -> Report:
    """The report of a model that has its stock path only. Raises UserError where another was asked for."""
    if question.path.switches:
        raise UserError(refused["fused"])
    main = predict(question)
    return Report(
        main=main, stock=main, fused=None, megakernel=None, ladder=(("stock", main),), leave_one_out=(),
        command=command, refused=refused,
    )  # fmt: skip


def _counted(of: int, on_done: OnDone) -> Answer:
    """``predict`` that also tells how many of the predictions are done."""
    done = 0
    on_done(done, of)

    def answer(question: Question) -> Prediction:
        nonlocal done
        found = predict(question)
        done += 1
        on_done(done, of)
        return found

    return answer


def _frame(*given: Any, **named: Any) -> pandas.DataFrame:
    """A DataFrame. Its library is large, and nothing else needs it: raises UserError where it is missing."""
    try:
        import pandas
    except ImportError:
        raise UserError("a DataFrame needs pandas; pip install 'k3sim[notebooks]'") from None
    return pandas.DataFrame(*given, **named)


def check_writable(files: Mapping[str, str]) -> None:
    """UserError when a file of the report cannot be written, before any of them is."""
    for path in files.values():
        if Path(path).is_dir():
            raise UserError(f"{path} is a folder and stands where a file of the report goes; move it or give --out")


def summary(prediction: Prediction) -> dict[str, Any]:
    """The figures that every path has."""
    return {
        "step_us": prediction.step_us,
        "tokens_per_second_per_user": prediction.tokens_per_second_per_user,
        "floor_us": prediction.floor_us,
        "hbm_busy_fraction": prediction.hbm_busy_fraction,
        "waits_us": prediction.waits_us,
    }


def _csv(rows: list[dict[str, Any]]) -> str:
    lines = [",".join(rows[0])]
    lines += [",".join(str(value) for value in row.values()) for row in rows]
    return "\n".join(lines) + "\n"
