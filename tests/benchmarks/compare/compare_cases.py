"""What tests of the comparison with peers share: workloads of a small vocabulary, the shape that goals are about."""

from benchmarks.compare import shapes
from benchmarks.compare.workloads import Lengths, Workload, drawn

BIG = shapes.SHAPES["bench-135m"]
VOCAB = 1_000


def workload(name: str, lengths: Lengths, round_: int = 0, seed: int = 0) -> Workload:
    """Drawn with the vocabulary of these tests."""
    return drawn(name, lengths, seed=seed, round_=round_, vocab_size=VOCAB)
