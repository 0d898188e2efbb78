"""The files of an export: their place, sharded weights, the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from tomoe.errors import Advice, UserError
from tomoe.files import format_bytes, free_on_disk
from tomoe.folders import holds
from tomoe.locks import LOCK_FILE
from tomoe.progress import StageCallback

SHARD_BYTES = 10**9  # of which one is in memory beside the model
OVERHEAD = 1.02  # disk space beside the weights: tokenizer, headers, card


def check_place(out: Path, source: Path, needed: int, force: bool) -> None:
    """Raise UserError if `out` is taken, is (or contains) the exported model, or if its disk has less than `needed` bytes."""
    place = out.resolve()
    if place == source.resolve() or place in source.resolve().parents:
        raise UserError(f"{out} holds the converted model itself; choose another folder for the export")
    if out.exists() and (not out.is_dir() or any(path.name != LOCK_FILE for path in out.iterdir())):
        if not holds(out / "export.json", '"tomoe-export-'):
            raise UserError(f"{out} is not empty and holds no export; choose another folder")
        if not force:
            raise UserError(f"{out} already holds an export", "choose another folder", Advice("force", "to replace it"))
    free = free_on_disk(place)
    if needed * OVERHEAD > free:
        raise UserError(
            f"the export takes {format_bytes(needed)}, but the disk of {out} has only {format_bytes(free)} left; free some, or "
            "convert with `target` set in the recipe, which makes all layers equally wide"
        )


def write_checkpoint(
    tensors: Iterator[tuple[str, Tensor]], folder: Path, total: int, on_progress: StageCallback
) -> None:
    """Write safetensors files of at most SHARD_BYTES each, with an index if there are several; one is in memory at a time."""
    shard: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    held = written = 0

    def flush() -> None:
        save_file(shard, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and held + tensor.nbytes > SHARD_BYTES:
            flush()
            held = 0
        shard[name] = tensor.detach().cpu().contiguous()
        held, written = held + tensor.nbytes, written + tensor.nbytes
        on_progress(written, max(total, written))
    flush()
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
        places = {name: file for file, held_names in zip(names, shards, strict=True) for name in held_names}
        index = {"metadata": {"total_size": written}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    mode = (folder / "config.json").stat().st_mode
    for n, file in enumerate(names):
        (folder / f"shard-{n}").rename(folder / file)
        # else only the owner could read it
        (folder / file).chmod(mode)


def write_config(config: PreTrainedConfig, folder: Path) -> None:
    """Write config.json with the keys of transformers 4, too: readers of only those would silently take defaults."""
    config.save_pretrained(folder)
    file = folder / "config.json"
    values = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps(older_keys(config) | values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def older_keys(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the rotary embedding in the keys of transformers 4."""
    older: dict[str, Any] = {}
    rope = getattr(config, "rope_parameters", None) or {}
    # some families have one rotary embedding for each kind of layer, and had other keys for each
    if "rope_theta" in rope:
        # The partial factor stays in: early versions of transformers 5 take the scaling instead of `rope_parameters`.
        scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
        older["rope_theta"] = rope["rope_theta"]
        older["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    if "partial_rotary_factor" in rope:
        older["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return older
