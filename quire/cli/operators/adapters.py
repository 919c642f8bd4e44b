"""`quire adapters`: LoRA adapters of a running scheduler."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options.gathering import gathers
from quire.client.connections import Credentials
from quire.operators import admin as administration

app = new_app()


@app.callback()
def adapters() -> None:
    """LoRA adapters in PEFT's format: load them while serving, and name them in requests as the model.

    [bold]quire adapters load sql ~/adapters/sql[/bold]
    [bold]quire generate --model sql "SELECT"[/bold]
    """


@app.command("list")
@gathers(credentials=a.credentials)
def list_adapters(
    as_json: o.AsJson = False,
    admin: o.Admin = o.DEFAULT_ADMIN,
    *,
    credentials: Credentials,
) -> None:
    """List the adapters that requests may name, and why one that a worker could not load is unusable."""
    with administration.AdminClient(o.host_and_port(admin, "--admin"), credentials=credentials) as client:
        found = client.list_adapters()
    fields = ("name", "adapter_id", "path", "rank", "num_bytes", "num_requests", "unavailable")
    rows = [{field: getattr(adapter, field) for field in fields} for adapter in found]
    if as_json:
        typer.echo(json.dumps({"adapters": rows}))
        return
    table = Table("name", "state", "rank", "bytes", "requests", "path")
    for row in rows:
        state = f"unavailable: {row['unavailable']}" if row["unavailable"] else "ready"
        table.add_row(
            row["name"], state, str(row["rank"]), str(row["num_bytes"]), str(row["num_requests"]), row["path"]
        )
    Console().print(table if rows else "no adapter is loaded")


@app.command("load")
@gathers(credentials=a.credentials)
def load_adapter(
    name: Annotated[str, typer.Argument(help="Name that requests will use.")],
    path: Annotated[
        Path,
        typer.Argument(help="Folder with adapter_config.json and adapter_model.safetensors, as the workers see it."),
    ],
    admin: o.Admin = o.DEFAULT_ADMIN,
    *,
    credentials: Credentials,
) -> None:
    """Load an adapter into every worker."""
    with administration.AdminClient(o.host_and_port(admin, "--admin"), credentials=credentials) as client:
        adapter = client.load_adapter(name, str(path.absolute()))
    typer.echo(f"loaded {adapter.name}: rank {adapter.rank}, {adapter.num_bytes} bytes")


@app.command("unload")
@gathers(credentials=a.credentials)
def unload_adapter(
    name: Annotated[str, typer.Argument(help="Name of the adapter.")],
    admin: o.Admin = o.DEFAULT_ADMIN,
    *,
    credentials: Credentials,
) -> None:
    """Unload an adapter; refused while requests use it."""
    with administration.AdminClient(o.host_and_port(admin, "--admin"), credentials=credentials) as client:
        client.unload_adapter(name)
    typer.echo(f"unloaded {name}")
