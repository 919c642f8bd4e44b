"""`quire convert`: convert a pickled checkpoint to safetensors."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from quire import extras
from quire.cli.groups import new_app
from quire.cli.options import common as o
from quire.sizes import size_text
from quire_tools.convert import checkpoint

app = new_app()


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="Folder with pytorch_model.bin or its shards, or one such file.")
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to create.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite files in DST.")] = False,
    as_json: o.AsJson = False,
) -> None:
    """Convert a pickled checkpoint (pytorch_model.bin) to safetensors, which the worker reads.

    A pickled file can run any code when it is opened. It is opened in a separate process, with torch's restricted
    unpickler, without network, and with limits for memory and time; a file with more than tensors is refused.
    What was written is read back and compared, tensor by tensor. Configuration and tokenizer are copied, code is not.

    [bold]quire convert ~/old-model ~/old-model-safetensors[/bold]
    [bold]quire convert ~/old-model/pytorch_model.bin ~/new-model --force[/bold]
    [bold]quire up --model ~/old-model-safetensors[/bold]
    """
    extras.require("quire convert", "worker")
    source, destination = source.expanduser(), destination.expanduser()
    files = checkpoint.pickled_files(source)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("converting", total=sum(file.stat().st_size for file in files))
        made = checkpoint.convert(source, destination, force=force, on_bytes=lambda n: bar.advance(task, n))
    if as_json:
        typer.echo(json.dumps({"destination": str(destination), **asdict(made)}))
        return
    typer.echo(
        f"{destination}: {made.num_tensors} tensors, {size_text(made.num_bytes)} in {', '.join(made.files)}; checked"
    )
    if made.copied:
        typer.echo(f"copied: {', '.join(made.copied)}")
    for note in made.notes:
        typer.echo(f"note: {note}", err=True)
