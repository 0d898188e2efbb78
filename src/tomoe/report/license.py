"""The hub id and license of a dense model, as far as files on this disk tell them. Makes no network call."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from huggingface_hub import ModelCard, try_to_load_from_cache
from yaml import YAMLError  # type: ignore[import-untyped]

from tomoe.model import catalog
from tomoe.report.summary import hub_id


@dataclass(frozen=True)
class BaseModelInfo:
    """What the metadata of a model card needs; None for what no file tells."""

    hub_id: str | None = None
    license: str | None = None  # as the hub writes it, for example apache-2.0


def base_model_info(model: str) -> BaseModelInfo:
    """Look up a hub id (its card in the hub's cache), a folder (its card), a .gguf file (its metadata) or a known name."""
    if not model:  # as a path it would be the working directory, which may have a README.md of its own
        return BaseModelInfo()
    path = Path(model).expanduser()
    if model in catalog.MODELS:
        known = catalog.MODELS[model]
        return BaseModelInfo(known.hub_id, known.license)
    if path.is_file():
        return BaseModelInfo(None, _gguf_license(path))
    if path.is_dir():
        return BaseModelInfo(None, _card_license(path / "README.md"))
    name = hub_id(model)
    cached = try_to_load_from_cache(name, "README.md") if name else None
    return BaseModelInfo(name, _card_license(Path(cached)) if isinstance(cached, str) else None)


def _card_license(card: Path) -> str | None:
    if not card.is_file():
        return None
    try:
        return _plain(ModelCard.load(card, ignore_metadata_errors=True).data.get("license"))
    except (OSError, ValueError, TypeError, YAMLError):
        # a damaged card of somebody else tells nothing
        return None


def _gguf_license(file: Path) -> str | None:
    try:
        field = gguf.GGUFReader(file).fields.get("general.license")
        return None if field is None else _plain(field.contents())
    except (OSError, ValueError, KeyError, IndexError):
        # damaged: loading it reports that
        return None


def _plain(license: Any) -> str | None:
    """The identifier in lower case; None for prose and for `other`."""
    shaped = isinstance(license, str) and re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,40}", license)
    return license.lower() if shaped and license.lower() not in ("other", "unknown") else None
