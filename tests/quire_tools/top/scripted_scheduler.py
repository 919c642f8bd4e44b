"""An AdminService that says what a test wants, on a port that it keeps over its restarts."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from protos.inference.v1 import admin_pb2 as pb
from protos.inference.v1 import admin_pb2_grpc
from tests.quire_tools.top.answers import busy_load, busy_requests, busy_workers, step


class ScriptedScheduler(admin_pb2_grpc.AdminServiceServicer):
    """`reports`: its steps. `calls`: names of the methods that were called; `since`: what the steps were asked from."""

    def __init__(self) -> None:
        self.reports = [step(number) for number in range(301, 401)]
        self.calls: list[str] = []
        self.since: list[int] = []
        self._server: grpc.Server | None = None
        self._port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None

    def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        self.calls.append("GetLoad")
        return busy_load()

    def ListRequests(self, request: pb.ListRequestsRequest, context: Any) -> pb.ListRequestsResponse:
        self.calls.append("ListRequests")
        return busy_requests()

    def ListWorkers(self, request: pb.ListWorkersRequest, context: Any) -> pb.ListWorkersResponse:
        self.calls.append("ListWorkers")
        return pb.ListWorkersResponse(workers=busy_workers())

    def WatchScheduler(self, request: pb.WatchSchedulerRequest, context: Any) -> Iterator[pb.StepReport]:
        assert not request.follow and not request.tables
        self.since.append(request.since_step)
        yield from (report for report in self.reports if report.step >= request.since_step)
