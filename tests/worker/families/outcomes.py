"""What became of the classes: outcomes, and the file that keeps them. Imports neither torch nor transformers."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

PATH = Path(__file__).with_name("table.json")
EQUAL, REFUSED, DIFFERENT, RAISED, UNKNOWN = "equal", "refused", "different", "raised", "unknown"
# What a table may not have: wrong tokens, and an error that does not say what is wrong and what to do.
FAULTS = (DIFFERENT, RAISED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one configuration.

    `why`: of a refusal, a fault or an unknown outcome. `num_tokens`: compared tokens. `reach`: distance of the
    farthest token that the last logits of the tiny model depend on.
    """

    outcome: str
    why: str = ""
    num_tokens: int = 0
    reach: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """Outcome of one class: of its default form, or of another that is a fault. `forms`: what became of the others."""

    model_type: str
    model_class: str
    outcome: str
    why: str = ""
    num_tokens: int = 0
    reach: int = 0
    forms: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Table:
    """Outcomes by model type, with the release of transformers that has these classes."""

    transformers: str
    trials: Mapping[str, Trial]

    @classmethod
    def read(cls, path: Path = PATH) -> "Table":
        raw = json.loads(path.read_text(encoding="utf-8"))
        return cls(raw["transformers"], {name: Trial(name, **fields) for name, fields in raw["classes"].items()})

    def write(self, path: Path = PATH) -> None:
        """One line for each class, in order of their names."""
        rows = [f"    {json.dumps(name)}: {json.dumps(_fields(self.trials[name]))}" for name in sorted(self.trials)]
        head = f'{{\n  "transformers": {json.dumps(self.transformers)},\n  "classes": {{\n'
        path.write_text(head + ",\n".join(rows) + "\n  }\n}\n", encoding="utf-8")

    def count(self, outcome: str) -> int:
        """Number of classes with this outcome."""
        return sum(trial.outcome == outcome for trial in self.trials.values())


def _fields(trial: Trial) -> dict[str, object]:
    return {name: value for name, value in asdict(trial).items() if value and name != "model_type"}
