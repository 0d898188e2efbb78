"""Loads a model and its tokenizer by one name: hub id, local folder, .gguf file, or a known name (smollm2-135m)."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tomoe.errors import Advice, Note, UserError, shortened
from tomoe.model import catalog, single_query
from tomoe.model.compute_dtype import compute_dtype, dtype_of
from tomoe.model.dequantization import drop_entry_, prepare_packing_
from tomoe.model.gguf_tensors import FastReader, reading_by
from tomoe.model.hub import download_model
from tomoe.model.library_errors import TOKENIZER_ADVICE, one_sentence, writing
from tomoe.model.mlp import decoder_layers
from tomoe.model.names import check_no_adapter
from tomoe.model.names import resolve as resolve
from tomoe.model.offload import cast_, iter_weights, load_offloaded
from tomoe.model.stored import StoredModel, is_gguf, location, read_config, untie_, writable_generation_
from tomoe.model.tokens import fit_tokenizer_

_CHUNK = 2**24  # elements of a tensor that are converted at once


def pick_device(name: str) -> str:
    """Return the device; `auto` is CUDA if available, else the CPU. Raises UserError for a device that does not exist."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = "meta"
    # a device without memory computes nothing
    if kind == "meta":
        raise UserError(f"torch knows no device {name!r} to compute on", Advice("device", "instead", "auto"))
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device is {name!r}, but torch sees no CUDA GPU here", Advice("device", "instead", "auto"))
    return name


def free_on_device(device: str | torch.device) -> int:
    """Bytes free on a device now; 0 for the CPU, and where PyTorch does not tell."""
    device = torch.device(device)
    ask = None if device.type == "cpu" else getattr(torch.get_device_module(device), "mem_get_info", None)
    return int(ask(device)[0]) if ask else 0


def _locate(model: str) -> Path | str:
    """Return what `resolve` finds; for a known model the folder that it is unpacked to on first use."""
    return catalog.unpacked(model, lambda folder: _unpack(model, folder)) if model in catalog.MODELS else resolve(model)


def _unpack(known: str, folder: Path) -> None:
    """Write a known model as a folder that loads as its .gguf file does, in every dtype."""
    gguf = str(resolve(known))
    # as exact as the file
    dense = load_dense(gguf, torch.float32)
    tokenizer = load_tokenizer(gguf)
    with one_sentence(known, folder), writing(f"the folder {folder}"):
        dense.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        # A config out of a .gguf file names no class, and a converted model would record one.
        dense.config.architectures = None
        dense.config.save_pretrained(folder)
        # only the owner could read the weights; config.json follows the umask
        for weights in folder.glob("*.safetensors"):
            weights.chmod((folder / "config.json").stat().st_mode)


def load_dense(
    model: str,
    dtype: torch.dtype | None,
    device: str | torch.device = "cpu",
    shards: int = 1,
    offload: bool | None = False,
) -> PreTrainedModel:
    """Load the causal language model, frozen and in evaluation mode, with weights of `dtype` (None: as stored, bfloat16 if that
    is packed); quantized weights are dequantized.

    shards: ranks that load it together, each its part of every layer (FSDP2). offload: keep the layers on disk and read each
    when it runs; None: if possible. No code that comes with a model is run, and the sizes that a folder claims are checked
    first. Raises UserError: no such model, hub out of reach, damaged, incomplete or left over weights, unknown architecture,
    quantized weights that transformers cannot turn back.
    """
    place = _locate(model)
    with one_sentence(model, place):
        stored = StoredModel.open(place if isinstance(place, Path) else download_model(place))
        dtype = dtype or stored.dtype or torch.bfloat16
        by_layer = stored.read_by_layer if offload is None else offload
        if by_layer:
            loaded = load_offloaded(stored, dtype, torch.device(device))
        else:
            settings = _shard_arguments(stored, dtype, shards)
            # tensor by tensor to a GPU: main memory need not hold all of them
            if shards == 1 and not stored.packing.unpacked_at_once and torch.device(device).type != "cpu":
                settings["device_map"] = {"": str(device)}
            loaded = stored.load(dtype, **settings)
            if stored.packing.unpacked_at_once:
                loaded = loaded.dequantize(dtype)
                cast_(loaded, dtype)
    if type(loaded.config) is not type(stored.config):
        kind = loaded.config.model_type
        warnings.warn(
            f"{model} reads more than text; of it, the text model ({kind}) is loaded alone", Note, stacklevel=2
        )
    drop_entry_(loaded.config)
    if shards == 1:
        untie_(loaded)
    writable_generation_(loaded)
    if title := _title(model, place):
        loaded.config._name_or_path = title
        # the title inside the GGUF file gets this name, and would be saved as a setting of the model
        if hasattr(loaded.config, "_model_name_or_path"):
            del loaded.config._model_name_or_path
    loaded.eval().requires_grad_(False)
    return loaded if by_layer or shards > 1 else cast(Any, loaded).to(device)


def load_model(name: str, dtype: str | torch.dtype, device: str = "auto", offload: bool = False) -> PreTrainedModel:
    """Call `load_dense` with dtype and device by name; dtype `auto`: weights as stored, computed with in float32 where 16 bits
    are much slower. Raises UserError as it does."""
    device = pick_device(device)
    model = load_dense(name, None if dtype == "auto" else dtype_of(dtype), device, offload=offload)
    if dtype == "auto":
        # no processor multiplies float16 fast
        half = model.dtype == torch.float16 and model.device.type == "cpu"
        compute = torch.float32 if half else compute_dtype("auto", model.dtype, device)
        if compute != model.dtype:
            cast_(model, compute)
    single_query.use_matrix_products_(model)
    return model


def note_rounding(model: str, dtype: torch.dtype) -> None:
    """Warn if a `dtype` that the user did not ask for rounds the weights of a model. Raises UserError as `load_dense`."""
    place = _locate(model)
    with one_sentence(model, place):
        stored = StoredModel.open(place if isinstance(place, Path) else download_model(place)).dtype
    if stored not in (None, dtype) and torch.promote_types(stored, dtype) != dtype:
        kept, taken = (str(t).removeprefix("torch.") for t in (stored, dtype))
        warnings.warn(
            f"the weights of {model} are stored in {kept}, and are rounded to {taken}, in which the dense model is measured too; "
            f"train.dtype={kept} keeps them as they are",
            Note,
            stacklevel=2,
        )


def load_config(model: str, checked: bool = False) -> PreTrainedConfig:
    """Load the config of a model; with `checked`, a folder's weights must be able to fill it. Raises UserError as
    `load_dense`."""
    place = _locate(model)
    with one_sentence(model, place, part="model" if checked else "config"):
        if checked and isinstance(place, Path):
            return StoredModel.open(place).config
        return read_config(place)


def check_loading(model: str) -> None:
    """Raise UserError for what `load_dense` and `load_tokenizer` would refuse, without reading a weight; of a folder without
    weights the config is checked, of a model on the hub the tokenizer, too."""
    place = resolve(model)
    if is_gguf(place):
        load_config(model)
        return
    with one_sentence(model, place):
        if isinstance(place, Path):
            check_no_adapter(place)
        if isinstance(place, Path) and any(place.glob("*.safetensors*")):
            stored = StoredModel.open(place)
            # bitsandbytes needs the numbers
            if not stored.packing.unpacked_at_once:
                stored.without_weights(torch.float32)
        else:
            prepare_packing_(read_config(place), {})
    if isinstance(place, str) or any(place.glob("tokenizer*")):
        load_tokenizer(model)


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, without references to its own code. Raises UserError as `load_dense`, and if the model has
    no row for one of its tokens."""
    place = _locate(model)
    with one_sentence(model, place, part="tokenizer"), reading_by(FastReader):
        # the tokens of a .gguf file are those of its rows, and reading its config takes seconds
        config = None if is_gguf(place) else read_config(place)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            **location(place), config=config, trust_remote_code=False
        )
        rows = None if config is None else getattr(config.get_text_config(), "vocab_size", None)
    # transformers makes some tokenizers out of no file at all
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(f"cannot load the tokenizer {model}: it has no files of one; {TOKENIZER_ADVICE}")
    if not isinstance(longest := tokenizer.model_max_length, int | float):
        raise UserError(
            f"cannot load the tokenizer {model}: its tokenizer_config.json is damaged (model_max_length is "
            f"{shortened(repr(longest))}, not a number); get it again"
        )
    if rows is not None:
        fit_tokenizer_(tokenizer, rows, model)
    if title := _title(model, place):
        tokenizer.name_or_path = title
    strip_remote_code_(tokenizer)
    return tokenizer


def strip_remote_code_(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make `save_pretrained` write no `auto_map`, which names code that loading the folder may run."""
    tokenizer.init_kwargs.pop("auto_map", None)
    # transformers writes it from these, too
    tokenizer._auto_map = tokenizer._auto_class = None


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 (hex) over names, shapes and bfloat16 bytes of all weights, tied ones once: equal for a model loaded in float32 and
    in bfloat16, in memory and offloaded, but not in float16. Takes tens of MB of memory for any model."""
    sha = hashlib.sha256()
    seen: set[tuple[object, ...]] = set()
    for name, tensor, temporary in iter_weights(model):
        storage = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        # a temporary tensor is never tied, and the next one may be at the same address
        if not temporary:
            if storage in seen:
                continue
            seen.add(storage)
        sha.update(f"{name} {tuple(tensor.shape)}\n".encode())
        for chunk in tensor.detach().reshape(-1).split(_CHUNK):
            canonical = chunk.to(torch.bfloat16) if chunk.is_floating_point() else chunk
            sha.update(canonical.cpu().contiguous().view(torch.uint8).numpy())
    return sha.hexdigest()


def _shard_arguments(stored: StoredModel, dtype: torch.dtype, shards: int) -> dict[str, Any]:
    if shards == 1:
        return {}
    if stored.packing.unpacked_at_once:
        raise UserError(f"{stored.place} cannot be sharded: {stored.packing.method} is unpacked as a whole")
    from transformers.distributed.configuration_utils import DistributedConfig

    if "fsdp_plan" not in DistributedConfig.__dataclass_fields__:
        raise UserError(
            f"transformers {transformers.__version__} cannot shard a model by a given plan; train.shard needs a newer version"
        )
    bare = stored.without_weights(dtype)
    names = {module: name for name, module in bare.named_modules()}
    plan = {f"{names[decoder_layers(bare)]}.*": "free_full_weight"}
    # a family's own plan binds the last norm to the output matrix, but the loss uses that matrix without the norm
    plan |= {name: "free_full_weight" for name in bare.fsdp_plan if name in names.values() and "*" not in name}
    plan[names[cast(Any, bare.get_output_embeddings())]] = "keep_full_weight"
    return {"distributed_config": DistributedConfig(fsdp_size=shards, fsdp_plan=plan)}


def _title(model: str, place: Path | str) -> str | None:
    """Name a model that came as a .gguf file after the file, wherever it is."""
    file = Path(catalog.MODELS[model].gguf) if model in catalog.MODELS else place
    return file.stem if is_gguf(file) else None
