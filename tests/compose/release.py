"""`make release` with images, twice from new clones of one commit: the same bytes, and images that run."""

import tempfile
from pathlib import Path

from deploy.release.images import IMAGES
from tests.compose.engine import Engine
from tests.install.releases import UMASKS, made, sums
from tests.support.commands import Failure, Progress


def check(engine: Engine, mirror: Path, progress: Progress) -> None:
    """Failure where a file differs, or an image does not answer."""
    with tempfile.TemporaryDirectory(prefix="quire-releases-") as scratch, engine.serving(mirror):
        found = []
        for name, umask in UMASKS.items():
            with progress.step(f"release in {name}"):
                found.append(made(Path(scratch, name), umask, environ=engine.environ))
            # The other one is not to find the layers of this one.
            engine.docker("buildx", "prune", "--all", "--force")
        one, other = (sums(release).splitlines() for release in found)
        if different := sorted(set(one) ^ set(other)):
            raise Failure("two releases of one commit differ:\n" + "\n".join(different))
        progress.say(f"{len(one)} files, twice the same bytes:\n" + "\n".join(one))
        for name in IMAGES:
            _runs(engine, name, found[0], progress)


def _runs(engine: Engine, name: str, release: Path, progress: Progress) -> None:
    """Load the image and ask it for its version, with nothing of the container's to write to and no network."""
    [archive] = release.glob(f"quire-{name}-*.oci.tar")
    tag = f"quire-{name}:{archive.name.removeprefix(f'quire-{name}-').removesuffix('.oci.tar')}"
    engine.docker("load", "--input", archive)
    options = ("--rm", "--read-only", "--network", "none", "--cap-drop", "ALL", "--entrypoint", "quire")
    said = engine.docker("run", *options, tag, "--version").strip()
    if not said.endswith(tag.partition(":")[2]):
        raise Failure(f"{tag} says that it is {said}")
    progress.say(f"{tag}: {archive.stat().st_size / 1e6:.0f} MB; it runs, and says {said!r}")
