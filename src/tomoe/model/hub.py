"""Plans come from the Hugging Face hub, plans and models go there; models are loaded from it by transformers itself."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

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

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
PLAN_FILES = ("plan.json", "plan.safetensors")
# The run (text, masks, optimizer) stays at home, exports go by themselves, and what is hidden or not yet whole goes nowhere.
STAYS = ("run/*", "export-*/*", "*.tmp", ".*", "*/.*", "__pycache__/*", "*.log")

_TRIED_ENOUGH = ("Timeout", "ConnectError")  # by huggingface_hub itself, six times
_PAUSES = (1.0, 2.0, 4.0)  # seconds before a connection that broke is tried again

T = TypeVar("T")


def patiently(work: Callable[[], T]) -> T:
    """Do it again where the connection to the hub broke.

    A hub that is slow or busy (408, 429, 5xx), and a download that stops half-way, huggingface_hub tries again by itself.
    """
    for pause in _PAUSES:
        try:
            return work()
        except (OSError, HTTPError, ValueError, RuntimeError) as error:
            said = broken_connection(error)
            if said is None or any(word in said for word in _TRIED_ENOUGH):
                raise
            time.sleep(pause)
    return work()


def broken_connection(error: BaseException | None) -> str | None:
    """What broke on the way to the hub, where that is behind an error; None where the hub gave an answer."""
    while error is not None:
        if isinstance(error, HTTPError) and not isinstance(error, HfHubHTTPError | BadRequestError):
            return f"{type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}".strip()
        error = error.__cause__ or error.__context__
    return None


def find_plan(name: str) -> Path:
    """The folder of a plan: `name` itself where it is one, else the plan files of a hub repository, downloaded.

    Raises UserError where there is neither, or the hub is out of reach.
    """
    if Path(name).is_dir() or not HUB_ID.fullmatch(name):
        return Path(name)  # whether it holds a plan is found out by whoever reads it
    with _telling(f"get the plan {name}"):
        folder = Path(patiently(lambda: snapshot_download(name, allow_patterns=list(PLAN_FILES))))
    if not all((folder / file).is_file() for file in PLAN_FILES):
        raise UserError(f"{name} on the hub holds no plan ({' and '.join(PLAN_FILES)}), and no folder has that name")
    return folder


def push(folder: Path, repo: str, private: bool = False) -> str:
    """Upload a folder, without its run and half-written files; returns the address of the repository.

    The repository is made where there is none. Raises UserError: not logged in, no right to write, hub out of reach, a
    name that is none, or a public repository where a private one was asked for (nothing is uploaded then).
    """
    if not HUB_ID.fullmatch(repo):
        raise UserError(f"{repo!r} is no name on the hub; it reads owner/name")
    api = HfApi()
    with _telling(f"push to {repo}"):
        address = api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.repo_info(repo).private:
            raise UserError(f"{repo} is there already and public, so nothing was uploaded; choose another name")
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            ignore_patterns=list(STAYS),
            commit_message=f"Upload {folder.resolve().name}",
        )
    return str(address)


@contextmanager
def _telling(aim: str) -> Iterator[None]:
    """Say in one sentence what the hub refused, or that it was not there."""
    try:
        yield
    except (OSError, HTTPError, HFValidationError, RuntimeError) as error:
        raise UserError(f"cannot {aim}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it where there is a network"
    if isinstance(error, LocalTokenNotFoundError):
        return "nobody is logged in here; do so with `hf auth login`"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return f"the hub refused ({status}); log in with `hf auth login`, with a token that may do this"
        if isinstance(error, RepositoryNotFoundError):
            return "the hub knows no such repository, or shows it to others only (`hf auth login`)"
    if broken := broken_connection(error):
        return f"the hub is out of reach ({broken})"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
