"""What a request's reader gets in one read: everything new since the previous one. Pure."""

from dataclasses import dataclass, field

from gateway_svc.requests.token_runs import ChoiceTokens
from protos.engine.v1 import engine_pb2


@dataclass(slots=True)
class ChoiceUpdate:
    """New output of one choice: consecutive tokens, and the finish message if the choice ended.

    `num_tokens`: length of the run. The run's token ids are filled in when the update is read, since the
    request stores them anyway.
    """

    run: ChoiceTokens = field(default_factory=ChoiceTokens)
    num_tokens: int = 0
    finished: engine_pb2.Finished | None = None


@dataclass(slots=True)
class Update:
    """New output of a request, with choices by number. A set `account` means that the request is over.

    `num_bytes`: as in `EngineRequest.num_unread_bytes`.
    """

    choices: dict[int, ChoiceUpdate] = field(default_factory=dict)
    num_bytes: int = 0
    started: engine_pb2.Started | None = None
    prompt_logprobs: engine_pb2.PromptLogprobs | None = None
    embedding: engine_pb2.Embedding | None = None
    account: engine_pb2.RequestAccount | None = None

    def choice(self, number: int) -> ChoiceUpdate:
        """Return the update of a choice, creating it if needed."""
        found = self.choices.get(number)
        if found is None:
            found = self.choices[number] = ChoiceUpdate()
        return found

    @property
    def has_output(self) -> bool:
        """True if the update holds output for the client."""
        return bool(self.choices or self.prompt_logprobs or self.embedding)
