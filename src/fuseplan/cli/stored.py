"""The commands `fuseplan cache`: the disk cache of compiled kernels."""

from __future__ import annotations

import click

from fuseplan.cli.options import AS_JSON
from fuseplan.cli.screen import print_json
from fuseplan.errors import counted
from fuseplan.stores.cache import cache_info, clear_cache
from fuseplan.stores.cache import entries as cache_entries


@click.group()
def cache() -> None:
    """Manage the disk cache of compiled kernels."""


@cache.command()
@AS_JSON
def info(as_json: bool) -> None:
    """Print the cache's folder, and the number and size of its kernels."""
    found = cache_info()
    if as_json:
        print_json({**found.to_json(), "sizes": cache_entries()})
    elif found.path is None:
        click.echo("the cache is turned off by FUSEPLAN_DISABLE_CACHE")
    else:
        problem = f"; it cannot be used: {found.problem}" if found.problem else ""
        click.echo(f"{found.path}: {counted(found.entries, 'kernel')}, {found.nbytes / 1e3:.1f} kB{problem}")


@cache.command()
@AS_JSON
def clear(as_json: bool) -> None:
    """Remove every kernel from the cache."""
    try:
        removed = clear_cache()
    except OSError as error:
        raise click.ClickException(f"the cache cannot be cleared: {error}") from error
    if as_json:
        print_json({"removed": removed})
    else:
        click.echo(f"removed {counted(removed, 'kernel')}")


@cache.command()
@AS_JSON
def path(as_json: bool) -> None:
    """Print the cache's folder."""
    where = cache_info().path
    if as_json:
        print_json({"path": where})
    else:
        click.echo(where or "")
