"""Families evictor, table and cached_alloc: recorded operations on the parts that the cache rules are made of.

`ops` take the place of requests and trace: each carries its inputs and, beside them, what the reference answered. A trace is the
list of our answers, one object per operation.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from block_manager.cache_rules import AllocStatus, PrefixHit
from block_manager.compat.allocators_2023 import CachedAllocator
from block_manager.compat.evictor_vllm import LruEvictor
from block_manager.compat.free_stack import StackThenEvictor
from block_manager.compat.vllm_063 import Vllm063Rules
from block_manager.pool import BlockPool
from tests.golden import forms_allocators as forms
from tests.golden.forms import check, refused
from tests.golden.scenario import Scenario

Op = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """Forms of a family: `whole`, of the file; `ops`, inputs of each kind of operation; `answers`, fields beside the inputs."""

    whole: type[forms.OpsFile]
    ops: Mapping[str, type[forms.Op]]
    answers: frozenset[str]

    def inputs(self, kind: str) -> list[str]:
        """Fields of the operation that are no answers."""
        return list(self.ops[kind].model_fields)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


class AllocatorFamily(ABC):
    """Runs the operations of one file."""

    format: ClassVar[Format]

    @abstractmethod
    def __init__(self, scenario: Scenario) -> None: ...

    def names(self, op: Op) -> dict[str, bool]:
        """Fields of the operation that name what there must be, and whether there is."""
        return {}

    @abstractmethod
    def do(self, op: Op) -> Op:
        """Our answers."""

    @classmethod
    def run(cls, scenario: Scenario, *, fast_path: bool = True) -> list[Op]:
        """Our answers to all operations. ScenarioError for what is not of the form."""
        check(cls.format.whole, scenario.data)
        for i, op in enumerate(scenario.data["ops"]):
            cls._check(op, i)
        runner = cls(scenario)
        return [runner._answer(op, i) for i, op in enumerate(scenario.data["ops"])]

    def _answer(self, op: Op, i: int) -> Op:
        for name, is_known in self.names(op).items():
            if not is_known:
                raise refused(f"ops[{i}].{name}", f"there is no such {name} at this point", op[name])
        return self.do(op)

    @classmethod
    def emitted(cls, scenario: Scenario, answers: list[Op]) -> dict[str, Any]:
        """What `--emit` writes: our answers, and the operations with our answers in them."""
        ops = []
        for op, answer in zip(scenario.data["ops"], answers, strict=True):
            inputs = {key: op[key] for key in cls.format.inputs(op["op"]) if key in op}
            ops.append(inputs | answer)
        return {"name": scenario.name, "trace": answers, "ops": ops}

    @classmethod
    def recorded(cls, scenario: Scenario) -> list[Op] | None:
        """What the reference answered; None in a file of inputs alone."""
        ops = scenario.data["ops"]
        answers = [
            {k: op[k] for k in op if k in cls.format.answers.difference(cls.format.inputs(op["op"]))} for op in ops
        ]
        return answers if any(answers) else None

    @classmethod
    def _check(cls, op: Op, i: int) -> None:
        kinds = cls.format.ops
        check(forms.AnyOp, op, "ops", i)
        if op["op"] not in kinds:
            raise refused(f"ops[{i}].op", f"unknown operation {op['op']!r}; there are: {', '.join(kinds)}", op["op"])
        answers = cls.format.answers.difference(cls.format.inputs(op["op"]))
        inputs = {key: value for key, value in op.items() if key not in answers and not key.startswith("raw_")}
        check(kinds[op["op"]], inputs, "ops", i)


class EvictorRun(AllocatorFamily):
    """The LRU evictor by itself (R111)."""

    format = Format(
        whole=forms.EvictorFile,
        ops=forms.EVICTOR_OPS,
        answers=_words("result error num_blocks"),
    )

    def __init__(self, scenario: Scenario) -> None:
        self._evictor = LruEvictor()

    def do(self, op: Op) -> Op:
        answer: Op = {}
        try:
            if op["op"] == "add":
                self._evictor.add(op["id"], op["num_hashed_tokens"], op["last_accessed"])
            elif op["op"] == "update":
                self._evictor.update(op["id"], op["last_accessed"])
            elif op["op"] == "remove":
                self._evictor.remove(op["id"])
            elif op["op"] == "evict":
                answer["result"] = self._evictor.evict()
        except ValueError:
            answer["error"] = "ValueError"
        return answer | {"num_blocks": len(self._evictor)}


@dataclass(slots=True)
class _Tokens:
    """A sequence that is nothing but its tokens."""

    name: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_placeholders: int = 0
    cache_salt: str = ""
    lora_id: int = 0
    lane: int | None = None
    no_cache_reuse: bool = False
    sibling_names: tuple[str, ...] = field(default=())


class TableRun(AllocatorFamily):
    """Block tables under the cache rules of 0.6.3."""

    format = Format(
        whole=forms.TableFile,
        ops=forms.TABLE_OPS,
        answers=_words("touched copies refused free tables queries hits hashed evictable"),
    )

    def __init__(self, scenario: Scenario) -> None:
        data = scenario.data
        self._caching: bool = data["prefix_caching"]
        self._sequences: dict[str, _Tokens] = {}
        self._rules = Vllm063Rules.make(
            block_size=data["block_size"],
            num_gpu_blocks=data["num_blocks"],
            num_cpu_blocks=0,
            max_model_len=data["num_blocks"] * data["block_size"],
            prefix_caching=data["prefix_caching"],
            watermark_blocks=0,
        )

    def names(self, op: Op) -> dict[str, bool]:
        return {} if op["op"] == "new" else {"table": op["table"] in self._sequences}

    def do(self, op: Op) -> Op:
        kinds: dict[str, Callable[[Op], Op]] = {
            "new": self._new, "append": self._append, "fork": self._fork, "free": self._free,
        }  # fmt: skip
        return kinds[op["op"]](op) | self._state()

    def _new(self, op: Op) -> Op:
        sequence = _Tokens(op["table"], list(op["tokens"]), len(op["tokens"]))
        if self._rules.can_admit([sequence], PrefixHit(), len(sequence.token_ids)) is not AllocStatus.OK:
            return {"refused": True}
        self._sequences[sequence.name] = sequence
        self._rules.admit([sequence], PrefixHit(), len(sequence.token_ids))
        return {}

    def _append(self, op: Op) -> Op:
        sequence, num_tokens = self._sequences[op["table"]], len(op["tokens"])
        sequence.token_ids += op["tokens"]
        touched = self._rules.num_touched(sequence)
        if not self._rules.can_extend([sequence], num_tokens):
            del sequence.token_ids[len(sequence.token_ids) - num_tokens :]
            return {"touched": touched, "refused": True}
        return {"touched": touched, "copies": len(self._rules.extend(sequence, num_tokens).copies)}

    def _fork(self, op: Op) -> Op:
        parent = self._sequences[op["table"]]
        child = _Tokens(op["child"], list(parent.token_ids), parent.num_prompt_tokens)
        self._sequences[child.name] = child
        self._rules.fork(parent, child)
        return {}

    def _free(self, op: Op) -> Op:
        sequence = self._sequences.pop(op["table"])
        sequence.num_scheduled_tokens = len(sequence.token_ids)
        self._rules.commit([sequence], op["now"])
        self._rules.release(sequence)
        self._rules.forget(sequence)
        return {}

    def _state(self) -> Op:
        names: dict[int, int] = {}
        tables = self._rules.ledger.tables
        held = {name: [names.setdefault(b, len(names)) for b in tables[name]] for name in self._sequences}
        state = {"free": self._rules.num_free_gpu, "tables": held}
        if not self._caching:
            return state
        queries, hits = self._rules.hits
        pool = self._rules.ledger.gpu
        return state | {
            "queries": queries, "hits": hits, "hashed": pool.num_prefixes, "evictable": pool.counts().cached,
        }  # fmt: skip


class CachedAllocRun(AllocatorFamily):
    """The allocator of the 2023 rules that finds blocks by hash."""

    format = Format(
        whole=forms.CachedAllocFile,
        ops=forms.CACHED_ALLOC_OPS,
        answers=_words("handle hit ref same_as error reused free in_use evictable"),
    )

    def __init__(self, scenario: Scenario) -> None:
        num_blocks = scenario.data["num_blocks"]
        self._free_blocks = StackThenEvictor(reversed(range(num_blocks)), keep_all=True)
        self._allocator = CachedAllocator(BlockPool(num_blocks, free_blocks=self._free_blocks))
        self._blocks: dict[int, int] = {}
        self._num_handles = 0

    def names(self, op: Op) -> dict[str, bool]:
        return {} if op["op"] == "allocate" else {"handle": op["handle"] in self._blocks}

    def do(self, op: Op) -> Op:
        kinds: dict[str, Callable[[Op], Op]] = {
            "allocate": self._allocate, "free": self._free, "promote": self._promote,
        }  # fmt: skip
        pool = self._allocator.pool
        answer = kinds[op["op"]](op)
        return answer | {
            "free": pool.num_free,
            "in_use": pool.num_blocks - pool.num_free,
            "evictable": len(self._free_blocks.evictor),
        }

    def _allocate(self, op: Op) -> Op:
        hits = self._allocator.num_hits
        try:
            block = self._allocator.allocate(_key(op["hash"]), op["num_hashed_tokens"])
        except IndexError:
            return {"error": "no_space"}
        handle = self._num_handles
        self._num_handles += 1
        self._blocks[handle] = block
        self._access(block, op["now"])
        return {
            "handle": handle,
            "hit": self._allocator.num_hits > hits,
            "ref": self._allocator.pool.refs[block],
            "same_as": next(h for h, b in self._blocks.items() if b == block),
        }

    def _free(self, op: Op) -> Op:
        block = self._blocks.pop(op["handle"])
        self._access(block, op["now"])
        self._allocator.release(block)
        return {"ref": self._allocator.pool.refs[block]}

    def _promote(self, op: Op) -> Op:
        block, key = self._blocks[op["handle"]], _key(op["hash"])
        assert key is not None
        self._access(block, op["now"])
        promoted = self._blocks[op["handle"]] = self._allocator.promote(block, key)
        self._access(promoted, op["now"])
        return {"reused": promoted != block, "ref": self._allocator.pool.refs[promoted]}

    def _access(self, block: int, now: float) -> None:
        self._allocator.pool.last_accessed[block] = now


def _key(given: int | None) -> bytes | None:
    return None if given is None else b"content" + str(given).encode()
