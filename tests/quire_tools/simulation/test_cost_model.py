"""The cost model: what a step costs by its parts, and the model that fits measured steps."""

import random

import numpy as np
import pytest

from quire_tools.simulation.cost_model import CPU, GPU, CostModel, StepShape, non_negative_least_squares
from scheduler_svc.core.composition import presets
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepPlan, StepResult
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_rules import StopRules
from svc_common.errors import InvalidArgument


def shapes(count: int, seed: int) -> list[StepShape]:
    """Steps as they come: prompts, decodes, both."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        prefill, decodes = rng.choice([0, rng.randint(1, 2_000)]), rng.randint(0, 64)
        context = prefill + decodes * rng.randint(10, 4_000)
        made.append(StepShape(prefill, decodes, context, prefill * rng.randint(1, 2_000), rng.choice([0, 0, 5])))
    return made


@pytest.mark.parametrize("machine", [GPU, CPU])
def test_a_machine_is_found_by_its_steps(machine: CostModel) -> None:
    """What measured steps tell about a machine is what it is, where nothing disturbs them."""
    samples = [(shape, machine.step_s(shape)) for shape in shapes(400, 1)]
    fit = CostModel.fit(samples, schedule_s=machine.schedule_s, wire_s=machine.wire_s)
    assert fit.error < 1e-6
    assert fit.num_steps == 400
    for shape in shapes(50, 2):
        assert fit.model.step_s(shape) == pytest.approx(machine.step_s(shape), rel=1e-4)


def test_noise_shows_in_the_error() -> None:
    """The error says how far modelled steps are from measured ones: about the noise."""
    rng = random.Random(3)
    samples = [(shape, GPU.step_s(shape) * rng.lognormvariate(0, 0.1)) for shape in shapes(2_000, 3)]
    fit = CostModel.fit(samples)
    assert 0.05 < fit.error < 0.09  # the median of |noise| is 0.067
    assert fit.model.base_s == pytest.approx(GPU.base_s, rel=0.05)


def test_no_coefficient_is_negative() -> None:
    """Steps that get cheaper with more work are taken for noise: time never flows back."""
    samples = [(StepShape(num_decode_seqs=n), 0.01 - 1e-4 * n) for n in range(1, 50)]
    model = CostModel.fit(samples).model
    assert min(model.base_s, model.decode_seq_s, model.prefill_token_s, model.context_token_s) >= 0
    assert model.decode_seq_s == 0


def test_nothing_to_fit_to() -> None:
    """Without a measured step there is no model, and the caller is told so."""
    with pytest.raises(InvalidArgument, match="no step"):
        CostModel.fit([(StepShape(), 0.0)])


def test_least_squares_against_all_subsets() -> None:
    """The active set finds what trying every subset of columns finds."""
    rng = np.random.default_rng(4)
    for _ in range(50):
        matrix, target = rng.normal(size=(12, 4)), rng.normal(size=12)
        found = non_negative_least_squares(matrix, target)
        assert (found >= 0).all()
        best = min(_residual_of(matrix, target, subset) for subset in range(16))
        assert float(np.linalg.norm(matrix @ found - target)) == pytest.approx(best, abs=1e-9)


def _residual_of(matrix: np.ndarray, target: np.ndarray, subset: int) -> float:
    columns = [column for column in range(matrix.shape[1]) if subset >> column & 1]
    if not columns:
        return float(np.linalg.norm(target))
    x = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
    return float(np.linalg.norm(matrix[:, columns] @ x - target)) if (x >= 0).all() else np.inf


def test_shape_of_plans() -> None:
    """Tokens of a prompt, sequences that decode, what they read: counted alike with columns and without."""
    for fast_path in (False, True):
        limits = CoreLimits(
            block_size=4, num_gpu_blocks=33, max_model_len=64, max_num_batched_tokens=64, max_num_seqs=8
        )
        core = presets.build("vllm-v1", limits, fast_path=fast_path)
        for name in "ab":
            core.add(Request(name, [ord(name)] * 5, StopRules(max_tokens=8), 0.0))
        [first] = core.schedule(0.0)
        assert StepShape.of(first, 4) == StepShape(num_prefill_tokens=10, num_context_tokens=10, num_pairs=30)
        core.update(result_of(first))
        [second] = core.schedule(1.0)
        core.update(result_of(second))
        [third] = core.schedule(2.0)
        assert (third.fast is not None) is fast_path
        assert StepShape.of(third, 4) == StepShape(num_decode_seqs=2, num_context_tokens=14)


def result_of(plan: StepPlan) -> StepResult:
    """One token for each."""
    return StepResult(plan.step, {entry.name: [7] for entry in plan.scheduled})
