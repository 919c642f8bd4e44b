"""Measures how a tenant that floods affects one that does not.

    python -m benchmarks.tenants --save            # about four minutes
    python -m benchmarks.tenants --seconds 5       # a short run

This module holds the runs and their table. The client: benchmarks.open_load; the services:
benchmarks.service.
"""

import asyncio
import hashlib
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.open_load import Flow, OpenLoad, Sent, figures
from benchmarks.service import Stack

POLICIES = {"fair": (), "not fair": ("tenant_fairness=false",)}
_WORKER = {"step_base_s": 0.02, "prefill_token_s": 10e-6, "decode_row_s": 50e-6, "num_gpu_blocks": 8_192}
QUIET_SHARE, FLOOD_SHARE = 0.1, 3.0
"""Shares of capacity in the overloaded run."""
OVERLOAD_OUTPUT = 48
_KEYS = {"quiet": "quiet-key", "flood": "flood-key"}

_HELP_END = """
Three processes and this client, on one machine; the simulated worker takes 20 ms per step. The quiet tenant sends --rate requests
per second; the flooding tenant has --flood clients, each of which sends the next request when one ends. Both send requests of the
same size. Runs in turn: the quiet tenant alone, both with tenant_fairness, both without. The first tenth of each run is left out.

Then overload: the queue accepts requests that start within --max-waiting-s; Poisson arrivals at a tenth of the capacity from the
quiet tenant and at three times the capacity from the other. All requests count.

Goals: p99 of the quiet tenant's time to first token beside the flood at most 1.5 times that alone; none of its requests refused.
"""


def main(
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each run.")] = 40.0,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Concurrent sequences.")] = 32,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests per second of the quiet tenant.")] = 10.0,
    flood: Annotated[int, typer.Option(min=1, help="Clients of the flooding tenant.")] = 200,
    max_waiting_s: Annotated[
        float, typer.Option(min=0.01, help="Maximum expected waiting time of an accepted request under overload.")
    ] = 2.0,
    seed: Annotated[int, typer.Option(help="Seed of the arrivals.")] = 1,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/tenants.json.")] = False,
) -> None:
    """Measures the quiet tenant's time to first token and refusals, alone and beside a flood."""
    result = measure(seconds, max_num_seqs, rate, flood, seed)
    result["overload"] = overload(seconds, max_num_seqs, max_waiting_s, seed)
    if save:
        report.save("tenants", {"benchmark": "tenants", "rate": rate, "flood": flood, **result})
    _show(result, Console())


def measure(seconds: float, max_num_seqs: int, rate: float, flood: int, seed: int) -> dict[str, Any]:
    """All runs, with a fresh stack for each policy."""
    quiet = Flow("quiet", rate, key=_KEYS["quiet"])
    flooding = Flow("flood", 0.0, num_clients=flood, key=_KEYS["flood"])
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        tenants = _tenants_file(Path(folder))
        for name, sets in POLICIES.items():
            with Stack(_WORKER, {"max_num_seqs": max_num_seqs, "policy_set": sets}, {"tenants": tenants}) as stack:
                if "alone" not in runs:
                    runs["alone"] = _run(stack.address, [quiet], seconds, seed)
                runs[name] = _run(stack.address, [quiet, flooding], seconds, seed)
    alone = runs["alone"]["quiet"]["ttft_s"]["p99"]
    ratios = {name: round(runs[name]["quiet"]["ttft_s"]["p99"] / alone, 3) for name in POLICIES}
    return {"max_num_seqs": max_num_seqs, "runs": runs, "ttft_p99_ratio": ratios}


def overload(seconds: float, max_num_seqs: int, max_waiting_s: float, seed: int) -> dict[str, Any]:
    """Measure the capacity, then run both tenants beyond it: how the calls of each ended."""
    scheduler = {"max_num_seqs": max_num_seqs, "max_waiting_s": max_waiting_s}
    clients = max_num_seqs + max(1, max_num_seqs // 4)
    full = Flow("flood", 0.0, output=OVERLOAD_OUTPUT, num_clients=clients, key=_KEYS["flood"])
    with tempfile.TemporaryDirectory() as folder:
        tenants = _tenants_file(Path(folder))
        with Stack(_WORKER, scheduler, {"tenants": tenants}) as stack:
            peak = _run(stack.address, [full], max(4.0, seconds / 4), seed)["flood"]["served_per_s"]
            rates = {"quiet": QUIET_SHARE * peak, "flood": FLOOD_SHARE * peak}
            flows = [Flow(name, rate, output=OVERLOAD_OUTPUT, key=_KEYS[name]) for name, rate in rates.items()]
            sent = _sent(stack.address, flows, seconds, seed)
    ends = {flow.name: dict(Counter(call.end for call in sent if call.flow == flow.name)) for flow in flows}
    return {"max_waiting_s": max_waiting_s, "capacity_per_s": peak, "ends": ends}


def _tenants_file(folder: Path) -> str:
    path = folder / "tenants.toml"
    hashes = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in _KEYS.items()}
    path.write_text("".join(f'[[tenants.{name}.keys]]\nsha256 = "{value}"\n' for name, value in hashes.items()))
    return str(path)


def _run(address: str, flows: list[Flow], seconds: float, seed: int) -> dict[str, Any]:
    sent = _sent(address, flows, seconds, seed)
    return {flow.name: figures([call for call in sent if call.flow == flow.name], seconds) for flow in flows}


def _sent(address: str, flows: list[Flow], seconds: float, seed: int) -> list[Sent]:
    async def run() -> list[Sent]:
        return await OpenLoad(address, seed).run(flows, seconds)

    return asyncio.run(run())


def _show(result: dict[str, Any], console: Console) -> None:
    table = Table("run", "tenant", "calls", "served/s", "TTFT p50 ms", "TTFT p99 ms", "to alone")
    for name, run in result["runs"].items():
        for tenant, f in run.items():
            ratio = f"{result['ttft_p99_ratio'][name]:.2f}" if tenant == "quiet" and name != "alone" else ""
            times = (f"{1e3 * f['ttft_s'][p]:,.1f}" for p in ("p50", "p99"))
            table.add_row(name, tenant, str(f["calls"]), f"{f['served_per_s']:.1f}", *times, ratio)
    console.print(table)
    overloaded = result["overload"]
    for tenant, ends in overloaded["ends"].items():
        how = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
        console.print(f"overload ({overloaded['capacity_per_s']:.1f}/s are served), {tenant}: {how}")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(epilog=_HELP_END)(main)
    app()
