"""Access to the lab: what another site's page may not do, what a key permits, and which headers browsers get."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from starlette.routing import Mount, Route

from gateway_svc.http.server import HttpServer
from gateway_svc.lab.guard import CONTENT_SECURITY_POLICY, LabGuard
from protos.inference.v1 import inference_pb2 as pb
from quire_tools.lab.recorded import RecordedLabSource
from tests.support.services.access_keys import bearer, tenants_file
from tests.support.services.lab_recordings import URL, client, recording
from tests.support.services.scripted_engine import asynchronous, finished, pair, tokens

pytestmark = pytest.mark.processes

EVIL = "https://evil.example"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> RecordedLabSource:
    """A recording's."""
    return RecordedLabSource(recording(tmp_path_factory.mktemp("guard")))


@asynchronous
async def test_browsers_are_told_what_the_page_may_do(source: RecordedLabSource) -> None:
    """Every answer, refusals too: nothing but the page's own files, in no frame, and types are not guessed."""
    assert "unsafe" not in CONTENT_SECURITY_POLICY and "default-src 'none'" in CONTENT_SECURITY_POLICY
    async with client(source) as http:
        for path in ("/", "/page/js/main.js", "/lab/about", "/lab/steps?since=x", "/nothing", "/page/none.js"):
            answer = await http.get(path)
            assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY, path
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["x-frame-options"] == "DENY"
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        refused = await http.get("/lab/about", headers={"host": "evil.example"})
        assert refused.headers["content-security-policy"] == CONTENT_SECURITY_POLICY


@asynchronous
@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:8001", True),
        ("localhost:8001", True),
        ("LOCALHOST", True),
        ("[::1]:8001", True),
        ("10.0.0.7", True),
        ("lab.example", True),
        ("evil.example", False),
        ("evil.example:8001", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("[evil]", False),
        ("", False),
    ],
)
async def test_names_that_another_site_may_have_are_refused(
    source: RecordedLabSource, host: str, allowed: bool
) -> None:
    """DNS rebinding: a site's name that resolves to this machine. Addresses, localhost and the operator's names are accepted."""
    async with client(source, "lab.example") as http:
        for path in ("/", "/lab/about", "/page/js/main.js"):
            answer = await http.get(path, headers={"host": host})
            assert (answer.status_code == 200) == allowed, (host, path, answer.status_code)
            if not allowed:
                assert answer.json()["error"]["code"] == "unknown_host"


@asynchronous
@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),
        ({"origin": URL}, True),
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"origin": EVIL}, False),
        ({"origin": "null"}, False),
        ({"origin": f"{URL}0"}, False),
        ({"origin": "http://127.0.0.1:9001"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-site"}, False),
        ({"origin": URL, "sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, False),
    ],
)
async def test_other_sites_pages_are_refused(source: RecordedLabSource, headers: dict[str, str], allowed: bool) -> None:
    """By Origin and Sec-Fetch-Site, whatever the path; a link to the page itself is fine."""
    async with client(source) as http:
        answer = await http.get("/lab/about", headers=headers)
        assert (answer.status_code == 200) == allowed, answer.text
        if not allowed:
            assert answer.json()["error"]["code"] == "cross_site"
        link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert (await http.get("/", headers=link)).status_code == 200


@asynchronous
async def test_what_changes_something_says_where_it_comes_from(source: RecordedLabSource) -> None:
    """Without an Origin of its own nothing but reading; a recording has no playground."""
    async with client(source) as http:
        for headers in ({}, {"origin": EVIL}, {"sec-fetch-site": "same-origin"}):
            answer = await http.post("/lab/api/v1/completions", json={"prompt": "x"}, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_site"), headers
        answer = await http.post("/lab/api/v1/completions", json={"prompt": "x"}, headers={"origin": URL})
        assert answer.status_code == 404


@asynchronous
async def test_only_the_pages_own_files_are_served(source: RecordedLabSource) -> None:
    """Nothing beside the folder, whatever the path says."""
    async with client(source) as http:
        for path in ("/page/../guard.py", "/page/%2e%2e/guard.py", "/page//etc/passwd", "/page/", "/page", "/guard.py"):
            assert (await http.get(path)).status_code in (404, 307), path


# --- keys ----------------------------------------------------------------------------------------------------------------


@asynchronous
async def test_no_route_of_the_lab_is_open_by_accident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys: what the scheduler holds wants an operator's, as over gRPC; the page itself and metrics want none."""
    served: list[Any] = []
    make = HttpServer.__init__

    def spy(self: HttpServer, app: Any, *more: Any) -> None:
        served.append(app)
        make(self, app, *more)

    monkeypatch.setattr(HttpServer, "__init__", spy)
    async with pair(tenants=tenants_file(tmp_path)) as (_, _, running):
        [guard] = [app for app in served if isinstance(app, LabGuard)]
        routes = [route.path for route in guard._app.routes if isinstance(route, Route)]  # type: ignore[attr-defined]
        mounts = [route.path for route in guard._app.routes if isinstance(route, Mount)]  # type: ignore[attr-defined]
        assert sorted(mounts) == ["/lab/api", "/page"] and len(routes) > 5
        async with httpx.AsyncClient(base_url=f"http://{running.admin_http}", timeout=10, verify=False) as http:
            for path in {*routes, "/lab", "/lab/", "/lab/nothing", "/anything", "/page", "/metrics/x"}:
                is_open = path in ("/", "/metrics")
                answer = await http.get(path)
                assert (answer.status_code == 401) != is_open, path
                if not is_open:
                    answer = await http.get(path, headers=bearer("acme"))
                    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_key_needed"), path
            answer = await http.get("/lab/steps", headers=bearer("operator"))
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "scheduler_away")
            assert (await http.get("/lab/about", headers=bearer("operator"))).json()["mode"] == "live"
            assert "quire_gateway" in (await http.get("/metrics", headers={"host": "gateway"})).text


@asynchronous
async def test_the_playground_goes_through_the_users_door(tmp_path: Path) -> None:
    """Any key that may generate, on its own terms; from the lab's own page alone."""
    async with pair(tenants=tenants_file(tmp_path)) as (_, attachment, running):
        own = {"origin": f"http://{running.admin_http}"}
        body = {"model": "tiny", "prompt": "x", "max_tokens": 2, "stream": True}
        async with (
            grpc.aio.insecure_channel(running.grpc),
            httpx.AsyncClient(base_url=f"http://{running.admin_http}/lab/api", timeout=10, verify=False) as http,
        ):
            await running.stub.Tokenize(pb.TokenizeRequest(text="x"), metadata=tuple(bearer("acme").items()))
            assert (await http.post("/v1/completions", json=body, headers=own)).status_code == 401
            assert (await http.post("/v1/completions", json=body, headers=bearer("acme"))).status_code == 403
            assert (await http.get("/v1/models", headers=bearer("acme"))).json()["data"][0]["id"] == "tiny"
            asked = asyncio.ensure_future(http.post("/v1/completions", json=body, headers=own | bearer("acme")))
            submit = await attachment.next_submit()
            attachment.send(tokens(submit.handle, 0, [70, 71]), finished(submit.handle, 2))
            answer = await asked
            assert answer.status_code == 200 and answer.headers["x-request-id"] == submit.request_id
            assert answer.text.rstrip().endswith("data: [DONE]") and submit.tenant == "acme"
