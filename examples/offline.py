"""Offline generation in this process: no server, vLLM's interface.

python examples/offline.py [MODEL]
"""

import sys
from pathlib import Path

from quire import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent / "models" / "tiny"

prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(model=MODEL)
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
