"""Download plans from the Hugging Face hub, upload plans and models to it. transformers itself downloads models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is of httpx or, later, of httpx2
    BadRequestError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from tomoe.errors import UserError
from tomoe.model.names import HUB_ID

PLAN_FILES = ("plan.json", "plan.safetensors")
# The run (text, masks, optimizer) is private, exports are uploaded by themselves, hidden and half-written files never.
UPLOAD_IGNORE = ("run/*", "export-*/*", "*.tmp", ".*", "*/.*", "__pycache__/*", "*.log")


def broken_connection(error: BaseException | None) -> str | None:
    """What broke on the way to the hub, if that caused an error; None if the hub answered."""
    while error is not None:
        if isinstance(error, HTTPError) and not isinstance(error, HfHubHTTPError | BadRequestError):
            return f"{type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}".strip()
        error = error.__cause__ or error.__context__
    return None


def find_plan(name: str) -> Path:
    """The folder of a plan: `name` itself if it is one, else the plan files of a hub repository, downloaded.

    Raises UserError if there is neither, or the hub is out of reach.
    """
    # whoever reads a folder finds out whether it holds a plan
    if Path(name).is_dir() or not HUB_ID.fullmatch(name):
        return Path(name)
    with _one_sentence(f"get the plan {name}"):
        folder = Path(snapshot_download(name, allow_patterns=list(PLAN_FILES)))
    if not all((folder / file).is_file() for file in PLAN_FILES):
        raise UserError(f"{name} on the hub holds no plan ({' and '.join(PLAN_FILES)}), and no folder has that name")
    return folder


def push(folder: Path, repo: str, private: bool = False) -> str:
    """Upload a folder, without its run and half-written files; returns the address of the repository.

    The repository is created if it does not exist. Raises UserError: not logged in, no right to write, hub out of reach,
    invalid name, or `private` for a repository that is public (nothing is uploaded then).
    """
    if not HUB_ID.fullmatch(repo):
        raise UserError(f"{repo!r} is not a name on the hub; it reads owner/name")
    api = HfApi()
    with _one_sentence(f"push to {repo}"):
        address = api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.repo_info(repo).private:
            raise UserError(f"{repo} exists and is public, so nothing was uploaded; choose another name")
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            ignore_patterns=list(UPLOAD_IGNORE),
            commit_message=f"Upload {folder.resolve().name}",
        )
    return str(address)


@contextmanager
def _one_sentence(aim: str) -> Iterator[None]:
    """Raise UserError, in one sentence, for what the hub refused or because it was out of reach."""
    try:
        yield
    except (OSError, HTTPError, HFValidationError, RuntimeError) as error:
        raise UserError(f"cannot {aim}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it if there is a network"
    if isinstance(error, LocalTokenNotFoundError):
        return "you are not logged in; run `hf auth login`"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return f"the hub refused ({status}); run `hf auth login` with a token that has the right to do this"
        if isinstance(error, RepositoryNotFoundError):
            return "the hub has no such repository, or it is private (`hf auth login`)"
    if broken := broken_connection(error):
        return f"the hub is out of reach ({broken})"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
