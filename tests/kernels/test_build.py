"""Building without a GPU: what the manifest says is what the cubins hold."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from k3sim.errors import UserError
from k3sim.kernels.costs import all_costs, code_of, cost_functions, work_of
from k3sim.kernels.folders import operators_with, part_of
from k3sim.kernels.footprints import COLUMNS, path_of
from k3sim.kernels.footprints.__main__ import document_of
from k3sim.kernels.toolchain import compile_cache
from k3sim.kernels.toolchain.build import build
from k3sim.kernels.toolchain.catalogue import BUILDS
from k3sim.kernels.toolchain.compile_cache import ARCHITECTURES
from k3sim.kernels.toolchain.machine_code import disassemble, sections
from k3sim.kernels.work import REGISTER_LOAD_CARVE_OUT
from k3sim.model.program import Weight

# A few words of traffic in all.
WITHOUT_WIDE_LOADS = {"l2_prefetch", "advance"}


def test_every_counted_code_is_of_a_cost() -> None:
    for folder in operators_with("cost"):
        module = part_of(folder, "cost")
        assert set(getattr(module, "CODE", {})) <= cost_functions(module).keys(), folder


def test_straight_code_is_no_longer_than_its_build() -> None:
    """Of 16 bytes an instruction, in the sizes that the builds are compared with below."""
    weight = Weight(region="", num_outputs=7168, depth=768, num_bytes=1)
    prep = work_of("mla_prep.fused", (weight, weight), {"rows": 1, "heads": 6, "kv_row_bytes": 576})
    produce = work_of("proj_allreduce.produce_whole", (weight,), {"rows": 1})
    counts = {name: code_of(name).serial_instructions for name in all_costs() if code_of(name).serial_instructions}
    counts["mla_prep.fused"] = prep.serial_instructions
    counts["proj_allreduce.produce_whole"] = produce.serial_instructions
    too_many = {name: count for name, count in counts.items() if not 0 < 16 * count <= code_of(name).num_bytes}
    assert len(counts) > 30 and not too_many


def test_carve_outs_are_those_of_the_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("cutlass")
    from k3sim.kernels.mla_prep.kernel import MlaPrepConfiguration
    from k3sim.kernels.proj_allreduce.kernel import ProduceConfiguration

    asked: list[int] = []
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    monkeypatch.setattr(compile_cache, "_compiled", {})
    monkeypatch.setattr(compile_cache, "_carve_out", lambda function, percent: asked.append(percent))
    for configuration in (
        MlaPrepConfiguration(rows=1, heads=6, fp8=True),
        ProduceConfiguration(rows=1, depth=768, hidden=7168, ranks=16, max_rows=16),
        "any other",
    ):
        compile_cache.compiled(configuration, lambda: None)
    weights = Weight(region="", num_outputs=7168, depth=768, num_bytes=1)
    said = [
        work_of("mla_prep.fused", (weights, weights), {"rows": 1, "heads": 6, "kv_row_bytes": 576}),
        work_of("proj_allreduce.produce_whole", (weights,), {"rows": 1}),
        work_of("skinny_gemv.tiled", (weights,), {"rows": 1}),
    ]
    expected = [REGISTER_LOAD_CARVE_OUT, REGISTER_LOAD_CARVE_OUT, compile_cache.ALL_SHARED]
    assert asked == [one.carve_out_percent for one in said] == expected


def test_every_operator_with_a_cost_is_built() -> None:
    costed = {name.split(".")[0] for name in all_costs()}
    # Kernels of others: cuBLAS, called through torch, and what public engines alone have.
    others = {"cublas", "expert_exchange", "gqa_decode", "grouped_experts", "indexer", "quantised_gemm"}
    assert costed == {*BUILDS, *others}


def test_names_of_kernels_are_file_names() -> None:
    for operator, kernels in BUILDS.items():
        pytest.importorskip("torch")
        for name in kernels():
            assert re.fullmatch(r"[a-z0-9_]+", name), (operator, name)


def test_unknown_names_are_refused_with_the_accepted(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown operator 'gemv'; accepted: attn_res, "):
        build(tmp_path, operators=("gemv",))
    with pytest.raises(UserError, match=r"unknown architecture 'sm_80'; accepted: sm_90a, "):
        build(tmp_path, architectures=("sm_80",))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_cubin_is_refused() -> None:
    with pytest.raises(ValueError, match="not a 64-bit ELF file"):
        sections(b"\x7fELF\x01 and so on")


@dataclass(frozen=True, kw_only=True)
class Built:
    """All kernels of one architecture."""

    architecture: str
    folder: Path
    manifest: dict[str, Any]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Most of a minute of a core each."""
    pytest.importorskip("torch")
    pytest.importorskip("cutlass")
    folder = tmp_path_factory.mktemp(request.param)
    return Built(
        architecture=request.param, folder=folder, manifest=build(folder, architectures=(request.param,))
    )


@pytest.mark.slow
def test_weights_are_asked_for_before_the_wait(whole: Built) -> None:
    """In the machine code: ptxas moves loads of read-only data behind a wait that follows them in the source."""
    entries = [
        entry
        for entry in whole.manifest["kernels"]
        if entry["operator"] in ("proj_allreduce", "latent_tail") and entry["kernel"].startswith(("produce", "up_"))
    ]
    assert len(entries) >= 8
    cubins = [(whole.folder / entry["cubin"]).read_bytes() for entry in entries]
    for entry, functions in zip(entries, disassemble(cubins, whole.architecture), strict=True):
        (lines,) = functions.values()
        wait = next(at for at, line in enumerate(lines) if "ACQBULK" in line)
        # Past L1, or by the copy engine: the weights.
        wide = [at for at, line in enumerate(lines) if re.match(r"LDG\..*\bNA\b|UBLKCP", line)]
        assert wide and all(at < wait for at in wide), entry["kernel"]


@pytest.mark.slow
def test_every_kernel_builds_without_a_spill_in_it(whole: Built) -> None:
    manifest = whole.manifest
    assert json.loads((whole.folder / "manifest.json").read_text()) == manifest
    built = {(entry["operator"], entry["kernel"]) for entry in manifest["kernels"]}
    assert built == {(operator, name) for operator, kernels in BUILDS.items() for name in kernels()}
    for entry in manifest["kernels"]:
        assert (whole.folder / entry["cubin"]).read_bytes()[:4] == b"\x7fELF"
        for code in entry["functions"]:
            assert code["spills"] == code["stack_bytes"] == 0, entry
            assert 8 <= code["registers"] <= 255, entry
            assert code["instructions"] > 20, entry
            if WITHOUT_WIDE_LOADS.isdisjoint((entry["operator"], entry["kernel"])):
                assert code["loads_16_byte"] + code["bulk_copies"] > 0, entry


@pytest.mark.slow
def test_footprints_are_those_of_the_build(whole: Built) -> None:
    """To the last instruction with the compilers that they were written with; with others, about as large."""
    built = document_of(whole.architecture, whole.folder, whole.manifest["kernels"])
    stored = json.loads(path_of(whole.architecture).read_text())
    write = f"python -m k3sim.kernels.footprints {whole.architecture}"
    assert {key: [row[0] for row in rows] for key, rows in built["kernels"].items()} == {
        key: [row[0] for row in rows] for key, rows in stored["kernels"].items()
    }, write
    if all(built[key] == stored[key] for key in ("compilers", "assembler")):
        assert built["kernels"] == stored["kernels"], write
        return
    for operator, rows in built["kernels"].items():
        for now, then in zip(rows, stored["kernels"][operator], strict=True):
            for column in ("registers", "threads", "code_bytes"):
                at = COLUMNS.index(column)
                assert now[at] == pytest.approx(then[at], rel=0.34), (operator, now, then, write)
