"""`tomoe generate MODEL "prompt"`: let a dense or a converted model write on."""

from __future__ import annotations

from typing import Annotated

import typer

from tomoe import api
from tomoe.cli.options import ModelArgument


def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0: always the most likely token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the draws at a temperature above 0.")] = 0,
) -> None:
    """Print the prompt and how the model goes on."""
    loaded, tokenizer = api.load(model)
    typer.echo(prompt + api.generate(loaded, tokenizer, prompt, max_new_tokens, temperature, seed))
