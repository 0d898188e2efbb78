"""`tomoe generate MODEL "prompt"`: let a dense or a converted model continue a prompt."""

from __future__ import annotations

from typing import Annotated

import typer

from tomoe.cli import options
from tomoe.cli.words import printable, quiet_libraries


def generate(
    model: options.Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Max tokens to write.")] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="Sampling temperature (0: the most likely token).")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Sampling seed.")] = 0,
    active: options.Dial = None,
) -> None:
    """Continue a prompt with a dense or a converted model."""
    options.check_model(model)

    from tomoe.model.generation import generate as continue_prompt
    from tomoe.moe.active_experts import ActiveExperts, load

    quiet_libraries()
    if active is not None:
        typer.echo(ActiveExperts.of(model).nearest(active), err=True)
    loaded, tokenizer = load(model, active=active)
    typer.echo(printable(prompt + continue_prompt(loaded, tokenizer, prompt, max_new_tokens, temperature, seed)))
