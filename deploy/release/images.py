"""Container images of a release, as OCI archives that are the same bytes when made again from the same commit and base images."""

import shutil
import subprocess
from datetime import datetime
from pathlib import Path

IMAGES = ("gateway", "scheduler", "worker")
_ASK_S = 20.0


def missing_engine() -> str:
    """Why no image can be built here, in words; empty where one can be."""
    if not shutil.which("docker"):
        return "docker is not installed"
    for command, missing in (
        ("version", "no Docker engine can be reached"),
        ("buildx version", "docker has no buildx"),
    ):
        try:
            subprocess.run(["docker", *command.split()], capture_output=True, check=True, timeout=_ASK_S)
        except (OSError, subprocess.SubprocessError):
            return missing
    return ""


def make_image(name: str, version: str, source: Path, folder: Path, made: datetime) -> Path:
    """Build deploy/NAME.Dockerfile from `source`; layers and configuration get the time `made`.

    BuildKit writes that time into files' time stamps as well (rewrite-timestamp), which needs BuildKit 0.13 or newer.
    """
    target = folder / f"quire-{name}-{version}.oci.tar"
    epoch = int(made.timestamp())
    output = f"type=oci,dest={target},name=quire-{name}:{version},rewrite-timestamp=true"
    subprocess.run(
        [
            *("docker", "buildx", "build", "--provenance=false", "--build-arg", f"SOURCE_DATE_EPOCH={epoch}"),
            *("--output", output, "--file", str(source / "deploy" / f"{name}.Dockerfile"), str(source)),
        ],
        check=True,
    )
    return target
