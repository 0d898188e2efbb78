"""Save a converted model as a Hugging Face folder: weights, config, modelling code, tokenizer, plan."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tomoe.errors import UserError
from tomoe.moe.modeling_tomoe import ToMoEConfig, ToMoEForCausalLM
from tomoe.plan import Plan


def save_moe(
    moe: ToMoEForCausalLM, plan: Plan, tokenizer: PreTrainedTokenizerBase | None, out: Path, force: bool = False
) -> None:
    """Write `out` under a temporary name, then rename, so that a half-written folder never bears the name.

    Files that other stages keep in `out` (recipe, metrics, report) stay. Raises UserError where `out` holds a model and
    `force` is not set, or where it cannot be written.
    """
    if (out / "config.json").exists() and not force:
        raise UserError(f"{out} already holds a model; choose another folder or give --force")
    part = out.with_name(out.name + ".part")
    try:
        if part.exists():
            shutil.rmtree(part)
        part.mkdir(parents=True)
        # auto_map in config.json and a copy of the modelling file: the folder then explains itself to transformers
        ToMoEConfig.register_for_auto_class()
        ToMoEForCausalLM.register_for_auto_class("AutoModelForCausalLM")
        moe.save_pretrained(part)
        plan.save(part)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        if out.exists():
            for kept in out.iterdir():
                if not (part / kept.name).exists():
                    shutil.move(kept, part / kept.name)
            shutil.rmtree(out)
        part.rename(out)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise UserError(f"cannot write the model to {out}: {error.strerror or error}") from error
