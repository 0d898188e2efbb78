"""The command line: a verb is a file is a subcommand. One verb reads one artifact and writes the next.

What needs PyTorch is imported inside the verbs, after their arguments were checked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import tomoe
from tomoe.cli.apply import apply
from tomoe.cli.benchmark import benchmark
from tomoe.cli.carve import carve
from tomoe.cli.convert import convert
from tomoe.cli.doctor import doctor
from tomoe.cli.evaluate import evaluate
from tomoe.cli.export import export
from tomoe.cli.finetune import finetune
from tomoe.cli.generate import generate
from tomoe.cli.inspect import inspect
from tomoe.cli.plan import plan
from tomoe.cli.push import push
from tomoe.cli.repair import repair
from tomoe.cli.report import report
from tomoe.cli.route import route
from tomoe.cli.stopping import Stopped, stoppable
from tomoe.cli.sweep import sweep
from tomoe.cli.train import train
from tomoe.cli.words import no_warnings, one_line
from tomoe.errors import UserError


class Verbs(TyperGroup):
    """The verbs. Without a default, typer would import pydantic for the value of --help, before any verb is looked at."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option


app = typer.Typer(
    name="tomoe",
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
VERBS = {
    "Convert": (doctor, convert, carve, repair, finetune, sweep),
    "Convert stage by stage": (train, plan, apply),
    "Look and measure": (evaluate, generate, report, inspect, route, benchmark),
    "Use elsewhere": (export, push),
}
for panel, verbs in VERBS.items():
    for verb in verbs:
        app.command(rich_help_panel=panel)(verb)


def _print_version(wanted: bool) -> None:
    if wanted:
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
    """Run one command and exit: 0 done, 2 an error that the user can fix (one line on stderr), 130 or 143 stopped."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with no_warnings(), stoppable(), _process_group():
            app(list(sys.argv[1:] if args is None else args), prog_name="tomoe")
    except UserError as error:
        _fail(2, str(error))
    except OSError as error:
        place = f" {error.filename}" if error.filename else ""
        _fail(2, f"cannot read or write{place}: {error.strerror or error}")
    except Stopped as stopped:
        _fail(128 + stopped.signum, str(stopped))
    except RuntimeError as error:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(error, torch.OutOfMemoryError):
            raise
        hint = "try train.gradient_checkpointing=true or a smaller data.seq_len"
        _fail(2, f"the device ran out of memory ({error}); {hint}")
    sys.exit(0)


@contextmanager
def _process_group() -> Iterator[None]:
    """Join the processes that torchrun started; without torchrun, PyTorch is not needed yet."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield
        return
    from tomoe import distributed

    with distributed.process_group():
        yield


def _fail(code: int, sentence: str) -> NoReturn:
    print("tomoe:", one_line(sentence), file=sys.stderr)
    sys.exit(code)
