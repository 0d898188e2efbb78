"""`tomoe export OUT --format mixtral -o DIR`: the converted model as an architecture that other programs know."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tomoe.cli.options import ForceOption, OutOption
from tomoe.cli.screen import Screen, results
from tomoe.export import PROOF_TOKENS, Exported
from tomoe.export import export as run_export
from tomoe.moe.export import Options

Format = Literal["auto", "mixtral", "qwen2_moe", "qwen3_moe", "hf"]
FormatOption = Annotated[Format, typer.Option("--format", help="auto: a stock architecture where one fits, else hf.")]


def export(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that `tomoe convert` wrote.")],
    out: OutOption,
    format: FormatOption = "auto",
    text: Annotated[
        str | None,
        typer.Option("--text", help="Prove it on this file; without it, on what was held out.", metavar="FILE"),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=16, help="Prove it on no more than these.")] = PROOF_TOKENS,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option("--dtype", help="Of the proof. float32 shows the most and takes the most memory."),
    ] = "float32",
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    width_multiple: Annotated[
        int, typer.Option("--width-multiple", min=1, help="Expert widths are multiples of this; K-quants need 256.")
    ] = Options.width_multiple,
    force: ForceOption = False,
) -> None:
    """Write a converted model in another form, and prove on real text that it is the same model."""
    with Screen() as screen:
        done = run_export(
            folder, format, out, text=text, tokens=tokens, dtype=dtype, device=device, options=Options(width_multiple),
            force=force, say=screen.say, listen=screen.listen,
        )  # fmt: skip
    show(done)


def show(done: Exported) -> None:
    """The proof and how to load what was written."""
    console = results()
    console.print(f"The same model: {done.result}.", soft_wrap=True, markup=False)
    console.print(f'{done.folder} loads with AutoModelForCausalLM.from_pretrained("{done.folder}")', soft_wrap=True)
