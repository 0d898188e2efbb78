"""Download models and plans from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is of httpx or, later, of httpx2
    BadRequestError,
    EntryNotFoundError,
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from tomoe.errors import UserError
from tomoe.files import weight_files
from tomoe.folders import PLAN
from tomoe.model.names import ADAPTER, HUB_ID, check_no_adapter

# the adapter first: a repository of one has no config of a model
CONFIG_FILES = (ADAPTER, "config.json", "generation_config.json", "model.safetensors.index.json")


def download_model(repo: str) -> Path:
    """Return the cached folder of a model on the hub: its configs and the safetensors files that transformers would read. Raises
    UserError if the repository holds an adapter, and whatever huggingface_hub raises."""
    folder: Path | None = None
    for name in CONFIG_FILES:
        # all files of one state of the repository, whose name the folder bears
        try:
            file = hf_hub_download(repo, name, revision=folder.name if folder else None)
        except EntryNotFoundError:
            if name == "config.json" and folder is None:
                raise
            continue
        folder = Path(file).parent
        check_no_adapter(folder)
    assert folder is not None
    for weights in weight_files(folder):
        hf_hub_download(repo, weights.name, revision=folder.name)
    return folder


def find_plan(name: str) -> Path:
    """Return the folder of a plan: `name` itself if it is one, else the plan files of a hub repository, downloaded. Raises
    UserError if there is neither, or the hub is out of reach."""
    # whoever reads a folder finds out whether it holds a plan
    if Path(name).is_dir() or not HUB_ID.fullmatch(name):
        return Path(name)
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(PLAN)))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        cause = hub_reason(error) or (lines[0].rstrip(".") if lines else type(error).__name__)
        raise UserError(f"cannot get the plan {name}: {cause}") from None
    if not (folder / "plan.json").is_file():
        raise UserError(f"{name} on the hub holds no plan (no plan.json), and no folder has that name")
    return folder


def hub_reason(error: BaseException) -> str | None:
    """Say what an error of the hub means, or why it was out of reach; None for other errors."""
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it if there is a network"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return f"the hub refused ({status}); run `hf auth login` with a token that has the right to do this"
        if isinstance(error, RepositoryNotFoundError):
            return "the hub has no such repository, or it is private (`hf auth login`)"
    broken: BaseException | None = error
    while broken is not None:
        if isinstance(broken, HTTPError) and not isinstance(broken, HfHubHTTPError | BadRequestError):
            what = f"{type(broken).__name__} {broken}".splitlines()[0].strip()
            return f"the hub cannot be reached ({what})"
        broken = broken.__cause__ or broken.__context__
    return None
