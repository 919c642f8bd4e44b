"""Compiled grammars of a worker: compiled on a thread of their own, shared by rows with the same grammar."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher

from protos.common.v1 import common_pb2
from svc_common.grammars import GrammarCompiler

log = logging.getLogger(__name__)

MAX_COMPILED = 64
COMPILE_TIMEOUT_S = 10.0


class CompiledGrammar:
    """A grammar that is or was compiled."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[LLMatcher]) -> None:
        self._future = future

    def new_matcher(self) -> LLMatcher | None:
        """A new matcher in its initial state; waits for the compiler. None if compiling failed (the log says why)."""
        try:
            return self._future.result(COMPILE_TIMEOUT_S).deep_copy()
        except TimeoutError:
            log.warning("a grammar was not compiled within %g s; its row fails", COMPILE_TIMEOUT_S)
        except Exception as error:
            log.warning("a row's grammar %s; the row fails", error)
        return None


class GrammarCache:
    """Owner of the compiler, its thread and the last 64 compiled grammars (rows hold their own copies).

    The tokenizer is read in the background from the start: about 1 s for 100,000 tokens.
    """

    def __init__(self, tokenizer_json: bytes, eos_ids: Sequence[int], vocab_size: int) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._compiler = self._pool.submit(GrammarCompiler, tokenizer_json, list(eos_ids), vocab_size)
        self._compiled: OrderedDict[tuple[int, str], CompiledGrammar] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        """Bits of a mask. Valid once a grammar has been compiled."""
        return self._compiler.result().num_tokens

    def compiled(self, grammar: common_pb2.Grammar) -> CompiledGrammar:
        """The grammar, compiled or being compiled. Never waits."""
        key = (grammar.kind, grammar.text)
        known = self._compiled.get(key)
        if known is None:
            known = self._compiled[key] = CompiledGrammar(self._pool.submit(self._compile, grammar))
        self._compiled.move_to_end(key)
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return known

    def _compile(self, grammar: common_pb2.Grammar) -> LLMatcher:
        return self._compiler.result().compile(grammar)
