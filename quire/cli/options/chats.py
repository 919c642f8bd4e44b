"""Options about tool calls and reasoning in chats, about scores of texts, and about routers in front of the gateway."""

from gateway_svc.settings import GatewaySettings
from quire.cli.options.settings import options_of

parsers = options_of(
    GatewaySettings,
    panels={
        "Chats": ("tool_parser", "reasoning_parser"),
        "Scores": ("score_template", "score_tokens", "enable_tokenizer_info_endpoint"),
        "Routers": (
            *("metrics_names", "router_headers", "objectives"),
            *("kv_events_endpoint", "kv_events_replay_endpoint", "kv_events_topic", "openengine"),
        ),
    },
)
