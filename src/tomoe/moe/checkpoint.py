"""Save a converted model as a Hugging Face folder: weights, config, modelling code, tokenizer, plan."""

from __future__ import annotations

import warnings
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from tomoe.errors import UserError
from tomoe.files import staged, write_sums
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.plan import Plan

SHARD = 10**9  # bytes; of weights that are folded as they are written, a whole shard is in memory at a time, twice
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
# what was said of the weights before these
FOUND = ("README.md", "evaluation.json", "benchmark.json", "report.json", "report.html", "figures")


def save_moe(
    moe: ToMoEForCausalLM, plan: Plan, tokenizer: PreTrainedTokenizerBase | None, out: Path, force: bool = False
) -> None:
    """Write the folder `out`, so that a half-written one is never taken for a model.

    The run and its recipe stay where they are in `out`; what was measured of an earlier model goes with it. Raises
    UserError where `out` holds a model and `force` is not set, or where it cannot be written.
    """
    refuse_overwriting(out, force)
    try:
        with staged(out, "config.json", (*WEIGHTS, *FOUND)) as part:
            with warnings.catch_warnings():  # transformers warns of the memory that a shard takes, and these are small
                warnings.filterwarnings("ignore", "Attempting to save a model with offloaded modules")
                moe.save_pretrained(part, max_shard_size=SHARD)
            plan.save(part)
            if tokenizer is not None:
                tokenizer.save_pretrained(part)
            mode = (part / "config.json").stat().st_mode
            for weights in part.glob("*.safetensors"):  # only the owner could read them; config.json follows the umask
                weights.chmod(mode)
            write_sums(part)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise UserError(f"cannot write the model to {out}: {reason or error}") from error


def refuse_overwriting(out: Path, force: bool, dense: str = "") -> None:
    """Raises UserError where `out` holds a model and `force` is not set, or is the folder of the `dense` model."""
    if dense and out.resolve() == Path(dense).expanduser().resolve():
        raise UserError(f"{out} is the model to begin with; choose another folder for the result")
    if (out / "config.json").exists() and not force:
        raise UserError(f"{out} already holds a model; choose another folder or give --force")
