"""The command line: one module per subcommand. A command reads one artifact and writes the next.

Commands import what needs PyTorch where they use it: help and mistyped options do not wait for it.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Annotated, Any, NoReturn

import click
import typer
from typer.core import TyperCommand

from tomoe.cli.apply import apply
from tomoe.cli.benchmark import benchmark
from tomoe.cli.compare import compare
from tomoe.cli.console import one_line, only_notes
from tomoe.cli.convert import convert
from tomoe.cli.doctor import doctor
from tomoe.cli.evaluate import evaluate
from tomoe.cli.export import export
from tomoe.cli.finetune import finetune
from tomoe.cli.generate import generate
from tomoe.cli.inspect import inspect
from tomoe.cli.methods import methods
from tomoe.cli.options import option_of
from tomoe.cli.plan import plan
from tomoe.cli.repair import repair
from tomoe.cli.report import report
from tomoe.cli.route import route
from tomoe.cli.signals import Stopped, stoppable
from tomoe.cli.train import train
from tomoe.errors import Advice, UserError, is_out_of_memory, shortened
from tomoe.version import __version__

# what takes less of it, of the options that the command has
LESS_MEMORY = (
    Advice("offload", "to hold one layer at a time"),
    Advice("context", "for shorter sequences", "N"),
    Advice("batch_size", "for smaller batches", "N"),
    Advice("data.seq_len", "for shorter sequences", "N"),
)


class _Command(TyperCommand):
    """A command that reports a wrong value without the class name of pydantic's error, which typer puts before it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


app = typer.Typer(
    name="tomoe",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = {
    "Convert": (doctor, convert, repair, finetune),
    "Convert stage by stage": (train, plan, apply),
    "Inspect and measure": (evaluate, compare, generate, report, inspect, route, benchmark, methods),
    "Export": (export,),
}
for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(cls=_Command, rich_help_panel=panel)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tomoe {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Makes a dense language model use only part of its weights for each token:
    as a Mixture-of-Experts, or by its largest inputs."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit: 0 done, 2 an error that the user can fix (one line on stderr), 130 or 143 stopped."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    words = list(sys.argv[1:] if args is None else args)
    for stream in (sys.stdout, sys.stderr):
        # a terminal or pipe that takes ASCII only shows the rest as escape sequences
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        with only_notes(), stoppable(), _process_group():
            app(words, prog_name="tomoe")
    except UserError as error:
        _fail(2, error.told(partial(option_of, command=_command(words))))
    except OSError as error:
        place = f" {error.filename}" if error.filename else ""
        _fail(2, f"cannot read or write{place}: {error.strerror or error}")
    except Stopped as stopped:
        _fail(128 + stopped.signum, str(stopped))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        found = UserError(f"memory ran out ({shortened(error)})", "free some", *LESS_MEMORY)
        _fail(2, found.told(partial(option_of, command=_command(words))))
    sys.exit(0)


def _process_group() -> AbstractContextManager[None]:
    """Join torchrun's process group, if it started this process with others. Raises UserError for a wrong WORLD_SIZE."""
    said = os.environ.get("WORLD_SIZE") or "1"
    if not said.isdecimal():
        raise UserError(f"the environment variable WORLD_SIZE is {said!r}, but it should be a number; unset it")
    if int(said) < 2:
        return nullcontext()
    from tomoe import distributed

    return distributed.process_group()


def _command(words: Sequence[str]) -> click.Command | None:
    """Find the command among the words of a command line."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return next((commands[word] for word in words if word in commands), None)


def _fail(code: int, sentence: str) -> NoReturn:
    print("tomoe:", one_line(sentence), file=sys.stderr)
    sys.exit(code)
