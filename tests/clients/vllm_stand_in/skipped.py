"""vLLM's HTTP tests that are not run against Quire, by file and test (`*`: all of a file), and why."""

_MODEL = "asserts what its own model or tokenizer makes: texts, lengths, numbers of tokens, ends"
_TEMPLATE = "asserts what its own chat template says, or roles that the built-in model's refuses"
_THINKING = "needs a model that thinks; the built-in one does not"
_LONG_CALLS = "needs a model that ends its calls; the built-in one writes arguments until the context ends"
_TOKEN_IDS_WISHED = "log probabilities of wished tokens (logprob_token_ids): refused by name"
_WHOLE_VOCABULARY = "log probabilities of the whole vocabulary (-1): refused; at most 20"
_EMBEDS = "prompts as embeddings: refused by name"
_VECTORS = "asserts vectors and numbers of tokens of a model of its own, or formats of vectors that Quire does not have"
_METRICS = "numbers of a request in its answer's body (--enable-per-request-metrics): not offered"
_ROUTE = "a route that Quire does not have"
_SIDE = "truncation_side=right: refused; prompts are truncated from the beginning"

_CHAT = "openai/chat_completion/"
SKIPPED: dict[str, dict[str, str]] = {
    f"{_CHAT}test_chat.py": {
        "test_single_chat_session": _MODEL,
        "test_structured_outputs_choice_chat": _MODEL,
        "test_structured_outputs_json_chat": _MODEL,
        "test_response_format_json_object": _MODEL,
        "test_response_format_json_schema": _MODEL,
        "test_complex_message_content": _MODEL,
        "test_custom_role": _TEMPLATE,
        "test_invocations": _ROUTE,
    },
    f"{_CHAT}test_chat_completion.py": {
        "test_kv_transfer_prompt_token_ids_round_trip": "kv_transfer_params: refused by name",
        "test_kv_transfer_prompt_token_ids_streaming": "kv_transfer_params: refused by name",
        "test_per_request_metrics_non_streaming": _METRICS,
        "test_per_request_metrics_on_final_usage_chunk": _METRICS,
    },
    f"{_CHAT}test_chat_echo.py": {
        "test_chat_session_with_echo_and_continue_final_message[test_case0]": "echo in a chat: refused by name",
        "test_prompt_logprobs": _WHOLE_VOCABULARY,
        "test_top_logprobs": _WHOLE_VOCABULARY,
    },
    f"{_CHAT}test_completion_with_function_calling.py": {
        "test_function_tool_use": _LONG_CALLS,
        "test_named_tool_use": _LONG_CALLS,
    },
    f"{_CHAT}test_include_reasoning.py": {
        "test_include_reasoning_true_non_streaming": _THINKING,
        "test_reasoning_tokens_in_usage": _THINKING,
        "test_include_reasoning_true_streaming": _THINKING,
        "test_default_includes_reasoning": _THINKING,
    },
    f"{_CHAT}test_logprob_token_ids.py": {
        "test_logprob_token_ids_returns_requested_ids": _TOKEN_IDS_WISHED,
        "test_logprob_token_ids_stream_with_no_top_k": _TOKEN_IDS_WISHED,
    },
    "openai/completion/test_completion.py": {
        "test_single_completion": _MODEL,
        "test_logprob_token_ids": _TOKEN_IDS_WISHED,
        "test_logprob_token_ids_stream": _TOKEN_IDS_WISHED,
        "test_completion_streaming": _MODEL,
        "test_completion_truncation_side_controls_prompt_truncation": _SIDE,
        "test_parallel_streaming": _MODEL,
        "test_parallel_no_streaming": _MODEL,
    },
    "openai/completion/test_prompt_validation.py": {
        "test_empty_prompt": _EMBEDS,
        "test_load_prompt_embeds": _EMBEDS,
    },
    "openai/test_chunked_prompt.py": {
        "test_completion_stream_options_and_logprobs_with_long_prompts": _MODEL,
    },
    "openai/models/test_models.py": {
        "test_check_models": "asserts that the root of an adapter is its folder; Quire tells no paths",
    },
    "openai/test_return_token_ids.py": {
        "test_chat_completion_with_tool_use": _TEMPLATE,
        "test_chat_completion_with_emoji_and_token_ids": _TEMPLATE,
    },
    "pooling/embed/test_online.py": {"*": _VECTORS},
    "serve/lora/test_lora_adapters.py": {"*": f"{_ROUTE}: adapters are loaded through AdminService"},
    "serve/middleware/test_optional_middleware.py": {
        "test_no_request_id_header": "asserts that answers have no x-request-id; Quire's have one",
        "test_enable_request_id_header": "asserts that a drawn id has 32 characters; Quire draws UUIDs with dashes",
        "test_v2_endpoint_accepts_valid_api_token": f"{_ROUTE} (Cohere's /v2/embed)",
        "test_v2_endpoint_rejects_missing_api_token": f"{_ROUTE} (Cohere's /v2/embed)",
    },
    "serve/tokenize/test_tokenization.py": {
        "test_tokenizer_info_basic": _ROUTE,
        "test_tokenizer_info_schema": _ROUTE,
        "test_tokenizer_info_consistency_with_tokenize": _ROUTE,
        "test_tokenizer_info_chat_template": _ROUTE,
    },
    "serve/instrumentator/test_basic.py": {
        "test_show_version": "the version of vLLM's second front end: there is none",
        "test_server_load": _ROUTE,
    },
}
