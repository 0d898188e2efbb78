"""`tomoe generate MODEL "prompt"`: continue a prompt with a dense or converted model."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from tomoe.cli import options
from tomoe.cli.console import printable, quiet_libraries


def generate(
    model: options.Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Max tokens to generate.")] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="Sampling temperature (0: the most likely token).")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Sampling seed.")] = 0,
    active: options.ActiveFraction = None,
    prompts: Annotated[
        Literal["chosen", "whole"] | None,
        typer.Option(
            "--prompts", help="Sparse inputs: long prompts use the chosen inputs (chosen), or all inputs (whole)."
        ),
    ] = None,
    dtype: options.RunDtype = "bfloat16",
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
) -> None:
    """Generate text with a dense or converted model."""
    from tomoe.model import generation
    from tomoe.moe import active_experts

    options.check_model(model)

    quiet_libraries()
    if active is not None:
        typer.echo(str(active_experts.runtime_settings(model).nearest(active)), err=True)
    loaded, tokenizer = active_experts.load(model, dtype, active=active, prompts=prompts)
    if getattr(loaded.config, "tomoe_prompts", None) == "whole":
        typer.echo("whole prompts: passes of more than four tokens use all inputs, as the dense model does", err=True)

    def show(text: str) -> None:
        # without a newline the stream would wait for one
        typer.echo(printable(text), nl=False)
        sys.stdout.flush()

    if not chat:
        show(prompt)
    generation.generate(loaded, tokenizer, prompt, max_new_tokens, temperature, seed, chat, show)
    typer.echo()
