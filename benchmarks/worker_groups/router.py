"""A router as peers have it: it picks a worker when a request arrives, and guesses caches and load from its own history.

The rule is that of SGLang's cache-aware routing (`sgl-router`, policy `cache_aware`): a request goes to the worker to which
the longest prefix of it was sent, if that is at least half of the prompt and the workers have about equal numbers of requests;
otherwise to the one with the fewest. What is cached there is not known: prefixes are forgotten, oldest first, beyond the size
of a cache.
"""

from collections import OrderedDict

from quire_tools.simulation.workloads import Job

_MATCH_THRESHOLD = 0.5
_BALANCE_ABS = 32
_BALANCE_REL = 1.1
_DURATION_S_PER_TOKEN = 0.012
"""A router sees when requests end; here they are taken to last for so long per output token."""


class Router:
    """Owner of what was sent to each worker. `cache_tokens`: size of a worker's cache."""

    def __init__(self, num_workers: int, cache_tokens: int, block_size: int) -> None:
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_workers)]
        self._ends: list[list[float]] = [[] for _ in range(num_workers)]
        self._most = cache_tokens // block_size
        self._block_size = block_size

    def worker_for(self, job: Job) -> int:
        """The worker for a request that arrives now; it counts as sent."""
        chunks = self._chunks(job.prompt)
        loads = [self._load(worker, job.at_s) for worker in range(len(self._sent))]
        matches = [self._match(worker, chunks) for worker in range(len(self._sent))]
        best = max(range(len(loads)), key=lambda worker: (matches[worker], -loads[worker]))
        is_even = max(loads) - min(loads) <= _BALANCE_ABS or max(loads) <= _BALANCE_REL * min(loads)
        if not (is_even and chunks and matches[best] / len(chunks) > _MATCH_THRESHOLD):
            best = min(range(len(loads)), key=lambda worker: loads[worker])
        self._note(best, chunks)
        self._ends[best].append(job.at_s + 0.1 + _DURATION_S_PER_TOKEN * job.num_output_tokens)
        return best

    def _load(self, worker: int, now: float) -> int:
        self._ends[worker] = [end for end in self._ends[worker] if end > now]
        return len(self._ends[worker])

    def _chunks(self, prompt: list[int]) -> list[int]:
        size, chain, found = self._block_size, 0, []
        for start in range(0, len(prompt) - size + 1, size):
            chain = hash((chain, *prompt[start : start + size]))
            found.append(chain)
        return found

    def _match(self, worker: int, chunks: list[int]) -> int:
        sent = self._sent[worker]
        return next((i for i, chunk in enumerate(chunks) if chunk not in sent), len(chunks))

    def _note(self, worker: int, chunks: list[int]) -> None:
        sent = self._sent[worker]
        for chunk in chunks:
            sent[chunk] = None
            sent.move_to_end(chunk)
        while len(sent) > self._most:
            sent.popitem(last=False)
