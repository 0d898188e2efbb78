"""Loads a model and its tokenizer by one name: hub id, local folder, .gguf file, or a known name (smollm2-135m)."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from tomoe.errors import UserError, shortened
from tomoe.model import catalog
from tomoe.model.arithmetic import compute_dtype
from tomoe.model.checks import check_model_folder
from tomoe.model.hub import broken_connection
from tomoe.model.names import resolve as resolve
from tomoe.model.offload import CannotOffload, cast_, iter_weights, load_offloaded
from tomoe.model.quantized import keep_differentiable_, quantization_config

# elements of a tensor that are converted at once
_CHUNK = 2**24
# what transformers raises for files, configs and repositories that it cannot use
_LOADING_ERRORS = (OSError, ValueError, RuntimeError, LookupError, SafetensorError, StrictDataclassError)
# what it raises for a config with words for numbers, zeros to divide by or endless nesting
_SENSELESS_CONFIG = (TypeError, AttributeError, ArithmeticError, AssertionError, RecursionError, MemoryError)
_NO_TOKENIZER = (
    "it has no tokenizer that can be read; copy tokenizer.json and tokenizer_config.json from where the model came from"
)


def pick_device(name: str) -> str:
    """The device itself; `auto` is CUDA if available, else the CPU. Raises UserError for a device that does not exist."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.device(name)
    except RuntimeError:
        raise UserError(f"torch knows no device {name!r}; use device=cpu, cuda or auto") from None
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"the recipe asks for device {name!r}, but torch sees no CUDA GPU here; use device=cpu or auto")
    return name


def load_dense(
    model: str, dtype: torch.dtype, device: str | torch.device = "cpu", shards: int = 1, offload: bool | None = False,
    quantization: str = "none", num_experts_per_tok: int | None = None,
) -> PreTrainedModel:  # fmt: skip
    """The causal language model, frozen and in evaluation mode, with weights of `dtype`.

    shards: ranks that load it together, each its part of every layer (FSDP2).
    offload: keep the layers on disk and read each when it runs (offload.py), with the same numbers; None: if possible.
    quantization: none, or int8 or nf4 for the projections within the layers (quantized.py).
    num_experts_per_tok: for a MoE, instead of the number in its config.

    Only safetensors and GGUF are read (GGUF is dequantized), and no code that comes with a model is run. The sizes that a
    folder claims are checked before anything is allocated. A model on the hub is checked only if it is offloaded: otherwise
    transformers downloads and loads it in one go.
    Raises UserError: no such model, hub out of reach, damaged or incomplete weights, unknown architecture.
    """
    place = resolve(model)
    with _one_sentence(model, place):
        if isinstance(place, Path) and place.is_dir():
            check_model_folder(place)
        try:
            if offload is not False:
                return _offloaded(model, place, dtype, torch.device(device))
        except CannotOffload:
            if offload:
                raise
        arguments = (
            _arguments(place, weights=True)
            | _shard_arguments(shards)
            | _quantization_arguments(model, place, quantization, dtype, device)
            | ({} if num_experts_per_tok is None else {"num_experts_per_tok": num_experts_per_tok})
        )
        loaded: PreTrainedModel
        info: dict[str, Any]
        loaded, info = AutoModelForCausalLM.from_pretrained(
            dtype=dtype, output_loading_info=True, trust_remote_code=False, **arguments
        )  # type: ignore[misc]  # a pair, because of output_loading_info
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(f"the weights of {model} lack {len(missing)} tensors of its config, for example {missing[0]}")
    if _is_gguf(place):
        _forget_gguf(loaded, place)
    loaded.eval().requires_grad_(False)
    keep_differentiable_(loaded)
    return loaded if shards > 1 or quantization != "none" else cast(Any, loaded).to(device)


def _offloaded(model: str, place: Path | str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    if _is_gguf(place):
        raise CannotOffload(f"{model} is a .gguf file, which cannot be read layer by layer; load it whole")
    if isinstance(place, str):
        patterns = ["*config.json", "model*.safetensors", "*.index.json"]
        place = Path(snapshot_download(place, allow_patterns=patterns))
        check_model_folder(place)
    config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    loaded = load_offloaded(place, config, dtype, device)
    if check_ids := getattr(loaded, "check_ids", None):
        check_ids()
    return loaded


def load_model(name: str, dtype: str, device: str = "auto", offload: bool = False) -> PreTrainedModel:
    """`load_dense` with dtype and device by name. Raises UserError as it does.

    dtype `auto`: bfloat16 weights, which compute in float32 where that is much faster (arithmetic.py).
    """
    device, stored = pick_device(device), torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    model = load_dense(name, stored, device, offload=offload)
    if dtype == "auto" and not offload and (compute := compute_dtype("auto", stored, device)) != stored:
        cast_(model, compute)
    return model


def load_config(model: str, checked: bool = False) -> PreTrainedConfig:
    """The config of a model; with `checked`, a folder's weights must be able to hold what its config claims.

    Raises UserError as `load_dense` does.
    """
    place = resolve(model)
    with _one_sentence(model, place, part="model" if checked else "config"):
        if checked and isinstance(place, Path) and place.is_dir():
            check_model_folder(place)
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            trust_remote_code=False, **_arguments(place, weights=False)
        )
    return config


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, without references to code of its own. Raises UserError as `load_dense` does."""
    place = resolve(model)
    with _one_sentence(model, place, part="tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            trust_remote_code=False, **_arguments(place, weights=False)
        )
    # transformers makes some tokenizers out of no file at all
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(f"cannot load the tokenizer {model}: {_NO_TOKENIZER}")
    if not isinstance(longest := tokenizer.model_max_length, int | float):
        raise UserError(
            f"cannot load the tokenizer {model}: its tokenizer_config.json is damaged (model_max_length is "
            f"{shortened(repr(longest))}, not a number); get it again"
        )
    if _is_gguf(place):
        tokenizer.name_or_path = place.stem
    strip_remote_code_(tokenizer)
    return tokenizer


def strip_remote_code_(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make `save_pretrained` write no `auto_map`.

    It names code, perhaps in a repository on the hub, that whoever loads the saved folder with trust_remote_code would run.
    """
    tokenizer.init_kwargs.pop("auto_map", None)
    # transformers writes it from these, too
    tokenizer._auto_map = tokenizer._auto_class = None


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 (hex) over names, shapes and bfloat16 bytes of all weights, tied ones once.

    It is the same for a model loaded in float32 and in bfloat16, whole and offloaded. Float16 rounds differently, so a model
    stored in another dtype and loaded in float16 has a different fingerprint. Takes tens of MB of memory for any model.
    """
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


def _arguments(place: Path | str, weights: bool) -> dict[str, Any]:
    """Arguments of `from_pretrained` for this kind of place."""
    if _is_gguf(place):
        gguf: dict[str, Any] = {"pretrained_model_name_or_path": str(place.parent), "gguf_file": place.name}
        # older versions of transformers have no such config: they always dequantize
        config = getattr(transformers, "GgufConfig", None)
        return gguf | ({"quantization_config": config(dequantize=True)} if weights and config else {})
    return {"pretrained_model_name_or_path": str(place)} | ({"use_safetensors": True} if weights else {})


def _shard_arguments(shards: int) -> dict[str, Any]:
    if shards == 1:
        return {}
    from transformers.distributed.configuration_utils import DistributedConfig

    if "fsdp_plan" not in DistributedConfig.__dataclass_fields__:
        raise UserError(
            f"transformers {transformers.__version__} cannot shard a model by a given plan; train.shard needs a newer version"
        )
    # by default it binds the last norm to the output matrix, but the loss uses that matrix without the norm
    plan = {"model.norm": "free_full_weight", "lm_head": "keep_full_weight"}
    return {"distributed_config": DistributedConfig(fsdp_size=shards, fsdp_plan=plan)}


def _quantization_arguments(
    model: str, place: Path | str, quantization: str, dtype: torch.dtype, device: str | torch.device
) -> dict[str, Any]:
    if quantization == "none":
        return {}
    if _is_gguf(place):
        raise UserError(f"{model} is a .gguf file, which is quantized already; use train.quantization = none")
    return {"quantization_config": quantization_config(quantization, dtype), "device_map": {"": str(device)}}


def _is_gguf(place: Path | str) -> TypeGuard[Path]:
    return isinstance(place, Path) and place.suffix == ".gguf"


def _forget_gguf(model: PreTrainedModel, place: Path) -> None:
    """Make a dequantized model save and reload as any other."""
    config = model.config
    config._name_or_path = place.stem
    # the title inside the GGUF file gets this name, and would be saved as a setting of the model
    for left_over in ("_model_name_or_path", "quantization_config"):
        if hasattr(config, left_over):
            delattr(config, left_over)


@contextmanager
def _one_sentence(model: str, place: Path | str, part: str = "model") -> Iterator[None]:
    """Load without messages of transformers; raise UserError, in one sentence, for what went wrong."""
    where = " from the hub" if isinstance(place, str) else ""
    try:
        with _quiet(place):
            yield
    except UserError:
        raise
    except _SENSELESS_CONFIG as error:
        cause = f"{type(error).__name__}: {str(error).strip()[:120]}"
        raise UserError(f"cannot load the {part} {model}{where}: its config makes no sense ({cause})") from None
    except _LOADING_ERRORS as error:
        offline = where and isinstance(error, OSError)
        hint = f"; {', '.join(catalog.names())} needs no hub" if offline else ""
        broken = broken_connection(error) if where else None
        reason = f"the hub is out of reach ({broken})" if broken else _reason(error)
        raise UserError(f"cannot load the {part} {model}{where}: {reason}{hint}") from None
    except BaseException as error:
        # tokenizers has no exception of its own, and Rust's panics are no Exception
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        cause = shortened(" ".join(str(error).split()))
        raise UserError(
            f"cannot load the {part} {model}{where}: its files are damaged ({cause}); get them again"
        ) from None


def _reason(error: Exception) -> str:
    """What transformers means, in its own words only if they are short and plain."""
    message = str(error)
    if isinstance(error, SafetensorError):
        return f"its weights are damaged ({message}); download or write them again"
    if isinstance(error, StrictDataclassError):
        cause = message.strip().splitlines()[-1].strip().removeprefix("ValueError: ")
        return f"its config makes no sense ({shortened(cause)})"
    if "trust_remote_code" in message:
        return "it comes with its own code (trust_remote_code), which is not run here"
    if "ignore_mismatched_sizes" in message:
        return "its weights do not have the shapes of its config"
    if message.startswith("Unrecognized"):
        return "its config belongs to no causal language model that transformers knows"
    if message.startswith("Couldn't instantiate the backend tokenizer"):
        return _NO_TOKENIZER
    if "reshape array" in message:
        return "the file is cut off; download or write it again"
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return re.split(r"\.\s", lines[0])[0].rstrip(".:") if lines else type(error).__name__


@contextmanager
def _quiet(place: Path | str) -> Iterator[None]:
    """No messages and bars of transformers, unless its verbosity is set to info; downloads keep their bars."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    if verbosity <= logging.INFO:
        yield
        return
    transformers_logging.set_verbosity_error()
    if isinstance(place, Path):
        transformers_logging.disable_progress_bar()
    # the bar of GGUF conversion obeys neither setting
    try:
        with contextlib.redirect_stderr(io.StringIO()) if _is_gguf(place) else contextlib.nullcontext():
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
