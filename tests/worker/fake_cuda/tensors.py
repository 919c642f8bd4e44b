"""A CUDA device that is none: tensors that say "cuda:0", hold their values on the host, and refuse what CUDA refuses.

`install` registers every operator of the dispatch key CUDA, which a torch without CUDA leaves empty, for good: it is for a process
of its own. Results are computed by the host's kernels, so they are those of the same code on the CPU. Checked are devices: tensors
of host and device do not mix, except where CUDA lets them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from triton.runtime import interpreter

from tests.support.triton_interpreter import patch_once_per_launch
from tests.worker.fake_cuda.ledger import LEDGER
from tests.worker.fake_cuda.recorder import RECORDER, is_launch

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")
aten = torch.ops.aten

_COPIES = {aten.copy_, aten._to_copy, aten.to}
# Index tensors may lie on the host; what is written may not, but for single values.
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
_READ_BY_THE_HOST = {aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.item}
# Kernels of which a result's size depends on values: the host waits for it.
_SIZED_BY_VALUES = {aten.nonzero, aten.masked_select, aten.unique_dim, aten._unique2, aten.unique_consecutive}
# Made by an empty tensor that is filled: these have no kernel of their own to be left to.
_FACTORIES = (
    "arange",
    "arange.start",
    "arange.start_step",
    "linspace",
    "randperm",
    "randperm.generator",
    "eye",
    "eye.m",
)


class WrongDevice(RuntimeError):
    """What CUDA would refuse."""


class DeviceTensor(torch.Tensor):
    """A tensor of the device. `inner`: its values, on the host."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "DeviceTensor":
        """Shares the values of `inner`."""
        assert type(inner) is torch.Tensor, type(inner)
        # Never an inference tensor itself, so that any of its views may be one or not.
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=DEVICE,
            )
        made.inner = inner
        LEDGER.hold(made, inner.untyped_storage())
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any operator with a tensor of the device among its arguments."""
        return _run(func, args, kwargs or {})

    # What torch enters with a guard of the device, which a torch without CUDA has not, goes in by another door.

    def __getitem__(self, index: Any) -> Any:
        return _faced(self)[_mapped(_faced, index)]

    def __setitem__(self, index: Any, value: Any) -> None:
        _faced(self)[_mapped(_faced, index)] = _faced(value)

    def __float__(self) -> float:
        return float(_faced(self))

    def __int__(self) -> int:
        return int(_faced(self))

    def __index__(self) -> int:
        return int(_faced(self))

    def __invert__(self) -> torch.Tensor:
        return torch.bitwise_not(self)

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> "DeviceTensor":
        _run(aten.copy_.default, (self, source, non_blocking), {})
        return self

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        return self if self.is_contiguous(memory_format=memory_format) else self.clone(memory_format=memory_format)

    def nonzero(self, *, as_tuple: bool = False) -> Any:
        return _faced(self).nonzero(as_tuple=as_tuple)

    def tolist(self) -> Any:
        """Torch has none for subclasses."""
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        """Where the values are."""
        return self.inner.data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeviceTensor({self.inner!r})"


class _Faced(torch.Tensor):
    """Stands for a tensor of the device where torch must not see which device it is."""

    inner: DeviceTensor

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _faced(value: Any) -> Any:
    if not isinstance(value, DeviceTensor):
        return value
    made = torch.Tensor._make_wrapper_subclass(
        _Faced, value.size(), strides=value.stride(), storage_offset=value.storage_offset(), dtype=value.dtype
    )
    made.inner = value
    return made


class Waits:
    """How often the host waited for the device. `inside`: counts from now on."""

    def __init__(self) -> None:
        self.seen: list[str] = []


WAITS = Waits()

LAUNCHES: list[Callable[[Sequence[Any]], None]] = []
"""Called with the arguments of each operator that launches work, and of each kernel, before it runs."""


# torch's own maps over trees take more time than the operators.


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """The same with each leaf of its tuples and lists changed."""
    if type(value) in (tuple, list):
        return type(value)([_mapped(change, part) for part in value])
    return change(value)


def _leaves(value: Any) -> Iterator[Any]:
    """Of tuples and lists."""
    if type(value) in (tuple, list):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _everywhere(
    change: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return _mapped(change, tuple(args)), {name: _mapped(change, value) for name, value in kwargs.items()}


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    packet = func.overloadpacket
    args, kwargs = _everywhere(lambda x: x.inner if isinstance(x, _Faced) else x, args, kwargs)
    if packet is aten.to:
        args, kwargs = _everywhere(lambda x: _indexed(x) if isinstance(x, torch.device) else x, args, kwargs)
        decomposed = func.decompose(*args, **kwargs)
        assert decomposed is not NotImplemented
        return decomposed
    flat = [*_leaves(args), *_leaves([*kwargs.values()])]
    _check_devices(func, args, kwargs, [x for x in flat if isinstance(x, torch.Tensor)])
    target = _target(kwargs, flat)
    _note_wait(packet, args, kwargs, target)
    generator = kwargs.get("generator")
    if generator is not None and target == DEVICE and generator.device.type == "cpu":
        raise WrongDevice(f"{func}: Expected a 'cuda' device type for generator but found 'cpu'")
    RECORDER.check(packet, flat, target)
    if is_launch(func):
        _tell(flat)
    plain_kwargs = {name: _plain(value) for name, value in kwargs.items() if name != "pin_memory"}
    if "device" in plain_kwargs:
        plain_kwargs["device"] = CPU
    if packet is aten.histc and not args[0].is_floating_point():
        # CUDA counts integers, the host does not.
        return DeviceTensor(func(args[0].inner.double(), *args[1:], **plain_kwargs).to(args[0].dtype))
    plain_args = [_plain(value) for value in args]
    result = func(*plain_args, **plain_kwargs)
    RECORDER.note(partial(func, *plain_args, **plain_kwargs), result)
    return _wrapped(func, flat, result, target)


def _tell(used: Sequence[Any]) -> None:
    for watch in LAUNCHES:
        watch(used)


def _indexed(device: torch.device) -> torch.device:
    return DEVICE if device.type == "cuda" else device


def _plain(value: Any) -> Any:
    return _mapped(lambda x: x.inner if isinstance(x, DeviceTensor) else x, value)


def _target(kwargs: dict[str, Any], flat: list[Any]) -> torch.device:
    """Where results lie: where they were asked for, else where arguments are."""
    wanted = kwargs.get("device")
    if wanted is not None:
        return DEVICE if torch.device(wanted).type == "cuda" else CPU
    return DEVICE if any(isinstance(x, DeviceTensor) for x in flat) else CPU


def _wrapped(func: Any, flat: list[Any], result: Any, target: torch.device) -> Any:
    """Results as tensors of `target`; one of the arguments `flat` that comes back is that argument."""
    known = {id(x.inner): x for x in flat if isinstance(x, DeviceTensor)}
    for x in known.values():
        if x.shape != x.inner.shape:
            raise NotImplementedError(f"{func} resizes a tensor, which the fake device cannot")

    def wrap(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, DeviceTensor):
            return x
        if id(x) in known:
            return known[id(x)]
        return DeviceTensor(x) if target == DEVICE else x

    return _mapped(wrap, result)


# --- what CUDA refuses -----------------------------------------------------------------------------------------------


def _check_devices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> None:
    packet = func.overloadpacket
    if packet in _COPIES or not any(isinstance(x, DeviceTensor) for x in tensors):
        return
    if packet in _INDEXED:
        if not isinstance(args[0], DeviceTensor):
            raise WrongDevice(f"{func}: indices should be on the same device as the indexed tensor (cpu)")
        # Any index; a value only if it is a single one.
        tensors = [x for x in args[2:3] if isinstance(x, torch.Tensor)]
        allowed = lambda x: x.dim() == 0  # noqa: E731
    elif torch.Tag.pointwise in func.tags or packet in {aten.masked_fill, aten.masked_fill_, aten.fill_, aten.where}:
        allowed = lambda x: x.dim() == 0  # noqa: E731
    else:
        allowed = lambda _: False  # noqa: E731
    for x in tensors:
        if not isinstance(x, DeviceTensor) and x.device.type == "cpu" and not allowed(x):
            raise WrongDevice(
                f"{func}: Expected all tensors to be on the same device, but found cuda:0 and cpu {tuple(x.shape)}"
            )
    written = kwargs.get("out")
    if written is None and func._schema.name.endswith("_") and args:
        written = args[0]
    if isinstance(written, torch.Tensor) and not isinstance(written, DeviceTensor):
        raise WrongDevice(f"{func}: writes to the host what is on the device")


def _note_wait(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: torch.device) -> None:
    """Where CUDA makes the host wait for all that is queued."""
    leaves = [*_leaves(args)]
    reads = packet in _READ_BY_THE_HOST | _SIZED_BY_VALUES
    masks = packet in _INDEXED and any(
        isinstance(x, DeviceTensor) and x.dtype in {torch.bool, torch.uint8} for x in _leaves(args[1])
    )
    to_host = packet is aten._to_copy and target == CPU and any(isinstance(x, DeviceTensor) for x in leaves)
    into_host = packet is aten.copy_ and not isinstance(args[0], DeviceTensor)
    waits = (to_host or into_host) and not (
        kwargs.get("non_blocking") or (packet is aten.copy_ and args[2:] == (True,))
    )
    if reads or masks or waits:
        RECORDER.refuse(f"{packet} waits for the device")
        WAITS.seen.append(str(packet))


# --- the device is there ---------------------------------------------------------------------------------------------


def _kernel_of(func: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _run(func, args, kwargs)


_LIBRARIES: list[torch.library.Library] = []


def install() -> None:
    """From now on, for the rest of the process, "cuda:0" is there: as tensors, and for Triton's interpreter."""
    if _LIBRARIES:
        return
    assert not torch.cuda.is_available(), "there is a real one"
    torch.cuda._lazy_init = lambda: None
    # What transformers asks before it chooses how experts are multiplied.
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "CUDA")
    some = torch.library.Library("aten", "IMPL")
    for name in ("copy_", *_FACTORIES):
        packet, _, overload = name.partition(".")
        some.impl(name, _kernel_of(getattr(getattr(aten, packet), overload or "default")), "CUDA")
    _LIBRARIES.extend((everything, some))
    patch_once_per_launch()
    interpreter.GridExecutor.__call__ = _launched(interpreter.GridExecutor.__call__)


def _launched(inner: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel launch: every tensor must be the device's."""

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()):
            if isinstance(x, torch.Tensor) and not isinstance(x, DeviceTensor):
                raise WrongDevice(f"a pointer of shape {tuple(x.shape)} cannot be accessed from Triton (cpu tensor?)")
        _tell([*args, *kwargs.values()])
        call = partial(inner, self, *map(_plain, args), **{name: _plain(value) for name, value in kwargs.items()})
        RECORDER.note(call, None, is_kernel=True)
        return call()

    return launch
