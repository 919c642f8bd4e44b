"""`quire embed`: texts as vectors."""

import io
import json
import sys
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from quire.cli.groups import new_app
from quire.cli.options import access as a
from quire.cli.options import common as o
from quire.cli.options import sampling as s
from quire.cli.options.gathering import gathers
from quire.client.connections import Credentials
from quire.client.outputs import EmbeddingRequestOutput
from quire.client.sampling_params import PoolingParams
from quire.client.sync_client import Client, RequestOptions
from svc_common.errors import ConfigError, InvalidArgument

app = new_app()

_PER_CALL = 256
_SHOWN = 5


class Format(StrEnum):
    """Output formats."""

    JSON = "json"
    TABLE = "table"
    NPY = "npy"


@app.command()
@gathers(credentials=a.credentials)
def embed(
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT...", help="Texts; absent = --file, or standard input.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="A text per line; - = standard input.", show_default=False, allow_dash=True),
    ] = None,
    pooling: Annotated[str, typer.Option(metavar="mean|last", help="How tokens become one vector.")] = "mean",
    normalize: Annotated[
        bool, typer.Option("--normalize/--no-normalize", help="Scale each vector to length 1.")
    ] = True,
    form: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="json: a line per text; table: for reading; npy: NumPy's file format. Default: table on a terminal, else json.",
            show_default=False,
        ),
    ] = None,
    model: s.Model = "",
    target: o.Target = o.DEFAULT_TARGET,
    *,
    credentials: Credentials,
) -> None:
    """Turn texts into vectors.

    [bold]quire embed "a cat" "a dog" --format table[/bold]
    [bold]quire embed --file lines.txt > vectors.jsonl[/bold]
    [bold]quire embed --file lines.txt --format npy > vectors.npy[/bold]
    [bold]cat lines.txt | quire embed --pooling last --no-normalize[/bold]
    """
    given = _texts(texts, file)
    form = form or (Format.TABLE if sys.stdout.isatty() else Format.JSON)
    if form is Format.NPY and sys.stdout.isatty():
        raise ConfigError("--format npy is binary: write it into a file (> vectors.npy)", reason="INVALID_SETTING")
    params = PoolingParams(pooling=pooling, normalize=normalize)
    with Client(o.host_and_port(target, "--target"), credentials=credentials) as client:
        _WRITERS[form](given, _embedded(client, given, params, RequestOptions(model=model)))


def _embedded(
    client: Client, texts: Sequence[str], params: PoolingParams, options: RequestOptions
) -> Iterator[EmbeddingRequestOutput]:
    """Embeddings in the order of the texts, in calls of the largest allowed size."""
    for start in range(0, len(texts), _PER_CALL):
        yield from client.embed(texts[start : start + _PER_CALL], params, options=options)


def _texts(texts: list[str] | None, file: Path | None) -> list[str]:
    if texts and file is not None:
        raise ConfigError("give texts or --file, not both", reason="INVALID_SETTING")
    lines = texts or [line for line in _content(file).splitlines() if line.strip()]
    if not lines:
        raise InvalidArgument.field(
            "texts", "there are none; give them as arguments, with --file, or on standard input"
        )
    return lines


def _content(file: Path | None) -> str:
    source = "standard input" if file is None or str(file) == "-" else str(file)
    try:
        raw = sys.stdin.buffer.read() if source == "standard input" else file.read_bytes()  # type: ignore[union-attr]
        return raw.decode()
    except OSError as error:
        raise ConfigError(f"--file: {source} cannot be read: {error.strerror}", reason="BAD_FILE") from None
    except UnicodeDecodeError as error:
        raise InvalidArgument.field("texts", f"{source} is not UTF-8 (byte {error.start})") from None


def _write_json(texts: Sequence[str], outputs: Iterator[EmbeddingRequestOutput]) -> None:
    for index, output in enumerate(outputs):
        values = {
            "index": index,
            "text": texts[index],
            "num_tokens": output.num_prompt_tokens,
            "embedding": output.outputs.embedding,
        }
        typer.echo(json.dumps(values, ensure_ascii=False))


def _write_table(texts: Sequence[str], outputs: Iterator[EmbeddingRequestOutput]) -> None:
    table = Table("text", "tokens", "size", "length", "first values")
    for text, output in zip(texts, outputs, strict=True):
        vector = output.outputs.embedding
        first = ", ".join(f"{value:.4f}" for value in vector[:_SHOWN])
        norm = float(np.linalg.norm(np.asarray(vector)))
        table.add_row(text[:40], str(output.num_prompt_tokens), str(len(vector)), f"{norm:.3f}", f"{first}, ...")
    Console().print(table)


def _write_npy(texts: Sequence[str], outputs: Iterator[EmbeddingRequestOutput]) -> None:
    """float32, [texts, size]."""
    held = io.BytesIO()
    np.save(held, np.asarray([output.outputs.embedding for output in outputs], np.float32), allow_pickle=False)
    sys.stdout.buffer.write(held.getvalue())
    sys.stdout.buffer.flush()


_WRITERS = {Format.JSON: _write_json, Format.TABLE: _write_table, Format.NPY: _write_npy}
