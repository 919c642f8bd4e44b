"""A double of an endpoint picker (Gateway API Inference Extension), as a process in Envoy's environment of its own.

`python picker.py INTERVAL_S`: reads endpoints, IP:PORT ..., from each line of its input, as a pool's ready pods change; prints the
port that it serves external processing on, then what it saw of each endpoint at each reading, a JSON object per line. Envoy sends
each request to the endpoint in the header that this sets: the one with the fewest requests by the last reading and since.
"""

import http.client
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from envoy.type.v3 import http_status_pb2

DESTINATION = "x-gateway-destination-endpoint"
_LOADS = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_TIMEOUT_S = 2


class Pool:
    """The endpoints that are ready, and their loads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: list[str] = []
        self._loads: dict[str, float] = {}
        self._since: Counter[str] = Counter()

    def want(self, endpoints: Iterable[str]) -> None:
        """Pods that are not on their way out."""
        with self._lock:
            self._wanted = list(endpoints)
            self._loads = {one: load for one, load in self._loads.items() if one in self._wanted}

    def pick(self) -> str | None:
        """The one with the fewest requests; None if none is ready."""
        with self._lock:
            if not self._loads:
                return None
            best = min(self._loads, key=lambda one: (self._loads[one] + self._since[one], one))
            self._since[best] += 1
            return best

    def read(self) -> dict[str, float | None]:
        """Read all, and take out those that are not ready."""
        with self._lock:
            wanted = list(self._wanted)
        found = {one: _load_of(one) for one in wanted}
        with self._lock:
            self._since.clear()
            self._loads = {one: load for one, load in found.items() if load is not None and one in self._wanted}
        return found


def _load_of(endpoint: str) -> float | None:
    try:
        if _get(endpoint, "/health")[0] != 200:
            return None
        lines = _get(endpoint, "/metrics")[1].splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] in _LOADS
        )
    except (OSError, http.client.HTTPException):
        return None


def _get(endpoint: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(endpoint, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


class Picker(external_processor_pb2_grpc.ExternalProcessorServicer):  # type: ignore[misc]
    """Answers Envoy's question for each request."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def Process(self, requests: Iterable[Any], context: Any) -> Iterator[Any]:
        """One stream for each HTTP request."""
        for request in requests:
            if request.HasField("request_headers"):
                yield self._destination()

    def _destination(self) -> Any:
        chosen = self._pool.pick()
        if chosen is None:
            status = http_status_pb2.HttpStatus(code=503)
            return pb.ProcessingResponse(immediate_response=pb.ImmediateResponse(status=status, body=b"no endpoint"))
        header = base_pb2.HeaderValueOption(header=base_pb2.HeaderValue(key=DESTINATION, raw_value=chosen.encode()))
        change = pb.HeaderMutation(set_headers=[header])
        common = pb.CommonResponse(header_mutation=change, clear_route_cache=True)
        return pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))


def main() -> None:
    """The process; it ends with its input."""
    interval_s, pool = float(sys.argv[1]), Pool()
    server = grpc.server(ThreadPoolExecutor(64))
    external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(Picker(pool), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()

    def read() -> None:
        while True:
            began = time.time()
            print(json.dumps({"began": began, "loads": pool.read()}), flush=True)
            time.sleep(interval_s)

    threading.Thread(target=read, daemon=True).start()
    for line in sys.stdin:
        pool.want(line.split())


if __name__ == "__main__":
    main()
