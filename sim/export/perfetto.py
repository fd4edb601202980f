"""Timelines as a native Perfetto trace, which ui.perfetto.dev and trace_processor open.

One process a timeline and rank (``fused rank 0``). Its threads, from the top:

| Thread | Slices |
| --- | --- |
| ``step`` | the step, in it the layers, in them the sublayers (``nesting.py``) |
| ``critical path`` | on the critical rank: the kernel that the step waits for, and in it the part of the wait or work |
| a stream each | kernels, and in them what each does, in the words of the waits with the phase behind it |

A counter track a resource follows, and an arrow leads from a kernel to each it held up.

Perfetto counts whole nanoseconds while a timeline counts picoseconds. Every time is rounded down by the same
rule, so slices that nest or touch still do; a phase that is empty then is left out. The exact times are annotations of
each kernel slice (``start_ps``, ``end_ps``), so durations add up without rounding.

Packets are in the order of time. They are built from the schema of the ``perfetto`` package. One message object is
kept for each kind of event and only its changing fields are set: a fresh message for each of half a million events
costs five times as much. Slices of one name and track differ by their time alone, so what follows it in the packet is
serialised once. Serialised traces may be concatenated, because ``Trace`` is one repeated field.

Format: https://perfetto.dev/docs/reference/synthetic-track-event
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

from k3sim.sim.export.lanes import assign_lanes
from k3sim.sim.export.nesting import sublayers
from k3sim.sim.export.timeline_data import worded_spans
from k3sim.sim.export.whole_file import write_whole_file
from k3sim.sim.timeline.critical_path import critical_path
from k3sim.sim.timeline.timeline import Counter, KernelRun, Phase, Timeline

PS_PER_NS = 1000
BYTES_PER_US_PER_GBPS = 1000  # one GB/s moves a thousand bytes in a microsecond
_KEY = struct.Struct(">QI")  # time and number of an event, in an order that bytes have too
# Of the wire format: packet is field 1 of Trace, and timestamp, field 8, comes first in it.
_PACKET_TAG, _TIME_TAG = b"\x0a", b"\x40"
SEQUENCE_ID = 1  # one writer; fixed, so that the same timelines give the same bytes
PIDS_PER_PROCESS = 100  # leaves room for thread ids of a process to follow its own

RESOURCE_TITLES = {
    "hbm": "HBM rate (GB/s)",
    "l2": "L2 rate (GB/s)",
    "nvlink egress": "NVLink egress rate (GB/s)",
    "nvlink ingress": "NVLink ingress rate (GB/s)",
}
KERNEL_ANNOTATIONS = ("kernel", "layer", "start_ps", "end_ps", "hbm_bytes", "l2_bytes", "sent_bytes")


def write_perfetto_trace(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Writes ``perfetto_bytes(timelines)`` to ``path``, whole or not at all.

    Raises ``UserError`` when ``path`` cannot be written.
    """
    write_whole_file(path, perfetto_bytes(timelines))


def perfetto_bytes(timelines: Mapping[str, Timeline]) -> bytes:
    """The timelines, by label, as one serialised Perfetto trace. The same timelines give the same bytes."""
    trace = _TraceWriter()
    for label, timeline in timelines.items():
        thread_of_kernel: dict[int, int] = {}
        for rank in timeline.ranks:
            trace.add_process(f"{label} rank {rank}", timeline.machine)
            _add_step(trace, timeline, rank, label)
            if rank == timeline.critical_rank:
                _add_critical_path(trace, timeline)
            for lane, kernels in assign_lanes(timeline.of_rank(rank)).items():
                thread = trace.add_thread(lane)
                thread_of_kernel.update((kernel.index, thread) for kernel in kernels)
            for counter in timeline.counters:
                if counter.rank == rank:
                    trace.add_counter(counter, timeline.step_ps)
        outgoing, incoming = trace.new_flows(timeline.kernels)
        # In start order a cause's packets precede its waiter's, also within the same nanosecond.
        for kernel in sorted(timeline.kernels, key=lambda kernel: (kernel.start_ps, kernel.index)):
            trace.add_kernel(
                kernel,
                _kernel_name(kernel, timeline),
                thread_of_kernel[kernel.index],
                outgoing.get(kernel.index, ()),
                incoming.get(kernel.index, ()),
            )
    return trace.serialised()


def _varint(value: int) -> bytes:
    """A number in the wire format: seven bits a byte, the lowest first."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _behind_time(packet: bytes) -> bytes:
    """What follows the time in a serialised packet of time 0."""
    start = _TIME_TAG + _varint(0)
    assert packet.startswith(start), packet[:4]
    return packet[len(start):]


@cache
def _phase_name(word: str, phase: Phase) -> str:
    """A phase in the words of the waits, with its own behind them where they differ."""
    return word if word.lower() == phase.value else f"{word} ({phase.value})"


def _kernel_name(kernel: KernelRun, timeline: Timeline) -> str:
    return f"{kernel.stage} L{kernel.layer}" if 0 <= kernel.layer < timeline.num_layers else kernel.stage


def _add_step(trace: _TraceWriter, timeline: Timeline, rank: int, label: str) -> None:
    track = trace.add_thread("step")
    inner = sublayers(timeline.of_rank(rank), timeline.num_layers, timeline.step_ps)
    nested: list[Slice] = []
    for layer, group in groupby(inner, key=lambda one: one.layer):
        parts = list(group)
        halves = [Slice(one.name, one.start_ps, one.end_ps) for one in parts]
        if 0 <= layer < timeline.num_layers:
            kind = "+".join(one.name for one in parts)
            nested.append(Slice(f"layer {layer} ({kind})", parts[0].start_ps, parts[-1].end_ps, tuple(halves)))
        else:
            nested += halves
    trace.add_slice(Slice(f"{label} step", 0, timeline.step_ps, tuple(nested)), track)


def _add_critical_path(trace: _TraceWriter, timeline: Timeline) -> None:
    """The segments of the critical path, those of one kernel that follow one another under its name."""
    track = trace.add_thread("critical path")
    runs = {kernel.index: kernel for kernel in timeline.kernels}
    for index, group in groupby(critical_path(timeline), key=lambda one: one.kernel):
        segments = list(group)
        name = _kernel_name(runs[index], timeline) if index in runs else "host"
        parts = tuple(Slice(one.part.word, one.start_ps, one.end_ps) for one in segments)
        trace.add_slice(Slice(name, segments[0].start_ps, segments[-1].end_ps, parts), track)


class Slice(NamedTuple):
    """A slice with those inside it, in order. Times in picoseconds."""

    name: str
    start_ps: int
    end_ps: int
    inner: tuple[Slice, ...] = ()


class _InternedStrings:
    """Strings by number, in order of first use. Numbers start at 1: the format reserves 0."""

    def __init__(self) -> None:
        self.number_of: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        return self.number_of.setdefault(text, len(self.number_of) + 1)

    def write_to(self, entries: Any) -> None:
        """Adds every string to a repeated field of ``InternedData``."""
        for text, number in self.number_of.items():
            entries.add(iid=number, name=text)


class _TraceWriter:
    """Serialised packets so far, and the strings they refer to by number.

    ``_events`` begin with their time in nanoseconds and their number, by which they are sorted in the end: on each
    track they come in order, and what nests there still does. A tuple of each would take 200 MB for all ranks.
    """

    def __init__(self) -> None:
        # Imported here: loading the schema costs 60 ms that only a trace should pay.
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2

        self._schema: Any = perfetto_trace_pb2
        self._descriptors: list[bytes] = []
        self._events: list[bytes] = []
        self._num_tracks = 0
        self._num_flows = 0
        self._pid = 0
        self._tid = 0
        self._process_track = 0
        self._event_names = _InternedStrings()
        self._categories = _InternedStrings()
        self._annotation_names = _InternedStrings()
        event_type = self._schema.TrackEvent
        self._kernel_begin = self._event(event_type.TYPE_SLICE_BEGIN, annotations=KERNEL_ANNOTATIONS)
        self._kernel_end = self._event(event_type.TYPE_SLICE_END)
        self._slice_begin = self._event(event_type.TYPE_SLICE_BEGIN)
        self._slice_end = self._event(event_type.TYPE_SLICE_END)
        self._sample = self._event(event_type.TYPE_COUNTER)
        # Packets of slices without their times, by the bytes that the time takes; times as they are written.
        self._edges: dict[tuple[int, str | None, int], tuple[bytes, bytes]] = {}
        self._stamps: dict[int, bytes] = {}

    def serialised(self) -> bytes:
        """The whole trace: interned strings first, since packets refer to strings that came before them."""
        trace, packet = self._one_packet()
        packet.first_packet_on_sequence = True
        packet.sequence_flags = self._schema.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        self._event_names.write_to(packet.interned_data.event_names)
        self._categories.write_to(packet.interned_data.event_categories)
        self._annotation_names.write_to(packet.interned_data.debug_annotation_names)
        self._events.sort()
        for index, event in enumerate(self._events):
            self._events[index] = event[_KEY.size:]
        return b"".join(chain((trace.SerializeToString(),), self._descriptors, self._events))

    def _add_event(self, time_ns: int, trace: Any) -> None:
        self._events.append(_KEY.pack(time_ns, len(self._events)) + trace.SerializeToString())

    def _add_edge(self, time_ns: int, track: int, name: str | None) -> None:
        """The begin of a slice of this name, the end of one without; what differs by time alone is serialised once."""
        stamp = self._stamps.get(time_ns)
        if stamp is None:
            stamp = self._stamps[time_ns] = _varint(time_ns)
        around = self._edges.get((track, name, len(stamp)))
        if around is None:
            around = self._edges[track, name, len(stamp)] = self._around_time(track, name, len(stamp))
        before, behind = around
        self._events.append(_KEY.pack(time_ns, len(self._events)) + before + stamp + behind)

    def _around_time(self, track: int, name: str | None, stamp_bytes: int) -> tuple[bytes, bytes]:
        """What comes before and behind the time of an edge in its packet."""
        _, packet, event = self._slice_end if name is None else self._slice_begin
        packet.timestamp = 0
        event.track_uuid = track
        if name is not None:
            event.name_iid = self._event_names[name]
        behind = _behind_time(packet.SerializeToString())
        return _PACKET_TAG + _varint(len(_TIME_TAG) + stamp_bytes + len(behind)) + _TIME_TAG, behind

    def add_process(self, name: str, machine: str) -> None:
        """Starts a process; the threads and counters added next belong to it."""
        self._pid += PIDS_PER_PROCESS
        self._tid = self._pid
        trace, descriptor = self._new_track()
        descriptor.process.pid = self._pid
        descriptor.process.process_name = name
        descriptor.process.process_labels.append(machine)
        self._process_track = descriptor.uuid
        self._descriptors.append(trace.SerializeToString())

    def add_thread(self, name: str) -> int:
        """A thread of the current process; returns its track."""
        trace, descriptor = self._new_track()
        descriptor.parent_uuid = self._process_track
        descriptor.thread.pid = self._pid
        descriptor.thread.tid = self._tid  # the first equals the pid, which viewers list first
        descriptor.thread.thread_name = name
        self._tid += 1
        self._descriptors.append(trace.SerializeToString())
        return int(descriptor.uuid)

    def add_counter(self, counter: Counter, end_ps: int) -> None:
        """A resource's rate as a counter track of the current process, zero again after the step."""
        trace, descriptor = self._new_track()
        descriptor.parent_uuid = self._process_track
        descriptor.name = RESOURCE_TITLES.get(counter.resource, f"{counter.resource} rate (GB/s)")
        descriptor.counter.unit_name = "GB/s"
        self._descriptors.append(trace.SerializeToString())

        trace, packet, event = self._sample
        event.track_uuid = descriptor.uuid
        rate_at_ns = {0: 0}
        rate_at_ns.update((time_ps // PS_PER_NS, rate) for time_ps, rate in counter.steps if time_ps < end_ps)
        rate_at_ns[end_ps // PS_PER_NS] = 0
        for time_ns, bytes_per_us in rate_at_ns.items():
            packet.timestamp = time_ns
            event.double_counter_value = bytes_per_us / BYTES_PER_US_PER_GBPS
            self._add_event(time_ns, trace)

    def new_flows(self, kernels: Sequence[KernelRun]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Numbers an arrow for each cause of each kernel; returns the arrows out of and into each kernel.

        A kernel that waits for data it sent itself, as in an all-reduce, has no arrow to itself.
        """
        outgoing: dict[int, list[int]] = {}
        incoming: dict[int, list[int]] = {}
        for kernel in kernels:
            for cause in kernel.causes:
                if cause != kernel.index:
                    self._num_flows += 1
                    outgoing.setdefault(cause, []).append(self._num_flows)
                    incoming.setdefault(kernel.index, []).append(self._num_flows)
        return outgoing, incoming

    def add_kernel(
        self, kernel: KernelRun, name: str, track: int, outgoing: Sequence[int], incoming: Sequence[int]
    ) -> None:
        """A kernel's slice with its phases inside it.

        The arrows into it hang on the slice's end: a kernel may begin, and then wait, before its cause does,
        and an arrow must start before it ends.
        """
        start_ns, end_ns = kernel.start_ps // PS_PER_NS, kernel.end_ps // PS_PER_NS
        is_instant = start_ns == end_ns  # drawn as an arrow head: a slice without a length would be lost
        trace, packet, event = self._kernel_begin
        event.type = self._schema.TrackEvent.TYPE_INSTANT if is_instant else self._schema.TrackEvent.TYPE_SLICE_BEGIN
        packet.timestamp = start_ns
        event.track_uuid = track
        event.name_iid = self._event_names[name]
        event.category_iids[:] = (self._categories[kernel.kind], self._categories[kernel.stage])
        event.flow_ids[:] = outgoing
        event.terminating_flow_ids[:] = incoming if is_instant else ()
        values = (
            kernel.index,
            kernel.layer,
            kernel.start_ps,
            kernel.end_ps,
            kernel.hbm_bytes,
            kernel.l2_bytes,
            kernel.sent_bytes,
        )
        for annotation, value in zip(event.debug_annotations, values, strict=True):
            annotation.int_value = value
        self._add_event(start_ns, trace)
        if is_instant:
            return
        if [span.phase for span in kernel.spans] != [Phase.RUN]:
            for span in kernel.spans:
                for word, start_ps, end_ps in worded_spans(span):
                    begin, end = start_ps // PS_PER_NS, end_ps // PS_PER_NS
                    if begin < end:
                        self._add_edge(begin, track, _phase_name(word, span.phase))
                        self._add_edge(end, track, None)

        trace, packet, event = self._kernel_end
        packet.timestamp = end_ns
        event.track_uuid = track
        event.terminating_flow_ids[:] = incoming
        self._add_event(end_ns, trace)

    def add_slice(self, one: Slice, track: int) -> None:
        """A slice and those inside it; nothing for one that begins and ends in the same nanosecond."""
        start_ns, end_ns = one.start_ps // PS_PER_NS, one.end_ps // PS_PER_NS
        if start_ns == end_ns:
            return
        self._add_edge(start_ns, track, one.name)
        for inner in one.inner:
            self.add_slice(inner, track)
        self._add_edge(end_ns, track, None)

    def _new_track(self) -> tuple[Any, Any]:
        """A trace of one packet that describes a track, and that description."""
        trace, packet = self._one_packet()
        self._num_tracks += 1
        packet.track_descriptor.uuid = self._num_tracks
        return trace, packet.track_descriptor

    def _event(self, event_type: int, annotations: Sequence[str] = ()) -> tuple[Any, Any, Any]:
        """A trace of one event to be used again and again: trace, its packet, its event."""
        trace, packet = self._one_packet()
        packet.sequence_flags = self._schema.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        packet.track_event.type = event_type
        for name in annotations:
            packet.track_event.debug_annotations.add(name_iid=self._annotation_names[name])
        return trace, packet, packet.track_event

    def _one_packet(self) -> tuple[Any, Any]:
        trace = self._schema.Trace()
        packet = trace.packet.add()
        packet.trusted_packet_sequence_id = SEQUENCE_ID
        return trace, packet
