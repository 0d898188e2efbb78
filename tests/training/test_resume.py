"""A run that was killed, starved of disk, damaged or fed with NaN: what it made before stays, and it resumes bit by bit."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pico_files import (
    FINE,
    CommandLine,
    contents,
    ended,
    forked,
    pico_recipe,
    refused,
    small,
    steps_of,
)
from tomoe.cli import main
from tomoe.data.corpus import Corpus
from tomoe.errors import UserError
from tomoe.locks import LOCK_FILE
from tomoe.methods import carve
from tomoe.methods.registry import resolve_method
from tomoe.methods.tomoe import method, objective
from tomoe.methods.tomoe.rotation import value_rotations
from tomoe.model.loading import load_dense
from tomoe.pipeline import convert as convert_module
from tomoe.pipeline.convert import convert
from tomoe.pipeline.stages import plan, train
from tomoe.plans import Plan
from tomoe.plans.repair import streams
from tomoe.plans.repair.plan import FinishedLayers
from tomoe.training import run_folder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "as_shipped")]


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    """And `whole`, a run of six steps that nothing stopped; to be read only."""
    train(pico_recipe(place, *SETTINGS), place / "whole")
    return place


# attention draws per token, too: the most that a resumed run has to draw again
SETTINGS = (
    "train.steps=6",
    "attention.pruning=per_token",
    "attention.rotate_values=true",
    "data.calibration_tokens=64",
    "data.evaluation_tokens=32",
)


def learning(place: Path, *changes: str) -> list[str | Path]:
    """Six steps of learning."""
    return [
        "train",
        place / "dense",
        "--data",
        place / "text.txt",
        *small(),
        *(f"--set={key}" for key in (*SETTINGS, *changes)),
    ]


def last_masks(run: Path) -> bytes:
    return (run / "masks" / "step-000006" / "masks.safetensors").read_bytes()


def assert_same_bytes(actual: Path, expected: Path) -> None:
    assert contents(actual / "masks") == contents(expected / "masks")
    assert steps_of(actual) == steps_of(expected)


def dying(place: object, name: str, nth: int, harm: Callable[..., None] = lambda *args, **more: None) -> None:
    """Kill this process (-9) at the nth call of a function, after some harm."""
    real, calls = getattr(place, name), itertools.count(1)

    def call(*args: Any, **more: Any) -> Any:
        if next(calls) == nth:
            harm(*args, **more)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **more)

    setattr(place, name, call)


def half(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path)
    os.truncate(path, path.stat().st_size // 2)


# at the nth forward pass, with half of the nth file of tensors written, with the nth checkpoint written but not renamed, or in
# the middle of the nth deletion of a folder
MOMENTS: dict[str, Callable[[int], None]] = {
    "pass": lambda nth: dying(objective.MaskStep, "__call__", nth),
    "file": lambda nth: dying(run_folder, "save_file", nth, half),
    "rename": lambda nth: dying(os, "rename", nth),
    "deletion": lambda nth: dying(shutil, "rmtree", nth, lambda folder, **_: (folder / "state.json").unlink()),
}
# Each of them gets further than the one before it, or is killed where nothing new was kept. A run that was killed after its
# first checkpoint writes that again: the fourth deletion is that of the older one.
KILLS = (("file", 1), ("rename", 1), ("pass", 2), ("deletion", 4), ("file", 3), ("pass", 3))


def test_killed_at_any_moment_it_ends_in_the_same_bytes(tomoe: CommandLine, tmp_path: Path, place: Path) -> None:
    run, resumed = tmp_path / "run", [*learning(place), "-o", tmp_path / "run", "--resume"]
    for kind, nth in KILLS:

        def killed(kind: str = kind, nth: int = nth) -> None:
            MOMENTS[kind](nth)
            main([str(word) for word in resumed])

        assert ended(forked(killed)) == -signal.SIGKILL, (kind, nth)
    assert tomoe(*resumed).code == 0
    assert_same_bytes(run, place / "whole")
    assert [row["step"] for row in steps_of(run)] == list(range(1, 7))
    plan(run, tmp_path / "plan")
    plan(place / "whole", tmp_path / "expected")
    assert contents(tmp_path / "plan") == contents(tmp_path / "expected")


# of a conversion that trains nothing: in the carve of the second layer, while its plan is kept, while the second layer is
# repaired, and while the model is written
STAGES: tuple[Callable[[], None], ...] = (
    lambda: dying(carve, "balanced_clusters", 2),
    lambda: dying(Plan, "save", 1, lambda plan, folder: (folder / "plan.safetensors").write_bytes(b"half")),
    lambda: dying(FinishedLayers, "keep", 2),
    lambda: dying(convert_module.steps, "fold_and_check", 1),
    lambda: dying(Path, "replace", 3),
)


def test_a_conversion_killed_at_any_moment_ends_in_the_same_bytes(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is trained, so there is no checkpoint: what took long is kept as the plan before the repair."""
    recipe, out = pico_recipe(place, "train.steps=0", "active=0.6", "repair.tokens=128", *FINE), tmp_path / "moe"
    assert resolve_method(recipe)[0].name == "carve"
    convert(recipe, tmp_path / "whole")
    for i, kill in enumerate(STAGES):

        def killed(kill: Callable[[], None] = kill) -> None:
            kill()
            convert(recipe, out, resume=True)

        assert ended(forked(killed)) == -signal.SIGKILL, i
        assert not (out / "config.json").exists()
        assert (out / "run" / "plan" / "plan.json").exists() == (i >= 2)
        assert not list((out / "run" / "masks").iterdir())
    assert list((out / "run" / "repair").iterdir())
    # the plan is made once
    monkeypatch.delattr(carve, "balanced_clusters")
    convert(recipe, out, resume=True)
    assert contents(out, ("cost.json",)) == contents(tmp_path / "whole", ("cost.json",))


def test_a_damaged_checkpoint_is_passed_over(tomoe: CommandLine, tmp_path: Path, place: Path) -> None:
    run, good = tmp_path / "run", place / "whole" / "masks" / "step-000006"
    shutil.copytree(place / "whole", run)
    last = run / "masks" / "step-000006"
    for name, harm in (
        ("masks.safetensors", (good / "masks.safetensors").read_bytes()[:-100]),
        ("optimizer.safetensors", (place / "dense" / "model.safetensors").read_bytes()),
        ("state.json", b"[]"),
        ("state.json", None),
    ):
        shutil.copytree(good, last, dirs_exist_ok=True)
        (last / name).unlink()
        if harm is not None:
            (last / name).write_bytes(harm)
        checkpoint = run_folder.RunFolder(run).last()
        assert checkpoint is not None
        assert checkpoint.step == 4, name
    assert tomoe(*learning(place), "-o", run, "--resume").code == 0
    assert_same_bytes(run, place / "whole")
    for file in run.glob("masks/*/masks.safetensors"):
        file.write_bytes(b"nothing")
    refused(tomoe(*learning(place), "-o", run, "--resume"), "no checkpoint")


def test_a_conversion_stopped_inside_the_repair_ends_in_the_same_bytes(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learning is over by then, so only the repair starts again; nothing of the first one is left."""
    recipe, out = pico_recipe(place, "train.steps=1", "repair.mode=full"), tmp_path / "moe"
    convert(recipe, tmp_path / "whole")
    stages: list[str] = []

    def stop(stage: str, done: int, total: int, info: Mapping[str, Any]) -> None:
        stages.append(stage)
        if stage == "repair":
            # a kill -9 at this moment would leave no more than this
            assert not list((out / "run").glob("tomoe-repair-*"))
            raise KeyboardInterrupt

    for memory in (2**30, 0):  # with 0 bytes for activations, they go to the disk
        monkeypatch.setattr(streams, "MEMORY", memory)
        with pytest.raises(KeyboardInterrupt):
            convert(recipe, out, resume=True, on_progress=stop)
        assert ("train" in stages) == (memory > 0)
        assert not (out / "config.json").exists()
        stages.clear()
    convert(recipe, out, resume=True, on_progress=lambda stage, *_: stages.append(stage))
    assert "train" not in stages
    assert "repair" in stages
    times = ("cost.json", "metrics.jsonl")
    assert contents(out, times) == contents(tmp_path / "whole", times)


@pytest.mark.parametrize("start", ["carved", "random"])
def test_a_resumed_run_keeps_the_basis_of_its_values(
    start: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes from the checkpoint, and is found once: calibration text is run again only if there is no checkpoint."""
    recipe = pico_recipe(place, *SETTINGS, f"start={start}")
    whole, run = place / "whole", tmp_path / "run"
    if start == "random":
        whole = tmp_path / "whole"
        train(recipe, whole)
    rotations = load_file(whole / "masks" / "step-000006" / "masks.safetensors")["attention.value_rotations"]
    dense, calibration = load_dense(recipe.model, torch.float32), Corpus.load(whole / "corpus.safetensors").calibration
    meant = torch.stack(value_rotations(dense, calibration.input_ids, calibration.mask))
    torch.testing.assert_close(rotations, meant, atol=1e-4, rtol=0)
    shutil.copytree(whole, run)
    shutil.rmtree(run / "masks" / "step-000006")
    for name in ("carve_", "value_rotations"):
        monkeypatch.delattr(method, name)
    train(recipe, run, resume=True)
    assert contents(run / "masks") == contents(whole / "masks")
    made = plan(run, tmp_path / "plan")
    assert all(torch.equal(layer.value_rotation, r) for layer, r in zip(made.layers, rotations, strict=True))


def test_a_resumed_run_of_fine_grained_experts_keeps_its_partition(place: Path, tmp_path: Path) -> None:
    recipe = pico_recipe(place, "active=0.6", *FINE)
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(recipe, whole)
    shutil.copytree(whole, run)
    shutil.rmtree(run / "masks" / "step-000004")
    train(recipe, run, resume=True)
    assert_same_bytes(run, whole)
    carved = load_file(whole / "masks" / "step-000004" / "masks.safetensors")["expert_of_neuron"]
    for layer, expert in zip(plan(run, tmp_path / "plan").layers, carved, strict=True):
        assert torch.equal(layer.expert_masks, torch.arange(64)[:, None] == expert)


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Writing past `size` bytes of a file fails inside the block, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_while_saving_the_model_loses_nothing(tomoe: CommandLine, tmp_path: Path, place: Path) -> None:
    recipe, out, whole = pico_recipe(place, "train.steps=0"), tmp_path / "out", tmp_path / "whole"
    convert(recipe, whole)
    weights = (whole / "model.safetensors").stat().st_size
    with files_no_larger_than(weights - 1), pytest.raises(UserError, match=f"cannot write the model to {out}: "):
        convert(recipe, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
    assert not (out / "config.json").exists()
    # a finished conversion without a report gets it, too
    command = ["convert", place / "dense", "--data", place / "text.txt", *small(train_steps="0"), "--resume", "-o"]
    assert tomoe(*command, out).code == 0
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    (out / "report.html").unlink()
    timed = ("cost.json", "README.md", ".README.md.sha256", "evaluation.json", "report.html")
    before = contents(out, but=timed)
    assert tomoe(*command, out).code == 0
    assert (out / "report.html").is_file()
    assert contents(out, but=timed) == before


def poison(monkeypatch: pytest.MonkeyPatch, steps: range) -> None:
    """The loss of these steps (counted from 0) is NaN."""
    real, calls = objective.distill_loss, itertools.count()

    def loss(*args: Any) -> Tensor:
        value: Tensor = real(*args)
        return value * float("nan") if next(calls) in steps else value

    monkeypatch.setattr(objective, "distill_loss", loss)


def test_a_loss_that_is_not_finite_skips_the_step(
    tomoe: CommandLine, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, range(2, 4))
    run = tmp_path / "run"
    outcome = tomoe(*learning(place, "train.save_every=1"), "-o", run)
    assert outcome.code == 0
    assert "step 3: the loss was not finite" in outcome.err
    assert [row["skipped"] for row in steps_of(run)] == [False, False, True, True, False, False]
    masks = load_file(run / "masks" / "step-000006" / "masks.safetensors")
    assert all(bool(t.isfinite().all()) for t in masks.values())


def test_too_many_in_a_row_stop_the_run_and_the_last_good_checkpoint_stays(
    tomoe: CommandLine, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    options = [*learning(place, "train.steps=8", "train.max_nonfinite_steps=3"), "-o", run]
    with monkeypatch.context() as only_here:
        poison(only_here, range(5, 8))
        outcome = tomoe(*options)
    assert outcome.code == 2
    assert "3 steps in a row" in outcome.err.splitlines()[-1]
    last = run / "masks" / "step-000004"
    assert sorted((run / "masks").glob("step-*"))[-1] == last
    assert all(bool(t.isfinite().all()) for t in load_file(last / "masks.safetensors").values())
    assert tomoe(*options, "--resume").code == 0
    assert steps_of(run)[-1]["step"] == 8
    assert torch.isfinite(torch.tensor([row["loss"] for row in steps_of(run)])).all()


@pytest.fixture(scope="module")
def younger(place: Path) -> Path:
    """A run of four steps by another seed."""
    train(pico_recipe(place, *SETTINGS, *YOUNGER), place / "younger")
    return place / "younger"


YOUNGER = ("train.steps=4", "seed=1")


@pytest.mark.parametrize("killed_at", ["recipe.json", "masks"])
def test_a_kill_while_an_older_run_goes_leaves_nothing_of_it_to_resume(
    tomoe: CommandLine, tmp_path: Path, place: Path, younger: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    """--force was killed before the older masks were gone: --resume then starts over, and does not adopt them."""
    run, options = tmp_path / "run", learning(place, *YOUNGER)
    shutil.copytree(place / "whole", run)

    def killed(path: Path, **_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as only_here:
        if killed_at == "masks":
            remove = shutil.rmtree
            only_here.setattr(
                shutil,
                "rmtree",
                lambda p, *a, **how: killed(p) if Path(p).name.startswith("step-") else remove(p, *a, **how),
            )
        else:
            unlink = Path.unlink
            only_here.setattr(
                Path, "unlink", lambda p, **how: unlink(p, **how) if p.name in (killed_at, LOCK_FILE) else killed(p)
            )
        assert tomoe(*options, "-o", run, "--force").code != 0
    assert list(run.glob("masks/step-*"))
    assert tomoe(*options, "-o", run, "--resume").code == 0
    assert_same_bytes(run, younger)
    assert steps_of(run)[0] != steps_of(place / "whole")[0], "another seed draws otherwise"


@pytest.mark.parametrize(("signum", "again"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_stopped_run_keeps_its_last_step(
    tomoe: CommandLine, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, signum: int, again: bool
) -> None:
    """A warning in the middle of step 4: the three whole steps are kept, and the rest ends in the same bytes.

    A scheduler sends SIGTERM to all of a job, and torchrun sends it to its processes again, while they write their checkpoint.
    """
    run, options = tmp_path / "run", learning(place, "train.save_every=100")
    learn, write, calls = objective.distill_loss, run_folder.save_file, itertools.count()
    warned: list[Path] = []

    def loss(*args: Any) -> Tensor:
        if next(calls) == 3:
            signal.raise_signal(signum)
        return learn(*args)

    def warned_again(tensors: dict[str, Tensor], path: Path) -> None:
        if path.parent.name == ".part-000003":
            warned.append(path)
            signal.raise_signal(signum)
        write(tensors, path)

    with monkeypatch.context() as only_here:
        only_here.setattr(objective, "distill_loss", loss)
        if again:
            only_here.setattr(run_folder, "save_file", warned_again)
        outcome = tomoe(*options, "-o", run)
    assert outcome.code == 128 + signum
    assert "Traceback" not in outcome.err
    assert "--resume" in outcome.err.splitlines()[-1]
    assert bool(warned) == again
    assert sorted(path.name for path in (run / "masks").iterdir()) == ["step-000000", "step-000003"]
    assert tomoe(*options, "-o", run, "--resume").code == 0
    assert last_masks(run) == last_masks(place / "whole")
    assert steps_of(run) == steps_of(place / "whole")
