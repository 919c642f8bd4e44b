"""Download models from the hub, or find them in its cache: safetensors, configuration, tokenizer, chat template. No code.

Uses huggingface_hub: HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN and HF_HOME have the same meaning as there;
interrupted downloads resume, and progress is shown on a terminal.
"""

import fnmatch
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from quire.sizes import size_text
from svc_common.errors import ConfigError, QuireError, Unavailable

_SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_WEIGHTS = "*.safetensors"
# Copies of the same weights for other programs: in folders (onnx/, original/), or as one file beside the
# shards.
_NOT_OURS = ("*/*", "consolidated*")
_PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_TIMEOUT_S = 10.0


def download(name: str, revision: str | None, *, weights: bool = True) -> Path:
    """The folder with the files of ORG/NAME; see quire.hub.checkpoint_folder."""
    wanted = [*_SMALL_FILES, *([_WEIGHTS] if weights else [])]
    with _explained(name, revision):
        listed = _listing(name, revision)
        if listed is not None:
            _check(name, [*listed])
            _say(f"{name}: {_size(listed, wanted)}from {constants.ENDPOINT} into {constants.HF_HUB_CACHE}")
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=wanted,
            ignore_patterns=list(_NOT_OURS),
            local_files_only=listed is None,
            etag_timeout=_TIMEOUT_S,
        )
    return Path(folder)


def _size(listed: Mapping[str, int], wanted: Sequence[str]) -> str:
    """Size of the wanted files, with a space after it; empty if the hub does not say."""
    files = (name for name in listed if not any(fnmatch.fnmatch(name, form) for form in _NOT_OURS))
    num_bytes = sum(listed[name] for name in files if any(fnmatch.fnmatch(name, form) for form in wanted))
    return f"{size_text(num_bytes)} " if num_bytes else ""


def _listing(name: str, revision: str | None) -> dict[str, int] | None:
    """Files on the hub and their sizes, 0 = unknown; None if it cannot be reached, so that the cache must suffice."""
    if constants.HF_HUB_OFFLINE:
        return None
    try:
        model = HfApi().model_info(name, revision=revision, timeout=_TIMEOUT_S, files_metadata=True)
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError):
        raise
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code < 500:
            raise
        return _unreachable(error)
    except (OSError, OfflineModeIsEnabled) as error:
        return _unreachable(error)
    except Exception as error:
        # The library's HTTP client differs between releases, and with it the class of a connection error.
        if not _is_connection_error(error):
            raise
        return _unreachable(error)
    return {file.rfilename: file.size or 0 for file in model.siblings or ()}


def _unreachable(error: Exception) -> dict[str, int] | None:
    _say(f"{constants.ENDPOINT} does not answer ({type(error).__name__}); looking into the cache")
    return None


def _is_connection_error(error: Exception) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(names & {"TransportError", "ConnectionError", "RequestException"})


def _check(name: str, files: Sequence[str]) -> None:
    """Raise ConfigError for a model that cannot be served, before anything large is downloaded."""
    top = [file for file in files if "/" not in file]
    if "config.json" not in top:
        raise _error("MODEL_INCOMPLETE", name, "has no config.json: it is no checkpoint of transformers' form")
    if any(fnmatch.fnmatch(file, _WEIGHTS) and not file.startswith("consolidated") for file in top):
        return
    pickled = sorted(file for file in top if any(fnmatch.fnmatch(file, form) for form in _PICKLED))
    if pickled:
        raise _error(
            "PICKLED_WEIGHTS",
            name,
            f"has only pickled weights ({pickled[0]}), which can run any code when they are opened and are not downloaded. Get "
            f"them yourself (hf download {name} --local-dir FOLDER), then: quire convert FOLDER NEW_FOLDER",
        )
    raise _error("MODEL_INCOMPLETE", name, "has no *.safetensors")


@contextmanager
def _explained(name: str, revision: str | None) -> Iterator[None]:
    """Convert the library's errors to Quire's."""
    try:
        yield
    except GatedRepoError:
        raise _error(
            "MODEL_GATED",
            name,
            f"is gated: accept its terms at {constants.ENDPOINT}/{name}, then set HF_TOKEN to a token of yours (or: hf auth login)",
        ) from None
    except RepositoryNotFoundError:
        raise _error(
            "MODEL_NOT_FOUND",
            name,
            f"is no folder here and no model at {constants.ENDPOINT}; check the name, and set HF_TOKEN if it is private",
        ) from None
    except RevisionNotFoundError:
        raise _error(
            "REVISION_NOT_FOUND", name, f"has no revision {revision!r} at {constants.ENDPOINT}; check --revision"
        ) from None
    except HFValidationError as error:
        raise _error("MODEL_NOT_FOUND", name, f"is no folder here, and no name of a model: {error}") from None
    except LocalEntryNotFoundError:
        raise _not_cached(name) from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        raise Unavailable(
            f"--model {name}: {constants.ENDPOINT} answered {status}; try again later", reason="HUB_UNREACHABLE"
        ) from None
    except OSError as error:
        raise Unavailable(
            f"--model {name}: the download broke off ({error}); the same command goes on where it ended",
            reason="HUB_UNREACHABLE",
        ) from None


def _not_cached(name: str) -> QuireError:
    cache = constants.HF_HUB_CACHE
    if constants.HF_HUB_OFFLINE:
        what = f"HF_HUB_OFFLINE is set, and {cache} does not have all of it: unset it"
    else:
        what = f"{constants.ENDPOINT} does not answer, and {cache} does not have all of it: check the network, or HF_ENDPOINT"
    return Unavailable(
        f"--model {name} is no folder here; {what}; or copy the checkpoint here and name its folder",
        reason="HUB_UNREACHABLE",
        metadata={"model": name, "endpoint": constants.ENDPOINT},
    )


def _error(reason: str, name: str, what: str) -> ConfigError:
    return ConfigError(f"--model {name} {what}", reason=reason, metadata={"model": name})


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
