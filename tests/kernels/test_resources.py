"""`python -m paged_kernels.resources`: what kernels take of GPUs that are not here."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import typer
from typer.testing import CliRunner

from paged_kernels.backend import AttentionRule, CacheShape
from paged_kernels.resources import __main__ as command
from paged_kernels.resources.compiled import GPUS, resources
from paged_kernels.resources.forms import attention_launches
from paged_kernels.resources.launches import Launch

APP = typer.Typer()
APP.command()(command.main)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def prompt_launch(*, fits: bool) -> Launch:
    """Attention of a prompt; with a single warp its registers are not enough."""
    found = attention_launches(CacheShape(16, 2, 64), 4, torch.bfloat16, AttentionRule(0.1))
    launch = [one for one in found if one.name == "attention_kernel"][-1]
    return launch if fits else replace(launch, options={**launch.options, "num_warps": 1})


@pytest.mark.long
@pytest.mark.parametrize("gpu", GPUS)
def test_what_does_not_fit_into_registers_is_seen(gpu):
    """On GPUs of both makers."""
    taken = resources(prompt_launch(fits=False), GPUS[gpu])
    assert taken.spilled_bytes > 0


@pytest.mark.long
def test_the_exit_status_tells_whether_a_kernel_spills(monkeypatch):
    """With a line of JSON for each kernel."""
    for fits in (True, False):

        def forms(fits: bool = fits) -> Iterator[tuple[str, Launch]]:
            yield "a prompt", prompt_launch(fits=fits)

        monkeypatch.setattr(command, "_forms", forms)
        result = CliRunner().invoke(APP, ["--gpu", "sm_80", "--json"])
        [row] = map(json.loads, result.stdout.splitlines())
        assert (result.exit_code, row["fits"], row["kernel"]) == (int(not fits), fits, "attention_kernel")


def test_an_unknown_gpu_is_refused():
    """By name."""
    result = CliRunner().invoke(APP, ["--gpu", "sm_70"])
    assert result.exit_code == 2
    assert "sm_70" in result.output


def spills_on_gfx942(row: dict[str, object]) -> bool:
    """Of latents in numbers with scales, a part of the registers is in memory there: 60 to 332 bytes of each thread."""
    form = str(row["form"])
    known = row["kernel"] == "attention_kernel" and row["gpu"] == "gfx942" and row["spilled_bytes"] < 400
    return known and "heads of 576" in form and ("int8 cache" in form or "fp8 cache" in form)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "gpus", [pytest.param(["sm_90"], marks=pytest.mark.long), pytest.param([*GPUS], marks=pytest.mark.soak)], ids=len
)
def test_no_kernel_spills(gpus, record_property, monkeypatch):
    """All forms of the table in bf16, but for one that is known; the command has those in fp16 too."""
    monkeypatch.setattr(command, "_DTYPES", {"bf16": torch.bfloat16})
    result = CliRunner().invoke(APP, ["--json", *(word for gpu in gpus for word in ("--gpu", gpu))])
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    spilling = [row for row in rows if not row["fits"]]
    assert [row for row in spilling if not spills_on_gfx942(row)] == []
    assert result.exit_code == bool(spilling)
    record_property("size", f"triton resources: {len(rows)} kernels, {len(spilling)} spill, {', '.join(gpus)}")
