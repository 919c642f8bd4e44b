"""The admin HTTP listener of a stack as it starts: the lab of this very stack, and metrics."""

import httpx

from quire.client.sampling_params import SamplingParams
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack
from tests.support.stack.commands import quire_here, steps


def test_the_lab_is_where_the_stack_says(stack: LocalStack, client: Client) -> None:
    """Page, steps equal to `quire steps`, why of a request, metrics; and `quire lab` says where."""
    output = client.generate("def f(x):", SamplingParams(max_tokens=4))
    with httpx.Client(base_url=stack.admin_url, timeout=30, verify=False) as http:
        assert "<title>Quire lab</title>" in http.get("/").text
        about = http.get("/lab/about").json()
        assert (about["mode"], about["can_generate"]) == ("live", True)
        told = http.get("/lab/steps", params={"since": 1, "limit": 200}).json()
        known = {step["step"]: step for step in steps(stack.admin_address, "--tables")}
        assert told and all(step["step"] in known for step in told)
        first = told[0]
        assert first["tables"]["changed"] == known[first["step"]]["tables"]
        why = http.get("/lab/why", params={"id": output.request_id}).json()
        assert why["episodes"][-1]["reason"] == "RUNNING"
        assert "quire_gateway" in http.get("/metrics").text
        models = http.get("/lab/api/v1/models").json()
        assert models["data"][0]["id"] == "tiny"
    assert quire_here("lab", "--url", stack.admin_url).stdout == f"lab {stack.admin_url}\n"
