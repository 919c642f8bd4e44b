"""What a CUDA graph does, on the fake device: work is recorded once, and repeated without the code that launched it.

Host values are those of the recording, tensors keep their addresses. Refused is what a capture refuses: waiting for the device, and
copies from host memory. What a recording allocated is memory that all recordings share: before one is repeated, it is garbage, that
of the others too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

aten = torch.ops.aten
_COPIES = {aten.copy_, aten._to_copy}
_UNINITIALISED = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided}


class RefusedInRecording(RuntimeError):
    """What CUDA says: operation not permitted when stream is capturing."""


@dataclass(slots=True)
class _Recording:
    calls: list[tuple[Callable[[], Any], list[torch.Tensor]]] = field(default_factory=list)
    own: list[torch.Tensor] = field(default_factory=list)
    """Memory that was allocated meanwhile."""
    num_kernels: int = 0


class Recorder:
    """Recordings of this process. `num_launched`: kernels and operators, outside of recordings; each repetition counts as one."""

    def __init__(self) -> None:
        self._now: _Recording | None = None
        self._made: list[_Recording] = []
        self.num_launched = 0

    @property
    def num_recorded(self) -> list[int]:
        """Launches in each recording, in the order in which they were made."""
        return [made.num_kernels for made in self._made]

    def recorded(self, work: Callable[[], None]) -> Callable[[], None]:
        """What repeats the launches of `work`, which runs once, as the first repetition."""
        made = self._now = _Recording()
        try:
            work()
        finally:
            self._now = None
        self._made.append(made)
        return lambda: self._repeat(made)

    def forget(self) -> None:
        """Recordings so far keep no memory from others. Counting begins."""
        self._made.clear()
        self.num_launched = 0

    def check(self, packet: Any, flat: Sequence[Any], target: torch.device) -> None:
        """Before an operator runs."""
        if (packet in _COPIES and target.type == "cuda") or packet is aten.copy_:
            tensors = [x for x in flat if isinstance(x, torch.Tensor)]
            if any(x.device.type == "cpu" for x in tensors) and any(x.device.type == "cuda" for x in tensors):
                self.refuse(f"{packet} copies between host and device")
            if packet is aten._to_copy and all(x.device.type == "cpu" for x in tensors):
                self.refuse(f"{packet} copies host memory to the device")

    def refuse(self, what: str) -> None:
        """Raises while work is recorded."""
        if self._now is not None:
            raise RefusedInRecording(f"{what}: operation not permitted when stream is capturing")

    def note(self, call: Any, result: Any, *, is_kernel: bool = False) -> None:
        """An operator, with what came of it, or a kernel."""
        launches = is_kernel or is_launch(call.func)
        if self._now is None:
            self.num_launched += launches
            return
        results = [
            x for x in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(x, torch.Tensor)
        ]
        given = {x.untyped_storage().data_ptr() for x in _tensors(call)}
        self._now.num_kernels += launches
        if not is_kernel and call.func.overloadpacket in _UNINITIALISED:
            self._now.own += results
            return
        self._now.own += [x for x in results if x.untyped_storage().data_ptr() not in given]
        self._now.calls.append((call, results))

    def _repeat(self, made: _Recording) -> None:
        self.num_launched += 1
        for recording in self._made:
            for tensor in recording.own:
                _spoil(tensor)
        for call, results in made.calls:
            found = call()
            for old, new in zip(results, found if isinstance(found, (tuple, list)) else [found], strict=False):
                if old is not new:
                    old.copy_(new)


def is_launch(func: Any) -> bool:
    """False for operators that only look at memory in another way, or take some."""
    packet = func.overloadpacket
    returns = func._schema.returns
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return packet not in _UNINITIALISED and not is_view


def _tensors(call: Any) -> list[torch.Tensor]:
    values = [*call.args, *call.keywords.values()]
    nested = [x for value in values for x in (value if isinstance(value, (tuple, list)) else [value])]
    return [x for x in nested if isinstance(x, torch.Tensor)]


def _spoil(tensor: torch.Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else 1)


RECORDER = Recorder()
