"""A release made twice, from two clones of one commit in different folders, is the same bytes."""

import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

from deploy.source import ROOT, source_time
from deploy.wheel import PURE, make_wheel, run_setuptools
from tests.install.releases import UMASKS, made, sums

pytestmark = [pytest.mark.soak, pytest.mark.timeout(10_800)]


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two of them."""
    pytest.importorskip("ziglang", reason="ziglang is not installed: make wheel")
    if not (ROOT / ".git").exists():
        pytest.skip("this checkout has no git repository to clone")
    folder = tmp_path_factory.mktemp("releases")
    one, other = (made(folder / name, umask, "--no-images") for name, umask in UMASKS.items())
    return one, other


def test_files_are_the_same(releases: tuple[Path, Path], record_property) -> None:
    """By their checksums, which are those of the files."""
    one, other = map(sums, releases)
    assert one == other
    assert {line.split()[1].partition("-")[0] for line in one.splitlines()} == {"quire", "NOTES.txt"}
    record_property("size", f"{len(one.splitlines())} files, twice")


def test_the_source_distribution_gives_the_same_wheel(releases: tuple[Path, Path]) -> None:
    """Nothing is missing in it."""
    folder = releases[0]
    [sdist], [pure] = folder.glob("*.tar.gz"), folder.glob("*-any.whl")
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(sdist) as packed:
        packed.extractall(scratch, filter="data")
        [unpacked] = Path(scratch).iterdir()
        built = run_setuptools("wheel", unpacked, Path(scratch))
        again = make_wheel(built, PURE, Path(scratch, unpacked.name), source_time())
        assert again.read_bytes() == pure.read_bytes()


def test_every_wheel_has_its_sbom(releases: tuple[Path, Path]) -> None:
    """Where PEP 770 wants it, and listed in RECORD."""
    wheels = list(releases[0].glob("*.whl"))
    assert len(wheels) == 3
    for path in wheels:
        with zipfile.ZipFile(path) as files:
            [sbom] = [name for name in files.namelist() if ".dist-info/sboms/" in name]
            assert f"{sbom},sha256=" in files.read(files.namelist()[-1]).decode()
