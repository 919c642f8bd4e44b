"""The table of all classes: that it is of the pinned transformers and has no fault; a sample of it, and what its runner notices."""

import os
import random
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import transformers
from transformers import AutoConfig

from svc_common.errors import ConfigError
from tests import models_page
from tests.support.tree import ROOT
from tests.worker.families import trial
from tests.worker.families.classes import COMMON, ENCODERS, OTHER_INPUTS
from tests.worker.families.outcomes import DIFFERENT, EQUAL, FAULTS, RAISED, REFUSED, UNKNOWN, Table, Trial
from tests.worker.families.page import need_of, section
from tests.worker.families.processes import run
from tests.worker.families.tiny_configs import model_types, tiny_config
from worker_svc.model import attention
from worker_svc.model.cache.cache_engine import CacheEngine

_SAMPLES = {EQUAL: 4, REFUSED: 2}


@pytest.fixture(scope="module")
def table() -> Table:
    return Table.read()


def test_the_table_is_of_the_pinned_transformers(table):
    """Its classes are those of the release in constraints.txt; another installed release may have others."""
    pinned = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("transformers==")]
    assert pinned == [f"transformers=={table.transformers}"]
    if transformers.__version__ == table.transformers:
        assert sorted(table.trials) == model_types()


def test_no_class_is_wrong_in_silence(table):
    """Every class gives the tokens of `generate`, is refused by name, or could not be tried: at least 120 of them."""
    assert len(table.trials) >= 120
    assert [name for name, found in table.trials.items() if found.outcome in FAULTS] == []
    assert all(found.why for found in table.trials.values() if found.outcome != EQUAL)
    assert table.count(EQUAL) + table.count(REFUSED) + table.count(UNKNOWN) == len(table.trials)


def test_common_families_are_classes_of_their_own(table):
    """The lists of families name classes that exist, each in one list."""
    assert len(COMMON) == 82
    assert set(table.trials) >= COMMON | ENCODERS | OTHER_INPUTS
    assert not COMMON & (ENCODERS | OTHER_INPUTS) and not ENCODERS & OTHER_INPUTS


def sampled(table: Table) -> list[str]:
    """Some classes of each outcome; others after each commit."""
    shown = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, check=False, text=True)
    rng, names = random.Random(shown.stdout), sorted(table.trials)
    of = {outcome: [name for name in names if table.trials[name].outcome == outcome] for outcome in _SAMPLES}
    return [name for outcome, count in _SAMPLES.items() for name in rng.sample(of[outcome], count)]


@pytest.mark.timeout(120)
def test_a_sample_of_the_table(table, record_property):
    """What the table says of some classes, found again."""
    if transformers.__version__ != table.transformers:
        pytest.skip(f"the table is of transformers {table.transformers}")
    names = sampled(table)
    for name in names:
        assert trial.tried(name) == table.trials[name]
    record_property("size", f"sample of the classes: {', '.join(names)}")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_whole_table(table, record_property):
    """`make test-families`: all classes, as in the table."""
    if transformers.__version__ != table.transformers:
        pytest.skip(f"the table is of transformers {table.transformers}")
    found = {one.model_type: one for one, _ in run(model_types(), os.cpu_count() or 1)}
    assert [one for name, one in found.items() if one != table.trials[name]] == []
    assert found.keys() == table.trials.keys()
    record_property("size", f"{len(found)} classes, {table.count(EQUAL)} of them equal to generate")


# --- what a trial notices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "attribute"), [(attention, "_rule"), (CacheEngine, "copy"), (CacheEngine, "swap_in")]
)
def test_what_is_left_out_is_different(owner, attribute, monkeypatch):
    """Without Granite's scale, and without block moves, tokens are others: the class is a fault, and the words say where."""
    inner = attention._rule
    left_out = {"_rule": lambda *given: replace(inner(*given), scale=0.25), "copy": _nothing, "swap_in": _nothing}
    monkeypatch.setattr(owner, attribute, left_out[attribute])
    found = trial.tried("granite")
    assert found.outcome == DIFFERENT
    assert re.search(r"token \d+ of \d+ is not generate's|logprobs deviate by|not finite", found.why)


def _nothing(*_given: object) -> None:
    return None


@pytest.mark.parametrize(
    ("error", "outcome", "why"),
    [
        (RuntimeError("boom"), RAISED, "RuntimeError: boom"),
        (ConfigError("no. Supported are others", reason="MODEL_UNSUPPORTED"), REFUSED, "no"),
    ],
)
def test_errors_of_the_loader(error, outcome, why, monkeypatch):
    """A refusal is one; any other error of the loader is a fault, if `generate` runs the model."""

    def make_engine(*_args, **_settings):
        raise error

    monkeypatch.setattr(trial, "make_engine", make_engine)
    found = trial.tried("llama")
    assert (found.outcome, found.why) == (outcome, why)


def _behaving(model_type: str) -> Trial:
    if model_type == "mamba":
        os._exit(3)
    if model_type == "llama":
        time.sleep(60)
    return Trial(model_type, "class", EQUAL)


@pytest.mark.long
def test_processes_that_crash_or_hang():
    """They are faults of their classes, and the others go on."""
    found = {one.model_type: one for one, _ in run(["llama", "mamba", "opt"], at_once=1, limit_s=5.0, work=_behaving)}
    assert {name: one.outcome for name, one in found.items()} == {"llama": RAISED, "mamba": RAISED, "opt": EQUAL}
    assert (found["llama"].why, found["mamba"].why) == ("does not end in time", "its process ends with code 3")


# --- the file and the page ---------------------------------------------------------------------------------------------


def test_the_file_and_the_page(tmp_path):
    """What is written is read again; a refusal is shown with its reason, and counted by what it needs."""
    refused = Trial(
        "mamba", "MambaForCausalLM", REFUSED, "MambaForCausalLM cannot be served: its module a_b (MambaMixer)"
    )
    equal = Trial("llama", "LlamaForCausalLM", EQUAL, num_tokens=5, reach=129, forms={"windows": EQUAL})
    Table("9.9", {"llama": equal, "mamba": refused}).write(tmp_path / "t.json")
    read = Table.read(tmp_path / "t.json")
    assert read.trials == {"llama": equal, "mamba": refused}
    assert need_of(refused) == "states or convolutions"
    text = section(read)
    assert "| `mamba` | `MambaForCausalLM` | refused: its module a\\_b (MambaMixer) |" in text
    assert "| `llama` | `LlamaForCausalLM` | equal, 5 tokens; with windows: equal |" in text
    assert "| all classes | 2 | 1 (50 %) | 1 | 0 |" in text


def test_the_page_needs_no_torch():
    """`tests.models_page` stays quick."""
    told = "import sys, tests.models_page; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", told], cwd=ROOT, check=False).returncode == 0


def test_traits_of_families_with_states():
    """The page has them as words; they are those of the checkpoints that tests run."""
    for family, words in models_page.STATE_TRAITS.items():
        assert models_page.traits(AutoConfig.for_model(**tiny_config(family)).to_dict()) == words
