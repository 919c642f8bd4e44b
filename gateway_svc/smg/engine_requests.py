"""Requests of the contract as Quire's. What Quire does not support is refused by name."""

from protos.inference.v1 import inference_pb2
from protos.routers.v1 import vllm_engine_pb2 as pb
from svc_common.errors import InvalidArgument

_ANY_OBJECT = '{"type": "object"}'
_REFUSED = {
    "kv_transfer_params": "Quire has no transfer of KV caches between engines",
    "kv_transfer_params_json": "Quire has no transfer of KV caches between engines",
    "mm_inputs": "Quire serves text models",
    "media_refs": "Quire serves text models",
}
_SEEDS = 2**64


def generate_request(request: pb.GenerateRequest) -> inference_pb2.GenerateRequest:
    """Raises InvalidArgument for what is not supported; values are checked as those of any request."""
    _refuse(request)
    made = inference_pb2.GenerateRequest()
    if request.WhichOneof("input") == "text":
        made.text = request.text
    else:
        made.token_ids.ids.extend(request.tokenized.input_ids)
    params = request.sampling_params
    _set_sampling(made.sampling, params)
    _set_stop(made.stop, params)
    _set_response(made.response, params)
    _set_constraint(made, params)
    if params.HasField("truncate_prompt_tokens"):
        made.truncate_prompt_tokens = max(0, params.truncate_prompt_tokens)
    return made


def embed_request(request: pb.EmbedRequest) -> inference_pb2.EmbedRequest:
    """One prompt of tokens."""
    made = inference_pb2.EmbedRequest()
    made.inputs.add().token_ids.ids.extend(request.tokenized.input_ids)
    return made


def _refuse(request: pb.GenerateRequest) -> None:
    for name, why in _REFUSED.items():
        if request.HasField(name):
            raise InvalidArgument.field(name, f"is not supported: {why}")
    if request.extra_mm_inputs:
        raise InvalidArgument.field("extra_mm_inputs", f"is not supported: {_REFUSED['mm_inputs']}")
    if request.data_parallel_rank:
        raise InvalidArgument.field("data_parallel_rank", f"is {request.data_parallel_rank}; a cell is one rank, 0")


def _set_sampling(sampling: inference_pb2.SamplingParams, params: pb.SamplingParams) -> None:
    if params.HasField("temperature"):
        sampling.temperature = params.temperature
    sampling.top_p, sampling.top_k, sampling.min_p = params.top_p or 1.0, params.top_k, params.min_p
    sampling.frequency_penalty, sampling.presence_penalty = params.frequency_penalty, params.presence_penalty
    sampling.repetition_penalty = params.repetition_penalty or 1.0
    sampling.n = params.n or 1
    if params.HasField("seed"):
        sampling.seed = params.seed % _SEEDS
    for token_id, bias in params.logit_bias.items():
        if token_id < 0:
            raise InvalidArgument.field("sampling_params.logit_bias", f"has the token id {token_id}; ids begin at 0")
        sampling.logit_bias[token_id] = bias


def _set_stop(stop: inference_pb2.StopConditions, params: pb.SamplingParams) -> None:
    if params.HasField("max_tokens"):
        stop.max_tokens = params.max_tokens
    stop.min_tokens, stop.ignore_eos = params.min_tokens, params.ignore_eos
    stop.stop_strings.extend(params.stop)
    stop.stop_token_ids.extend(params.stop_token_ids)
    stop.include_in_output = params.include_stop_str_in_output


def _set_response(response: inference_pb2.ResponseOptions, params: pb.SamplingParams) -> None:
    response.special_tokens = not params.skip_special_tokens
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name) and (number := getattr(params, name)) < 0:
            raise InvalidArgument.field(f"sampling_params.{name}", f"is {number}; send the number of top tokens")
    if params.HasField("logprobs"):
        response.logprobs, response.num_top_logprobs = True, params.logprobs
    if params.HasField("prompt_logprobs"):
        response.num_prompt_logprobs = params.prompt_logprobs


def _set_constraint(made: inference_pb2.GenerateRequest, params: pb.SamplingParams) -> None:
    match params.WhichOneof("constraint"):
        case "json_schema":
            made.json_schema = params.json_schema
        case "regex":
            made.regex = params.regex
        case "grammar":
            made.lark = params.grammar
        case "json_object" if params.json_object:
            made.json_schema = _ANY_OBJECT
        case "choice":
            made.choice.choices.extend(params.choice.choices)
        case "structural_tag":
            raise InvalidArgument.field(
                "sampling_params.structural_tag", "is not supported; send json_schema, regex, grammar or choice"
            )
