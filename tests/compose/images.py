"""Images without a registry: base images from Debian, ours from their Dockerfiles, stand-ins for those that only a registry has.

Builds reach nothing but a folder with Debian packages and wheels, served inside the engine's namespace: the base images are set up
to use it, as those of a company with mirrors are, and the Dockerfiles are those that users build.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.compose.engine import ADDRESS, FOLDER, MIRROR_PORT, Engine
from tests.support.commands import ROOT, Failure, Progress, run
from tests.support.debian import RELEASE, program

OURS = ("gateway", "scheduler", "worker")
STAND_INS = ("jaeger", "collector", "prometheus", "grafana")
_MIRROR = f"http://{ADDRESS}:{MIRROR_PORT}"
_IMPORTED = "quire-test-base"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SETTINGS = {
    "pip.conf": f"[global]\nno-index = true\nfind-links = {_MIRROR}/wheels/\ntrusted-host = {ADDRESS}\n",
    "sources.list": f"deb [trusted=yes] {_MIRROR}/debs ./\n",
    "no-cache": 'APT::Keep-Downloaded-Packages "false";\nDPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb"; };\n',
    "Dockerfile": (
        f"FROM {_IMPORTED}\n"
        f'LABEL quire.stand-in="Debian {RELEASE} with its own Python"\n'
        "COPY pip.conf /etc/pip.conf\n"
        "COPY sources.list /etc/apt/sources.list\n"
        "COPY no-cache /etc/apt/apt.conf.d/no-cache\n"
    ),
}


@dataclass(slots=True, frozen=True)
class ComposeFile:
    """docker-compose.yml as compose understands it, all profiles on."""

    services: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, engine: Engine) -> "ComposeFile":
        """Needs no running engine, only its client."""
        text = engine.docker("compose", "--profile", "*", "config", "--format", "json")
        return cls(json.loads(text)["services"])

    def image(self, service: str) -> str:
        """Its image, tag and all."""
        return str(self.services[service]["image"])


def import_bases(engine: Engine, tar: Path) -> None:
    """The images that our Dockerfiles are FROM, made of `tar`."""
    engine.docker("import", "--change", f"ENV PATH={_PATH}", "--change", 'CMD ["python3"]', tar, _IMPORTED)
    folder = FOLDER / "base"
    folder.mkdir()
    for name, text in _SETTINGS.items():
        (folder / name).write_text(text, encoding="utf-8")
    for image in _bases():
        engine.docker("build", "--quiet", "--tag", image, folder)


def _bases() -> set[str]:
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "deploy").glob("*.Dockerfile"))
    return {image for text in texts for image in re.findall(r"^FROM (\S+)", text, re.M)}


def build_ours(engine: Engine, mirror: Path, progress: Progress) -> None:
    """Gateway, scheduler and worker by `docker compose build`, one after the other; the clock tells each."""
    with engine.serving(mirror):
        for service in OURS:
            with progress.step(f"image of the {service}"):
                engine.docker("compose", "build", service)


def build_stand_ins(engine: Engine, mirror: Path, compose: ComposeFile, progress: Progress) -> None:
    """Images with the names that docker-compose.yml has for what comes from a registry."""
    folder = Path(__file__).parent / "stand_ins"
    with engine.serving(mirror), progress.step("images of the stand-ins"):
        for name in STAND_INS:
            tag = compose.image(name)
            engine.docker("build", "--quiet", "--target", name, "--tag", tag, "--file", folder / "Dockerfile", folder)


def sizes(engine: Engine, compose: ComposeFile) -> dict[str, int]:
    """Bytes of each image, and of the base that they share."""
    names = {service: compose.image(service) for service in (*OURS, *STAND_INS)}
    return {"base": engine.image_bytes(_IMPORTED)} | {name: engine.image_bytes(tag) for name, tag in names.items()}


def make_mirror(folder: Path, debs: Path, wheels: Path) -> Path:
    """One folder with both, by links."""
    mirror = folder / "mirror"
    shutil.rmtree(mirror, ignore_errors=True)
    mirror.mkdir()
    (mirror / "debs").symlink_to(debs)
    (mirror / "wheels").symlink_to(wheels)
    return mirror


def client_version() -> str:
    """Of docker's client, for the report."""
    return run(program("docker"), "--version").strip()


def check_no_images(engine: Engine) -> None:
    """`Failure` unless the engine starts without any."""
    if found := engine.docker("image", "ls", "--quiet").split():
        raise Failure(f"the engine already had {len(found)} images")
