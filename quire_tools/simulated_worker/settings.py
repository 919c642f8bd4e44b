"""Settings of the simulated worker: sizes of its memory and a linear cost model of a step."""

from typing import Annotated

from pydantic import Field

from quire_tools.simulation.cost_model import CostModel
from worker_svc.settings import ShellSettings


class SimulatedWorkerSettings(ShellSettings):
    """A worker with a cost model instead of a model; all durations are multiplied by `time_scale`."""

    served_model_name: str = "simulated"
    """Name that requests use."""
    vocab_size: Annotated[int, Field(ge=260)] = 320
    """Tokens of the vocabulary: 256 bytes, the special tokens, then filler."""
    max_model_len: Annotated[int, Field(ge=2)] = 4_096
    """Longest prompt plus output, in tokens."""
    num_gpu_blocks: Annotated[int, Field(ge=1)] = 4_096
    """KV blocks."""
    num_cpu_blocks: Annotated[int, Field(ge=0)] = 1_024
    """KV blocks in host memory."""
    time_scale: Annotated[float, Field(ge=0)] = 1.0
    """Factor on all durations; 0 = as fast as possible."""
    step_base_s: Annotated[float, Field(ge=0)] = 4e-3
    """Seconds of every step."""
    prefill_token_s: Annotated[float, Field(ge=0)] = 20e-6
    """Seconds more for each prompt token of it."""
    decode_row_s: Annotated[float, Field(ge=0)] = 20e-6
    """Seconds more for each sequence that gets one token."""
    context_token_s: Annotated[float, Field(ge=0)] = 10e-9
    """Seconds more for each token of KV that attention reads."""
    load_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that loading takes."""
    eos_probability: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Chance that a sampled token ends its sequence."""

    @property
    def cost_model(self) -> CostModel:
        """The cost model of a step, before `time_scale`."""
        return CostModel(self.step_base_s, self.prefill_token_s, self.decode_row_s, self.context_token_s)

    @property
    def name(self) -> str:
        """Name the model is served under."""
        return self.served_model_name
