"""`tomoe export OUT --format mixtral -o DIR`: the converted model as an architecture that other programs know."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tomoe.cli.options import ForceOption, OutOption
from tomoe.cli.screen import Screen, results
from tomoe.exporting.gguf import Precision
from tomoe.exporting.run import PROOF_TOKENS, Exported
from tomoe.exporting.run import export as run_export
from tomoe.exporting.targets import Options, gguf_file

Format = Literal["auto", "mixtral", "qwen2_moe", "qwen3_moe", "gguf", "hf"]
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
    weights: Annotated[Precision, typer.Option("--weights", help="Of a GGUF file.")] = Options.precision,
    force: ForceOption = False,
) -> None:
    """Write a converted model in another form, and prove on real text that it is the same model."""
    with Screen() as screen:
        done = run_export(
            folder, format, out, text=text, tokens=tokens, dtype=dtype, device=device,
            options=Options(width_multiple, weights), force=force, say=screen.say, listen=screen.listen,
        )  # fmt: skip
    show(done)


def show(done: Exported) -> None:
    """The proof and how to load what was written."""
    console = results()
    if done.proof is None:
        sentence = (
            "Not proved: llama.cpp is not here. To prove it: pip install xllamacpp, then export again with --force."
        )
    else:
        sentence = f"The same model: {done.proof.result}."
    console.print(sentence, soft_wrap=True, markup=False)
    for who, words in ((done.proof.written if done.proof else None) or {}).items():
        console.print(f"{who}: {words!r}", soft_wrap=True, markup=False)
    console.print(f"{done.folder} is ready: {how_to_load(done)}", soft_wrap=True, markup=False)


def how_to_load(done: Exported) -> str:
    """One line for a user."""
    if done.choice.target.name == "gguf":
        return f"llama-cli -m {gguf_file(done.folder, done.options)}"
    flag = ", trust_remote_code=True" if done.choice.target.name == "hf" else ""
    return f'AutoModelForCausalLM.from_pretrained("{done.folder}"{flag})'
