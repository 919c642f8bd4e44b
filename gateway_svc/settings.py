"""What an operator can set about a gateway. Nothing here reads the environment: the command line passes values in."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]


class GatewaySettings(BaseModel):
    """Settings of one gateway process; port 0 = any free port."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scheduler: str = "127.0.0.1:50060"
    """Address of the scheduler's EngineService, HOST:PORT."""
    host: str = "127.0.0.1"
    grpc_port: Port = 50051
    http_port: Port = 8000
    admin_port: Port = 50052

    max_request_s: Seconds = 600.0
    """Deadline of requests whose client gave none, and the longest deadline that counts."""
    max_waiting_requests: Annotated[int, Field(ge=1)] = 1024
    """Requests that may wait here while the scheduler is away or no model is loaded."""
    scheduler_away_s: Seconds = 30.0
    """How long requests outlive a lost scheduler before they end with UNAVAILABLE."""
    warm_up_s: Seconds = 60.0
    """How long a request waits for the first model while a worker is loading it."""
    unreachable_s: Seconds = 5.0
    """How long a request waits for the first model while nobody is loading one: no scheduler, no worker."""
    max_buffered_tokens: Annotated[int, Field(ge=1)] = 4_000_000
    """Tokens kept for readers that are slower than generation; beyond it the slowest stream ends."""
    drain_s: Annotated[float, Field(ge=0)] = 2.0
    """How long running requests may go on after a stop was asked for."""
    reflection: bool = True
    """Offer gRPC server reflection."""
