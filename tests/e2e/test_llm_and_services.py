"""`LLM` in this process, in front of the services, and their client: the same outputs with the same seed."""

import json
from typing import Any

from quire import LLM, ChatOptions, Client, PoolingParams, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.local_stack.stack import LocalStack

PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
TIGHT: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "num_gpu_blocks_override": 32,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
    "swap_space": "1MiB",
    "policy_set": {"restraint": None},
}
"""A budget that forces chunks, and few blocks, so that sequences are preempted."""
RARE = [
    SamplingParams(n=3, seed=1, max_tokens=12, min_p=0.05, repetition_penalty=1.2, prompt_logprobs=2, logprobs=2),
    SamplingParams(n=2, best_of=4, seed=2, max_tokens=12, presence_penalty=0.5, frequency_penalty=0.5),
    SamplingParams(n=3, best_of=4, use_beam_search=True, max_tokens=12, length_penalty=0.5, logprobs=True),
    SamplingParams(seed=4, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[a-z]{4} [0-9]{3}")),
]


FORCED = SamplingParams(n=2, seed=7, max_tokens=80)
TOOLS = ChatOptions(
    tools=[
        {
            "name": "f",
            "parameters": {
                "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["n"],
                "additionalProperties": False,
            },
        }
    ],
    tool_choice="required",
    parallel_tool_calls=False,
)


def test_same_seed_same_tokens_as_the_services(stack: LocalStack, client: Client) -> None:
    """One (seed, request): the same tokens, text and logprobs in process and through three processes (invariance contract)."""
    params = [SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_tokens=24, logprobs=1) for seed in range(4)]
    params += RARE
    prompts = PROMPTS * 2
    there = [client.generate(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    with LLM(**TIGHT) as llm, LLM(target=stack.grpc_address) as remote:
        here, behind = (where.generate(prompts, params) for where in (llm, remote))
        chats = [where.chat(["hi", [{"role": "user", "content": "x"}]], FORCED, chat=TOOLS) for where in (llm, remote)]
        vectors = [where.embed(PROMPTS, PoolingParams(normalize=False)) for where in (llm, remote)]
    for ours, theirs, third in zip(here, there, behind, strict=True):
        assert ours.outputs == theirs.outputs == third.outputs
        assert ours.prompt_logprobs == theirs.prompt_logprobs == third.prompt_logprobs
    _check_chats(*chats)
    assert [[v.outputs for v in found] for found in vectors[:1]] == [
        [v.outputs for v in found] for found in vectors[1:]
    ]
    assert [len(output.outputs) for output in here] == [1] * 4 + [3, 2, 3, 1]
    assert [o.prompt for o in behind] == prompts
    assert [o.prompt_token_ids for o in behind] == [o.prompt_token_ids for o in here]


def _check_chats(here: list[RequestOutput], there: list[RequestOutput]) -> None:
    """The same calls in process and behind a gateway, but for their ids; several choices have their own."""
    for ours, theirs in zip(here, there, strict=True):
        assert [output.token_ids for output in ours.outputs] == [output.token_ids for output in theirs.outputs]
        assert len({output.tool_calls[0].id for output in (*ours.outputs, *theirs.outputs)}) == 4
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            ((call,), (same,)) = one.tool_calls, other.tool_calls
            assert (call.name, call.arguments) == (same.name, same.arguments)
            assert json.loads(call.arguments)["n"] in range(10)
            assert one.finish_reason == other.finish_reason == "tool_calls"
