"""Plans are applied to the public weights, uploaded and downloaded; whatever the hub refuses is one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import OfflineModeIsEnabled
from transformers import AutoModelForCausalLM

from pico_files import CommandLine, contents, refused
from tomoe.errors import UserError
from tomoe.exporting.publish import push_folder
from tomoe.model import hub
from tomoe.model.hub import find_plan
from tomoe.plan import Plan


@pytest.fixture(scope="module")
def made(converted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `dense`, a conversion `moe` with its run, and the bare `plan`."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(converted, folder, dirs_exist_ok=True)
    (folder / "plan").mkdir()
    for name in hub.PLAN_FILES:
        shutil.copy(folder / "moe" / name, folder / "plan")
    return folder


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of the hub's client, which do not reach the hub."""
    calls: list[dict[str, Any]] = []

    def create_repo(_: HfApi, repo: str, **options: Any) -> str:
        calls.append({"create": repo} | options)
        return f"https://hub/{repo}"

    def upload_folder(_: HfApi, **options: Any) -> None:
        calls.append(options)

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "repo_info", lambda *_: SimpleNamespace(private=calls[0]["private"]))
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    return calls


@pytest.mark.slow
def test_a_plan_and_the_dense_weights_make_the_same_model(tomoe: CommandLine, made: Path, tmp_path: Path) -> None:
    out = tmp_path / "applied"
    done = tomoe("apply", made / "plan", made / "dense", "-o", out)
    assert done.code == 0, done.err
    ours, theirs = contents(out), contents(made / "moe")
    for name in ("model.safetensors", "config.json", "plan.json", "plan.safetensors", "recipe.json", "tokenizer.json"):
        assert ours[name] == theirs[name], name
    ids = torch.arange(3, 30)[None]
    assert AutoModelForCausalLM.from_pretrained(out)(ids).logits.shape == (1, 27, 259)
    card = (out / "README.md").read_text()
    assert "tomoe apply plan dense -o applied" in card
    assert str(made) not in card, "a path of this machine in a card that travels"
    assert "not measured" in card.lower()
    refused(tomoe("apply", made / "plan", made / "dense", "-o", out), "--force")


def test_other_weights_of_the_same_sizes_are_refused(tomoe: CommandLine, made: Path, tmp_path: Path) -> None:
    dense = AutoModelForCausalLM.from_pretrained(made / "dense")
    with torch.no_grad():
        dense.model.layers[1].mlp.up_proj.weight[3, 4] += 1
    shutil.copytree(made / "dense", tmp_path / "other")
    dense.save_pretrained(tmp_path / "other")
    refused(tomoe("apply", made / "plan", tmp_path / "other", "-o", tmp_path / "out"), "made for other weights")
    assert not (tmp_path / "out").exists()


def test_a_plan_comes_from_the_hub(
    tomoe: CommandLine, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, list[str]]] = []

    def download(repo: str, allow_patterns: list[str]) -> str:
        calls.append((repo, allow_patterns))
        return str(made / "plan")

    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert tomoe("apply", "ada/plan", made / "dense", "-o", "out").code == 0
    assert calls == [("ada/plan", ["plan.json", "plan.safetensors"])]
    assert Plan.load(Path("out")).widths() == Plan.load(made / "plan").widths()
    # a plan from elsewhere may not choose a folder of this machine as its dense model
    refused(
        tomoe("apply", "ada/plan", "-o", "other"), "does not say where its dense model", "tomoe apply ada/plan MODEL"
    )
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    refused(tomoe("apply", "ada/empty", "-o", "other"), "ada/empty", "holds no plan")


def test_a_folder_goes_before_a_repository_of_the_same_name(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made.parent)
    assert find_plan(f"{made.name}/plan") == Path(made.name) / "plan"


@pytest.mark.parametrize("what", ["plan", "moe"])
def test_push_sends_the_folder_with_a_card_and_without_the_run(
    tomoe: CommandLine, made: Path, tmp_path: Path, uploads: list[dict[str, Any]], what: str
) -> None:
    from huggingface_hub.utils import filter_repo_objects

    folder = tmp_path / "sent"
    shutil.copytree(made / what, folder)
    for rubbish in ("run/masks/step-000001/state.json", ".plan.json.77.tmp", "sub/.hidden", ".part/model.safetensors"):
        (folder / rubbish).parent.mkdir(parents=True, exist_ok=True)
        (folder / rubbish).write_text("x")
    strangers = ("data/model.safetensors", "figures/mine.png", "notes.txt")
    for stranger in strangers:
        (folder / stranger).parent.mkdir(exist_ok=True)
        (folder / stranger).write_text("mine")
    ours = {path.relative_to(made / what).as_posix() for path in (made / what).rglob("*") if path.is_file()}
    done = tomoe("push", folder, "ada/sea", "--private")
    assert done.code == 0, done.err
    create, upload = uploads
    assert create == {"create": "ada/sea", "private": True, "exist_ok": True}
    assert upload["repo_id"] == "ada/sea"
    assert upload["folder_path"] == folder
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    sent = set(filter_repo_objects(files, allow_patterns=upload["allow_patterns"]))
    assert sent == {name for name in ours if not name.startswith(("run/", "."))} | {"README.md"}
    assert ("model.safetensors" in sent) == (what == "moe")
    assert f"Left out, because tomoe did not write them: {', '.join(strangers)}." in done.err
    assert "https://hub/ada/sea" in done.err + done.out
    assert Plan.load(folder).recipe["model"] in done.err + done.out, (
        "it does not say that a path of this machine travels along"
    )


def test_the_card_of_a_plan_says_how_to_use_it(made: Path, tmp_path: Path, uploads: list[dict[str, Any]]) -> None:
    folder = tmp_path / "sent"
    shutil.copytree(made / "plan", folder)
    head = json.loads((folder / "plan.json").read_text())
    head["recipe"]["model"] = "ada/ocean-1b"
    (folder / "plan.json").write_text(json.dumps(head))
    push_folder(folder, "ada/sea")
    card = (folder / "README.md").read_text()
    for words in (
        "base_model: ada/ocean-1b",
        "tomoe apply ada/sea ada/ocean-1b -o OUT",
        "60%",
        " kB",
        head["source"][:16],
    ):
        assert words in card
    (folder / "README.md").write_text("my own words")
    push_folder(folder, "ada/sea")
    assert (folder / "README.md").read_text() == "my own words"


def test_nothing_is_uploaded_to_a_public_repository_that_was_asked_for_in_private(
    tomoe: CommandLine, made: Path, uploads: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HfApi, "repo_info", lambda *_: SimpleNamespace(private=False))
    refused(tomoe("push", made / "moe", "ada/sea", "--private"), "public", "nothing was uploaded")
    assert len(uploads) == 1


def test_what_is_no_plan_and_no_model_is_not_uploaded(
    tomoe: CommandLine, made: Path, tmp_path: Path, uploads: list[dict[str, Any]]
) -> None:
    refused(tomoe("push", tmp_path, "ada/sea"), "holds no plan")
    refused(tomoe("push", made / "moe", "sea"), "owner/name")
    refused(tomoe("push", made / "moe", "../../etc"), "owner/name")
    assert not uploads
    for name in ("config.json", "model.gguf"):
        (tmp_path / name).write_text("{}")
        refused(tomoe("push", tmp_path, "ada/sea"), "nothing was uploaded")
        assert not uploads
        # an export has no plan, but says what it is
        (tmp_path / "export.json").write_text("{}")
        assert tomoe("push", tmp_path, "ada/sea").code == 0
        assert uploads
        uploads.clear()
        (tmp_path / name).unlink()
        (tmp_path / "export.json").unlink()


class Refusing(BaseHTTPRequestHandler):
    """A hub that answers every request with one status."""

    status = 401

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_POST

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    web = HTTPServer(("127.0.0.1", 0), Refusing)
    thread = Thread(target=web.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{web.server_port}"
    web.shutdown()
    web.server_close()
    thread.join()


def at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """The real client, at another address, online as far as it knows."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "HfApi", lambda: HfApi(endpoint=endpoint, token="hf_none"))


@pytest.mark.parametrize("status", [401, 403])
def test_who_is_not_logged_in_is_told_how(
    tomoe: CommandLine, made: Path, server: str, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    at(monkeypatch, server)
    monkeypatch.setattr(Refusing, "status", status)
    refused(tomoe("push", made / "moe", "ada/sea"), "cannot push to ada/sea", "hf auth login")


def test_no_hub_within_reach(tomoe: CommandLine, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, "http://127.0.0.1:9")
    refused(tomoe("push", made / "moe", "ada/sea"), "cannot push to ada/sea", "out of reach")


def test_offline(tomoe: CommandLine, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE is set in these tests, so the client itself refuses."""
    refused(tomoe("push", made / "moe", "ada/sea"), "HF_HUB_OFFLINE")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    refused(tomoe("apply", "ada/nowhere", "x", "-o", tmp_path / "out"), "cannot get the plan ada/nowhere")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"), hub._one_sentence("do it"):
        raise OfflineModeIsEnabled("offline")
