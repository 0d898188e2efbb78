"""Plans are applied to the public weights, uploaded and downloaded; whatever the hub refuses is one sentence."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from transformers import AutoModelForCausalLM

from pico_files import CommandLine, contents, refused
from tomoe.errors import UserError
from tomoe.folders import PLAN
from tomoe.model import hub
from tomoe.model.hub import find_plan
from tomoe.plans import Plan


@pytest.fixture(scope="module")
def made(converted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `dense`, a conversion `moe` with its run, and the bare `plan`."""
    folder = shutil.copytree(converted, tmp_path_factory.mktemp("made"), dirs_exist_ok=True)
    (folder / "plan").mkdir()
    for name in PLAN:
        shutil.copy(folder / "moe" / name, folder / "plan")
    return folder


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


@pytest.mark.parametrize("status", [401, 403])
def test_who_is_not_logged_in_is_told_how(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        response = SimpleNamespace(status_code=status, headers={}, request=None)
        raise HfHubHTTPError("no\nlong story", response=response)

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with pytest.raises(
        UserError, match=rf"^cannot get the plan ada/sea: the hub refused \({status}\); run `hf auth login`"
    ):
        find_plan("ada/sea")


def test_offline(tomoe: CommandLine, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE is set in these tests, so the client itself refuses."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    refused(tomoe("apply", "ada/nowhere", "x", "-o", tmp_path / "out"), "cannot get the plan ada/nowhere")
    assert "HF_HUB_OFFLINE" in str(hub.hub_reason(OfflineModeIsEnabled("offline")))
