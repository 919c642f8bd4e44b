"""The invariance contract: a token's logits are bitwise the same for any batch, chunking, block placement, prefix
hit, recompute or swap. Each scenario is a seeded random life of several sequences, compared bit for bit with each one alone."""

import random

import pytest
import torch

from tests.support.checkpoints import DENSE_FAMILIES
from tests.support.worker.chaos import EVENTS, NUM_BLOCKS, Chaos, origin
from tests.support.worker.driver import BLOCK_SIZE, Driver, generate, make_engine
from worker_svc.invariance import Elementwise, RowProbe, RowRule, measure

_QUICK = ("llama", "gemma2", "gpt2")
LENGTHS = (1, 5, 16, 33, 50, 18)
NEW_TOKENS = 10
QUICK_SEEDS = (2,)  # in which everything happens


def prompts_of(rng: random.Random) -> dict[str, list[int]]:
    """Prompts of several lengths; the last begins like the fifth, by more than a block."""
    prompts = {f"p{i}": [rng.randrange(256) for _ in range(n)] for i, n in enumerate(LENGTHS)}
    prompts["p5"] = prompts["p4"][:BLOCK_SIZE] + prompts["p5"][:2]
    return prompts


def alone(engine, prompts) -> Driver:
    driver = Driver(engine)
    for name, prompt in prompts.items():
        driver._next_block = 0
        generate(driver, name, prompt, NEW_TOKENS)
    return driver


def check_bits(expected: Driver, found: Driver) -> None:
    for name, tokens in found.tokens.items():
        known = expected.logits[origin(name)]
        assert tokens[:NEW_TOKENS] == expected.tokens[origin(name)], name
        for position in found.logits[name].keys() & known.keys():
            assert torch.equal(known[position], found.logits[name][position]), f"{name} at {position}"
    assert all(found.logits[name].keys() >= by_position.keys() for name, by_position in expected.logits.items())


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(
            (family, "float32") if family in _QUICK else pytest.param(family, "float32", marks=pytest.mark.long)
            for family in DENSE_FAMILIES
        ),
        ("llama", "bfloat16"),
        pytest.param("gpt2", "bfloat16", marks=pytest.mark.long),
    ],
)
def test_bits_do_not_depend_on_company(family, dtype, families):
    """In random schedules with other rows, logits are bitwise equal to those of the row alone."""
    engine = make_engine(families[family].path, num_blocks=NUM_BLOCKS, dtype=dtype)
    assert engine.invariant
    check_schedules(engine, seeds=QUICK_SEEDS)


def check_schedules(engine, seeds) -> None:
    prompts = prompts_of(random.Random(5))
    expected = alone(engine, prompts)
    events = set()
    for seed in seeds:
        chaos = Chaos(engine, prompts, seed, num_tokens=NEW_TOKENS)
        check_bits(expected, chaos.run())
        events |= chaos.events
    assert events == EVENTS - {"long neighbour"}


def test_bits_on_the_torch_path(families, monkeypatch):
    """The same without compiled kernels (forced by the environment)."""
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "torch")
    engine = make_engine(families["qwen3"].path, num_blocks=NUM_BLOCKS)
    assert engine.invariant
    check_schedules(engine, seeds=QUICK_SEEDS)


@pytest.mark.long
@pytest.mark.parametrize("num_threads", [1, 3, 4])
@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_bits_with_other_thread_counts(family, num_threads, families):
    """Logits are bitwise equal to those of the row alone for each number of threads by itself."""
    path = families[family].path
    before = torch.get_num_threads()
    try:
        engine = make_engine(path, num_blocks=NUM_BLOCKS, num_threads=num_threads)
        check_schedules(engine, seeds=range(20))
    finally:
        torch.set_num_threads(before)


def test_a_broken_rule_is_seen(families):
    """The property test can fail: plain modules' float32 rows differ without padding whenever the processor's library says so."""
    path = families["llama"].path
    engine = make_engine(path, num_blocks=NUM_BLOCKS, fuse=False)
    assert engine.invariant
    if engine.row_rule.minimum == 1:
        pytest.skip("on this processor products have the same bits at every row count")
    loose = make_engine(path, num_blocks=NUM_BLOCKS, invariant=False, fuse=False)
    assert not loose.invariant
    assert loose.row_rule == RowRule()
    with pytest.raises(AssertionError):
        check_schedules(loose, seeds=range(3))


# --- measuring -------------------------------------------------------------------------------------------------------


class Faulty(torch.nn.Module):
    """Adds a little to every row at the row counts that `bad` names."""

    def __init__(self, bad) -> None:
        super().__init__()
        self.bad = bad
        self.bias = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x + 1.0 if self.bad(len(x)) else x


def rule_of(bad, max_rows=2048) -> RowRule | None:
    return measure([RowProbe(Faulty(bad), 2, 4, torch.float32)], max_rows, budget_s=5.0)


def test_measured_rules():
    """Minimum, multiple and maximum are found from behaviour alone; None where nothing helps."""
    assert rule_of(lambda n: False) == RowRule()
    assert rule_of(lambda n: n < 12) == RowRule(minimum=12)
    eights = rule_of(lambda n: n % 8 != 0)
    assert eights is not None
    assert (eights.minimum, eights.multiple) == (8, 8)
    capped = rule_of(lambda n: n > 511)
    assert capped is not None
    assert capped.maximum == 511
    # More rows than memory could hold are never tried.
    assert rule_of(lambda n: n > 20_000, max_rows=2**31) == RowRule(maximum=16_384)
    assert rule_of(lambda n: n != 64) is None


def test_low_precision_is_probed_sharply():
    """A difference in the order of summation that bfloat16 results nearly always hide is found all the same."""

    class Product(torch.nn.Linear):
        def forward(self, x):
            products = x.float()[:, None] * self.weight.float()
            places = range(products.shape[-1])
            total = torch.zeros(products.shape[:-1])
            for i in reversed(places) if len(x) == 1 else places:
                total = total + products[..., i]
            return total.to(x.dtype)

    module = Product(64, 32, bias=False, dtype=torch.bfloat16)
    rows = torch.randn(64, 64).bfloat16()
    ordinary = torch.cat([module(row[None]) for row in rows])
    assert (ordinary == module(rows)).float().mean() > 0.95
    assert measure([RowProbe(module, 2, 64, torch.bfloat16)], 64) == RowRule(minimum=2)


def test_elementwise_shares_are_whole_vectors():
    """Row counts whose shares would end within a vector are passed over."""
    rule = RowRule(elementwise=Elementwise(widths=(704,), num_threads=3, vector=32))
    assert rule.padded(1) == 1
    assert rule.padded(50) == 50  # 35,200 elements: two shares of 17,600
    assert rule.padded(95) == 96  # three shares: a multiple of 3 rows
    odd = RowRule(elementwise=Elementwise(widths=(24,), num_threads=1, vector=32))
    assert [odd.padded(n) for n in (1, 4, 5)] == [4, 4, 8]


def test_rules_pad_and_cut():
    """Padding reaches an allowed count; pieces are no larger than the maximum and lose nothing."""
    rule = RowRule(minimum=12, multiple=4, maximum=512)
    assert [rule.padded(n) for n in (1, 12, 13, 512)] == [12, 12, 16, 512]
    assert list(rule.pieces(1100)) == [(0, 512), (512, 1024), (1024, 1100)]
    assert rule.joined(RowRule(minimum=1, multiple=8, maximum=100)) == RowRule(16, 8, 96)
    assert rule.joined(RowRule(maximum=8)) is None


def test_cut_steps_keep_their_bits(families):
    """A step larger than the rule's maximum runs in pieces, with the same tokens and logits."""
    path = families["qwen2"].path
    prompts = {"a": list(range(100, 150)), "b": list(range(30)), "c": [7, 8, 9]}
    whole, cut = Driver(make_engine(path)), Driver(_with_rule(path, RowRule(16, 1, 32)))
    for driver in (whole, cut):
        for name, prompt in prompts.items():
            driver.add(name, prompt)
        driver.run()
        driver.run()
    assert whole.tokens == cut.tokens
    for name in prompts:
        for position, logits in whole.logits[name].items():
            assert torch.equal(logits, cut.logits[name][position])


def _with_rule(path, rule: RowRule):
    engine = make_engine(path)
    engine.row_rule = rule
    engine.allocate(160, 0)
    return engine
