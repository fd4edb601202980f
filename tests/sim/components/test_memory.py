"""HBM and L2: what is resident, what an eviction costs, what a prefetch does and does not fetch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import PS, TINY, check_lines

from k3sim.sim.components.memory import HBM, L2, Memory, StreamLimit

FAST = StreamLimit(10**9, 10**9)


def memory(**machine: object) -> tuple[simpy.Environment, Memory]:
    env = simpy.Environment(initial_time=0)
    return env, Memory(env, replace(TINY, **machine))  # type: ignore[arg-type]


def test_bytes_in_flight_and_sms_cap_a_stream() -> None:
    _, one = memory(hbm_in_flight_curve=((100.0, 0.1e12), (1000.0, 1e12)), hbm_bytes_per_s_per_sm=0.3e12)
    assert one.limit(10, 10, 100) == StreamLimit(100_000, 4_000_000, share=1000)
    assert one.limit(100, 20, 500) == StreamLimit(1_000_000, 4_000_000, share=10_000)  # L2 at the rate of all ten SMs
    assert one.limit(2, 2, 1000) == StreamLimit(200_000, 800_000, share=2000)
    assert one.limit(2, 2, 5000) == StreamLimit(600_000, 800_000, share=10_000)  # two SMs draw no more
    assert one.limit(10, 10, 10) == StreamLimit(10_000, 4_000_000, share=100)  # below the curve in proportion


def test_weights_are_served_from_l2_once() -> None:
    env, one = memory()
    env.run(until=env.process(one.prefetch("w", 300, FAST)))
    hbm, l2, from_hbm, from_l2 = one.fetch("w", 500, FAST, reused=False)
    env.run(until=hbm & l2)
    assert (from_hbm, from_l2) == (200, 300)
    assert env.now == 300 + 200
    assert one.l2.resident("w") == 0
    assert one.l2.used_bytes == 500
    assert one.split("w", 500) == (500, 0)


def test_a_reused_region_is_found_again() -> None:
    env, one = memory()
    assert one.fetch("kv", 500, FAST, reused=True)[2:] == (500, 0)
    assert one.fetch("kv", 800, FAST, reused=True)[2:] == (300, 500)
    assert one.l2.resident("kv") == 800
    env.run()


def test_bytes_without_a_region_always_come_from_hbm() -> None:
    env, one = memory()
    for _ in range(2):
        assert one.fetch("", 500, FAST, reused=False)[2:] == (500, 0)
    env.run()


def test_hbm_traffic_crosses_the_l2_port() -> None:
    env, one = memory(l2_read_bytes_per_s=1e12)
    one.l2.insert("w", 1000)
    _, l2, _, _ = one.fetch("w", 1000, FAST, reused=False)
    hbm, _, _, _ = one.fetch("", 1000, FAST, reused=False)
    env.run(until=l2 & hbm)
    assert env.now == 2000
    counters = {counter.resource: counter.bytes_until(2000) for counter in one.counters(0)}
    assert counters == {HBM: 1000, L2: 2000}


@pytest.mark.parametrize(
    ("rate", "latency_ps"),
    [(250_000, 12), (900_000, 12), (950_000, 31), (1_000_000, 50)],  # half way from 90 % to all: half way to 50
)
def test_a_dependent_load_queues_near_the_ceiling(rate: int, latency_ps: int) -> None:
    env, one = memory(l2_far_latency_s=12 * PS, l2_loaded_latency_s=50 * PS)
    assert one.latency_ps() == 12  # a block waits for its slowest line
    one.fetch("", 1000, StreamLimit(rate, 1), reused=False)
    env.run(until=1)
    assert one.latency_ps() == latency_ps
    env.run()
    assert one.latency_ps() == 12


def test_hbm_is_shared_by_bytes_in_flight() -> None:
    env, one = memory()
    deep, _, _, _ = one.fetch("", 3000, StreamLimit(10**9, 10**9, share=300), reused=False)
    shallow, _, _, _ = one.fetch("", 3000, StreamLimit(10**9, 10**9, share=100), reused=False)
    env.run(until=deep)
    assert env.now == 4000  # three quarters of a byte a picosecond, not a half
    env.run(until=shallow)
    assert env.now == 6000


def test_a_partial_grid_streams_more_slowly() -> None:
    _, one = memory(hbm_partial_grid_loss=0.1)
    rates = {blocks: one.limit(blocks, blocks, 9000).hbm_bytes_per_us for blocks in (5, 7, 8, 10, 20)}
    # Of seven blocks four share two pairs of SMs, of eight six share three.
    assert rates[7] == round(1_000_000 * (1 - 0.1 * 4 * (4 / 7) * (3 / 7)))
    assert rates[8] == round(1_000_000 * (1 - 0.1 * 4 * 0.75 * 0.25))
    assert rates[5] == rates[10] == rates[20] == 1_000_000


def test_a_written_byte_costs_as_a_copy() -> None:
    env, one = memory(hbm_copy_bytes_per_s=0.8e12)
    read, _, _, _ = one.fetch("", 1000, FAST, reused=False)
    written = one.write(1000, FAST)
    env.run(until=read & written)
    assert env.now == 2500  # 2000 bytes at the rate of a copy


def test_a_hit_waits_for_a_queueing_fraction() -> None:
    _, one = memory()
    one.asked_bytes = 400  # as long as the queue that is free
    assert one.queueing_ps() == 0
    one.asked_bytes = 402  # two picoseconds more, of which a hit waits a quarter
    assert one.queueing_ps() == 0
    one.asked_bytes = 403
    assert one.queueing_ps() == 1
    one.asked_bytes = 1400
    assert (one.queueing_ps(), one.latency_ps()) == (250, 260)


def test_prefetches_are_held_back_by_their_issue() -> None:
    _, one = memory(prefetch_bytes_per_s_per_sm=0.3e12)
    assert one.prefetch_limit(2, 1000).hbm_bytes_per_us == 200_000  # by the curve
    assert one.prefetch_limit(2, 10_000).hbm_bytes_per_us == 600_000
    assert one.prefetch_limit(8, 10_000).hbm_bytes_per_us == 1_000_000


CHUNK = Memory.PREFETCH_CHUNK_BYTES


def test_a_prefetch_does_not_repeat_what_is_there() -> None:
    env, one = memory(l2_effective_bytes=10 * CHUNK)
    one.l2.insert("w", CHUNK)
    done = env.process(one.prefetch("w", 3 * CHUNK, FAST))
    env.run(until=done)
    assert done.value == 2 * CHUNK
    assert env.now == 2 * CHUNK
    assert one.l2.resident("w") == 3 * CHUNK


def test_a_prefetch_taken_over_finishes_its_chunk() -> None:
    env, one = memory(l2_effective_bytes=10 * CHUNK)
    done = env.process(one.prefetch("w", 4 * CHUNK, FAST))
    env.run(until=CHUNK + CHUNK // 2)
    assert one.fetch("w", 4 * CHUNK, FAST, reused=False)[2:] == (3 * CHUNK, CHUNK)
    env.run(until=done)
    assert done.value == 2 * CHUNK
    env.run()


def test_a_prefetch_fetches_what_kernels_left() -> None:
    env, one = memory(l2_effective_bytes=10 * CHUNK)
    hbm, _, _, _ = one.fetch("w", CHUNK, FAST, reused=False)
    env.run(until=hbm)
    done = env.process(one.prefetch("w", 3 * CHUNK, FAST))
    env.run(until=done)
    assert done.value == 2 * CHUNK
    assert one.fetch("w", 2 * CHUNK, FAST, reused=False)[2:] == (0, 2 * CHUNK)
    env.run()


def test_a_prefetch_larger_than_l2_ends() -> None:
    env, one = memory(l2_effective_bytes=2 * CHUNK)
    done = env.process(one.prefetch("w", 5 * CHUNK, FAST))
    env.run(until=done)
    assert done.value == 5 * CHUNK
    assert one.l2.resident("w") == one.l2.used_bytes == 2 * CHUNK


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("fetch", "reuse", "write", "prefetch")),
            st.sampled_from(("", "v", "w")),
            st.integers(0, 30_000),
            st.integers(0, 20_000),
        ),
        max_size=15,
    )
)
def test_hbm_and_l2_serve_what_was_asked(steps: list[tuple[str, str, int, int]]) -> None:
    env, one = memory()
    hbm_bytes, l2_bytes = 0, 0
    prefetched: list[simpy.events.Process] = []
    for action, region, num_bytes, pause_ps in steps:
        if action == "write":
            one.write(num_bytes, FAST)
            hbm_bytes += num_bytes
        elif action == "prefetch":
            prefetched.append(env.process(one.prefetch(region or "v", num_bytes, FAST)))
        else:
            _, _, from_hbm, from_l2 = one.fetch(region, num_bytes, FAST, reused=action == "reuse" and bool(region))
            assert from_hbm + from_l2 == num_bytes
            assert min(from_hbm, from_l2) >= 0
            hbm_bytes += from_hbm
            l2_bytes += from_l2
        env.run(until=env.now + pause_ps + 1)
        check_lines(one.l2)
    env.run()
    hbm_bytes += sum(int(done.value or 0) for done in prefetched)
    served = {counter.resource: counter.bytes_until(int(env.now)) for counter in one.counters(0)}
    slack = 5 * (len(steps) + 1)  # less than one picosecond at full rate a transfer
    assert served.get(HBM, 0) == pytest.approx(hbm_bytes, abs=slack)
    assert served.get(L2, 0) == pytest.approx(hbm_bytes + l2_bytes, abs=slack)
    assert served.get(HBM, 0) >= hbm_bytes - 1e-3
