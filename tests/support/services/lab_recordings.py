"""Recordings of random lives for the tests of the lab, and the page's application over one of them."""

from pathlib import Path

import httpx

from gateway_svc.calls import DefaultTenantOnly
from gateway_svc.lab.app import lab_app
from gateway_svc.lab.guard import LabGuard
from quire_tools.lab.recorded import RecordedLabSource
from scheduler_svc.observe.recording.file_format import Recording
from tests.support.core.recorded_lives import recorded, recorded_of_several

URL = "http://127.0.0.1:8001"


def recording(folder: Path, policy: str = "quire", seed: int = 1, *, several: bool = False) -> Recording:
    """One random life under that policy, in a file. `several`: of several workers, which come and go."""
    path = folder / f"{policy}-{seed}.rec"
    (recorded_of_several if several else recorded)(policy, seed).write(path)
    return Recording(path)


def client(source: RecordedLabSource, *names: str) -> httpx.AsyncClient:
    """Of the lab of a recording, in this process. `names`: hosts by which it may be called."""
    guarded = LabGuard(lab_app(source), DefaultTenantOnly(), names)
    return httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url=URL)
