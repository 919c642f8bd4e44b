"""Options about tool calls and reasoning in chats, and about scores of texts."""

from gateway_svc.settings import GatewaySettings
from quire.cli.options.settings import options_of

parsers = options_of(
    GatewaySettings,
    panels={
        "Chats": ("tool_parser", "reasoning_parser"),
        "Scores": ("score_template", "score_tokens", "enable_tokenizer_info_endpoint"),
    },
)
