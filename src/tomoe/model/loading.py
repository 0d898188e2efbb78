"""A dense model and its tokenizer by one name: hub id, local folder, .gguf file, or a name that `tomoe fetch` knows."""

from __future__ import annotations

import contextlib
import difflib
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
from transformers.utils import logging as chatter

from tomoe.errors import UserError
from tomoe.model import catalog as fetch
from tomoe.model.checks import vet
from tomoe.model.hub import HUB_ID, broken_connection, patiently
from tomoe.model.offload import CannotStream, load_streamed, weights_of
from tomoe.model.quantized import keep_differentiable_, quantization_config

_CHUNK = 2**24  # elements of a tensor that are converted at once
# What transformers raises for files, configs and repositories it cannot use.
_LOADING_ERRORS = (OSError, ValueError, RuntimeError, LookupError, SafetensorError, StrictDataclassError)
# What falls out of it where a config holds words for numbers, zeros to divide by or endless nests.
_SENSELESS = (TypeError, AttributeError, ArithmeticError, AssertionError, RecursionError, MemoryError)


def resolve(model: str) -> Path | str:
    """The folder or .gguf file of a model, fetched if need be, or its hub id as it is.

    A name that `tomoe fetch` knows means that model; write ./name for a folder of the same name.
    Raises UserError for what is none of these.
    """
    if model in fetch.names():
        return fetch.fetch(model)
    path = Path(model).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; did you mean {path / ggufs[0]}?" if ggufs else ""
        raise UserError(f"the folder {model} holds no config.json, so it is not a Hugging Face model{hint}")
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise UserError(f"{model} is a file, but a model is a folder with config.json or a .gguf file")
    if HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return model
    near = difflib.get_close_matches(model, fetch.names(), n=1)
    hint = f"; did you mean {near[0]}?" if near else f", and `tomoe fetch` knows only {', '.join(fetch.names())}"
    raise UserError(f"there is no folder or .gguf file {model!r}, a hub id would read owner/name{hint}")


def load_dense(
    model: str, dtype: torch.dtype, device: str | torch.device = "cpu", shares: int = 1, stream: bool | None = False,
    base: str = "dense",
) -> PreTrainedModel:  # fmt: skip
    """The causal language model, frozen and in evaluation mode, with weights of `dtype`.

    With `shares` > 1, so many processes load it together, each its share of every layer (FSDP2). With `stream`, its layers
    stay in their files and are read whenever they run: the same numbers, in the memory of one layer (see streaming.py);
    None: if that can be, else whole.
    Another `base` than "dense" packs the layers' projections into 8 or 4 bits (see quantized.py).

    Only safetensors and GGUF are read (GGUF is dequantized), and no code that comes with a model is run.
    Raises UserError: no such model, hub out of reach, damaged or incomplete weights, unknown architecture.
    """
    place = resolve(model)
    with _telling(model, place):
        if isinstance(place, Path) and place.is_dir():
            vet(place)
        try:
            if stream is not False:
                return _streamed(model, place, dtype, torch.device(device))
        except CannotStream:
            if stream:
                raise
        own = _arguments(place, weights=True) | _sharing(shares) | _packing(model, place, base, dtype, device)
        loaded: PreTrainedModel
        info: dict[str, Any]
        loaded, info = patiently(
            lambda: AutoModelForCausalLM.from_pretrained(
                dtype=dtype, output_loading_info=True, trust_remote_code=False, **own
            )
        )  # type: ignore[misc]  # a pair, because of output_loading_info
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(f"the weights of {model} lack {len(missing)} tensors of its config, for example {missing[0]}")
    if _is_gguf(place):
        _forget_gguf(loaded, place)
    loaded.eval().requires_grad_(False)
    keep_differentiable_(loaded)
    return loaded if shares > 1 or base != "dense" else cast(Any, loaded).to(device)


def _streamed(model: str, place: Path | str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    if _is_gguf(place):
        raise CannotStream(f"{model} is a .gguf file, which cannot be read layer by layer; load it whole")
    if isinstance(place, str):
        name, wanted = place, ["*config.json", "model*.safetensors", "*.index.json"]
        place = Path(patiently(lambda: snapshot_download(name, allow_patterns=wanted)))
        vet(place)
    config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    loaded = load_streamed(place, config, dtype, device)
    if check_ids := getattr(loaded, "check_ids", None):
        check_ids()
    return loaded


def load_config(model: str, vetted: bool = False) -> PreTrainedConfig:
    """Only the config of a model; `vetted`: of a folder, held against the headers of its weights.

    Raises UserError as `load_dense` does.
    """
    place = resolve(model)
    with _telling(model, place, part="model" if vetted else "config"):
        if vetted and isinstance(place, Path) and place.is_dir():
            vet(place)
        config: PreTrainedConfig = patiently(
            lambda: AutoConfig.from_pretrained(trust_remote_code=False, **_arguments(place, weights=False))
        )
    return config


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to a model. Raises UserError as `load_dense` does."""
    place = resolve(model)
    with _telling(model, place, part="tokenizer"):
        tokenizer: PreTrainedTokenizerBase = patiently(
            lambda: AutoTokenizer.from_pretrained(trust_remote_code=False, **_arguments(place, weights=False))
        )
    if _is_gguf(place):
        tokenizer.name_or_path = place.stem
    return tokenizer


def fingerprint(model: PreTrainedModel) -> str:
    """Sha256 (hex) over names, shapes and bfloat16 bytes of all weights, tied ones once.

    The same for a model loaded in float32 and in bfloat16, whole and streamed. Float16 rounds differently, so a model stored
    in another dtype and loaded in float16 has a fingerprint of its own. Takes tens of MB of memory, whatever the model.
    """
    sha = hashlib.sha256()
    seen: set[tuple[object, ...]] = set()
    for name, tensor, passing in weights_of(model):
        storage = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        if storage in seen and not passing:
            continue
        if not passing:  # the next one may be read to the same place
            seen.add(storage)
        sha.update(f"{name} {tuple(tensor.shape)}\n".encode())
        for chunk in tensor.detach().reshape(-1).split(_CHUNK):
            canonical = chunk.to(torch.bfloat16) if chunk.is_floating_point() else chunk
            sha.update(canonical.cpu().contiguous().view(torch.uint8).numpy())
    return sha.hexdigest()


def _arguments(place: Path | str, weights: bool) -> dict[str, Any]:
    """What `from_pretrained` wants for this kind of place."""
    if _is_gguf(place):
        gguf: dict[str, Any] = {"pretrained_model_name_or_path": str(place.parent), "gguf_file": place.name}
        # older versions of transformers have no such config: they always dequantize
        config = getattr(transformers, "GgufConfig", None)
        return gguf | ({"quantization_config": config(dequantize=True)} if weights and config else {})
    return {"pretrained_model_name_or_path": str(place)} | ({"use_safetensors": True} if weights else {})


def _sharing(shares: int) -> dict[str, Any]:
    if shares == 1:
        return {}
    from transformers.distributed.configuration_utils import DistributedConfig

    if "fsdp_plan" not in DistributedConfig.__dataclass_fields__:
        raise UserError(
            f"transformers {transformers.__version__} cannot be told how to share a model out; train.shard needs a newer one"
        )
    # Left to itself it binds the last norm to the output matrix, and the loss uses that matrix without the norm.
    plan = {"model.norm": "free_full_weight", "lm_head": "keep_full_weight"}
    return {"distributed_config": DistributedConfig(fsdp_size=shares, fsdp_plan=plan)}


def _packing(
    model: str, place: Path | str, base: str, dtype: torch.dtype, device: str | torch.device
) -> dict[str, Any]:
    if base == "dense":
        return {}
    if _is_gguf(place):
        raise UserError(f"{model} is a .gguf file, which cannot be packed anew; learn with train.base = dense")
    return {"quantization_config": quantization_config(base, dtype), "device_map": {"": str(device)}}


def _is_gguf(place: Path | str) -> TypeGuard[Path]:
    return isinstance(place, Path) and place.suffix == ".gguf"


def _forget_gguf(model: PreTrainedModel, place: Path) -> None:
    """Make a dequantized model save and reload as any other."""
    config = model.config
    config._name_or_path = place.stem
    # The title inside the GGUF file lands under this name, and would be saved as a setting of the model.
    for left_over in ("_model_name_or_path", "quantization_config"):
        if hasattr(config, left_over):
            delattr(config, left_over)


@contextmanager
def _telling(model: str, place: Path | str, part: str = "model") -> Iterator[None]:
    """Load without chatter, and say in one sentence what went wrong."""
    where = " from the hub" if isinstance(place, str) else ""
    try:
        with _quiet(place):
            yield
    except UserError:
        raise
    except _SENSELESS as error:
        found = f"{type(error).__name__}: {str(error).strip()[:120]}"
        raise UserError(f"cannot load the {part} {model}{where}: its config makes no sense ({found})") from None
    except _LOADING_ERRORS as error:
        hint = f"; without a hub there is {', '.join(fetch.names())}" if where and isinstance(error, OSError) else ""
        broken = broken_connection(error) if where else None
        reason = f"the hub is out of reach ({broken})" if broken else _reason(error)
        raise UserError(f"cannot load the {part} {model}{where}: {reason}{hint}") from None


def _reason(error: Exception) -> str:
    """What transformers means, in its own words only where they are short and plain."""
    said = str(error)
    if isinstance(error, SafetensorError):
        return f"its weights are damaged ({said}); get them again"
    if isinstance(error, StrictDataclassError):
        return f"its config makes no sense ({said.strip().splitlines()[-1].strip().removeprefix('ValueError: ')})"
    if "trust_remote_code" in said:
        return "it needs code of its own (trust_remote_code), and code that comes with a model is not run here"
    if "ignore_mismatched_sizes" in said:
        return "its weights do not have the shapes that its config gives"
    if said.startswith("Unrecognized"):
        return "its config is of no causal language model that transformers knows"
    if "reshape array" in said:
        return "the file is cut off; get it again"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return re.split(r"\.\s", lines[0])[0].rstrip(".:") if lines else type(error).__name__


@contextmanager
def _quiet(place: Path | str) -> Iterator[None]:
    """No messages and no bars of transformers, unless its verbosity is set to info; downloads keep their bars."""
    before, bars = chatter.get_verbosity(), chatter.is_progress_bar_enabled()
    if before <= logging.INFO:
        yield
        return
    chatter.set_verbosity_error()
    if isinstance(place, Path):
        chatter.disable_progress_bar()
    # The bar of GGUF conversion obeys neither setting.
    try:
        with contextlib.redirect_stderr(io.StringIO()) if _is_gguf(place) else contextlib.nullcontext():
            yield
    finally:
        chatter.set_verbosity(before)
        if bars:
            chatter.enable_progress_bar()
