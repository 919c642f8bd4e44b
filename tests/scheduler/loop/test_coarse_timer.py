"""The step loop's timer: the waiting thread is woken in time, and a later time costs no new timer; on both event loops."""

import asyncio
import time
from collections.abc import Callable

import pytest
import uvloop

from scheduler_svc.loop.coarse_timer import Alarm

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
NewLoop = Callable[[], asyncio.AbstractEventLoop]


@LOOPS
def test_it_rings_by_the_earliest_time_asked_for(new_loop: NewLoop) -> None:
    """A nearer time replaces a farther one; a farther one after it is served by the ring that comes early."""

    async def rung_after() -> float:
        rung = asyncio.Event()
        alarm, began = Alarm(rung.set), time.monotonic()
        for seconds in (30.0, 0.02, 60.0, None):
            alarm.within(seconds)
        async with asyncio.timeout(10):
            await rung.wait()
        return time.monotonic() - began

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert 0.01 < runner.run(rung_after()) < 5


@LOOPS
def test_it_rings_again_only_when_asked_again(new_loop: NewLoop) -> None:
    """After a ring nothing is armed; the next wait arms it anew. A moment that is there may be asked for twice before it rings."""

    async def count() -> list[int]:
        rings: list[int] = []
        alarm = Alarm(lambda: rings.append(len(rings)))
        alarm.within(0.0)
        alarm.within(0.0)
        await asyncio.sleep(0.05)
        assert rings == [0]
        alarm.within(0.0)
        await asyncio.sleep(0.05)
        return rings

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(count()) == [0, 1]
