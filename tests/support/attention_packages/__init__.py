"""Stand-ins for attention libraries that need a GPU: their calls, with the parameters of the real ones, computed in plain torch.

`installed` makes them importable under the names of the real ones. `tests/kernels/test_attention_libraries.py` compares parameters.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.nn.attention import varlen

from tests.support.attention_packages import in_torch

FOLDER = Path(__file__).parent
MODULES = ("flashinfer", "flash_attn_interface")


@pytest.fixture
def attention_packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-ins instead of the real libraries."""
    monkeypatch.syspath_prepend(FOLDER)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(varlen, "varlen_attn", in_torch.varlen_attn)
    yield
    for name in MODULES:
        sys.modules.pop(name, None)
