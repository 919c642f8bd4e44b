"""Errors of models and sizes that cannot be divided over ranks."""

from svc_common.errors import ConfigError


def refused(what: str, **metadata: str) -> ConfigError:
    """ConfigError that says `what` about --tensor-parallel."""
    return ConfigError(f"--tensor-parallel: {what}", reason="TENSOR_PARALLEL", metadata=metadata)


def advice(value: int) -> str:
    """Numbers of ranks up to 8 that divide `value`."""
    return ", ".join(str(count) for count in range(1, 9) if value % count == 0)
