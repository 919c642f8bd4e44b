"""`quire models`: what is served."""

import dataclasses
import json
from typing import Annotated

import typer

from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options.gathering import gathers
from quire.client.connections import Credentials
from quire.client.sync_client import Client
from svc_common.errors import Unavailable

app = new_app()


@app.command()
@gathers(credentials=a.credentials)
def models(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    target: o.Target = o.DEFAULT_TARGET,
    *,
    credentials: Credentials,
) -> None:
    """List the models served, with their limits.

    [bold]quire models[/bold]
    [bold]quire models --target gateway.example:50051 --json[/bold]
    """
    with Client(o.host_and_port(target, "--target"), credentials=credentials) as client:
        cards = client.models()
    if not cards:
        raise Unavailable(f"no model is loaded yet behind {target}; try again when its worker is ready")
    for card in cards:
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(card)))
            continue
        chat = "chat" if card.chat else "completion only"
        typer.echo(f"{card.name}  {card.max_model_len} tokens  vocabulary {card.vocab_size}  {chat}")
