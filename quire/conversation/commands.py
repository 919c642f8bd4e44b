"""Slash commands of a conversation. Each is a method here; /help shows its docstring."""

import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from quire.client.chat_messages import Message
from quire.conversation.session import Session
from quire.operators import why as timeline
from quire.operators.admin import AdminClient
from svc_common.errors import ConfigError, QuireError

Ask = Callable[[Message], None]
_ALIASES = {"/exit": "/quit", "/?": "/help"}


class Commands:
    """Runs slash commands. `ask`: sends a turn and shows the answer; `admin`: makes an admin client, for /why."""

    def __init__(self, session: Session, ask: Ask, admin: Callable[[], AdminClient]) -> None:
        self._session, self._ask, self._admin = session, ask, admin
        self.is_over = False
        self._table: dict[str, tuple[str, Callable[[str], None]]] = {
            "/help": ("", self._help),
            "/reset": ("", self._reset),
            "/system": ("TEXT", self._system),
            "/model": ("NAME", self._model),
            "/save": ("FILE", self._save),
            "/load": ("FILE", self._load),
            "/set": ("KEY=VALUE", self._set),
            "/params": ("", self._params),
            "/retry": ("", self._retry),
            "/undo": ("", self._undo),
            "/tool": ("RESULT", self._tool),
            "/usage": ("", self._usage),
            "/why": ("", self._why),
            "/quit": ("", self._quit),
        }

    @property
    def words(self) -> list[str]:
        """Names of the commands."""
        return list(self._table)

    def run(self, line: str) -> None:
        """Run one line; an error is printed and changes nothing."""
        name, _, rest = line.strip().partition(" ")
        _, command = self._table.get(_ALIASES.get(name, name), ("", None))
        if command is None:
            self._say(
                f"{name} is no command; /help lists them. A question that begins with a slash: put a space before it"
            )
            return
        try:
            command(rest.strip())
        except QuireError as error:
            self._say(f"error: {error.message}")

    def _say(self, text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def _help(self, _: str) -> None:
        """this list"""
        for name, (argument, command) in self._table.items():
            self._say(f"  {f'{name} {argument}':<20}{command.__doc__}")
        self._say(
            'A line that ends in \\ goes on in the next; """ begins and ends a turn of several lines. Ctrl-C ends an answer.'
        )

    def _reset(self, _: str) -> None:
        """forget what was said; system message and settings stay"""
        self._session.turns.clear()
        self._session.last = None

    def _system(self, text: str) -> None:
        """say what the model is to be, from the next answer on; without TEXT: nothing"""
        self._session.system = text

    def _model(self, name: str) -> None:
        """talk to another model or adapter; without NAME: the service's own"""
        self._session.model = name

    def _save(self, name: str) -> None:
        """write the conversation into a file"""
        self._session.save(_path(name, "/save"))
        self._say(f"saved {len(self._session.turns)} turns")

    def _load(self, name: str) -> None:
        """go on with a saved conversation"""
        self._session.load(_path(name, "/load"))
        self._say(f"loaded {len(self._session.turns)} turns")

    def _set(self, assignment: str) -> None:
        """change sampling: /set temperature=0.2; KEY= is the model's default"""
        self._session.set(assignment)

    def _params(self, _: str) -> None:
        """show model, system message and sampling"""
        session = self._session
        self._say(f"  model: {session.model or '(the only one)'}\n  system: {session.system or '(none)'}")
        for key, value in session.settings.items():
            self._say(f"  {key}: {'(default)' if value is None else value}")

    def _retry(self, _: str) -> None:
        """ask the last question again, for another answer"""
        before = list(self._session.turns)
        turn = self._session.undo()
        if turn is None:
            raise ConfigError("there is nothing to ask again", reason="NO_TURN")
        self._ask(turn)
        if len(self._session.turns) < len(before):  # no new answer: keep the old one
            self._session.turns[:] = before

    def _undo(self, _: str) -> None:
        """take the last question and its answer back"""
        if self._session.undo() is None:
            raise ConfigError("there is nothing to take back", reason="NO_TURN")

    def _tool(self, result: str) -> None:
        """answer the tool call that the model waits for"""
        call_id = self._session.next_call_id()
        if not call_id:
            raise ConfigError("the model waits for no tool", reason="NO_TURN")
        self._ask({"role": "tool", "content": result, "tool_call_id": call_id})

    def _usage(self, _: str) -> None:
        """tokens of this conversation so far"""
        spent = self._session.spent
        self._say(
            f"  {spent.num_answers} answers: {spent.num_prompt_tokens} prompt tokens ({spent.num_cached_tokens} cached), "
            f"{spent.num_output_tokens} output tokens ({spent.num_reasoning_tokens} of reasoning)"
        )

    def _why(self, _: str) -> None:
        """where the time of the last answer went"""
        last = self._session.last
        if last is None:
            raise ConfigError("there is no answer yet", reason="NO_TURN")
        with self._admin() as client:
            response = client.explain(last.request_id)
        console = Console(stderr=True)
        console.print(timeline.why_table(response))
        console.print(timeline.summary(response))

    def _quit(self, _: str) -> None:
        """end (also Ctrl-D)"""
        self.is_over = True


def _path(name: str, command: str) -> Path:
    if not name:
        raise ConfigError(f"{command} FILE: name a file", reason="BAD_FILE")
    return Path(name).expanduser()
