"""A stream on the terminal: text as it arrives, and one line about the request at the end."""

import sys

from quire.client.outputs import CompletionOutput, RequestOutput
from quire.client.sync_client import Stream


def show(stream: Stream, *, num_choices: int = 1) -> None:
    """Write the text to standard output as it arrives, and a final newline; several choices when all are complete, each under its
    number. Ctrl-C cancels the request.
    """
    try:
        for delta in stream:
            if num_choices == 1:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        stream.cancel()
        sys.stdout.write("\n")
        raise
    if num_choices > 1:
        sys.stdout.write("\n".join(_numbered(choice) for choice in stream.result.outputs))
    sys.stdout.write("\n")
    sys.stdout.flush()


def _numbered(choice: CompletionOutput) -> str:
    score = "" if choice.score is None else f" score {choice.score:.4f}"
    return f"[{choice.index}]{score}\n{choice.text}"


def summary(output: RequestOutput) -> None:
    """Print one line on standard error if that is a terminal: tokens, finish reason, how to repeat the request."""
    if not sys.stderr.isatty():
        return
    num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
    reasons = ", ".join(str(completion.finish_reason) for completion in output.outputs)
    sys.stderr.write(
        f"[{output.model}: {output.num_prompt_tokens} prompt tokens ({output.num_cached_tokens or 0} cached), "
        f"{num_tokens} generated, {reasons}; seed {output.seed}, request {output.request_id}]\n"
    )
