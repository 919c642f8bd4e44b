"""What a reader of one request has, over one stream or several in a row at whatever gateways: everything in it exactly once."""

from dataclasses import dataclass, field

from protos.inference.v1 import inference_pb2 as pb

Piece = pb.Delta | pb.ToolCallDelta | pb.ReasoningDelta
_PIECES = ("delta", "tool_call_delta", "reasoning_delta")


@dataclass
class Read:
    """Tokens are checked for gaps and repeats as they come. `texts`: by choice, kind of piece and number of the tool call."""

    texts: dict[tuple[int, str, int], str] = field(default_factory=dict)
    calls: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    tops: dict[int, list[list[int]]] = field(default_factory=dict)
    ends: dict[int, pb.Finished] = field(default_factory=dict)
    started: list[pb.Started] = field(default_factory=list)
    prompt: pb.PromptLogprobs | None = None
    usage: pb.Usage | None = None
    _sequence: int = 0

    def take(self, event: pb.GenerateEvent) -> None:
        """The next event of the stream; each stream is dense and begins with Started."""
        kind = str(event.WhichOneof("event"))
        if kind == "started":
            self._begin(event.started)
        assert event.sequence == self._sequence
        self._sequence += 1
        if kind in _PIECES:
            self._piece(kind, getattr(event, kind))
        elif kind == "finished":
            assert event.finished.choice not in self.ends
            self.ends[event.finished.choice] = event.finished
        elif kind == "prompt_logprobs":
            self.prompt = event.prompt_logprobs
        elif kind == "usage":
            assert self.usage is None and len(self.ends) == len(self.ids)
            self.usage = event.usage

    def _begin(self, started: pb.Started) -> None:
        """Ends are told again by each stream."""
        self.started.append(started)
        self._sequence = 0
        self.ends.clear()

    def _piece(self, kind: str, piece: Piece) -> None:
        known = self.ids.setdefault(piece.choice, [])
        assert piece.choice not in self.ends
        assert piece.token_offset == len(known), (
            f"choice {piece.choice}: {piece.token_offset} after {len(known)} tokens"
        )
        known += piece.token_ids
        number = piece.index if isinstance(piece, pb.ToolCallDelta) else 0
        if isinstance(piece, pb.ToolCallDelta) and piece.name:
            assert (piece.choice, number) not in self.calls
            self.calls[piece.choice, number] = piece.id, piece.name
        text = piece.arguments if isinstance(piece, pb.ToolCallDelta) else piece.text
        key = (piece.choice, kind, number)
        self.texts[key] = self.texts.get(key, "") + text
        self.logprobs.setdefault(piece.choice, []).extend(piece.logprobs)
        self.tops.setdefault(piece.choice, []).extend(list(top.token_ids) for top in piece.top_logprobs)

    @property
    def text(self) -> str:
        """Of the first choice, outside of calls and reasoning."""
        return self.texts.get((0, "delta", 0), "")

    @property
    def num_tokens(self) -> int:
        """Over all choices."""
        return sum(map(len, self.ids.values()))

    def positions(self) -> list[pb.ChoicePosition]:
        """Where to read on."""
        return [pb.ChoicePosition(choice=choice, token_offset=len(ids)) for choice, ids in self.ids.items()]

    def whole(self, *, call_ids: bool = True) -> tuple[object, ...]:
        """What must be the same however it was read; but for `call_ids`, whatever request it was of."""
        ends = {choice: end.SerializeToString(deterministic=True) for choice, end in self.ends.items()}
        calls = self.calls if call_ids else {key: name for key, (_, name) in self.calls.items()}
        assert self.usage is not None
        num_tokens = self.usage.completion_tokens
        return self.texts, calls, self.ids, self.logprobs, self.tops, ends, self.prompt, num_tokens
