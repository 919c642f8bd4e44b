"""`quire up` with options as `vllm serve` has them: several served names, renamed options, and a sentence about the others."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from svc_common.errors import ConfigError

_NAMES, _ALIAS = "--served-model-name", "--model-alias"

Aliases = Annotated[
    list[str] | None,
    typer.Option(
        _ALIAS,
        metavar="NAME",
        help="Further name under which requests may ask for the model; answers have its first name. Repeatable.",
        show_default=False,
        rich_help_panel="Model",
    ),
]

SAME_AS = {
    "--port": "--http-port",
    "--tensor-parallel-size": "--tensor-parallel",
    "-tp": "--tensor-parallel",
    "--pipeline-parallel-size": "--pipeline-parallel",
    "-pp": "--pipeline-parallel",
    "--data-parallel-size": "--workers",
    "-dp": "--workers",
    "--max-loras": "--max-adapters",
    "--max-lora-rank": "--max-adapter-rank",
    "--async-scheduling": "--overlap",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
}
"""vLLM's options that are ours under another name, with the same values."""

INSTEAD = {
    "--api-key": "use --tenants FILE: hashed keys, with limits for each tenant (quire keys)",
    "--chat-template": "the template comes from the checkpoint; change it there",
    "--config": "write the options on the command line",
    "--disable-log-requests": "leave it out: requests are not logged",
    "--disable-log-stats": "use --stats-interval-s 0",
    "--enable-auto-tool-choice": "leave it out: tools are always on",
    "--enable-chunked-prefill": "use --policy: prompts are cut into chunks by quire and vllm-v1, and not by vllm-v0",
    "--enable-lora": "leave it out: use --adapter NAME=PATH",
    "--enforce-eager": "use --no-fuse",
    "--hf-overrides": "change the checkpoint's config.json; a reranker needs --score-template FILE --score-tokens yes,no",
    "--limit-mm-per-prompt": "leave it out: models take text only",
    "--load-format": "leave it out: weights are safetensors or GGUF",
    "--lora-modules": "use --adapter NAME=PATH, once for each",
    "--otlp-traces-endpoint": "set OTEL_EXPORTER_OTLP_ENDPOINT",
    "--scheduling-policy": "leave it out: the default policy orders by priority and by waiting time",
    "--seed": "send a seed with the request",
    "--speculative-config": "use --draft-model FOLDER or --drafts, with --set num_spec_tokens=4",
    "--ssl-certfile": "use --tls FOLDER, or quire serve gateway --tls-cert",
    "--ssl-keyfile": "use --tls FOLDER, or quire serve gateway --tls-key",
    "--task": "leave it out: every model generates and embeds",
    "--tokenizer": "leave it out: the tokenizer comes from the checkpoint",
    "--tool-call-parser": "leave it out, as it is found from the chat template, or use --tool-parser",
    "--trust-remote-code": "leave it out: only model classes of transformers itself are served",
    "--uvicorn-log-level": "leave it out: the log has warnings and what services do",
}
"""vLLM's options that `quire up` does not have, and what to do."""


class VllmCommand(TyperCommand):
    """A command that reads vLLM's options. Raises ConfigError with one sentence for those that it does not have."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See the class."""
        return super().parse_args(ctx, translated(with_aliases(args)))


def translated(arguments: Sequence[str]) -> list[str]:
    """Arguments with vLLM's names replaced by ours, in either form: `--port 1` and `--port=1`."""
    found = []
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if name in INSTEAD:
            raise ConfigError(f"{name} is an option of vLLM: {INSTEAD[name]}", reason="INVALID_SETTING")
        found.append(f"{SAME_AS.get(name, name)}{separator}{value}")
    return found


def with_aliases(arguments: Sequence[str]) -> list[str]:
    """`--served-model-name A B C` as `--served-model-name A --model-alias B --model-alias C`; the rest as it is."""
    found: list[str] = []
    num_names = -1  # given so far in the list; -1 = not in one
    for argument in arguments:
        num_names = 0 if argument == _NAMES else -1 if num_names < 0 or argument.startswith("-") else num_names + 1
        found += [_ALIAS, argument] if num_names > 1 else [argument]
    return found


def alias_arguments(aliases: Sequence[str] | None) -> list[str]:
    """The aliases as arguments of `quire serve gateway`."""
    return [part for alias in aliases or () for part in (_ALIAS, alias)]
