"""The protos and buf: our files pass, and what would break a client is found (docs/decisions/0012).

Every test works on a copy of the protos; the files themselves are checked by `make check`.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.node import node_packages
from tests.support.tree import ROOT

BASELINE = ROOT / "protos" / "baseline.binpb"
INFERENCE = "protos/inference/v1/inference.proto"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The protos and buf.yaml in a folder of their own."""
    for source in [ROOT / "buf.yaml", *ROOT.glob("protos/*/v1/*.proto")]:
        target = tmp_path / source.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    return tmp_path


def buf(folder: Path, *arguments: str) -> str:
    """What buf finds fault with; empty = nothing."""
    command = [node_packages("tools") / ".bin" / "buf", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert bool(done.returncode) == bool(done.stdout), done.stderr
    return done.stdout


def breaking(folder: Path) -> str:
    """What of the released API is broken in `folder`."""
    return buf(folder, "breaking", "--against", str(BASELINE))


def change(folder: Path, old: str, new: str, file: str = INFERENCE) -> None:
    """Replaces `old`, which has to be there."""
    path = folder / file
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{file} has no {old!r} any more; take another example"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


BREAKS = [
    ("optional float temperature = 1;", "optional double temperature = 1;", "changed type"),
    ("rpc Tokenize(", "rpc ToTokens(", 'RPC "Tokenize" on service "InferenceService" was deleted'),
    ("returns (stream GenerateEvent);", "returns (GenerateEvent);", "from server streaming to server unary"),
    ("uint32 max_tokens = 4;", "uint32 token_limit = 4;", 'changed name from "max_tokens"'),
    ("string tool_call_id = 5;", "string tool_call_id = 77;", 'name "tool_call_id" on message "Message" was deleted'),
    ("string role = 1;", "string role = 71;\n  // New.\n  string html = 1;", 'changed name from "role"'),
    ("repeated Choice choices = 4;", "Choice choices = 4;", "changed cardinality"),
    ("ON_DEADLINE_FAIL = 1;", "ON_DEADLINE_FAIL = 7;", 'value "1" on enum "OnDeadline" was deleted'),
]


def test_what_breaks_clients_is_found(copy: Path) -> None:
    """A changed type, removed method, renamed field, moved or reused number, other cardinality: each is named."""
    for old, new, _ in BREAKS:
        change(copy, old, new)
    found = breaking(copy)
    assert [fault for _, _, fault in BREAKS if fault not in found] == []


STYLES = [
    ("service InferenceService ", "service Inference ", 'should be suffixed with "Service"'),
    ("POOLING_LAST = 2;", "LAST = 2;", 'should be prefixed with "POOLING_"'),
    ("POOLING_UNSPECIFIED = 0;", "POOLING_NONE = 0;", 'should be suffixed with "_UNSPECIFIED"'),
    ("bool resumable = 14;", "bool Resumable = 14;", "should be lower_snake_case"),
    ("package quire.inference.v1;", "package quire.inference;", "correctly formed version"),
    ("  // Served name.\n", "", "should have a non-empty comment"),
]


def test_what_is_not_our_style_is_found(copy: Path) -> None:
    """Names of services, enums, fields and packages follow buf's STANDARD rules, and everything has a comment."""
    for old, new, _ in STYLES:
        change(copy, old, new)
    found = buf(copy, "lint")
    assert [fault for _, _, fault in STYLES if fault not in found] == []


def test_additions_and_internal_changes_pass(copy: Path) -> None:
    """New fields break no client; messages of our own services may change, as both sides tell their revision.

    And so the faults above are those of the changes made there.
    """
    change(copy, "string content = 2;", "string content = 2;\n  // New.\n  string html = 99;")
    change(copy, "string build = 2;", "string release = 9;", "protos/common/v1/common.proto")
    assert buf(copy, "lint") + breaking(copy) == ""
