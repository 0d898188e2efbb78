"""The command line: a verb is a file is a subcommand. One verb reads one artefact and writes the next."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import torch
import typer

import tomoe
from tomoe import distributed
from tomoe.cli.apply import apply
from tomoe.cli.benchmark import benchmark
from tomoe.cli.carve import carve
from tomoe.cli.convert import convert
from tomoe.cli.doctor import doctor
from tomoe.cli.evaluate import evaluate
from tomoe.cli.export import export
from tomoe.cli.fetch import fetch
from tomoe.cli.finetune import finetune
from tomoe.cli.generate import generate
from tomoe.cli.inspect import inspect
from tomoe.cli.plan import plan
from tomoe.cli.push import push
from tomoe.cli.report import report
from tomoe.cli.route import route
from tomoe.cli.screen import quiet_libraries
from tomoe.cli.stopping import Stopped, stoppable
from tomoe.cli.sweep import sweep
from tomoe.cli.train import train
from tomoe.errors import UserError

app = typer.Typer(
    name="tomoe",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (
    doctor,
    convert,
    carve,
    train,
    plan,
    apply,
    finetune,
    export,
    evaluate,
    benchmark,
    sweep,
    generate,
    report,
    route,
    inspect,
    fetch,
    push,
):
    app.command()(verb)
app.command("fold", hidden=True)(apply)  # the stage's own name


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tomoe {tomoe.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Turn a dense causal language model into a Mixture-of-Experts."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit: 0 done, 2 what the user can mend (one line on stderr), 130 or 143 stopped."""
    quiet_libraries()
    try:
        with stoppable(), distributed.together():
            app(list(sys.argv[1:] if args is None else args), prog_name="tomoe")
    except UserError as error:
        _fail(2, str(error))
    except torch.OutOfMemoryError as error:
        _fail(
            2,
            f"the device ran out of memory ({error}); try train.gradient_checkpointing=true or a smaller data.block_size",
        )
    except OSError as error:
        place = f" {error.filename}" if error.filename else ""
        _fail(2, f"cannot read or write{place}: {error.strerror or error}")
    except Stopped as stopped:
        _fail(128 + stopped.signum, str(stopped))
    sys.exit(0)


def _fail(code: int, sentence: str) -> NoReturn:
    print("tomoe:", " ".join(sentence.split()), file=sys.stderr)
    sys.exit(code)
