"""Faults of a simulation, drawn from the seed or given by time."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Faults:
    """Times are seconds of virtual time, chances are between 0 and 1. Default: no faults.

    `kills`: the worker process dies, loses its memory, and restarts after `restart_s`. `breaks`: the stream
    breaks with all messages on it and reconnects after `reconnect_s`; the epoch continues, except with chance
    `takeover`: another scheduler owned the worker meanwhile. `step_failure`, `row_failure`: a step, or one
    sequence of it, fails. `duplicate`: a result arrives twice. `jitter_s`: messages take up to that much
    longer, in order. `slow`: (from, to, factor), steps take longer in between. `jumps`: (at, by), the
    scheduler's clock jumps forward.
    """

    kills: tuple[float, ...] = ()
    breaks: tuple[float, ...] = ()
    takeover: float = 0.0
    restart_s: float = 1.0
    reconnect_s: float = 0.1
    step_failure: float = 0.0
    row_failure: float = 0.0
    duplicate: float = 0.0
    jitter_s: float = 0.0
    slow: tuple[tuple[float, float, float], ...] = ()
    jumps: tuple[tuple[float, float], ...] = ()

    def slowness(self, now: float) -> float:
        """Factor by which a step that starts now takes longer."""
        factor = 1.0
        for start, end, times in self.slow:
            if start <= now < end:
                factor *= times
        return factor

    @classmethod
    def random(cls, rng: random.Random, horizon_s: float) -> "Faults":
        """A random mixture for a run of about `horizon_s`; each kind occurs in some of them."""

        def times(most: int, chance: float) -> tuple[float, ...]:
            count = rng.randint(1, most) if rng.random() < chance else 0
            return tuple(sorted(rng.uniform(0, horizon_s) for _ in range(count)))

        slow_from = rng.uniform(0, horizon_s)
        return cls(
            kills=times(2, 0.3),
            breaks=times(4, 0.4),
            takeover=rng.choice([0.0, 0.3]),
            restart_s=rng.uniform(0.0, 0.2) * horizon_s,
            reconnect_s=rng.uniform(0.0, 0.05) * horizon_s,
            step_failure=rng.choice([0.0, 0.0, 0.0, 0.05]),
            row_failure=rng.choice([0.0, 0.0, 0.0, 0.05]),
            duplicate=rng.choice([0.0, 0.0, 0.2]),
            jitter_s=rng.choice([0.0, 0.0, 0.01]) * horizon_s,
            slow=((slow_from, slow_from + 0.2 * horizon_s, 10.0),) if rng.random() < 0.2 else (),
            jumps=tuple((at, rng.uniform(0, 10) * horizon_s) for at in times(1, 0.2)),
        )
