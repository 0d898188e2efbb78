"""`tomoe methods [NAME]`: list the methods, or the settings of one."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from tomoe.cli.console import output
from tomoe.recipe import target_rules


def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show the settings of this method, or of FILE.py:CLASS.")
    ] = None,
) -> None:
    """List the conversion methods, or the settings of one."""
    from tomoe.methods import registry

    console = output()
    if name is None:
        table = Table("name", "what it does", "trains", "runs in", box=None, pad_edge=False)
        for known in registry.names():
            found = registry.find(known)
            table.add_row(known, found.summary(), found.trains or "nothing", _served(found.kind))
        console.print(table)
        return
    found = registry.find(name)
    console.say(found.summary())
    if found.paper:
        console.say(f"Published: {found.paper}")
    console.say(f"Trains: {found.trains or 'nothing'}. Runs in: {_served(found.kind)}.")
    for key, field in found.Config.model_fields.items():
        console.say(
            f"  --set method.{key}={field.get_default(call_default_factory=True)}", f"      {field.description}"
        )
    for key, value in found.defaults.items():
        console.say(f"  {key} is {value} unless it is given")


def _served(kind: target_rules.Form) -> str:
    """Name the engines that can run a plan of this kind."""
    exports = [target for target, rules in target_rules.TARGET_RULES.items() if kind in rules.forms]
    others = [target for target in exports if target not in ("hf", "gpu")]
    engines = "transformers, vLLM" + (", llama.cpp" if "gguf" in others else "")
    return engines if others else "transformers"
