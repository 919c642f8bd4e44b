"""The gRPC API: a stream, a chat, many requests at once, and a typed error. Start `quire up` first.

python examples/grpc_client.py [HOST:PORT]
"""

import asyncio
import sys

from quire import AsyncClient, Client, SamplingParams
from svc_common.errors import InvalidArgument

TARGET = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"


def stream_and_chat() -> None:
    """What a script does: text as it comes, then one answer."""
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=1)
    with Client(TARGET) as client:
        print("models:", ", ".join(card.name for card in client.models()))
        stream = client.generate_stream("import os\n\n", params)
        for delta in stream:
            print(delta.text, end="", flush=True)
        print(f"\n[{stream.result.outputs[0].finish_reason}, seed {stream.result.seed}]")
        print("chat:", client.chat("What is a list comprehension?", params).text)


async def many_at_once() -> None:
    """Requests that run together share every step of the model."""
    async with AsyncClient(TARGET) as client:
        prompts = [f"def function_{i}(" for i in range(8)]
        params = SamplingParams(max_tokens=16, temperature=0)
        outputs = await asyncio.gather(*(client.generate(prompt, params) for prompt in prompts))
        for prompt, output in zip(prompts, outputs, strict=True):
            print(repr(prompt + output.text))


def typed_error() -> None:
    """Errors say which field is wrong."""
    with Client(TARGET) as client:
        try:
            client.generate([10**9])
        except InvalidArgument as error:
            print("refused:", [(v.field, v.description) for v in error.violations])


if __name__ == "__main__":
    stream_and_chat()
    asyncio.run(many_at_once())
    typed_error()
