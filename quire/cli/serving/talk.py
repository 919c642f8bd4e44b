"""The conversation of `quire run`, over the services that it started. Imported while they start."""

import functools
import sys

from quire.cli.requests.chat import ChatAnswers, converse
from quire.client.sync_client import Client
from quire.conversation.session import Session
from quire.local_stack.stack import LocalStack
from quire.operators.admin import AdminClient


def talk(stack: LocalStack, session: Session, prompt: str | None, *, history: bool) -> None:
    """Answer `prompt`, or without one read turns from standard input until its end."""
    with Client(stack.grpc_address, credentials=stack.credentials) as client:
        can_chat = client.models()[0].chat
        if not can_chat:
            _say("the model has no chat template: each prompt is completed, and none before it is seen")
        answers = ChatAnswers(client, session, completes=not can_chat)
        if prompt is not None:
            answers.ask({"role": "user", "content": prompt})
            return
        if sys.stdin.isatty():
            _say("/help lists commands; Ctrl-D or /exit ends")
        admin = functools.partial(AdminClient, stack.admin_address, credentials=stack.credentials)
        converse(session, answers, admin, history=history)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
