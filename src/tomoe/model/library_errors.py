"""Turn errors of libraries that read or write a model into one sentence each; pass their warnings on."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from pathlib import Path

from safetensors import SafetensorError
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from tomoe.errors import Advice, Note, UserError, is_out_of_memory, shortened
from tomoe.model import catalog
from tomoe.model.hub import hub_reason

# Warnings of transformers and accelerate that say what the loader has read from their report, or has handled itself.
HANDLED = (
    "LOAD REPORT",
    "specifies to tie",
    "Unknown quantization type",
    "we will default to dequantizing",
    "The modules are dequantized in",
    "parameters are on the meta device",
    "generation flags are not valid",
)

# What transformers says of a model that it does not know: the files are complete.
_UNKNOWN = (
    "does not recognize this architecture",
    "Unrecognized configuration class",
    "Unrecognized model",
    "is not supported yet",
)

# What is raised where the bytes of a file are not what its format says.
_UNREADABLE = (SafetensorError, UnicodeDecodeError, EOFError)

TOKENIZER_ADVICE = "copy tokenizer.json and tokenizer_config.json from where the model came from"


@contextmanager
def one_sentence(model: str, place: Path | str, part: str = "model") -> Iterator[None]:
    """Raise UserError, in one sentence, for any error of the libraries within the block; they print nothing."""
    where = " from the hub" if isinstance(place, str) else ""
    # a .gguf file is its own tokenizer
    advice = TOKENIZER_ADVICE if part == "tokenizer" and Path(place).suffix != ".gguf" else ""
    with _raising(f"cannot load the {part} {model}{where}", bool(where), advice), _listening(place, model):
        yield


@contextmanager
def usable_config(place: Path | str) -> Iterator[None]:
    """Raise UserError, in one sentence, for any error that a config causes in the libraries."""
    with _raising(f"the config of {place} cannot be used", False, ""):
        yield


def check_generation_config(folder: Path) -> None:
    """Raise UserError, in one sentence, for settings that transformers refuses to read; without them the model loads."""
    file = folder / "generation_config.json"
    if file.exists():
        with _raising(f"{file} cannot be used", False, "take this setting out of it, or delete the file"):
            GenerationConfig.from_pretrained(folder)


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Raise UserError, in one sentence, if the libraries cannot write; bugs in tomoe pass through."""
    try:
        yield
    except (UserError, AssertionError):
        raise
    except Exception as error:
        raise UserError(f"cannot write {what}: {reason(error)}") from error


@contextmanager
def _raising(aim: str, on_hub: bool, advice: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        # a panic of Rust is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        cause = hub_reason(error) if on_hub else None
        if cause or (on_hub and isinstance(error, OSError)):
            advice = f"{', '.join(catalog.MODELS)} needs no hub"
        # it says what to install
        elif isinstance(error, ImportError):
            advice = ""
        elif is_out_of_memory(error):
            raise UserError(
                f"{aim}: {cause or reason(error)}; there is too little memory",
                "free some",
                Advice("offload", "to hold one layer at a time"),
            ) from None
        elif isinstance(error, _UNREADABLE):
            advice = "its files are damaged or cut off; get them again"
        elif any(words in str(error) for words in _UNKNOWN):
            advice = ""
        raise UserError("; ".join(filter(None, (f"{aim}: {cause or reason(error)}", advice)))) from None


def reason(error: BaseException) -> str:
    """Return a library's message in one line, in its own words with one exception."""
    message = " ".join(str(error.strerror if isinstance(error, OSError) and error.strerror else error).split())
    if "trust_remote_code" in message:
        return "it comes with its own code (trust_remote_code), which is not run here"
    # other messages are not sentences for users: a key, a number, half of what went wrong; those of Rust have no type
    plain = type(error) is Exception or isinstance(
        error, OSError | ValueError | RuntimeError | ImportError | SafetensorError
    )
    bare = not message or not plain
    return shortened(": ".join(filter(None, (type(error).__name__ if bare else "", message.rstrip(".:")))))


@contextmanager
def _listening(place: Path | str, model: str) -> Iterator[None]:
    """Capture messages and bars of transformers, unless its verbosity is info; what is not handled becomes a `Note`."""
    bars = transformers_logging.is_progress_bar_enabled()
    if transformers_logging.get_verbosity() <= logging.INFO:
        yield
        return
    loggers = [logging.getLogger(name) for name in ("transformers", "accelerate")]
    before = [(logger.level, logger.handlers, logger.propagate) for logger in loggers]
    heard = BufferingHandler(sys.maxsize)
    for logger in loggers:
        logger.handlers, logger.propagate = [heard], False
        logger.setLevel(logging.WARNING)
    if isinstance(place, Path):
        transformers_logging.disable_progress_bar()
    # the bar of GGUF conversion obeys no setting
    silent = isinstance(place, Path) and place.suffix == ".gguf"
    try:
        with contextlib.redirect_stderr(io.StringIO()) if silent else contextlib.nullcontext():
            yield
    finally:
        for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.handlers, logger.propagate = handlers, propagate
        if bars:
            transformers_logging.enable_progress_bar()
    for message in dict.fromkeys(record.getMessage() for record in heard.buffer):
        if not any(words in message for words in HANDLED):
            warnings.warn(f"{model}: {shortened(' '.join(message.split()))}", Note, stacklevel=4)
