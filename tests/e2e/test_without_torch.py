"""Gateway and scheduler run where torch is not installed (P5): the whole path over the simulated worker.

torch is made unimportable in all three processes.
"""

import os
from pathlib import Path

from quire import SamplingParams
from quire.client.sync_client import Client
from quire.local_stack.stack import LocalStack

_BLOCKER = '''
import sys

class _Absent:
    """Answers for torch and transformers as if they were not installed."""
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "safetensors"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, _Absent())
'''


def test_the_stack_serves_without_torch(tmp_path: Path) -> None:
    """All three processes get the blocker; a completion comes back."""
    (tmp_path / "sitecustomize.py").write_text(_BLOCKER)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": path}
    with LocalStack(simulated=True, environ=environ) as stack, Client(stack.grpc_address) as client:
        output = client.generate("hello", SamplingParams(max_tokens=6, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 6
