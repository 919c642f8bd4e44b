"""Fields of SGLang's, llama.cpp's and TGI's APIs: those with an equivalent here, and those that are refused.

Meanings are from SGLang's OpenAI protocol and sampling parameters, llama.cpp's server README and TGI's
GenerateParameters. Fields without effect on the output (`cache_prompt`, `rid`, `timings_per_token`) are not
listed, since unknown fields are accepted. `regex`, `json_schema` and TGI's `grammar` are handled in
`structured`. Pure.
"""

from collections.abc import Mapping
from typing import Any

from gateway_svc.http.json_body import refuse

Neutral = dict[str, tuple[Any, ...]]

SAME_AS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "truncate": "truncate_prompt_tokens",
}
"""Foreign field name to ours; the values are the same."""

_UNBOUNDED = {"n_predict": (-1, -2)}
"""Values equivalent to omitting our field."""

_USE_TOP = "use temperature, top_k, top_p or min_p"
_USE_PENALTIES = "use repetition_penalty, presence_penalty or frequency_penalty, which count the whole text"
_USE_ADAPTER = "load the adapter (quire adapters load) and send its name as model"
_USE_LARK = "send guided_grammar with a Lark grammar, guided_regex or guided_json"
_USE_LOGPROBS = "send logprobs (chat: top_logprobs), and prompt_logprobs for the prompt"
_LEAVE_OUT = "leave the field out"

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    # sampling
    "adaptive_decay": ((0.9,), _USE_TOP),
    "adaptive_target": ((-1,), _USE_TOP),
    "do_sample": ((True,), "send temperature=0 for the likeliest tokens"),
    "dry_allowed_length": ((2,), _USE_PENALTIES),
    "dry_base": ((1.75,), _USE_PENALTIES),
    "dry_multiplier": ((0,), _USE_PENALTIES),
    "dry_penalty_last_n": ((-1, 0), _USE_PENALTIES),
    "dry_sequence_breakers": ((["\n", ":", '"', "*"], []), _USE_PENALTIES),
    "dynatemp_exponent": ((1,), _USE_TOP),
    "dynatemp_range": ((0,), _USE_TOP),
    "min_keep": ((0,), _USE_TOP),
    "mirostat": ((0,), _USE_TOP),
    "mirostat_eta": ((0.1,), _USE_TOP),
    "mirostat_tau": ((5,), _USE_TOP),
    "repeat_last_n": ((0, 64), _USE_PENALTIES),
    "repeat_penalty": ((1,), _USE_PENALTIES),
    "samplers": ((), _USE_TOP),
    "tfs_z": ((1,), _USE_TOP),
    "top_a": ((0,), _USE_TOP),
    "top_n_sigma": ((-1, 0), _USE_TOP),
    "typical_p": ((1,), _USE_TOP),
    "watermark": ((False,), _LEAVE_OUT),
    "xtc_probability": ((0,), _USE_TOP),
    "xtc_threshold": ((0.1,), _USE_TOP),
    # what the output must match, and where it ends
    "custom_logit_processor": ((), "use logit_bias, allowed_token_ids, bad_words or structured output"),
    "custom_params": (({},), _LEAVE_OUT),
    "ebnf": (("",), _USE_LARK),
    "grammar_lazy": ((False,), _USE_LARK),
    "grammar_triggers": (([],), _USE_LARK),
    "n_indent": ((0,), _LEAVE_OUT),
    "stop_regex": (([], ""), "send stop with texts"),
    "structural_tag": ((), "send tools, or response_format with a JSON schema"),
    "t_max_predict_ms": ((0,), "send the header x-request-timeout-ms and on_deadline=return_partial"),
    # models
    "adapter_id": (("",), _USE_ADAPTER),
    "lora": (([],), _USE_ADAPTER),
    "lora_path": (("",), _USE_ADAPTER),
    "lora_request": ((), _USE_ADAPTER),
    # prompts
    "guideline": ((), "put it into messages"),
    "input_embeds": ((), "send text or token ids"),
    "input_prefix": (("",), "put it into prompt"),
    "input_suffix": (("",), "put it into prompt"),
    "session_params": (({},), "send the whole prompt; what it begins with alike is cached"),
    "tool_prompt": ((), "put it into messages"),
    # what the answer shows
    "decoder_input_details": ((False,), _USE_LOGPROBS),
    "n_probs": ((0,), _USE_LOGPROBS),
    "post_sampling_probs": ((False,), _USE_LOGPROBS),
    "reasoning_format": (("auto", "deepseek", "none"), _LEAVE_OUT),
    "return_full_text": ((False,), "send echo=true"),
    "return_hidden_states": ((False,), "send POST /v1/embeddings"),
    "separate_reasoning": ((True,), "it is always apart; include_reasoning=false leaves it out"),
    "stream_reasoning": ((True,), _LEAVE_OUT),
    "top_n_tokens": ((0,), _USE_LOGPROBS),
}
NEUTRAL: Neutral = {name: values for name, (values, _) in _REFUSED.items()}
"""Values without effect."""
INSTEAD: Mapping[str, str] = {name: instead for name, (_, instead) in _REFUSED.items()}
"""What to send instead of refused values."""


def translated(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace fields by their equivalents. Raises InvalidArgument if both are given and differ."""
    if SAME_AS.keys().isdisjoint(fields):
        return fields
    theirs = {name: fields[name] for name in SAME_AS if fields.get(name) is not None}
    ours = {name: value for name, value in fields.items() if name not in SAME_AS}
    for name, value in theirs.items():
        if value in _UNBOUNDED.get(name, ()):
            continue
        if ours.setdefault(SAME_AS[name], value) != value:
            refuse(name, f"and {SAME_AS[name]} mean the same and differ; send one of them")
    return ours
