"""`tomoe push PATH OWNER/NAME`: a plan, a converted model or an export, with its card, to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tomoe.cli.console import Screen
from tomoe.exporting import publish
from tomoe.folders import left_out, listed


def push(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Plan, converted model or export.")],
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository; created if it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
) -> None:
    """Upload a plan, a model or an export to the Hugging Face hub."""
    with Screen() as screen:
        address, local = publish.push_folder(path, repo, private)
    strangers = left_out(path)
    others = f" Left out, because tomoe did not write them: {listed(strangers)}." if strangers else ""
    names = f" Its recipe names paths of this machine: {', '.join(local)}." if local else ""
    following = "" if (path / "config.json").exists() else f" To build the model: tomoe apply {repo} MODEL -o OUT"
    screen.say(f"Uploaded to {address}.{others}{names}{following}")
