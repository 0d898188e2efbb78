"""Save a converted model as a Hugging Face folder: weights, config, modelling code, tokenizer, plan."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from tomoe.errors import UserError
from tomoe.files import write_sums
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.plan import Plan

SHARD = 10**9  # bytes; of weights that are folded as they are written, a whole shard is in memory at a time, twice


def save_moe(
    moe: ToMoEForCausalLM, plan: Plan, tokenizer: PreTrainedTokenizerBase | None, out: Path, force: bool = False
) -> None:
    """Write `out` under a temporary name first, so that a half-written folder is never taken for a model.

    Files that other stages keep in `out` (run, recipe, metrics, report) stay where they are. Raises UserError where `out`
    holds a model and `force` is not set, or where it cannot be written.
    """
    if (out / "config.json").exists() and not force:
        raise UserError(f"{out} already holds a model; choose another folder or give --force")
    part = out.with_name(out.name + ".part")
    try:
        if part.exists():
            shutil.rmtree(part)
        part.mkdir(parents=True)
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
        _put_in_place(part, out)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) else None
        raise UserError(f"cannot write the model to {out}: {reason or error}") from error


def _put_in_place(part: Path, out: Path) -> None:
    """`config.json` makes a folder a model, so it goes first and comes last."""
    if not out.exists():
        part.rename(out)
        return
    (out / "config.json").unlink(missing_ok=True)
    for old in [*out.glob("*.safetensors"), *out.glob("*.safetensors.index.json")]:
        old.unlink()
    for file in sorted(part.iterdir(), key=lambda file: file.name == "config.json"):
        place = out / file.name
        if place.is_dir():
            shutil.rmtree(place)
        file.replace(place)
    part.rmdir()
