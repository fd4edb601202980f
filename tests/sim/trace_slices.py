"""A Perfetto trace read back the way its viewer reads it: by time, one stack of open slices a track."""

from __future__ import annotations

from dataclasses import dataclass, field

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TracePacket, TrackEvent


@dataclass
class Slice:
    process: str
    thread: str
    depth: int
    name: str
    categories: list[str]
    annotations: dict[str, int]
    start_ns: int
    end_ns: int = -1
    flows_out: list[int] = field(default_factory=list)
    flows_in: list[int] = field(default_factory=list)


ABOVE_KERNELS = ("step", "critical path")


def kernel_slices(trace_bytes: bytes) -> list[Slice]:
    """The slices of kernels and of their phases, in order of their begin."""
    return [one for one in read_slices(trace_bytes) if one.thread not in ABOVE_KERNELS]


def read_slices(trace_bytes: bytes) -> list[Slice]:
    """Every slice, in order of its begin; fails where a viewer would drop or misplace one, or sort packets anew."""
    trace = Trace.FromString(trace_bytes)
    assert {packet.trusted_packet_sequence_id for packet in trace.packet} == {1}
    assert trace.packet[0].sequence_flags == TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    interned = trace.packet[0].interned_data
    event_names = {entry.iid: entry.name for entry in interned.event_names}
    categories = {entry.iid: entry.name for entry in interned.event_categories}
    annotation_names = {entry.iid: entry.name for entry in interned.debug_annotation_names}
    processes: dict[int, str] = {}
    threads: dict[int, tuple[str, str]] = {}
    open_slices: dict[int, list[Slice]] = {}
    slices: list[Slice] = []
    started_flows: set[int] = set()
    ended_flows: set[int] = set()
    for packet in trace.packet:
        track = packet.track_descriptor
        if track.HasField("process"):
            processes[track.uuid] = track.process.process_name
        elif track.HasField("thread"):
            threads[track.uuid] = (processes[track.parent_uuid], track.thread.thread_name)
            open_slices[track.uuid] = []
    events = [packet for packet in trace.packet if packet.HasField("track_event")]
    times = [packet.timestamp for packet in events]
    assert times == sorted(times), "packets are not in the order of time"
    for packet in events:
        event = packet.track_event
        if event.type in (TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_INSTANT):
            process, thread = threads[event.track_uuid]
            opened = Slice(
                process,
                thread,
                len(open_slices[event.track_uuid]),
                event_names[event.name_iid],
                [categories[number] for number in event.category_iids],
                {annotation_names[note.name_iid]: note.int_value for note in event.debug_annotations},
                packet.timestamp,
                flows_out=list(event.flow_ids),
            )
            open_slices[event.track_uuid].append(opened)
            slices.append(opened)
            assert started_flows.isdisjoint(event.flow_ids)
            started_flows.update(event.flow_ids)
        if event.type in (TrackEvent.TYPE_SLICE_END, TrackEvent.TYPE_INSTANT):
            closed = open_slices[event.track_uuid].pop()
            closed.end_ns = packet.timestamp
            is_instant = event.type == TrackEvent.TYPE_INSTANT
            assert (closed.end_ns == closed.start_ns) == is_instant, "a slice without a length"
            closed.flows_in = list(event.terminating_flow_ids)
            assert started_flows.issuperset(closed.flows_in), "an arrow ends before it starts"
            assert ended_flows.isdisjoint(closed.flows_in)
            ended_flows.update(closed.flows_in)
    assert not any(open_slices.values()), "a slice never ends"
    assert started_flows == ended_flows
    return slices
