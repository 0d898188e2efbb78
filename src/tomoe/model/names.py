"""What a model's name refers to: a folder, a .gguf file, a known name or a hub id."""

from __future__ import annotations

import difflib
import json
import os
import re
from pathlib import Path
from typing import TypeVar

from tomoe.errors import Advice, UserError, shortened
from tomoe.files import read_json, read_text
from tomoe.model import catalog
from tomoe.recipe.shared import RunRecipe

ADAPTER = "adapter_config.json"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# of the files that a model is read from
_READ = (".safetensors", ".json", ".jinja", ".model", ".txt", ".gguf")

AnyRecipe = TypeVar("AnyRecipe", bound=RunRecipe)


def absolute(name: str) -> str:
    """Return a file or folder by its absolute path, any other name unchanged."""
    local = name and name not in catalog.MODELS and Path(name).expanduser().exists()
    return os.path.abspath(Path(name).expanduser()) if local else name


def located(recipe: AnyRecipe) -> AnyRecipe:
    """Return the recipe with absolute paths: recorded names are read in other folders, too, where a relative path would not exist
    or, if it reads owner/name, would mean somebody else's repository on the hub."""
    # other names of text are looked up before files
    sources = [absolute(name) if HUB_ID.fullmatch(name) else name for name in recipe.data.sources]
    moved: dict[str, object] = {"model": absolute(recipe.model), "data.sources": sources}
    given = recipe.flatten()
    if "dense" in given:
        moved["dense"] = absolute(given["dense"])
    changes = [f"{key}={json.dumps(value)}" for key, value in moved.items() if value != given[key]]
    return recipe.changed(changes) if changes else recipe


def check_finished(folder: Path) -> None:
    """Raise UserError if the folder holds a run without its finished model."""
    if not (folder / "run" / "recipe.json").is_file() or (folder / "config.json").exists():
        return
    if (folder / "run" / "no-model.txt").is_file():
        reason, _, change = read_text(folder / "run" / "no-model.txt").partition("; ")
        again = Advice("force", f"to {shortened(change)}", here=False)
        raise UserError(f"{folder} holds no model: {shortened(reason)}", *([again] if change else []))
    raise UserError(
        f"the conversion in {folder} is not finished",
        Advice("resume", "when its command runs again, which goes on or says why it cannot", here=False),
    )


def check_no_adapter(folder: Path) -> None:
    """Raise UserError if the folder holds a peft adapter: alone it is not a model, and beside one it would be ignored."""
    if not (folder / ADAPTER).is_file():
        return
    advice = "merge it (peft: merge_and_unload), save the merged model and name that"
    if (folder / "config.json").is_file():
        raise UserError(f"{folder} holds an adapter ({ADAPTER}) beside the model; {advice}, or move the adapter away")
    base = read_json(folder / ADAPTER).get("base_model_name_or_path") or "another model"
    raise UserError(f"{folder} holds an adapter of {shortened(base)}, not a model; {advice}")


def check_links(folder: Path) -> None:
    """Raise UserError if a model file is a broken link."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not path.exists() and path.suffix in _READ:
            raise UserError(
                f"{path} is a link that leads to no file ({path.readlink()}): the rest of this copy of the model was moved or "
                "deleted; get the model again"
            )


def resolve(model: str) -> Path | str:
    """Return the folder or .gguf file of a model, downloaded if it has a known name (./name is a folder of that name); a hub id
    unchanged. Raises UserError for any other name."""
    if model in catalog.MODELS:
        return catalog.fetch(model)
    path = Path(model).expanduser()
    if path.is_dir():
        check_links(path)
        if (path / "config.json").is_file():
            return path
        check_finished(path)
        check_no_adapter(path)
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; did you mean {path / ggufs[0]}?" if ggufs else ""
        raise UserError(f"the folder {model} holds no config.json, so it is not a Hugging Face model{hint}")
    if path.is_symlink() and not path.exists():
        check_links(path.parent)
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise UserError(f"{model} is a file, but a model is a folder with config.json or a .gguf file")
    if HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return model
    known = list(catalog.MODELS)
    near = difflib.get_close_matches(model, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else f", and the known names are {', '.join(known)}"
    raise UserError(f"there is no folder or .gguf file {model!r}, a hub id reads owner/name{hint}")
