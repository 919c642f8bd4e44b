"""The step loop's timer: the waiting thread is woken in time, and a later time costs no new timer."""

import asyncio
import time

from scheduler_svc.loop.coarse_timer import Alarm


def test_it_rings_by_the_earliest_time_asked_for() -> None:
    """A nearer time replaces a farther one; a farther one after it is served by the ring that comes early."""

    async def rung_after() -> float:
        rung = asyncio.Event()
        alarm, began = Alarm(rung.set), time.monotonic()
        for seconds in (30.0, 0.02, 60.0, None):
            alarm.within(seconds)
        async with asyncio.timeout(10):
            await rung.wait()
        return time.monotonic() - began

    assert 0.01 < asyncio.run(rung_after()) < 5


def test_it_rings_again_only_when_asked_again() -> None:
    """After a ring nothing is armed; the next wait arms it anew."""

    async def count() -> list[int]:
        rings: list[int] = []
        alarm = Alarm(lambda: rings.append(len(rings)))
        alarm.within(0.0)
        await asyncio.sleep(0.05)
        assert rings == [0]
        alarm.within(0.0)
        await asyncio.sleep(0.05)
        return rings

    assert asyncio.run(count()) == [0, 1]
