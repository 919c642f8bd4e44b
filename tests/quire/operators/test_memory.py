"""`quire blocks --memory` against a running scheduler, and its report as JSON values and as text."""

import io
import json

import pytest
from rich.console import Console

from protos.inference.v1 import admin_pb2 as pb
from quire.client.sampling_params import SamplingParams
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack
from quire.operators.admin import AdminClient
from quire.operators.memory import memory_json, memory_of, memory_tables
from tests.support.stack.commands import quire_here

RESPONSE = pb.GetBlocksResponse(
    block_size=16,
    gpu=pb.BlockPool(total=100, free=94),
    memory=pb.MemoryReport(
        paged=pb.PagedMemory(
            num_sequences=2, num_tokens=120, logical_blocks=8, physical_blocks=6, waste_tokens=12, max_waste_tokens=9
        ),
        contiguous=pb.ContiguousMemory(used=120, reserved=40, internal=96, external=64, num_regions=2, num_left_out=1),
    ),
)


def test_as_json() -> None:
    """R209: counts as they are, shares as fractions."""
    assert memory_json(RESPONSE) == {
        "block_size": 16,
        "num_blocks": 100,
        "num_sequences": 2,
        "num_tokens": 120,
        "logical_blocks": 8,
        "physical_blocks": 6,
        "saved": 0.25,
        "waste_tokens": 12,
        "max_waste_tokens": 9,
        "waste": 0.125,
        "contiguous": {
            "used": 0.375,
            "reserved": 0.125,
            "internal": 0.3,
            "external": 0.2,
            "num_slots": 320,
            "num_regions": 2,
            "num_left_out": 1,
        },
    }


def test_as_tables() -> None:
    """R209: the numbers that a person looks for."""
    console = Console(file=io.StringIO(), width=120)
    console.print(memory_tables(RESPONSE))
    text = console.file.getvalue()
    for part in (
        "logical blocks",
        "25.0%",
        "12.5%",
        "worst sequence 9",
        "37.5%",
        "30.0%",
        "20.0%",
        "1 running sequence",
    ):
        assert part in text, part


def test_of_a_running_scheduler(simulated_stack: LocalStack) -> None:
    """R209: requests in the middle of their output; figures agree with the tables read at the same instant, and asked for only."""
    stack = simulated_stack
    with Client(stack.grpc_address) as client:
        idle = json.loads(quire_here("blocks", "--memory", "--json", "--admin", stack.admin_address).stdout)
        assert (idle["num_sequences"], idle["saved"], idle["contiguous"]["num_slots"]) == (0, 0.0, 0)
        stream = client.generate_stream(
            "a prompt of some length " * 8, SamplingParams(max_tokens=3_000, ignore_eos=True)
        )
        deltas = iter(stream)
        next(deltas)
        with AdminClient(stack.admin_address) as admin:
            assert not admin.blocks().HasField("memory")
            response = admin.blocks(memory=True)
        paged, [table] = memory_of(response).paged, response.tables
        assert (paged.logical_blocks, paged.physical_blocks) == (len(table.blocks), len(table.blocks))
        assert paged.num_tokens == 16 * len(table.blocks) - paged.waste_tokens and paged.max_waste_tokens < 16
        live = json.loads(quire_here("blocks", "--memory", "--json", "--admin", stack.admin_address).stdout)
        shares = [live["contiguous"][name] for name in ("used", "reserved", "internal", "external")]
        assert sum(shares) == pytest.approx(1.0) and live["contiguous"]["num_regions"] == 1
        assert "saved by sharing" in quire_here("blocks", "--memory", "--admin", stack.admin_address).stdout
        stream.cancel()
