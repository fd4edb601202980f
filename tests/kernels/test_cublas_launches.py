"""Records of cuBLAS's launches: what the file says, and the rule for shapes and rows that it does not list."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3sim.calibrate.probes.cublas_launches import launch_row, products, text_of
from k3sim.kernels.cublas import configuration
from k3sim.kernels.cublas.configuration import cublas_launch, launches


def test_names_say_tile_stages_and_cluster() -> None:
    one = cublas_launch(num_outputs=8448, depth=7168, rows=1)  # nvjet_sm90_tst_64x8_64x16_2x1_v_bz_TNT
    assert (one.tile_outputs, one.tile_rows, one.stage_depth, one.stages, one.cluster_blocks) == (64, 8, 64, 16, 2)
    assert (one.num_blocks, one.threads, one.registers, one.smem_bytes) == (132, 384, 168, 164_308)
    assert one.ring_weight_bytes == 16 * 64 * 64 * 2 and one.add_up_blocks == 0


def test_split_products_have_a_second_launch() -> None:
    one = cublas_launch(num_outputs=3584, depth=7168, rows=1)
    assert (one.num_blocks, one.add_up_blocks, one.add_up_threads, one.add_up_registers) == (132, 112, 512, 32)


def test_rows_between_take_the_next_tile() -> None:
    listed = launches()[False, 8448, 7168]
    assert cublas_launch(num_outputs=8448, depth=7168, rows=9) == listed[12]
    assert cublas_launch(num_outputs=8448, depth=7168, rows=128) == listed[128]
    assert cublas_launch(num_outputs=8448, depth=7168, rows=500) == listed[128]


def test_an_unlisted_shape_is_tiled_like_the_nearest() -> None:
    like = cublas_launch(num_outputs=6288, depth=7168, rows=1)  # 99 tiles of 64 outputs, clusters of four
    one = cublas_launch(num_outputs=6400, depth=7000, rows=1)
    assert (like.num_blocks, one.num_blocks, one.stages) == (100, 104, like.stages)
    by_head = cublas_launch(num_outputs=24 * 512, depth=128, rows=1, by_head=True)
    assert by_head.num_blocks == 2 * cublas_launch(num_outputs=12 * 512, depth=128, rows=1, by_head=True).num_blocks


def test_every_shape_and_number_of_rows_is_recorded() -> None:
    path = Path(configuration.__file__).with_name("h200.json")
    document = json.loads(path.read_text())
    assert [tuple(row[:4]) for row in document["launches"]] == list(products())
    assert text_of(document) == path.read_text()
    for by_rows in launches().values():
        for one in by_rows.values():
            assert one.num_blocks % one.cluster_blocks == 0 and one.smem_bytes <= 227 * 1024
            assert one.registers * one.threads <= 65_536


def test_kernel_events_become_a_row() -> None:
    def event(name: str, grid: list[int], block: list[int], registers: int) -> dict[str, object]:
        given = {"grid": grid, "block": block, "registers per thread": registers, "shared memory": 7}
        return {"name": name, "args": given}

    product, add_up = event("nvjet", [2, 66, 1], [384, 1, 1], 168), event("reduce", [640, 1, 1], [32, 16, 1], 32)
    assert launch_row([product]) == ["nvjet", 132, 384, 168, 7, 0, 0, 0]
    assert launch_row([product, add_up]) == ["nvjet", 132, 384, 168, 7, 640, 512, 32]
    with pytest.raises(RuntimeError, match="a product of 0 kernels"):
        launch_row([])
