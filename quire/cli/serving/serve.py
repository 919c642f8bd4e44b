"""`quire serve ...`: the group of single services."""

from typing import ClassVar

from quire.cli.groups import CommandGroup, new_app


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
