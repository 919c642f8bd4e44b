"""DumpRecording: the record buffer's contents, in chunks of a recording file."""

import asyncio
from collections.abc import AsyncIterator, Iterator

from protos.inference.v1 import admin_pb2
from scheduler_svc.observe.recording.record_buffer import RecordBuffer, RecordBufferReader, SentSegment
from svc_common.errors import FailedPrecondition

_PART_BYTES = 2**20


async def dump(
    record_buffer: RecordBuffer, request: admin_pb2.DumpRecordingRequest
) -> AsyncIterator[admin_pb2.DumpRecordingResponse]:
    """Kept segments, oldest first; with `follow`, new ones as they are completed. FailedPrecondition if recording is off."""
    if not record_buffer.is_on:
        raise FailedPrecondition(
            "this scheduler records nothing; start it with --record-memory above 0", reason="NOT_RECORDING"
        )
    yield admin_pb2.DumpRecordingResponse(beginning=record_buffer.beginning(), segment=request.since_segment)
    reader = RecordBufferReader(record_buffer, request.since_segment, leaves_open=request.follow)
    while True:
        async for packed in _in_thread(reader.new()):
            for part in _parts(packed):
                yield part
        if not request.follow:
            return
        await reader.wait()


async def _in_thread(packing: Iterator[SentSegment]) -> AsyncIterator[SentSegment]:
    """Pack segments in a thread, so that steps continue meanwhile."""
    while (packed := await asyncio.to_thread(next, packing, None)) is not None:
        yield packed


def _parts(packed: SentSegment) -> Iterator[admin_pb2.DumpRecordingResponse]:
    frame = packed.frame
    for start in range(0, len(frame), _PART_BYTES):
        part = admin_pb2.DumpRecordingResponse(
            data=frame[start : start + _PART_BYTES], segment=packed.number, num_left=packed.num_left
        )
        if start + _PART_BYTES >= len(frame):
            part.num_steps = packed.num_steps
        yield part
