"""`quire serve ...`: the group of single services."""

from typing import Any, ClassVar

from quire.cli.groups import CommandGroup, new_app
from svc_common.errors import ConfigError


class ServeGroup(CommandGroup):
    """Commands of `quire serve`."""

    table: ClassVar[dict[str, tuple[str, str]]] = {
        "gateway": (
            "quire.cli.serving.serve_gateway",
            "The users' door: gRPC and the OpenAI HTTP API. Needs no torch.",
        ),
        "scheduler": ("quire.cli.serving.serve_scheduler", "Owner of queues and block tables. Needs no torch."),
        "worker": ("quire.cli.serving.serve_worker", "Owner of the model and the KV cache."),
        "simulated-worker": (
            "quire_tools.commands.serve_simulated_worker",
            "A worker with a cost model instead of a model.",
        ),
    }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve the first argument to its command. Raises ConfigError for a model, as in `vllm serve MODEL`."""
        if args and args[0] not in self.table and not args[0].startswith("-"):
            raise ConfigError(
                f"there is no such service as {args[0]}, only {', '.join(self.table)}; to serve a model: quire up --model "
                f"{args[0]}, or quire run {args[0]}",
                reason="INVALID_SETTING",
            )
        return super().resolve_command(ctx, args)


app = new_app()


@app.callback(cls=ServeGroup, no_args_is_help=True)
def serve() -> None:
    """Start one service, as a container or a second machine would.

    The three together are what [bold]quire up[/bold] starts. Each prints [bold]service NAME pid=N address=HOST:PORT[/bold]
    once it listens; they may start in any order and wait for each other.

      [bold]quire serve worker --model models/tiny --port 50061[/bold]
      [bold]quire serve scheduler --worker 127.0.0.1:50061 --port 50060[/bold]
      [bold]quire serve gateway --scheduler 127.0.0.1:50060[/bold]
    """
