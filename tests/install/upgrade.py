"""`python -m tests.install.upgrade NEW_WHEEL [--old WHEEL | --from REVISION]`: an upgrade under load, as `make test-upgrade` does.

The old release's worker, scheduler and two gateways serve its own clients, whose streams are resumable. One after the other each
service is ended by SIGTERM and replaced by the new release's. No request may fail, and no token may change. Needs what
`python -m tests.install` needs, twice. Exit status 0 when that holds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from quire.local_stack.ports import reserved
from tests.install.checks import named_command
from tests.install.environment import Environment
from tests.repo.checkout import checkout
from tests.support.commands import ROOT, Failure, Progress, run
from tests.support.stack.supervised import is_serving

SERVICES = ("worker", "scheduler", "gateway-1", "gateway-2")
"""In the order in which they are replaced."""
NUM_ENDED = 4
"""Streams that have to end between one replacement and the next."""
_PATIENCE_S = 600.0
_WAITS = {
    "worker": (),
    "scheduler": ("--no-worker-timeout-s", "300", "--frontend-grace-s", "60"),
    "gateway": ("--scheduler-away-s", "300"),
}
"""Longer than the defaults: the machine that runs this may load a model slowly."""


class Services:
    """Processes, each of the release that it was last started from, at ports that stay.

    `ports`: by name of the service, and "http" where the gateway's HTTP port is to stay too. `options`: by kind of service.
    """

    def __init__(
        self,
        ports: Mapping[str, int],
        folder: Path,
        host: str = "127.0.0.1",
        options: Mapping[str, Sequence[str]] = _WAITS,
    ) -> None:
        self._ports, self._folder, self._host, self._more = ports, folder, host, options
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def address(self, name: str) -> str:
        """Where it listens."""
        return f"{self._host}:{self._ports[name]}"

    def start(self, name: str, environment: Environment) -> None:
        """Start it; `wait_serving` waits for it. It ends with this process."""
        kind = name.partition("-")[0]
        command = [
            environment.bin / "quire",
            *("serve", kind, "--host", self._host, "--port", str(self._ports[name])),
            *self._options(kind, environment),
            "--stop-with-stdin",
        ]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, cwd=environment.empty, env=environment.environ, stdin=subprocess.PIPE, stdout=log, stderr=log
            )

    def wait_serving(self, name: str) -> None:
        """Until its health says that it serves: a worker does when a scheduler has allocated its cache."""
        until(lambda: self._serves(name), f"the {name} serves", self.log(name))

    def _options(self, kind: str, environment: Environment) -> tuple[str, ...]:
        peers = {
            "worker": ("--model", built_in_model(environment), "--metrics-port", "0"),
            "scheduler": ("--worker", self.address("worker"), "--admin-port", "0", "--metrics-port", "0"),
            "gateway": (
                *("--scheduler", self.address("scheduler")),
                *("--http-port", str(self._ports.get("http", 0)), "--admin-port", "0", "--admin-http-port", "0"),
            ),
        }
        return (*peers[kind], *self._more[kind])

    def _serves(self, name: str) -> bool:
        if (status := self._processes[name].poll()) is not None:
            raise Failure(f"the {name} ended with status {status}: {self.log(name)}")
        return is_serving(self.address(name))

    def stop(self, name: str) -> None:
        """End it as an orchestrator does; it must end by itself, without an error."""
        process = self._processes.pop(name)
        process.terminate()
        if status := process.wait(timeout=_PATIENCE_S):
            raise Failure(f"the {name} ended with status {status} after SIGTERM: {self.log(name)}")

    def log(self, name: str) -> str:
        """The end of what it wrote."""
        return (self._folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")[-1500:]

    def close(self) -> None:
        """End what runs, in whatever state it is."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Clients:
    """upgrade_load.py in the old release's environment. Context manager."""

    def __init__(self, environment: Environment, targets: str) -> None:
        command = [environment.python, "-P", Path(__file__).with_name("upgrade_load.py"), targets]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, cwd=environment.empty, env=environment.environ, text=True, **pipes)
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        self._lines.extend(self._process.stdout)

    def wait_ready(self) -> None:
        """Until the undisturbed streams have been read."""
        until(lambda: self._lines, "the clients have read their streams undisturbed")

    def wait_ended(self, count: int) -> None:
        """Until that many more streams have ended."""
        wanted = len(self._lines) + count
        until(lambda: len(self._lines) >= wanted or self._process.poll() is not None, f"{count} streams end")

    def phase(self, name: str) -> None:
        """What happens from now on."""
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()

    def report(self) -> dict[str, Any]:
        """Let the streams end; what they gave."""
        self._process.stdin.close()
        self._process.wait(timeout=_PATIENCE_S)
        self._reader.join()
        found: dict[str, Any] = json.loads(self._lines[-1])
        return found

    def close(self) -> None:
        """End it if it runs."""
        self._process.kill()
        self._process.wait()


def built_in_model(environment: Environment) -> str:
    """Folder of the model that the installation carries."""
    [found] = environment.folder.glob("venv/lib/python*/site-packages/quire/tiny")
    return str(found)


def until(holds: Any, what: str, log: str = "") -> None:
    """Wait for it; Failure after ten minutes."""
    end_s = time.monotonic() + _PATIENCE_S
    while not holds():
        if time.monotonic() > end_s:
            raise Failure(f"not within {_PATIENCE_S:.0f} s: {what} {log}")
        time.sleep(0.05)


def upgrade(old: Environment, new: Environment, folder: Path, progress: Progress) -> dict[str, Any]:
    """Serve from `old`, replace each service by that of `new` under its clients; what the clients report."""
    with ExitStack() as owned:
        ports = owned.enter_context(reserved("127.0.0.1", dict.fromkeys(SERVICES, 0)))
        services = Services(ports, folder)
        owned.callback(services.close)
        with progress.step("services of the old release"):
            for name in SERVICES:
                services.start(name, old)
            for name in SERVICES:
                services.wait_serving(name)
        clients = Clients(old, f"{services.address('gateway-1')},{services.address('gateway-2')}")
        owned.callback(clients.close)
        clients.wait_ready()
        clients.wait_ended(NUM_ENDED)
        for name in SERVICES:
            with progress.step(f"{name} replaced, {NUM_ENDED} more streams"):
                clients.phase(name)
                services.stop(name)
                services.start(name, new)
                services.wait_serving(name)
                clients.wait_ended(NUM_ENDED)
        return clients.report()


@contextmanager
def old_wheel(given: Path | None, revision: str | None, progress: Progress) -> Iterator[Path]:
    """The wheel of the old release: the one given, or built from a commit by its own scripts."""
    if given is not None:
        yield given
        return
    revision = revision or previous_revision()
    with tempfile.TemporaryDirectory() as folder:
        with checkout(revision) as root, progress.step(f"wheel of {revision}"):
            (root / "build").mkdir(exist_ok=True)
            (root / "build" / "kernels").symlink_to(ROOT / "build" / "kernels")
            environ = {"PYTHONPATH": str(root / "kernels")}
            run(sys.executable, "-m", "deploy.wheel", "--to", folder, environ=environ, cwd=root)
        [made] = Path(folder).glob("*.whl")
        yield made


def previous_revision() -> str:
    """The latest tag before this commit; without one its parent."""
    tag = run("git", "describe", "--tags", "--abbrev=0", "HEAD~1", check=False).strip()
    return tag or run("git", "rev-parse", "HEAD~1").strip()


def _told(report: dict[str, Any], progress: Progress) -> int:
    for name in SERVICES:
        progress.say(f"{name}: longest pause of a stream {report['pause_s'].get(name, 0.0):.1f} s")
    for failure in report["failed"]:
        progress.say(f"FAIL {failure}")
    num_requests = sum(report["ended"].values())
    counts = f"{len(report['failed'])} failed, {report['num_changed']} with other tokens"
    progress.say(f"{num_requests} requests, {report['num_tokens']} tokens, {counts}")
    return min(1, len(report["failed"]) + report["num_changed"])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.install.upgrade", description=__doc__)
    parser.add_argument("wheel", type=Path, help="of the new release, for this machine")
    parser.add_argument("--old", type=Path, help="wheel of the old release; default: built from --from")
    parser.add_argument("--from", dest="revision", help="default: the latest tag before this commit, else its parent")
    given = parser.parse_args()
    progress = Progress()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="quire-upgrade-") as folder,
            old_wheel(given.old, given.revision, progress) as found,
        ):
            old = installed(Environment(found.resolve(), Path(folder, "old")), progress)
            new = installed(Environment(given.wheel.resolve(), Path(folder, "new")), progress)
            return _told(upgrade(old, new, Path(folder), progress), progress)
    except Failure as failure:
        progress.say(f"FAIL {failure}")
        return 1


def installed(environment: Environment, progress: Progress) -> Environment:
    """Install the wheel, with the extras that `quire up` names."""
    with progress.step(f"installation, {environment.folder.name} release: {environment.wheel.name}"):
        environment.make()
        named_command(environment)
    return environment


if __name__ == "__main__":
    sys.exit(main())
