"""Nothing in the tree executes what came from outside, and nothing names the machine it was written on."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.tree import name_of, python_files, text_files

BANNED_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
BANNED_BUILTINS = {"eval", "exec"}
BANNED_CALLS = {"torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system"}
BANNED_LAST_WORDS = {name.rpartition(".")[2] for name in BANNED_CALLS}
BANNED_TRUE = {"trust_remote_code", "allow_pickle", "shell"}
_ANY_DANGER = re.compile(
    rf"\b(?:{'|'.join(BANNED_MODULES | BANNED_BUILTINS)})\b|\b(?:{'|'.join(BANNED_TRUE)})\s*="
    rf"|\b(?:{'|'.join(name.replace('.', '[^a-z]*') for name in BANNED_CALLS)})\b"
)
# The one place that opens pickles: a process of its own for each, restricted to tensors, behind further walls (`quire convert`).
ALLOWED = {"quire_tools/convert/child.py": "torch.load(map_location='cpu', weights_only=True, mmap=is_zip)"}
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home/\w|Users/\w|root/|work/\w)")


def dangers(source: str) -> Iterator[str]:
    """What in `source` could run foreign code, as "line: what"."""
    if source.isascii() and not _ANY_DANGER.search(source):
        return  # most sources need no syntax tree
    for node in ast.walk(ast.parse(source)):
        for what in _dangers_of(node):
            yield f"{node.lineno}: {what}"  # type: ignore[attr-defined]


def _dangers_of(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (a.name for a in names if a.name.partition(".")[0] in BANNED_MODULES)
        case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in BANNED_MODULES:
            yield module
        case ast.Call(func=ast.Name(id=name)) if name in BANNED_BUILTINS:
            yield f"{name}()"
        case ast.Call(func=ast.Attribute(attr=last)) if (
            last in BANNED_LAST_WORDS and ast.unparse(node.func) in BANNED_CALLS
        ):
            yield f"{ast.unparse(node.func)}({', '.join(ast.unparse(k) for k in node.keywords)})"
        case ast.keyword(arg=str(name), value=ast.Constant(value=True)) if name in BANNED_TRUE:
            yield f"{name}=True"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "exec('1')",
        "torch.load(f)",
        "yaml.load(f)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "numpy.load(f, allow_pickle=True)",
        "subprocess.run(c, shell=True)",
    ],
)
def test_each_danger_is_seen(source: str) -> None:
    """The scanner knows each of them."""
    assert list(dangers(source))


def test_what_only_looks_dangerous_passes() -> None:
    """Methods of those names and safe variants are fine."""
    harmless = "model.eval()\nyaml.safe_load(f)\nasyncio.create_subprocess_exec(a)\nf(trust_remote_code=False)"
    assert not list(dangers(harmless))


def test_no_foreign_code_is_run_anywhere() -> None:
    """No pickle, eval, exec, torch.load, yaml.load, remote code or shell in any Python file."""
    files = python_files()
    assert len(files) > 30
    found = {name_of(path): list(dangers(path.read_text(encoding="utf-8"))) for path in files}
    found = {name: seen for name, seen in found.items() if seen}
    allowed = {name: seen for name, seen in found.items() if name in ALLOWED}
    assert found == allowed, found
    assert {name: [what.partition(": ")[2] for what in seen] for name, seen in allowed.items()} == {
        name: [what] for name, what in ALLOWED.items()
    }, "each exactly once, and restricted"


def test_no_machine_paths() -> None:
    """No absolute path of a home folder or workplace in any text file."""
    found, seen = [], 0
    for path, text in text_files():
        seen += 1
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{name_of(path)}:{number}: {line.strip()[:80]}")
    assert seen > 60
    assert not found, found


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("/" + "home/ada/quire", True),
        ("open('/" + "root/x')", True),
        ("/" + "work/main", True),
        ("http://host/home/x", False),
        ("tests/work/x", False),
        ("/models/tiny", False),
    ],
)
def test_machine_paths_are_told_from_others(line: str, bad: bool) -> None:
    """Absolute ones are found, relative ones and addresses are not."""
    assert bool(MACHINE_PATH.search(line)) is bad
