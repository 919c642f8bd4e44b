"""What Debian has: a Docker engine, compose and buildx, a root file system for base images, packages for builds.

Everything is fetched from the mirror that this machine's apt uses and checked against Debian's keys. PROGRAMS that are
missing are installed; the rest is only unpacked or kept in the cache folder.
"""

import gzip
import hashlib
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.commands import Failure, Progress, run

PROGRAMS = {
    "docker": "docker.io",
    "runc": "runc",
    "iptables": "iptables",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "nsenter": "util-linux",
}
RELEASE = "bookworm"
"""Of the base images: that of python:3.11-slim-bookworm."""
DOCKER_RELEASE = "trixie"
"""Of compose 2, buildx, and an engine that can make an image twice alike (BuildKit 0.13): bookworm has them not, or older ones."""
PLUGINS = ("docker-compose", "docker-buildx")
ENGINE = ("docker.io", "containerd")
"""Without runc, which needs a newer libc than bookworm's: that of PROGRAMS does."""
IN_BASE = ("python3", "python3-venv", "ca-certificates")
FOR_BUILDS = ("gcc", "libc6-dev", "prometheus", "busybox")
"""What Dockerfiles install by apt: ours, and those of the stand-ins."""
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
MIRROR_VARIABLE = "QUIRE_COMPOSE_MIRROR"
_POLICY = Path("/usr/sbin/policy-rc.d")


def program(name: str) -> str:
    """Path of one of PROGRAMS, or of docker's client; never one of /usr/local, which need not be the engine's own."""
    for folder in ("/usr/sbin", "/usr/bin", "/sbin", "/bin"):
        if os.access(Path(folder, name), os.X_OK):
            return str(Path(folder, name))
    raise Failure(f"{name} is not there")


def install_programs(progress: Progress, names: Collection[str] = tuple(PROGRAMS)) -> None:
    """Those of PROGRAMS that are missing, by apt. `Failure` where that cannot be."""
    missing = sorted({PROGRAMS[name] for name in names if not _is_there(name)})
    if not KEYRING.exists():
        missing.append("debian-archive-keyring")
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise Failure(f"these packages are needed, and root and apt to install them: {' '.join(missing)}")
    with progress.step(f"installing {' '.join(missing)}"), _nothing_is_started():
        run("apt-get", "update", "-qq")
        options = ("--yes", "--no-install-recommends")
        run("apt-get", "install", *options, *missing, environ={"DEBIAN_FRONTEND": "noninteractive"})


def _is_there(name: str) -> bool:
    try:
        return bool(program(name))
    except Failure:
        return False


@contextmanager
def _nothing_is_started() -> Iterator[None]:
    """Debian's packages start their daemons when installed, unless this file says no."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n", encoding="utf-8")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()


def mirror() -> str:
    """Address of the mirror that apt has for Debian on this machine."""
    if given := os.environ.get(MIRROR_VARIABLE):
        return given
    listed = run("apt-get", "indextargets", "--format", "$(REPO_URI)", f"Codename: {RELEASE}").split()
    if not listed:
        raise Failure(f"this machine's apt knows no mirror of Debian {RELEASE}: give one in {MIRROR_VARIABLE}")
    return listed[0]


@dataclass(slots=True, frozen=True)
class Apt:
    """apt with lists, cache and status of its own under `folder`, for `release`; the machine's are not touched.

    `installed` is a dpkg status file: what counts as being there already. `architecture`: where it is not this machine's.
    """

    folder: Path
    release: str
    installed: Path | None = None
    architecture: str | None = None

    def fetch(self, *packages: str, with_dependencies: bool) -> list[Path]:
        """The .deb files of `packages`, newest of the release."""
        archives = self.folder / "cache" / "archives"
        for needed in (archives / "partial", self.folder / "lists" / "partial", self.folder / "state"):
            needed.mkdir(parents=True, exist_ok=True)
        source = f"deb [signed-by={KEYRING}] {mirror()} {self.release} main\n"
        (self.folder / "sources.list").write_text(source, encoding="utf-8")
        run("apt-get", *self._options(), "update", "-qq")
        if with_dependencies:
            wanted = ("install", "--yes", "--download-only", "--no-install-recommends", *packages)
            run("apt-get", *self._options(), *wanted)
        else:
            run("apt-get", *self._options(), "download", *packages, cwd=archives)
        return sorted(archives.glob("*.deb"))

    def _options(self) -> list[str]:
        status = self.installed or self.folder / "status"
        status.touch()
        values: dict[str, Path | str] = {
            "Dir::State": self.folder / "state",
            "Dir::State::status": status,
            "Dir::State::lists": self.folder / "lists",
            "Dir::Cache": self.folder / "cache",
            "Dir::Etc::sourcelist": self.folder / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "APT::Sandbox::User": "root",
            "Debug::NoLocking": "true",
        }
        if self.architecture is not None:
            values |= {"APT::Architecture": self.architecture, "APT::Architectures::": self.architecture}
        return [word for name, value in values.items() for word in ("-o", f"{name}={value}")]


@dataclass(slots=True, frozen=True)
class Docker:
    """What is unpacked of DOCKER_RELEASE. `config`: for DOCKER_CONFIG, with compose and buildx. `path`: PATH with dockerd first."""

    config: Path
    path: str


def fetch_docker(folder: Path) -> Docker:
    """Engine and plugins, kept in `folder`."""
    root, config = folder / "docker", folder / "docker-config"
    if not (root / ".complete").exists():
        shutil.rmtree(root, ignore_errors=True)
        for package in (*PLUGINS, *ENGINE):
            (deb,) = Apt(folder / "for-docker" / package, DOCKER_RELEASE).fetch(package, with_dependencies=False)
            run("dpkg", "-x", deb, root)
        shutil.copytree(root / "usr/libexec/docker/cli-plugins", config / "cli-plugins", dirs_exist_ok=True)
        (root / ".complete").touch()
    path = (root / "usr/sbin", root / "usr/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
    return Docker(config, os.pathsep.join(map(str, path)))


def make_base(folder: Path) -> Path:
    """A tar file of Debian with Python: what base images are imported from."""
    tar, root = folder / "base.tar", folder / "base"
    if not tar.exists():
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        run(
            program("debootstrap"),
            "--variant=minbase",
            f"--include={','.join(IN_BASE)}",
            f"--keyring={KEYRING}",
            RELEASE,
            root,
            mirror(),
        )
        shutil.copy(root / "var/lib/dpkg/status", folder / "base.status")
        (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        for litter in (root / "var/cache/apt/archives", root / "var/lib/apt/lists"):
            shutil.rmtree(litter)
            litter.mkdir()
        partial = tar.with_suffix(".partial")
        run("tar", "-C", root, "--numeric-owner", "-cf", partial, ".")
        partial.rename(tar)
        shutil.rmtree(root)
    return tar


def fetch_for_builds(folder: Path) -> Path:
    """Folder that apt can use as a repository (`deb [trusted=yes] URL ./`): FOR_BUILDS and what they depend on."""
    repository = folder / "debs"
    if not (repository / "Packages.gz").exists():
        apt = Apt(folder / "for-builds", RELEASE, folder / "base.status")
        found = apt.fetch(*FOR_BUILDS, with_dependencies=True)
        shutil.rmtree(repository, ignore_errors=True)
        repository.mkdir()
        for deb in found:
            shutil.move(deb, repository / deb.name.replace("%3a", "_"))
        index = "\n".join(map(_entry, sorted(repository.glob("*.deb"))))
        (repository / "Packages.gz").write_bytes(gzip.compress(index.encode()))
    return repository


def _entry(deb: Path) -> str:
    digest = hashlib.sha256(deb.read_bytes()).hexdigest()
    control = run("dpkg-deb", "--field", deb).strip()
    return f"{control}\nFilename: ./{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {digest}\n"
