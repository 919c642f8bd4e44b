"""`python -m tests.install.audit`: known vulnerabilities of what constraints.txt pins, as `make audit` runs it.

Exit status: 0 = all packages were looked up and none has one; 1 = some have; 2 = not all could be looked up. pip-audit asks the
advisory services, one after the other; it is installed into .venv/audit.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.commands import ROOT, run

SERVICES = ("pypi", "osv")
_ENVIRONMENT = ROOT / ".venv" / "audit"
_PIP_AUDIT = "pip-audit>=2.10,<3"
_TIMEOUT_S = "20"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one service said. `vulnerable`: a line each; `unknown`: packages that it could not look up."""

    num_packages: int
    vulnerable: tuple[str, ...]
    unknown: tuple[str, ...]

    @classmethod
    def of(cls, report: dict[str, Any]) -> "Verdict":
        """From pip-audit's JSON."""
        found = report["dependencies"]
        lines = [
            f"{package['name']} {package['version']}: {flaw['id']}, repaired in {', '.join(flaw['fix_versions']) or 'no release'}"
            for package in found
            for flaw in package.get("vulns", ())
        ]
        return cls(len(found), tuple(lines), tuple(package["name"] for package in found if "skip_reason" in package))

    @property
    def status(self) -> int:
        """Exit status; a package that was not looked up is not a package without vulnerabilities."""
        return 1 if self.vulnerable else 2 if self.unknown or not self.num_packages else 0


def main() -> int:
    """The command."""
    program = _program()
    for service in SERVICES:
        verdict = _ask(program, service)
        if verdict is not None and len(verdict.unknown) < verdict.num_packages:
            print("\n".join(verdict.vulnerable))
            print(
                f"{service}: {verdict.num_packages} packages, {len(verdict.vulnerable)} vulnerabilities"
                + (f"; not looked up: {', '.join(verdict.unknown)}" if verdict.unknown else "")
            )
            return verdict.status
        print(f"{service}: this advisory service cannot be reached from here")
    print("NOT AUDITED: no advisory service can be reached; run `make audit` on a machine with access to one")
    return 2


def _program() -> Path:
    program = _ENVIRONMENT / "bin" / "pip-audit"
    if not program.exists():
        run(sys.executable, "-m", "venv", _ENVIRONMENT)
        run(_ENVIRONMENT / "bin" / "pip", "install", "--quiet", _PIP_AUDIT)
    return program


def _ask(program: Path, service: str) -> Verdict | None:
    """None where the service does not answer."""
    options = ("--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json", "--timeout", _TIMEOUT_S)
    command = [program, "--vulnerability-service", service, *options, "--requirement", ROOT / "constraints.txt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    try:
        return Verdict.of(json.loads(done.stdout))
    except ValueError:
        sys.stderr.write(done.stderr.strip().rpartition("\n")[2][:300] + "\n")
        return None


if __name__ == "__main__":
    sys.exit(main())
