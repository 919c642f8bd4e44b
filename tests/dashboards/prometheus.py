"""A real Prometheus for a test: a process on a free port, with our configuration and other targets."""

import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.tree import ROOT

HOW_TO_GET_IT = "there is no `prometheus` here; on Debian and Ubuntu: apt install prometheus"
CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
SCRAPE_S = 0.5
_LISTENS = re.compile(r'msg="Listening on" address=(\S+)')
_START_S = 30.0


def binary() -> str | None:
    """Where it is."""
    return shutil.which("prometheus")


class Prometheus:
    """Its HTTP API. Times are Unix seconds."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._http = httpx.Client(base_url=f"http://{address}/api/v1", timeout=20)

    def range(self, query: str, start_s: float, end_s: float, step_s: float) -> list[dict[str, Any]]:
        """Series: {metric, values: [[time, text], ...]}. AssertionError for a query that it does not take."""
        params = {"query": query, "start": start_s, "end": end_s, "step": step_s}
        return list(self._get("/query_range", params)["result"])

    def at(self, query: str, time_s: float) -> list[dict[str, Any]]:
        """Series: {metric, value: [time, text]}."""
        return list(self._get("/query", {"query": query, "time": time_s})["result"])

    def targets(self) -> list[dict[str, Any]]:
        """Those that it scrapes."""
        return list(self._get("/targets", {})["activeTargets"])

    def rules(self) -> list[dict[str, Any]]:
        """Of all groups."""
        return [rule for group in self._get("/rules", {})["groups"] for rule in group["rules"]]

    def close(self) -> None:
        self._http.close()

    def _get(self, path: str, params: Mapping[str, Any]) -> Any:
        answer = self._http.get(path, params=dict(params))
        assert answer.status_code == 200, f"{params}: {answer.text}"
        return answer.json()["data"]


def configuration(targets: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """deploy/prometheus/prometheus.yml with these targets by job; other jobs are left out."""
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    names = {job["job_name"] for job in config["scrape_configs"]}
    assert targets.keys() <= names
    config["global"] |= {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"}
    config["rule_files"] = [str(CONFIG.parent / name) for name in config["rule_files"]]
    config["scrape_configs"] = [
        {"job_name": name, "static_configs": [{"targets": list(found)}]} for name, found in targets.items()
    ]
    return dict(config)


@contextmanager
def running(folder: Path, targets: Mapping[str, Sequence[str]]) -> Iterator[Prometheus]:
    """One that scrapes `targets` (HOST:PORT by job) every half second and keeps what it has in `folder`."""
    config, log = folder / "prometheus.yml", folder / "prometheus.log"
    config.write_text(yaml.safe_dump(configuration(targets)), encoding="utf-8")
    command = [
        str(binary()),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder)
    try:
        api = Prometheus(_address(process, log))
        _wait_up(api, sum(len(found) for found in targets.values()))
        yield api
        api.close()
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        if found := _LISTENS.search(log.read_text(encoding="utf-8", errors="replace")):
            return found[1]
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"prometheus did not start:\n{log.read_text(encoding='utf-8', errors='replace')[-3000:]}")


def _wait_up(api: Prometheus, count: int) -> None:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        try:
            found = api.targets()
        except (httpx.HTTPError, AssertionError):
            found = []
        if len(found) == count and all(target["health"] == "up" for target in found):
            return
        time.sleep(0.1)
    raise AssertionError(f"not all targets are up: {[(t['scrapeUrl'], t['lastError']) for t in api.targets()]}")
