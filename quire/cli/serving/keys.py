"""`quire keys`: API keys for a tenants file. A key is shown once, when it is made; the file has only its hash."""

import datetime
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gateway_svc.access.keys import Keyring, hash_key, new_key
from gateway_svc.access.tenants_file import TENANT_NAME, TenantEntry, Tenants, parse_tenants, read_tenants
from quire.cli.groups import new_app
from svc_common.errors import ConfigError, Unauthenticated

app = new_app()

_File = Annotated[Path, typer.Argument(metavar="FILE", help="The tenants file.")]


@app.callback(no_args_is_help=True)
def keys() -> None:
    """Make, hash, list and check API keys.

    [bold]quire keys new acme --file tenants.toml[/bold]
    [bold]quire keys list tenants.toml[/bold]
    """


@app.command("new")
def new(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Tenant of the key; a new one is added.")],
    file: Annotated[
        Path | None,
        typer.Option(help="Add it to this tenants file; running gateways reload it.", show_default=False),
    ] = None,
    name: Annotated[str, typer.Option(help="Purpose, shown in lists.")] = "",
    days: Annotated[
        int | None, typer.Option(min=1, max=36_500, help="Days of validity. Default: unlimited.", show_default=False)
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Allow the admin API.")] = False,
) -> None:
    """Make a key and print it, once; and the lines for the tenants file, or add them with --file."""
    if not TENANT_NAME.fullmatch(tenant):
        raise ConfigError(
            f"{tenant!r} is no name of a tenant; use letters, digits, dots, dashes and underscores, at most 64",
            reason="TENANT_NAME",
        )
    key = new_key()
    lines = _lines(tenant, key, name, days, admin=admin)
    if file is None:
        typer.echo(key)
        typer.echo(f"\n# for the tenants file:\n{lines}", err=True)
    else:
        _append(file, lines)
        typer.echo(key)


@app.command("hash")
def hash_() -> None:
    """Print the SHA-256 of a key that is read from standard input, so that no process list or shell history shows it.

    [bold]quire keys hash < key.txt[/bold]
    """
    typer.echo(hash_key(_read_key()))


@app.command("list")
def list_(file: _File) -> None:
    """Show tenants, limits and keys of a file."""
    tenants = read_tenants(file)
    table = Table("tenant", "key", "SHA-256", "expires", "may", "limits")
    for tenant_name, tenant in sorted(tenants.tenants.items()):
        rows = [
            (key.name, f"{key.sha256[:12]}...", _expiry(key.expires), _rights(key.admin, key.may_name_tenants))
            for key in tenant.keys
        ]
        for number, row in enumerate(rows or [("none", "", "", "")]):
            table.add_row(tenant_name if number == 0 else "", *row, _limits(tenant) if number == 0 else "")
    Console().print(table)


@app.command("check")
def check(
    file: _File,
    key: Annotated[
        bool, typer.Option("--key", help="Also read a key from standard input and print its tenant.")
    ] = False,
) -> None:
    """Check a tenants file.

    [bold]quire keys check tenants.toml --key < key.txt[/bold]
    """
    tenants = read_tenants(file)
    num_keys = sum(len(tenant.keys) for tenant in tenants.tenants.values())
    typer.echo(f"{file} is sound; tenants: {len(tenants.tenants)}, keys: {num_keys}")
    if key:
        typer.echo(_owner(tenants, _read_key()))


def _owner(tenants: Tenants, key: str) -> str:
    found = Keyring(tenants).find(key)
    if found is None:
        raise Unauthenticated("this key is not in the file", reason="UNKNOWN_KEY")
    if found.key.has_expired(datetime.datetime.now(datetime.UTC)):
        raise Unauthenticated(f"this key of tenant {found.tenant} has expired", reason="EXPIRED_KEY")
    return f"the key is {found.tenant}'s" + (f" ({found.key.name})" if found.key.name else "")


def _read_key() -> str:
    key = typer.prompt("key", hide_input=True) if sys.stdin.isatty() else sys.stdin.readline()
    if not key.strip():
        raise ConfigError("no key came on standard input", reason="API_KEY")
    return str(key).strip()


def _lines(tenant: str, key: str, name: str, days: int | None, *, admin: bool) -> str:
    lines = [f'[[tenants."{tenant}".keys]]', f'sha256 = "{hash_key(key)}"']
    if name:
        lines.append(f"name = {_quoted(name)}")
    if days is not None:
        end = datetime.datetime.now(datetime.UTC).replace(microsecond=0) + datetime.timedelta(days=days)
        lines.append(f"expires = {end.isoformat().replace('+00:00', 'Z')}")
    return "\n".join([*lines, "admin = true"] if admin else lines) + "\n"


def _quoted(text: str) -> str:
    if not text.isprintable():
        raise ConfigError("--name has characters that cannot be shown", reason="KEY_NAME")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _append(file: Path, lines: str) -> None:
    """Replace the file atomically, and only if it is valid with the new lines."""
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    text = f"{before.rstrip()}\n\n{lines}" if before.strip() else lines
    parse_tenants(text, file)
    beside = file.with_name(f".{file.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.chmod(file.stat().st_mode & 0o777 if file.exists() else 0o600)
    beside.replace(file)


def _expiry(expires: datetime.datetime | None) -> str:
    return "never" if expires is None else f"{expires:%Y-%m-%d %H:%M %Z}"


def _rights(admin: bool, may_name_tenants: bool) -> str:
    return ", ".join([*(["admin"] if admin else []), *(["name tenants"] if may_name_tenants else [])])


def _limits(tenant: TenantEntry) -> str:
    values = tenant.model_dump(exclude={"keys"}, exclude_defaults=True)
    return ", ".join(
        f"{name} = {', '.join(sorted(v)) if isinstance(v, frozenset) else v}" for name, v in values.items()
    )
