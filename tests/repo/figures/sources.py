"""Which files are product code, tools, historic rules and documents, in this layout and in that of commits before it."""

import functools
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.outline import Outline, outline
from tests.support.tree import NOT_OURS

PRODUCT = (
    "block_manager/",
    "gateway_svc/",
    "kernels/",
    "protos/",
    "quire/",
    "quire_tools/",
    "scheduler_svc/",
    "svc_common/",
    "worker_svc/",
)
# What does not serve: it only looks, or exists for comparison. Below each, where the same files were before.
TOOLS = (
    "quire_tools/",
    *(f"quire/{name}/" for name in ("bench", "convert", "doctor", "lab", "plan", "top", "tour")),
    *(f"quire/cli/{name}.py" for name in ("bench", "convert", "doctor", "lab", "plan", "replay", "top", "tour")),
    "quire/cli/serve_simulated_worker.py",
    *(f"quire/{name}.py" for name in ("reasons_now", "replay_plot", "replay_report")),
    *(
        f"scheduler_svc/recording/{name}.py"
        for name in ("memory_course", "observed", "recorded_tokens", "watched_core", "what_if")
    ),
    "scheduler_svc/core/batch_queue.py",
    "scheduler_svc/simulation/",
    "worker_svc/simulated/",
)
HISTORIC = (
    "block_manager/compat/",
    "block_manager/evictor.py",
    "block_manager/free_stack.py",
    *(
        f"block_manager/rules/{name}.py"
        for name in (
            *("allocator_063", "allocators_2023", "computed_prefix", "prefix_keys", "sliding_window"),
            *("swap_063", "tables_063", "vllm_063", "vllm_2023", "written"),
        )
    ),
    "scheduler_svc/core/policies/chitu/",
    "scheduler_svc/core/policies/vllm_v0/",
    *(
        f"scheduler_svc/core/{name}.py"
        for name in ("affinity", "lanes", "late_outputs", "scorers", "task_policies", "task_spec", "threshold")
    ),
    *(
        f"scheduler_svc/core/phases/{name}.py"
        for name in (
            *("decode", "prefill", "priority_preemption", "ranks", "reserved", "scored"),
            *("shares", "skew", "swapped", "tasks", "v0"),
        )
    ),
)
_CODE = {".py", ".proto", ".cpp", ".h", ".js", ".mjs", ".css", ".html", ".sh"}
_TEXT = _CODE | {".md", ".toml", ".yml", ".yaml", ".txt", ".rs", ".ts", ".json", ".xml", ""}
_HISTORY = ("CHANGELOG.md", "docs/decisions/")


@dataclass(frozen=True)
class Sources:
    """Files of one checkout, as paths relative to `root`; generated code is left out."""

    root: Path
    names: Sequence[str]

    @classmethod
    def of(cls, root: Path) -> "Sources":
        """Tracked and new files; in a folder without git all that is not an environment or a build."""
        command = ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "-z"]
        if (root / ".git").exists():
            listed = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout.decode().split("\0")
        else:
            paths = (path.relative_to(root) for path in root.rglob("*"))
            listed = [path.as_posix() for path in paths if not NOT_OURS & set(path.parts)]
        kept = (name for name in listed if name and (root / name).is_file() and "_pb2" not in name)
        return cls(root, sorted(kept))

    def text(self, name: str) -> str:
        """Contents of a file."""
        return _text(self.root / name)

    def outline(self, name: str) -> Outline:
        """What a Python file imports and defines."""
        return outline(self.root / name)

    def python(self) -> list[str]:
        """Python files of the product."""
        return [name for name in self.names if name.startswith(PRODUCT) and name.endswith(".py")]

    def serving(self) -> list[str]:
        """Python files of the product without tools and historic rules."""
        return [name for name in self.python() if not name.startswith((*TOOLS, *HISTORIC))]

    def code(self) -> list[str]:
        """Source files of all languages outside tests, benchmarks and examples included."""
        return [name for name in self.names if Path(name).suffix in _CODE and not name.startswith("tests/")]

    def prose(self) -> list[str]:
        """Product code of all languages, and documents that are not history."""
        product = [name for name in self.code() if name.startswith(PRODUCT)]
        documents = [name for name in self.names if name.endswith(".md") and not name.startswith("tests/")]
        return [name for name in [*product, *documents] if not name.startswith(_HISTORY)]

    def texts(self) -> list[str]:
        """Every text file that is not history, data of a test or a result."""
        left_out = (*_HISTORY, "benchmarks/results/", "tests/golden/v", "models/", "quire/tiny/", "LICENSE")
        return [name for name in self.names if Path(name).suffix in _TEXT and not name.startswith(left_out)]


@functools.cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
