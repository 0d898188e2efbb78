"""`tomoe push PATH OWNER/NAME`: a plan or a converted model, with its card, to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tomoe import api
from tomoe.cli.screen import Screen


def push(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A plan folder or a converted model.")],
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository; it is made where there is none.")],
    private: Annotated[bool, typer.Option("--private", help="Show it to yourself only.")] = False,
) -> None:
    """Upload a plan or a converted model to the hub, without its training run."""
    address, local = api.push_folder(path, repo, private)
    said = f" Its recipe names what lies on this machine: {', '.join(local)}." if local else ""
    following = "" if (path / "config.json").exists() else f" To make the model of it: tomoe apply {repo} MODEL -o OUT"
    Screen().say(f"Uploaded to {address}.{said}{following}")
