"""Recordings as files: what is written is read, and whatever happened to a file on the way is said clearly."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from scheduler_svc.observe.recording import codec, file_format, snapshot
from scheduler_svc.observe.recording.file_format import FORMAT, MAGIC, Recording, RecordingError, RecordingWriter
from scheduler_svc.observe.recording.replay import replay
from scheduler_svc.observe.recording.segment_buffer import PackedSegment, RecordingSegment, SegmentBuffer
from scheduler_svc.observe.recording.snapshot import CoreSnapshot, SnapshotError
from svc_common.version import VERSION
from tests.support.core.recorded_lives import recorded

LIFE = recorded("vllm-v1", 0)


@pytest.fixture(name="path")
def _path(tmp_path: Path) -> Path:
    path = tmp_path / "life.rec"
    LIFE.write(path)
    return path


def test_what_is_written_is_read(path: Path) -> None:
    """Segments, steps and header come back."""
    recording = Recording(path)
    held = list(LIFE.buffer.segments())
    assert recording.num_segments == len(held) > 2
    assert recording.num_steps == sum(segment.num_steps for segment in held)
    assert recording.about == {"verbatim": False}
    assert [segment.num_steps for segment in recording.segments()] == [segment.num_steps for segment in held]
    assert [segment.number for segment in recording.segments(2)] == [segment.number for segment in held[2:]]
    assert replay(recording.segments(1)).identical


def test_a_segment_that_is_not_there(path: Path) -> None:
    """Says which there are."""
    with pytest.raises(RecordingError, match=r"has no segment 99; the first is 0, the last \d+"):
        next(Recording(path).segments(99))


def _reason(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(RecordingError) as error:
        Recording(path)
    assert str(path) in error.value.message
    return error.value.reason


def test_files_that_are_no_recordings(path: Path) -> None:
    """Typed errors that name the file."""
    assert _reason(path, b"") == "NOT_A_RECORDING"
    assert _reason(path, b"{}") == "NOT_A_RECORDING"
    assert _reason(path, b"PK\x03\x04" * 100) == "NOT_A_RECORDING"
    with pytest.raises(RecordingError, match="cannot be read: No such file"):
        Recording(path.with_name("nothing"))
    with pytest.raises(RecordingError, match="cannot be read"):
        Recording(path.parent)


def test_other_versions(path: Path) -> None:
    """Another format, or another release: says which made it and which reads it."""
    data = path.read_bytes()
    number = data.replace(MAGIC + FORMAT.to_bytes(4, "little"), MAGIC + (FORMAT + 1).to_bytes(4, "little"), 1)
    assert _reason(path, number) == "OTHER_VERSION"
    release = data.replace(VERSION.encode(), b"9" * len(VERSION), 1)
    assert _reason(path, release) == "OTHER_VERSION"
    path.write_bytes(release)
    with pytest.raises(RecordingError, match=f"recorded by quire {'9' * len(VERSION)} .* this is quire {VERSION}"):
        Recording(path)


def test_files_cut_short(path: Path) -> None:
    """Wherever the cut is."""
    data = path.read_bytes()
    places = [3, 9, 17, 25, len(data) // 3, len(data) // 2, len(data) - 1]
    assert {_reason(path, data[:place]) for place in places} == {"CUT_SHORT"}


@pytest.mark.parametrize("change", [lambda byte: byte ^ 1, lambda byte: 255 - byte])
def test_altered_files(path: Path, change: Callable[[int], int]) -> None:
    """Whichever byte behind the preamble it is; a length that grew looks like a cut."""
    data = path.read_bytes()
    start = 16 + len(VERSION)
    for place in range(start, len(data), max(1, len(data) // 150)):
        altered = bytearray(data)
        altered[place] = change(data[place])
        assert _reason(path, bytes(altered)) in ("ALTERED", "CUT_SHORT")


def test_parts_put_elsewhere(path: Path) -> None:
    """R201: whole frames left out, repeated, exchanged or appended are noticed."""
    head, *frames = _frames()
    end = path.read_bytes()[len(head) + sum(map(len, frames)) :]
    assert _reason(path, head + b"".join([*frames[1:], end])) == "ALTERED"
    assert _reason(path, head + b"".join([frames[1], frames[0], *frames[2:], end])) == "ALTERED"
    assert _reason(path, head + b"".join([frames[0], *frames, end])) == "ALTERED"
    assert _reason(path, head + b"".join([*frames, end, b"\0"])) == "ALTERED"
    assert _reason(path, head + b"".join([*frames, end, end])) == "ALTERED"


def _frames() -> list[bytes]:
    frames = [file_format.segment_frame(segment, LIFE.alias) for segment in LIFE.buffer.segments()]
    return [file_format.beginning({"verbatim": False}), *frames]


def test_contents_that_make_no_sense(tmp_path: Path) -> None:
    """Digests that are right say nothing of what they are digests of."""
    path = tmp_path / "odd.rec"
    with path.open("wb") as file:
        writer = RecordingWriter(file)
        writer.write(file_format.beginning({}))
        writer.write(file_format._frame(file_format.SEGMENT, b"nothing of the kind"))
        writer.finish(num_segments=1, num_steps=1)
    with pytest.raises(RecordingError, match="segment 0 makes no sense"):
        next(Recording(path).segments())


# --- what a stranger's snapshot may do ---------------------------------------------------------------------------------


def _document(root: list[object], *classes: list[object]) -> bytes:
    return json.dumps({"classes": classes, "objects": [root]}).encode()


@pytest.mark.parametrize(
    "document",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"[]",
        b'{"classes": [], "objects": []}',
        b'{"classes": [], "objects": [["l", "list", [1]]]}',
        _document(["o", 0], ["os", "system", []]),
        _document(["o", 0], ["subprocess", "Popen", []]),
        _document(["o", 0], ["scheduler_svc.core.composition.presets", "replace", []]),
        _document(["o", 0], ["scheduler_svc.observe.recording.snapshot", "CoreSnapshot", []]),
        _document(["o", 0, 1], ["scheduler_svc.core.scheduler", "Scheduler", ["__class__"]]),
        _document(["o", 0], ["scheduler_svc.core.request", "Place", []]),
        _document(
            ["o", 0, ["g", "scheduler_svc.core.request", "enum"]],
            ["scheduler_svc.core.parts.queues", "ArrivalQueue", ["x"]],
        ),
        _document(["l", "list", [["e", "scheduler_svc.core.request", "Place", "x"]]]),
        _document(["l", "list", [["n", "scheduler_svc.core.request", "Group", 1]]]),
        _document(["l", "list", [["x", 1]]]),
        _document(["l", "list", [[7]]]),
        _document(["a", {"type": "O", "shape": [1], "values": [1]}]),
        _document(["r", 99]),
        _document(["o", 0], ["block_manager.nothing", "here", []]),
    ],
)
def test_snapshots_run_nothing(document: bytes) -> None:
    """Only objects of a core can be made: nothing else is called or imported, whatever the snapshot contains."""
    taken = next(LIFE.buffer.segments()).snapshot
    with pytest.raises(SnapshotError):
        snapshot.restore(replace(taken, objects=document))


def test_snapshots_of_another_shape() -> None:
    """Tokens or requests that are not there."""
    taken = LIFE.segments()[1].snapshot
    with pytest.raises(SnapshotError):
        snapshot.restore(CoreSnapshot(taken.objects, taken.tokens, []))


# --- the buffer ----------------------------------------------------------------------------------------------------------


def test_the_ring_is_bounded() -> None:
    """The oldest segments go; those that are left replay."""
    life = recorded("vllm-v0", 1, num_events=400, max_bytes=120_000)
    numbers = [segment.number for segment in life.buffer.segments()]
    assert numbers[0] > 0
    assert numbers == list(range(numbers[0], life.buffer.num_segments))
    assert life.buffer.num_bytes == sum(segment.num_bytes for segment in life.buffer.segments())
    assert life.buffer.num_bytes <= 120_000
    assert replay(life.segments()).identical


def test_a_segment_ends_by_bytes_too() -> None:
    """Where steps are large, before it has its steps, but no large core is written down at each step; one is always held."""
    segments = LIFE.segments()
    events = [event for segment in segments for event in segment.events]
    for snapshot_bytes, numbers in ((500, [0, 1]), (5_000, [1])):
        buffer = SegmentBuffer(1_000, 8_000)
        assert buffer.is_full
        taken = CoreSnapshot(b"x" * snapshot_bytes, segments[0].snapshot.tokens, [])
        buffer.begin(1, {}, taken, goes_on=False)
        coming = cycle(events)
        while not buffer.is_full:
            buffer.add(next(coming))
        most = max(2_000, 2 * taken.num_bytes)
        assert most <= buffer.num_bytes < most + max(event.num_bytes for event in events)
        buffer.begin(2, {}, taken, goes_on=True)
        assert [segment.number for segment in buffer.segments()] == numbers


def test_complete_segments_are_held_packed() -> None:
    """All but the newest, in less than half of what their objects take, and nothing is lost of them; the oldest go."""
    sources = list(LIFE.buffer.segments())
    objects_bytes = sum(segment.num_bytes for segment in sources)
    buffer = SegmentBuffer(1_000, 2**20, pack=_pack_at_once)
    for segment in sources:
        buffer.begin(segment.first_step, segment.about, segment.snapshot, goes_on=segment.goes_on)
        for event in segment.events:
            buffer.add(event, num_steps=len(getattr(event, "decisions", ())))
    *packed, newest = buffer.segments()
    assert isinstance(newest, RecordingSegment) and all(isinstance(segment, PackedSegment) for segment in packed)
    assert buffer.num_bytes < objects_bytes / 2
    for segment, source in zip(packed, sources, strict=False):
        found = codec.decode(file_format.contents(segment.frame))
        assert (found.first_step, found.num_steps) == (source.first_step, segment.num_steps)
        assert len(found.events) == len(source.events)
    small = SegmentBuffer(1_000, 1, pack=_pack_at_once)
    for segment in sources:
        small.begin(segment.first_step, segment.about, segment.snapshot, goes_on=True)
        small.add(segment.events[0])
    assert [segment.number for segment in small.segments()] == [2], "one is always held"


def _pack_at_once(segment: RecordingSegment) -> "Future[PackedSegment]":
    done: Future[PackedSegment] = Future()
    frame = file_format.segment_frame(segment, LIFE.alias)
    done.set_result(PackedSegment(segment.number, segment.first_step, segment.num_steps, frame))
    return done


def test_segments_of_a_decoded_recording_are_encoded_alike() -> None:
    """What is read and written again is the same, so that recordings can be cut and joined."""
    for segment in LIFE.segments():
        assert codec.encode(codec.decode(codec.encode(segment, None)), None) == codec.encode(segment, None)
