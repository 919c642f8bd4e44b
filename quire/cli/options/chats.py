"""Options about tool calls and reasoning in chats."""

from gateway_svc.settings import GatewaySettings
from quire.cli.options.settings import options_of

parsers = options_of(GatewaySettings, panels={"Chats": ("tool_parser", "reasoning_parser")})
