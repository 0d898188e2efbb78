"""`tomoe export OUT --format mixtral -o DIR`: write the converted model as an architecture that other programs support."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tomoe.cli import options
from tomoe.cli.console import Screen, output
from tomoe.recipe import target_rules

if TYPE_CHECKING:
    from tomoe.exporting import export as exporting

Format = Literal["auto", target_rules.Format]


def export(
    folder: options.Converted,
    out: options.Out,
    format: Annotated[
        Format, typer.Option("--format", help="Target; auto: a stock architecture if one fits, else hf.")
    ] = "auto",
    text: Annotated[
        str | None,
        typer.Option("--text", help="Text for verification (default: the conversion's held-out text).", metavar="FILE"),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=16, help="Max tokens for verification.")] = 4096,
    dtype: Annotated[
        options.Dtype, typer.Option("--dtype", help="Dtype for verification (float32 is strictest).")
    ] = "float32",
    device: options.Device = "auto",
    width_multiple: Annotated[
        int | None,
        typer.Option(
            "--width-multiple",
            min=1,
            help="Pad expert widths to a multiple; K-quants need 256.",
            show_default="64; for fine-grained experts 8, in GGUF none",
        ),
    ] = None,
    weights: Annotated[target_rules.Precision, typer.Option("--weights", help="Precision of a GGUF file.")] = "f16",
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Skip verification; GGUF without xllamacpp needs it.")
    ] = False,
    force: options.Force = False,
    offload: Annotated[
        bool, typer.Option("--offload", help="Compare one layer at a time (for models larger than RAM in float32).")
    ] = False,
) -> None:
    """Export to a stock architecture (Mixtral, GLM-4-MoE ...) or GGUF, and verify it on text."""
    from tomoe.exporting import export as exporting
    from tomoe.exporting import target

    with Screen() as screen:
        exported = exporting.export(
            folder,
            format,
            out,
            text=text,
            tokens=tokens,
            dtype=dtype,
            device=device,
            options=target.Options(width_multiple, weights),
            force=force,
            unverified=unverified,
            offload=offload,
            say=screen.say,
            on_progress=screen.on_progress,
        )
    _show(exported)


def _show(exported: exporting.Exported) -> None:
    console = output()
    proof = exported.proof
    if proof is None:
        console.say("Not verified: nothing was compared with the converted model.")
    else:
        console.say(f"The same model: {proof.result}.")
        for name, text in (proof.written or {}).items():
            console.say(f"{name}: {text!r}")
    how_to_load = exported.choice.target.how_to_load(exported.folder, exported.options)
    console.say(f"{exported.folder} is ready: {how_to_load}")
