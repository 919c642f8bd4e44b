"""`quire chat`: a conversation on the terminal, or one question."""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options import sampling as s
from quire.cli.options.gathering import gathers
from quire.cli.requests.stream_output import summary
from quire.client.chat_messages import ChatOptions, Message
from quire.client.connections import Credentials
from quire.client.sync_client import Client, RequestOptions, Stream
from quire.conversation.commands import Commands
from quire.conversation.display import AnswerDisplay
from quire.conversation.keyboard import Keyboard, state_folder
from quire.conversation.session import Session
from quire.operators.admin import AdminClient
from svc_common.errors import ConfigError, QuireError

app = new_app()

HISTORY_FILE = "chat_history"
_NO_TOOLS = ChatOptions()


@app.command()
@gathers(credentials=a.credentials)
def chat(
    text: Annotated[
        str | None, typer.Argument(help="One question; absent = a conversation.", show_default=False)
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System message that starts the conversation.", show_default=False)
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="JSON list of tools that the model may call, in OpenAI's form.", show_default=False
        ),
    ] = None,
    max_tokens: s.MaxTokens = None,
    temperature: s.Temperature = None,
    top_p: s.TopP = None,
    top_k: s.TopK = None,
    seed: s.Seed = None,
    stop: s.Stop = None,
    ignore_eos: s.IgnoreEos = False,
    model: s.Model = "",
    history: Annotated[
        bool,
        typer.Option("--history/--no-history", help="Keep what is typed in $XDG_STATE_HOME/quire, for the next time."),
    ] = True,
    target: o.Target = o.DEFAULT_TARGET,
    admin: o.Admin = o.DEFAULT_ADMIN,
    *,
    credentials: Credentials,
) -> None:
    """Talk to the model. A conversation reads one line per turn; Ctrl-C ends an answer, Ctrl-D or /quit the conversation.

    /help lists what else can be typed: /retry, /undo, /set temperature=0.2, /save FILE, /why and more. A line that ends in a
    backslash goes on in the next. From a pipe each line is a turn. Reasoning is dimmed on a terminal, and left out of a pipe.

    [bold]quire chat[/bold]
    [bold]quire chat "What does itertools.chain do?" --max-tokens 80[/bold]
    [bold]quire chat --system "Answer in one line." --temperature 0[/bold]
    [bold]printf 'hello\\nand now?\\n' | quire chat[/bold]
    """
    settings: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": tuple(stop or ()),
        "ignore_eos": ignore_eos,
    }
    session = Session(system or "", model, settings)
    options = ChatOptions(tools=_tools(tools))
    with Client(o.host_and_port(target, "--target"), credentials=credentials) as client:
        answers = ChatAnswers(client, session, options)
        if text is not None:
            answers.ask({"role": "user", "content": text})
        else:
            converse(session, answers, _admin_of(admin, credentials), history=history)


class ChatAnswers:
    """Answers turns through the service. `completes`: each turn is a prompt to complete, for a model without chat template."""

    def __init__(
        self, client: Client, session: Session, options: ChatOptions = _NO_TOOLS, *, completes: bool = False
    ) -> None:
        self._client, self._session, self._options, self._completes = client, session, options, completes

    def ask(self, turn: Message) -> None:
        """Show the answer, and add turn and answer to the conversation."""
        output = AnswerDisplay().show(self._stream(turn))
        self._session.answered(turn, output)
        summary(output)

    def _stream(self, turn: Message) -> Stream:
        session, options = self._session, RequestOptions(model=self._session.model)
        if self._completes:
            return self._client.generate_stream(turn["content"], session.params, options=options)
        return self._client.chat_stream(session.asked(turn), session.params, chat=self._options, options=options)

    def try_asking(self, turn: Message) -> None:
        """`ask`; a failed or interrupted answer is reported, and the turn is not added to the conversation."""
        try:
            self.ask(turn)
        except KeyboardInterrupt:
            return
        except QuireError as error:
            sys.stderr.write(f"error: {error.message}\n")


def _admin_of(address: str, credentials: Credentials) -> Callable[[], AdminClient]:
    return functools.partial(AdminClient, o.host_and_port(address, "--admin"), credentials=credentials)


def converse(session: Session, answers: ChatAnswers, admin: Callable[[], AdminClient], *, history: bool) -> None:
    """Read turns from standard input and answer them, until its end or /quit. `admin`: for /why."""
    commands = Commands(session, answers.try_asking, admin)
    keyboard = Keyboard(history=state_folder() / HISTORY_FILE if history else None, words=commands.words)
    with keyboard.ready():
        while not commands.is_over:
            try:
                line = keyboard.turn()
            except KeyboardInterrupt:
                sys.stderr.write("\n(Ctrl-D or /quit ends the conversation)\n")
                continue
            if line is None:
                break
            if line.startswith("/"):
                commands.run(line)
            elif line.strip():
                answers.try_asking({"role": "user", "content": line})


def _tools(path: Path | None) -> list[dict[str, Any]]:
    """The tools in a file. Raises ConfigError if it has none."""
    if path is None:
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tools: {path} cannot be read: {error}", reason="BAD_FILE") from None
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise ConfigError(f"--tools: {path} holds no JSON list of tools", reason="BAD_FILE")
    return found
