"""Adapters of every family: the dense ones with all linear modules changed, mixtures of experts in their attention."""

import pytest
import torch

from svc_common.errors import InvalidArgument
from tests.support.checkpoints import FAMILIES, MIXTURES, make_checkpoint
from tests.support.worker.adapter_folders import Oracle, make_adapter
from tests.support.worker.driver import Driver, make_engine

TOLERANCE = 1e-4
PROMPT = list(range(5, 40))


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_peft(family, tmp_path):
    """A row with an adapter and one without share every step; tokens and logits are those of PEFT alone."""
    base = make_checkpoint(family, tmp_path / "base")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if family in MIXTURES else "all-linear"
    path = make_adapter(base, tmp_path / "a", 1, r=4, target_modules=targets, fan_in_fan_out=family == "gpt2")
    engine = make_engine(base)
    driver = Driver(engine)
    engine.load_adapter(1, str(path))
    for name, adapter_id in (("with", 1), ("without", 0)):
        driver.add(name, PROMPT, room=8, rare={"adapter_id": adapter_id})
    for _ in range(8):
        driver.run()
    oracle = Oracle(base, {1: path})
    for name, adapter_id in (("with", 1), ("without", 0)):
        logits = oracle.logits([*PROMPT, *driver.tokens[name]], adapter_id)
        assert driver.tokens[name] == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
        for position, found in driver.logits[name].items():
            torch.testing.assert_close(found, logits[position - 1], atol=TOLERANCE, rtol=TOLERANCE)
    assert driver.tokens["with"] != driver.tokens["without"]


def test_adapters_of_experts_are_refused(tmp_path):
    """Experts are parameters, not modules that see every token: the refusal says so."""
    config = {"r": 4, "target_parameters": ["mlp.experts.gate_up_proj"], "target_modules": ["q_proj"]}
    base = make_checkpoint("mixtral", tmp_path / "base")
    path = make_adapter(base, tmp_path / "a", 1, **config)
    with pytest.raises(InvalidArgument, match="target_parameters") as caught:
        make_engine(base).load_adapter(1, str(path))
    assert caught.value.reason == "ADAPTER_UNSUPPORTED"
