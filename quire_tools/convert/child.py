"""The child process that opens one pickled file: `python -I child.py SOURCE DESTINATION`. Imports nothing of Quire.

Three barriers, each sufficient by itself: torch's restricted unpickler (`weights_only`) builds only tensors
and plain containers and refuses every other name; an audit hook stops any attempt to start a process, open
a connection or write a file from Python; and the process has limits for memory, time and file sizes and, if
the system permits, no network.

Writes one JSON object per line to standard output: {"walls": ...}, {"tensor": ...} for each tensor, and
{"done": true} or {"error": ...}.
"""

import ctypes
import hashlib
import json
import os
import re
import resource
import sys
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save_file

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_FORBIDDEN = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.startfile", "os.remove",
    "os.rename", "os.rmdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate", "os.kill", "os.putenv", "shutil.",
    "ctypes.", "pty.", "pickle.find_class", "urllib.", "ftplib.", "smtplib.", "webbrowser.",
)  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_BASE_BYTES, _FILE_FACTOR, _MIN_SECONDS, _SLOWEST_BYTES_PER_S = 2 << 30, 4, 120, 5_000_000
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")


class Refused(Exception):
    """The file cannot be converted; the message says why."""


def say(**values: Any) -> None:
    """Write one line for the parent process."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def leave_the_network() -> bool:
    """Move to a new, empty network namespace; returns False if the system does not permit it."""
    try:
        return bool(ctypes.CDLL(None).unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0)
    except (OSError, AttributeError):
        return False


def limit(num_bytes: int) -> None:
    """Limit memory, time and file size in proportion to the size of the file; disable core dumps."""
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    most = mapped + _BASE_BYTES + _FILE_FACTOR * num_bytes
    seconds = _MIN_SECONDS + num_bytes // _SLOWEST_BYTES_PER_S
    for kind, value in (
        (resource.RLIMIT_AS, most),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, _BASE_BYTES + _FILE_FACTOR * num_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def forbid(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook that raises Refused; it cannot be removed once installed."""
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES
    if writes or event.startswith(_FORBIDDEN):
        raise Refused(f"it tries {event}, which is not allowed here")


def load(source: str) -> dict[str, torch.Tensor]:
    """Load tensors by name. Raises Refused if the file is not a checkpoint."""
    with open(source, "rb") as file:
        is_zip = file.read(2) == b"PK"  # the format since torch 1.6; only that can be mapped
    try:
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=is_zip)
    except Refused:
        raise
    except Exception as error:  # damaged or hostile files may raise anything
        raise Refused(_why(error)) from None
    return tensors_of(content)


def _why(error: Exception) -> str:
    text = str(error)
    named = re.search(r"GLOBAL (\S+)|(?:global|class|function) [`']?([\w.]+\.[\w.]+)", text)
    if "nsupported" in text and named:
        return f"it wants to run {named[1] or named[2]}, as a pickle can; nothing of it was run"
    lines = [line for line in text.splitlines() if line.strip()]
    return f"it cannot be read as weights ({type(error).__name__}: {lines[0][:200] if lines else 'no reason given'})"


def tensors_of(content: Any) -> dict[str, torch.Tensor]:
    """Tensors of a state dict, possibly nested in a training checkpoint."""
    for name in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            say(note=f"the weights are in its entry {name!r}")
            content = content[name]
    if not isinstance(content, Mapping):
        raise Refused(f"it holds a {type(content).__name__}, not tensors by name")
    tensors = {str(name): value for name, value in content.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise Refused("there are no tensors in it")
    left_out = [str(name) for name in content if name not in tensors]
    if left_out:
        say(note=f"left out, as they are no tensors: {', '.join(left_out[:5])}{' ...' if len(left_out) > 5 else ''}")
    return tensors


def unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors with separate memory, since safetensors has no views. Of names that share memory, each is written."""
    seen: set[int] = set()
    own, shared = {}, []
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise Refused(f"{name} is a sparse or quantized tensor, which safetensors does not have")
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen:
            shared.append(name)
        alone = storage.data_ptr() not in seen and storage.nbytes() == tensor.nbytes
        seen.add(storage.data_ptr())
        own[name] = (tensor if alone else tensor.clone(memory_format=torch.contiguous_format)).detach().contiguous()
    if shared:
        say(
            note=f"{len(shared)} tensors share memory with others and have a copy of their own: {', '.join(shared[:3])}"
        )
    return own


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 (hex) of the tensor's bytes in memory order."""
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def convert(source: str, destination: str) -> None:
    """Convert one file."""
    limit(os.path.getsize(source))
    sys.addaudithook(forbid)
    tensors = unshared(load(source))
    for name, tensor in tensors.items():
        say(
            tensor=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            num_bytes=tensor.nbytes,
            sha256=digest(tensor),
        )
    save_file(tensors, destination, metadata={"format": "pt"})


def main() -> None:
    """Exit with status 0 after "done", or 1 after "error"."""
    torch.set_num_threads(1)
    say(walls={"network": leave_the_network()})
    try:
        convert(*sys.argv[1:3])
    except Refused as error:
        say(error=str(error))
        sys.exit(1)
    except (MemoryError, OSError, RuntimeError, ValueError) as error:
        say(error=f"{type(error).__name__}: {str(error)[:300]}")
        sys.exit(1)
    say(done=True)


if __name__ == "__main__":
    main()
