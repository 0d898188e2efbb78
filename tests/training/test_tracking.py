"""Trackers get the rows of metrics.jsonl, from the first step on at every start; TensorBoard for real, others by stand-ins."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pico_files import CommandLine, pico_recipe, small, write_pico, write_text
from tomoe.conversion import train
from tomoe.errors import UserError
from tomoe.recipe.conversion import Recipe
from tomoe.training import tracking
from tomoe.training.run_folder import RunFolder

pytestmark = pytest.mark.slow

STAND_IN = """
import json, pathlib
PLACE = pathlib.Path(__file__).with_suffix(".jsonl")

def note(*said):
    with PLACE.open("a") as file:
        file.write(json.dumps(said) + "\\n")

class Run:
    def log(self, metrics, step=None):
        note("log", step, metrics)
    def finish(self):
        print("finished")
        note("finish")

def init(project, name, config):
    print("welcome")
    note("init", project, name, config)
    return Run()
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_pico(tmp_path / "dense")
    write_text(tmp_path / "text.txt")
    return tmp_path


def recipe_of(place: Path, track: str) -> Recipe:
    return pico_recipe(place, "train.log_every=2", f"report_to={track}")


@pytest.fixture(params=["trackio", "wandb"])
def stand_in(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / f"{request.param}.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path / "clients")
    monkeypatch.delitem(sys.modules, request.param, raising=False)
    return request.param


def received(place: Path, kind: str) -> list[list[object]]:
    return [json.loads(line) for line in (place / "clients" / f"{kind}.jsonl").read_text().splitlines()]


def drawn(row: dict[str, float]) -> dict[str, float]:
    return {key: float(value) for key, value in row.items() if key != "step" and value is not None}


def test_clients_hear_what_is_logged_and_no_more(
    place: Path, stand_in: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(place, stand_in)
    train(recipe, place / "out" / "run")
    rows = RunFolder(place / "out" / "run").rows()
    assert [row["step"] for row in rows] == [2, 4]
    first, *logs, last = received(place, stand_in)
    assert first[:3] == ["init", "tomoe", "out"]
    assert first[3] == recipe.flatten()
    assert logs == [["log", row["step"], drawn(row)] for row in rows]
    assert last == ["finish"]
    assert capsys.readouterr().out == ""  # their greetings are no result
    monkeypatch.delitem(sys.modules, stand_in)


def test_a_run_that_goes_on_is_told_from_its_first_step(
    place: Path, stand_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = place / "run"
    heard = RunFolder.append_metrics

    def cut(self: RunFolder, row: dict[str, object]) -> None:
        heard(self, row)
        if row["step"] == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "append_metrics", cut)
    with pytest.raises(KeyboardInterrupt):
        train(recipe_of(place, stand_in), run)
    assert received(place, stand_in)[-1] == ["finish"]
    monkeypatch.setattr(RunFolder, "append_metrics", heard)
    before = len(received(place, stand_in))
    train(recipe_of(place, stand_in), run, resume=True)
    assert [message[:2] for message in received(place, stand_in)[before:]] == [
        ["init", "tomoe"],
        ["log", 2],
        ["log", 4],
        ["finish"],
    ]
    monkeypatch.delitem(sys.modules, stand_in)


def test_tensorboard_holds_the_rows_also_after_a_second_start(place: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is the extra `track`")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = place / "run"
    train(recipe_of(place, "tensorboard"), run)
    train(recipe_of(place, "tensorboard"), run, resume=True)
    rows = RunFolder(run).rows()
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {f"train/{key}" for row in rows for key in drawn(row)}
    for key in ("distill", "active_fraction", "skipped"):
        events_read = [(event.step, event.value) for event in events.Scalars(f"train/{key}")]
        assert events_read == [(row["step"], pytest.approx(float(row[key]))) for row in rows]


def test_what_is_not_finite_is_left_out() -> None:
    row = {"step": 3, "loss": None, "skipped": True, "tokens": 512, "note": "words"}
    assert tracking._numbers(row) == {"skipped": 1.0, "tokens": 512.0}


def test_the_tracker_changes_nothing_that_is_learned() -> None:
    plain, followed = (Recipe.load(None, [f"report_to={kind}"]) for kind in ("none", "wandb"))
    assert plain.digest() == followed.digest()
    assert plain.differences(followed) == []
    with pytest.raises(UserError, match="report_to is 'mlflow'"):
        Recipe.load(None, ["report_to=mlflow"])


def test_a_missing_package_is_said_before_the_run_begins(
    tomoe: CommandLine, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    done = tomoe(
        "train",
        place / "dense",
        "-o",
        place / "run",
        "--data",
        place / "text.txt",
        "--set",
        "report_to=wandb",
        *small(),
    )
    assert done.code == 2
    assert done.err == (
        "tomoe: the recipe sets report_to=wandb, but the package wandb is not installed; install it with: pip install wandb\n"
    )
    assert not (place / "run").exists()


def test_a_tracker_that_cannot_begin_is_one_sentence(
    place: Path, stand_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "clients" / f"{stand_in}.py").write_text("def init(**given):\n    raise OSError('no key\\nlong story')\n")
    with pytest.raises(UserError, match=f"^{stand_in} cannot start: no key; set it up, or use report_to=none$"):
        train(recipe_of(place, stand_in), place / "run")
    monkeypatch.delitem(sys.modules, stand_in)
