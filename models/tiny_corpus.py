"""The corpus of models/tiny: the standard library of the running interpreter.

Two kinds of document come out of it: plain text (source files and the language
reference that ``pydoc`` carries) and short chats whose answers are docstrings and
sources. Every file is split off for validation, or not, by a hash of its path.
"""

import ast
import builtins
import importlib
import inspect
import itertools
import random
import sysconfig
import textwrap
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Message = dict[str, str]
Chat = list[Message]

# Tests, tables and generated files say little about how Python is written.
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "encodings",
    "ensurepip",
    "pydoc_data",
    "__pycache__",
}
SKIPPED_FILES = ("_sysconfigdata", "entities.py", "__phello__")

# Modules written in C: they have docstrings, but no source to read.
C_MODULES = ("math", "cmath", "itertools", "time", "array", "zlib", "binascii", "gc", "marshal")

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant who knows Python.",
    "You answer questions about the Python standard library.",
)
DOC_QUESTIONS = (
    "What does `{name}` do?",
    "What does {name} do?",
    "Explain `{name}`.",
    "What is `{name}`?",
    "How do I use `{name}`?",
)
SOURCE_QUESTIONS = (
    "Write the {kind} `{name}`.",
    "Write the {kind} {name}.",
    "Write a {kind} like `{name}`.",
    "Show me the source of `{name}`.",
)
MODULE_QUESTIONS = ("What is the module `{name}` for?", "What does the module {name} do?")
LONGEST_SOURCE = 2400
LONGEST_DOC = 1200
HELD_OUT_ONE_IN = 50


@dataclass
class Corpus:
    """Plain texts and chats, either to train on or held out."""

    texts: list[str] = field(default_factory=list)
    chats: list[Chat] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """One thing that can be asked about: a module, a class or a function."""

    kind: str
    name: str
    doc: str
    source: str = ""


def library_root() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(root: Path) -> list[Path]:
    """The ``*.py`` files worth reading, in a fixed order."""
    files = sorted(root.rglob("*.py"))
    return [path for path in files if is_wanted(path.relative_to(root))]


def is_wanted(path: Path) -> bool:
    """Whether a file, given relative to the library's root, belongs to the corpus."""
    if SKIPPED_FOLDERS.intersection(path.parts):
        return False
    return not path.name.startswith(SKIPPED_FILES)


def is_held_out(name: str) -> bool:
    """Whether a document is kept for validation: about one in fifty, the same each time."""
    return zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0


def load_corpus() -> tuple[Corpus, Corpus]:
    """Read the standard library: what to train on, and what is held out."""
    train, held_out = Corpus(), Corpus()
    root = library_root()
    for path in source_files(root):
        name = path.relative_to(root).as_posix()
        add_source(held_out if is_held_out(name) else train, name, read_text(path))
    for topic, text in sorted(topics.items()):
        (held_out if is_held_out(topic) else train).texts.append(text)
    train.chats.extend(make_chats(c_entries()))
    return train, held_out


def read_text(path: Path) -> str:
    """A source file's text; the few files that are not UTF-8 lose some characters."""
    return path.read_text(encoding="utf-8", errors="ignore")


def add_source(corpus: Corpus, name: str, source: str) -> None:
    """Add one source file to the corpus, and the chats that can be made from it."""
    if not source.strip():
        return
    corpus.texts.append(source)
    corpus.chats.extend(make_chats(source_entries(module_name(name), source)))


def module_name(path: str) -> str:
    """The dotted name of the module that lies at a path below the library's root."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return "os.path" if name == "posixpath" else name


def source_entries(module: str, source: str) -> Iterator[Entry]:
    """The module itself, and the public classes and functions in its source."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    if doc := ast.get_docstring(tree):
        yield Entry("module", module, doc)
    yield from member_entries(module, tree, source)


def member_entries(owner: str, node: ast.AST, source: str) -> Iterator[Entry]:
    """The public classes and functions directly below a node, and those in its classes."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Definition):
            continue
        if child.name.startswith("_"):
            continue
        yield node_entry(f"{owner}.{child.name}", child, source)
        if isinstance(child, ast.ClassDef):
            yield from member_entries(f"{owner}.{child.name}", child, source)


def node_entry(name: str, node: Definition, source: str) -> Entry:
    """What can be said of one class or function: its docstring and its source."""
    kind = "class" if isinstance(node, ast.ClassDef) else "function"
    first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
    lines = source.splitlines()[first - 1 : node.end_lineno]
    text = textwrap.dedent("\n".join(lines))
    return Entry(kind, name, ast.get_docstring(node) or "", text)


def c_entries() -> Iterator[Entry]:
    """The built-ins, the methods of built-in types, and some modules written in C."""
    modules = [importlib.import_module(name) for name in C_MODULES]
    for module in modules:
        yield from object_entries(f"{module.__name__}.", module)
    yield from object_entries("", builtins)
    for kind in (str, bytes, list, dict, set, tuple, int, float, object):
        yield from object_entries(f"{kind.__name__}.", kind)


def object_entries(prefix: str, owner: object) -> Iterator[Entry]:
    """The public attributes of a live object that have a docstring of their own."""
    for name, value in sorted(vars(owner).items()):
        doc = inspect.getdoc(value) if callable(value) else None
        if doc and not name.startswith("_"):
            yield Entry("function", prefix + name, doc)


def make_chats(entries: Iterable[Entry]) -> list[Chat]:
    """The chats about some entries; nothing for an entry of which nothing can be said."""
    return [chat for chat in map(make_chat, entries) if chat]


def make_chat(entry: Entry) -> Chat:
    """A chat of one or two questions about an entry; empty if there is nothing to say."""
    rng = random.Random(entry.name)
    turns = list(itertools.chain(doc_turn(entry, rng), source_turn(entry, rng)))
    if len(turns) == 4 and rng.random() < 0.7:
        turns = turns[2:] if rng.random() < 0.5 else turns[:2]
    if turns and rng.random() < 0.3:
        turns.insert(0, {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    return turns


def doc_turn(entry: Entry, rng: random.Random) -> Chat:
    """A question that the entry's docstring answers."""
    if not entry.doc:
        return []
    questions = MODULE_QUESTIONS if entry.kind == "module" else DOC_QUESTIONS
    return turn(rng.choice(questions), entry, shorten(entry.doc))


def source_turn(entry: Entry, rng: random.Random) -> Chat:
    """A request that the entry's source fulfils."""
    if not entry.source or len(entry.source) > LONGEST_SOURCE:
        return []
    return turn(rng.choice(SOURCE_QUESTIONS), entry, f"```python\n{entry.source}\n```")


def turn(question: str, entry: Entry, answer: str) -> Chat:
    """One question and its answer, as messages."""
    asked = question.format(name=entry.name, kind=entry.kind)
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def shorten(text: str) -> str:
    """The first paragraphs of a text, as many as fit in an answer."""
    kept = ""
    for paragraph in text.strip().split("\n\n"):
        if kept and len(kept) + len(paragraph) > LONGEST_DOC:
            break
        kept = f"{kept}\n\n{paragraph}" if kept else paragraph
    return kept[: 2 * LONGEST_DOC]
