"""One gateway of two real cells: each request is served by the cell of its model, also when a cell loses its scheduler."""

import time
from collections.abc import Callable
from pathlib import Path

from quire import SamplingParams
from quire.client.messages import RequestOptions
from quire.client.sync_client import Client
from tests.support.checkpoints import make_checkpoint
from tests.support.stack.supervised import Case, Readings, gateway_of, read_all, supervised

NAMES = ("tiny", "other")
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PROMPTS = [[5 + number, 9, 11] for number in range(4)]
BEGUN = 30


def cases(model: str) -> list[Case]:
    """Requests for one model."""
    return [Case(prompt, GREEDY, RequestOptions(model=model)) for prompt in PROMPTS]


def test_each_cell_serves_its_model(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Tokens are those of the cell's own gateway, while the scheduler of one of them is killed too."""
    path = make_checkpoint("llama", tmp_path / "other")
    with supervised() as one, supervised(model=path) as other:
        cells = (one, other)
        expected = [
            output
            for name, cell in zip(NAMES, cells, strict=True)
            for output in read_all(cell.stack.grpc_address, cases(name))
        ]
        both = [case for name in NAMES for case in cases(name)]
        addresses = [cell.stack.scheduler_address for cell in cells]
        with gateway_of(one.stack.options.environ, *addresses) as address:
            with Client(address) as client:
                while {card.name for card in client.models()} != set(NAMES):
                    time.sleep(0.05)
            assert read_all(address, both) == expected

            def kill(readings: Readings) -> None:
                readings.wait_for(BEGUN)
                other.kill("scheduler")

            assert read_all(address, both, kill) == expected
        assert len(other.deaths) >= 1 and not one.deaths
        record_property(
            "size", f"{3 * len(both)} requests at {len(cells)} cells, 1 kill of a scheduler, 0 lost or changed"
        )
