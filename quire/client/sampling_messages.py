"""Convert SamplingParams to the public API's messages. Pure."""

from collections.abc import Sequence

from protos.common.v1 import common_pb2
from protos.inference.v1 import inference_pb2 as pb
from quire.client.sampling_params import SamplingParams
from quire.client.value_checks import valid_ids, valid_text
from svc_common.errors import InvalidArgument

_EARLY_STOPPING: dict[bool | str, common_pb2.BeamStop] = {
    True: common_pb2.BEAM_STOP_WHEN_ENOUGH,
    False: common_pb2.BEAM_STOP_WHEN_UNBEATABLE,
    "never": common_pb2.BEAM_STOP_NEVER,
}


def fill(request: pb.GenerateRequest | pb.ChatRequest, params: SamplingParams | None) -> None:
    """Write the parameters into `request`; those that are None stay unset."""
    if not isinstance(params, SamplingParams | None):
        raise InvalidArgument.field("sampling_params", f"must be SamplingParams, not {type(params).__name__}")
    if params is None:
        return
    request.sampling.CopyFrom(_sampling(params))
    request.stop.CopyFrom(_stop(params))
    request.response.logprobs = params.wants_logprobs
    if params.num_top_logprobs:
        request.response.num_top_logprobs = params.num_top_logprobs
    if params.prompt_logprobs is not None:
        request.response.num_prompt_logprobs = params.prompt_logprobs
    if params.structured_outputs is not None:
        params.structured_outputs.fill(request)


def _sampling(params: SamplingParams) -> pb.SamplingParams:
    sampling = pb.SamplingParams(
        n=params.n,
        best_of=params.best_of,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=None if params.top_k is None else max(params.top_k, 0),
        min_p=params.min_p,
        seed=params.seed,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias={int(i): float(bias) for i, bias in (params.logit_bias or {}).items()},
        allowed_token_ids=_ids_of("allowed_token_ids", params.allowed_token_ids),
        bad_words=[valid_text("bad_words", word) for word in params.bad_words or ()],
    )
    if params.use_beam_search:
        sampling.beam.length_penalty = params.length_penalty
        sampling.beam.early_stopping = _EARLY_STOPPING[params.early_stopping]
    return sampling


def _stop(params: SamplingParams) -> pb.StopConditions:
    return pb.StopConditions(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_strings=[valid_text("stop", s) for s in params.stop_strings],
        stop_token_ids=_ids_of("stop_token_ids", params.stop_token_ids),
        ignore_eos=params.ignore_eos,
    )


def _ids_of(name: str, ids: Sequence[int] | None) -> list[int]:
    return valid_ids(name, () if ids is None else ids)
