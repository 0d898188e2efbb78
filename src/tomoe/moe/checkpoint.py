"""Save a converted model as a Hugging Face folder: weights, config, modeling code, tokenizer, plan."""

from __future__ import annotations

import warnings
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe.errors import UserError
from tomoe.files import atomic_folder, read_json, write_sums
from tomoe.folders import REPLACED, refuse_overwriting
from tomoe.model.compute_dtype import dtype_of
from tomoe.model.far_tokens import BEHIND, far_tokens, first_difference, layer_outputs, near_tokens
from tomoe.model.library_errors import writing
from tomoe.model.loading import load_dense, pick_device, strip_remote_code_
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.plans import AnyPlan

# Bytes. If layers are folded as they are written, a whole shard is in memory at a time, twice.
CHECKPOINT_SHARD_BYTES = 10**9


def save_moe(
    moe: ToMoEForCausalLM, plan: AnyPlan, tokenizer: PreTrainedTokenizerBase | None, out: Path, force: bool = False,
    check: bool = False,
) -> None:  # fmt: skip
    """Write the folder `out` atomically; with `check`, only if the model loaded from it computes the same (`check_written`).

    The run and its recipe stay in `out`; what was measured of an earlier model there is deleted with it, and nothing else.
    Raises UserError if `out` holds a model and `force` is not set, if it holds files of somebody else (`folders`), or if it
    cannot be written.
    """
    refuse_overwriting(out, force)
    with writing(f"the model to {out}"), atomic_folder(out, "config.json", (*REPLACED, "export.json")) as part:
        with warnings.catch_warnings():
            # transformers warns of the memory that a shard takes, and these are small
            warnings.filterwarnings("ignore", "Attempting to save a model with offloaded modules")
            moe.save_pretrained(part, max_shard_size=CHECKPOINT_SHARD_BYTES)
        plan.save(part)
        if tokenizer is not None:
            save_tokenizer(tokenizer, part)
        readable_weights(part)
        write_sums(part)
        if check:
            check_written(moe, part)


def readable_weights(folder: Path) -> None:
    """Give the weights the permissions of config.json, which follow the umask; as written, only the owner could read them."""
    mode = (folder / "config.json").stat().st_mode
    for weights in folder.glob("*.safetensors"):
        weights.chmod(mode)


def check_written(moe: ToMoEForCausalLM, folder: Path) -> None:
    """Load the model from its folder, as a user would, and compare its logits with those of the model in memory: on its first
    tokens, and beyond sliding windows and the original context. Raises UserError for a difference."""
    loaded = load_dense(str(folder), moe.dtype, moe.device, offload=None)
    for tokens in (near_tokens(moe), *far_tokens(moe)):
        ours, theirs = tokens.run(moe).float(), tokens.run(loaded).float()
        # A near tie of a router may fall otherwise for single tokens.
        off = ((ours - theirs).norm(dim=-1) / ours.norm(dim=-1).clamp_min(1e-9)).median()
        if not float(off) <= (1e-3 if moe.dtype == torch.float32 else 3e-2):
            ids = tokens.ids[:, : 2 * BEHIND]
            place = first_difference(layer_outputs(moe, ids), layer_outputs(loaded, ids), 3e-2)
            raise UserError(
                f"the model computes something else when it is loaded from its folder, {tokens.what} (logits differ by "
                f"{float(off):.1%}; {place}), so nothing was written; this is an error of tomoe or of transformers "
                f"{transformers.__version__} with this family"
            )


def check_writing(dense: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the parts copied from the dense model, and delete them again: what depends on the input must not fail after hours.
    Raises UserError if it cannot be written."""
    with writing("the config and tokenizer of this model"), TemporaryDirectory(prefix="tomoe-") as folder:
        dense.config.save_pretrained(folder)
        if dense.generation_config is not None:
            dense.generation_config.save_pretrained(folder)
        save_tokenizer(tokenizer, Path(folder))


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer without `auto_map`, the dense model's pointer to code that loading would run."""
    bare = copy(tokenizer)
    bare.init_kwargs = dict(tokenizer.init_kwargs)
    strip_remote_code_(bare)
    bare.save_pretrained(folder)


def stored_dtype(folder: Path) -> str:
    """The dtype of a converted model's weights. Raises UserError if the folder holds no converted model."""
    try:
        config = read_json(folder / "config.json")
        stored, kind = str(config.get("dtype") or "float32"), config.get("model_type")
    except UserError as error:
        raise UserError(
            f"{folder} holds no converted model (no readable config.json); name a folder that `tomoe convert` wrote"
        ) from error
    if kind != "tomoe":
        raise UserError(f"{folder} holds a {kind!r} model; name a folder that `tomoe convert` wrote")
    if stored not in ("float32", "bfloat16", "float16"):
        raise UserError(
            f"the config of {folder} names {stored[:40]!r} as dtype of its weights; it is damaged, convert again"
        )
    return stored


def load_moe(folder: Path, dtype: str | None, device: str = "auto", offload: bool = False) -> ToMoEForCausalLM:
    """Load the converted model in `dtype`, or as stored; with `offload` its layers stay on disk. Raises UserError if the folder
    holds none."""
    stored = stored_dtype(folder)
    moe = load_dense(str(folder), dtype_of(dtype or stored), pick_device(device), offload=offload)
    assert isinstance(moe, ToMoEForCausalLM)
    return moe
