"""The ends of a stage's model: where hidden states of the stage before arrive, and where they leave for the next."""

from typing import Protocol

import torch
from transformers import PreTrainedModel

from worker_svc.model.decoder.part import decoder_of
from worker_svc.model.fused.elsewhere import Elsewhere, StageArrival
from worker_svc.model.stages.division import StagePart, layers_of, refused


class StateLinks(Protocol):
    """Carries hidden states of each forward pass between neighbouring stages, in order."""

    def receive(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """States of this shape that the stage before sent, in new memory. Raises PeerLost."""
        ...

    def send(self, states: torch.Tensor) -> None:
        """Send states to the next stage. Raises PeerLost."""
        ...


class StageEnds:
    """Call `enter` before each forward pass of `model`, a class of `division.staged`, and `leave` after it.

    Until `link`, states that arrive are made up of the tokens, so that no other stage need run.
    """

    def __init__(self, model: PreTrainedModel, part: StagePart) -> None:
        layers = layers_of(model)
        self.part = part
        self._width, self._dtype = model.config.get_text_config(decoder=True).hidden_size, model.dtype
        first, after = layers[0], None if part.is_last else layers[part.layers.stop]
        self.arrival = first if isinstance(first, StageArrival) else None
        self._after = after if isinstance(after, Elsewhere) else None
        self._links: StateLinks | None = None

    def link(self, links: StateLinks) -> None:
        """Pass states between stages from now on."""
        self._links = links

    def enter(self, token_ids: torch.Tensor) -> None:
        """Have the states of a pass over `token_ids` [1, T] arrive, padding included."""
        if self.arrival is None:
            return
        if self._links is None:
            self.arrival.states = self._made_up(token_ids)
        else:
            self.arrival.states = self._links.receive(torch.Size((*token_ids.shape, self._width)), self._dtype)

    def _made_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        columns = torch.arange(1, self._width + 1)
        return torch.sin((token_ids[..., None] + 1) * columns * 0.37).to(self._dtype)

    @property
    def left(self) -> torch.Tensor:
        """States [1, T, H] behind the stage's last layer, as its modules computed them. Not for the last stage.

        Raises ConfigError if the decoder hands something else from layer to layer.
        """
        assert self._after is not None
        seen = self._after.seen
        if not isinstance(seen, torch.Tensor) or seen.ndim != 3 or seen.shape[-1] != self._width:
            raise refused("the model's layers do not return hidden states alone; serve it with one stage")
        return seen

    def leave(self, states: torch.Tensor) -> None:
        """Send the states [1, T, H] of a pass to the next stage, once linked."""
        if self._links is not None:
            self._links.send(states)

    def check(self, model: PreTrainedModel) -> None:
        """Raise ConfigError if a layer reads more than hidden states and positions, which other stages do not know.

        Runs the decoder twice, for other tokens.
        """
        if self.arrival is None:
            return
        found, decoder = [], decoder_of(model)
        for token_id in (0, 1):
            token_ids = torch.full((1, 4), token_id)
            self.arrival.states = self._made_up(torch.arange(4)[None])
            out = decoder(input_ids=token_ids, position_ids=torch.arange(4)[None], use_cache=False)
            found.append(out.last_hidden_state if self.part.is_last else self.left)
        if not torch.equal(*found):
            raise refused(f"layers of {type(model).__name__} read the tokens themselves; serve it with one stage")
