"""A stream on the terminal: text as it comes, and one line about the request for a person at the end."""

import sys

from quire.client import Stream
from quire.outputs import RequestOutput


def show(stream: Stream) -> None:
    """Writes the text to standard output as it comes, and a final newline. Ctrl-C cancels the request."""
    try:
        for delta in stream:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        stream.cancel()
        sys.stdout.write("\n")
        raise
    sys.stdout.write("\n")
    sys.stdout.flush()


def summary(output: RequestOutput) -> None:
    """One line on standard error, where a person reads it: tokens, why it ended, how to repeat it."""
    if not sys.stderr.isatty():
        return
    completion = output.outputs[0]
    sys.stderr.write(
        f"[{output.model}: {output.num_prompt_tokens} prompt tokens ({output.num_cached_tokens or 0} cached), "
        f"{len(completion.token_ids)} generated, {completion.finish_reason}; seed {output.seed}, request {output.request_id}]\n"
    )
