"""The cell's load at the gateway's HTTP port: /metrics under Quire's and vLLM's names, /v1/loads, /load."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from gateway_svc.cell.definitions import CELL_METRICS, VLLM_ADAPTERS, VLLM_CACHE, VLLM_HISTOGRAMS, VLLM_VALUES
from gateway_svc.metric_definitions import METRICS
from svc_common.observability.metrics import Kind
from tests.support.scraping import Scrape, check_names
from tests.support.services.harness import run_async, scheduler, worker
from tests.support.services.scripted_engine import gateway
from tests.support.services.served_stack import ServedStack

pytestmark = pytest.mark.processes

ENGINE = {"model_name": "simulated", "engine": "0"}


@pytest.fixture
def http(stack: ServedStack) -> Iterator[httpx.Client]:
    """Plain HTTP."""
    with httpx.Client(base_url=stack.http_url, timeout=20) as made:
        yield made


def complete(http: httpx.Client, **fields: object) -> httpx.Response:
    """A completion of few tokens."""
    return http.post("/v1/completions", json={"model": "simulated", "prompt": "hello", "max_tokens": 4, **fields})


def test_metrics_have_all_names_and_equal_values(http: httpx.Client) -> None:
    """Quire's names are those that are defined; vLLM's are exactly those of the page, and say the same."""
    complete(http)
    told = Scrape(http.get("/metrics").text)
    check_names(told.families, (*METRICS, *CELL_METRICS))
    vllm = {family.name for family in told.families if family.name.startswith("vllm:")}
    assert vllm == {*VLLM_VALUES, *VLLM_HISTOGRAMS, VLLM_ADAPTERS, VLLM_CACHE}
    assert told.value("vllm:kv_cache_usage_perc", engine="0") == told.value("quire_cell_kv_usage_ratio")
    assert told.value("quire_cell_age_seconds") <= 5
    generated = "vllm:generation_tokens_total"
    assert told.value(generated, engine="0") >= 4
    for name, value in VLLM_VALUES.items():
        [labels] = told.labels_of(name + ("_total" if value.kind is Kind.COUNTER else ""))
        assert labels == ENGINE
    [cache] = told.labels_of(VLLM_CACHE)
    assert int(cache["block_size"]) > 0 and int(cache["num_gpu_blocks"]) > 0
    [adapters] = told.labels_of(VLLM_ADAPTERS)
    assert adapters == {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    ours = told.total("gen_ai_server_time_to_first_token_seconds_count")
    assert told.total("vllm:time_to_first_token_seconds_count") == ours > 0
    assert told.value("vllm:request_generation_tokens_sum", engine="0") >= 4


def test_loads_in_the_forms_of_sglang_and_vllm(http: httpx.Client) -> None:
    """An idle cell; a rank that there is not is refused by name."""
    complete(http)
    answer = http.get("/v1/loads", params={"include": "core,disagg,queues,memory"}).json()
    [load] = answer["loads"]
    assert answer["dp_rank_count"] == 1 and 0 <= answer["age_s"] <= 5 and answer["timestamp"]
    assert load["dp_rank"] == 0 and load["num_total_reqs"] == load["num_running_reqs"] + load["num_waiting_reqs"]
    assert load["max_total_num_tokens"] > 0 and load["max_running_requests"] > 0
    assert 0 <= load["token_usage"] <= 1 and 0 <= load["cache_hit_rate"] <= 1
    assert http.get("/load").json()["server_load"] >= 0
    refused = http.get("/v1/loads", params={"dp_rank": "1"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "dp_rank"


@run_async
async def test_the_load_is_of_all_requests() -> None:
    """Two requests where one may run: one runs and one waits."""
    async with (
        worker(time_scale=1.0) as (worker_address,),
        scheduler(worker_address, policy_set=("max_num_seqs=1",)) as (address, _),
        gateway(address, metrics_names="vllm") as running,
        httpx.AsyncClient(base_url=f"http://{running.http}", timeout=20) as http,
    ):
        body = {"model": "simulated", "prompt": "hello", "max_tokens": 3000, "ignore_eos": True}
        asked = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(2)]
        load: dict[str, float] = {}
        while (load.get("num_running_reqs"), load.get("num_waiting_reqs")) != (1, 1):
            await asyncio.sleep(0.02)
            answer = await http.get("/v1/loads")
            load = answer.json()["loads"][0] if answer.is_success else {}
        assert load["max_running_requests"] == 1 and load["num_waiting_uncached_tokens"] == 5
        told = Scrape((await http.get("/metrics")).text)
        while told.value("vllm:num_requests_waiting", engine="0") != 1:
            told = Scrape((await http.get("/metrics")).text)
        assert not any(family.name.startswith("quire_cell") for family in told.families)
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


@run_async
async def test_without_a_scheduler_there_is_no_load() -> None:
    """The forms answer 503 with the reason that routers read; metrics lack the cell's values only."""
    async with (
        gateway("127.0.0.1:1") as running,
        httpx.AsyncClient(base_url=f"http://{running.http}", timeout=20) as http,
    ):
        refused = await http.get("/v1/loads")
        assert (
            refused.status_code == 503 and refused.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
        )
        told = Scrape((await http.get("/metrics")).text)
        check_names(told.families, METRICS)
