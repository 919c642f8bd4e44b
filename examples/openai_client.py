"""The OpenAI API with OpenAI's own client (`pip install openai`). Start `quire up` first.

python examples/openai_client.py [URL]
"""

import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"

client = OpenAI(base_url=f"{URL}/v1", api_key="unused")
model = client.models.list().data[0].id

completion = client.completions.create(model=model, prompt="class Stack:", max_tokens=40, seed=1)
print("class Stack:" + completion.choices[0].text)

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "How do I sort a dictionary by value?"}],
    max_tokens=60,
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
