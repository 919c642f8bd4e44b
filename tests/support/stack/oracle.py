"""`transformers.generate` as the oracle, and workloads to ask it."""

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Expected:
    """Greedy tokens of a prompt and the natural log probability of each."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Job:
    """One prompt and how many tokens to generate."""

    prompt: tuple[int, ...]
    max_tokens: int


def mixed_jobs(count: int, vocab_size: int, seed: int = 0) -> list[Job]:
    """Prompts of 3 to 150 tokens, outputs of 8 to 40; some share a long prefix."""
    draw = random.Random(seed)
    shared = tuple(draw.randrange(vocab_size) for _ in range(64))
    jobs = []
    for i in range(count):
        prompt = tuple(draw.randrange(vocab_size) for _ in range(draw.choice([3, 17, 40, 90, 150])))
        jobs.append(Job(shared + prompt[:20] if i % 4 == 3 else prompt, draw.choice([8, 20, 40])))
    return jobs


@cache
def _model(path: Path):
    from tests.support.checkpoints import load_reference

    return load_reference(path, attn_implementation="eager")


def expected(path: Path, job: Job) -> Expected:
    """What `transformers.generate` makes of the job, greedily, to its full length, in float32."""
    import torch

    prompt = torch.tensor([job.prompt])
    with torch.inference_mode():
        out = _model(path).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=job.max_tokens,
            min_new_tokens=None,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = out.sequences[0, len(job.prompt) :].tolist()
    logprobs = [torch.log_softmax(row[0].float(), -1)[t].item() for row, t in zip(out.logits, tokens, strict=True)]
    return Expected(tokens, logprobs)


def greedy_after(path: Path, job: Job, token_ids: list[int]) -> Expected:
    """The likeliest token at each position after the prompt, given the tokens before it: one pass over prompt and output.

    It equals the output exactly if that is what greedy generation gives, `expected(path, job)`, since the first token that differs
    from it follows the same tokens.
    """
    import torch

    inputs = torch.tensor([[*job.prompt, *token_ids[: job.max_tokens - 1]]])
    with torch.inference_mode():
        rows = torch.log_softmax(_model(path)(inputs).logits[0, len(job.prompt) - 1 :].float(), -1)
    logprobs, tokens = rows.max(-1)
    return Expected(tokens.tolist(), logprobs.tolist())


def beams(path: Path, job: Job, width: int = 4) -> list[list[int]]:
    """The hypotheses of `generate(num_beams=width)`, best first, all of full length."""
    import torch

    prompt = torch.tensor([job.prompt])
    with torch.inference_mode():
        out = _model(path).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=job.max_tokens,
            eos_token_id=None,
            pad_token_id=0,
            temperature=None,
            top_p=None,
        )
    return [row[len(job.prompt) :].tolist() for row in out]
