"""A run that was killed, starved of disk, damaged or fed with NaN: what it made before stays, and it resumes bit by bit."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from launcher import EVERYTHING
from pico_files import CommandLine, contents, pico_recipe, refused, small, steps_of, write_pico, write_text
from tomoe.cli import main
from tomoe.conversion import steps
from tomoe.conversion.convert import convert
from tomoe.conversion.verbs import plan, train
from tomoe.data.corpus import Corpus
from tomoe.locks import LOCK_FILE
from tomoe.model.loading import load_dense
from tomoe.pruning.learned import objective
from tomoe.pruning.learned.rotation import value_rotations
from tomoe.pruning.repair import streams
from tomoe.training import run_folder

pytestmark = pytest.mark.slow

# One process that has imported everything forks a fresh `tomoe train` again and again, which kills itself (-9) at its nth
# forward pass, with half of its nth file of tensors written, or with its nth checkpoint or file written but not renamed.
KILLER = (
    EVERYTHING
    + """
import os, random, signal, sys
from pathlib import Path
from tomoe.pruning.learned.objective import MaskStep
from tomoe.training import run_folder

whole, killed, *options = sys.argv[1:]

def begin(run, *more, dies=lambda: None):
    pid = os.fork()
    if pid == 0:
        dies()
        os.dup2(os.open(run + ".log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        try:
            main(["train", "-o", run, *options, *more])
        except SystemExit as left:
            os._exit(left.code or 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def dying(place, name, nth, harm=lambda *args: None):
    real, calls = getattr(place, name), iter(range(10**6))

    def call(*args, **more):
        if next(calls) + 1 == nth:
            harm(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **more)

    setattr(place, name, call)

def half(tensors, path, save=run_folder.save_file):
    save(tensors, path)
    os.truncate(path, path.stat().st_size // 2)

MOMENTS = {
    "pass": lambda nth: dying(MaskStep, "__call__", nth),
    "file": lambda nth: dying(run_folder, "save_file", nth, half),
    "rename": lambda nth: dying(os, "rename", nth),
}
torch.set_num_threads(1)
assert begin(whole) == 0, Path(whole + ".log").read_text()
chance, code, kills = random.Random(0), -9, dict.fromkeys(MOMENTS, 0)
while code == -9 and min(kills.values()) < 3:
    kind, nth = min(kills, key=kills.get), chance.randint(1, 5)
    code = begin(killed, "--resume", dies=lambda: MOMENTS[kind](nth))
    kills[kind] += code == -9
code = begin(killed, "--resume") if code == -9 else code
assert code == 0, Path(killed + ".log").read_text()
print(*kills.values())
"""
)


def test_killed_at_any_moment_it_ends_in_the_same_bytes(
    tomoe: CommandLine, tmp_path: Path, model: Path, text: Path
) -> None:
    # dynamic attention draws per token, too: the most that a resumed run has to draw again
    options = [model, "--data", text, "--attention", "per_token", *small(train_steps="12", train_save_every="2")]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = subprocess.run(
        [sys.executable, "-c", KILLER, *map(str, (whole, killed, *options))],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert min(map(int, done.stdout.split())) >= 1, "it was not killed in every way"
    last = Path("masks") / "step-000012" / "masks.safetensors"
    assert (whole / last).read_bytes() == (killed / last).read_bytes()
    for run in (whole, killed):
        assert tomoe("plan", run, "-o", tmp_path / f"plan-{run.name}").code == 0
    assert contents(tmp_path / "plan-whole") == contents(tmp_path / "plan-killed")
    assert steps_of(whole) == steps_of(killed)
    assert [row["step"] for row in steps_of(killed)] == list(range(1, 13))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `dense`, `text.txt`, and `whole`, a run of six steps that nothing stopped; to be read only."""
    place = tmp_path_factory.mktemp("place")
    write_pico(place / "dense")
    write_text(place / "text.txt")
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in (*learning(place), "-o", place / "whole")])
    assert not left.value.code
    return place


def learning(place: Path, **changes: str) -> list[str | Path]:
    """Six steps of learning."""
    return ["train", place / "dense", "--data", place / "text.txt", *small(**{"train_steps": "6"} | changes)]


def last_masks(run: Path) -> bytes:
    return (run / "masks" / "step-000006" / "masks.safetensors").read_bytes()


@pytest.mark.parametrize("harm", ["cut", "foreign weights", "no state", "state of nothing"])
def test_a_damaged_checkpoint_is_passed_over(tomoe: CommandLine, tmp_path: Path, place: Path, harm: str) -> None:
    shutil.copytree(place / "whole", tmp_path / "run")
    last = tmp_path / "run" / "masks" / "step-000006"
    if harm == "cut":
        (last / "masks.safetensors").write_bytes((last / "masks.safetensors").read_bytes()[:-100])
    elif harm == "foreign weights":
        (last / "optimizer.safetensors").write_bytes((place / "dense" / "model.safetensors").read_bytes())
    elif harm == "no state":
        (last / "state.json").unlink()
    else:
        (last / "state.json").write_text("[]")
    assert tomoe(*learning(place), "-o", tmp_path / "run", "--resume").code == 0
    assert last_masks(tmp_path / "run") == last_masks(place / "whole")


@pytest.mark.usefixtures("model", "text")
@pytest.mark.parametrize("spills", [False, True])
def test_a_conversion_stopped_inside_the_repair_ends_in_the_same_bytes(
    spills: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learning is over by then, so only the repair starts again; nothing of the first one is left."""
    recipe = pico_recipe(tmp_path, "repair.mode=full")
    monkeypatch.setattr(streams, "MEMORY", 0 if spills else 2**30)
    stages: list[str] = []

    def stop(stage: str, done: int, total: int, info: Mapping[str, Any]) -> None:
        stages.append(stage)
        if stage == "repair":
            # a kill -9 at this moment would leave no more than this
            assert not list((tmp_path / "moe" / "run").glob("tomoe-repair-*"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(recipe, tmp_path / "moe", on_progress=stop)
    assert "train" in stages
    assert not (tmp_path / "moe" / "config.json").exists()
    again: list[str] = []
    convert(recipe, tmp_path / "moe", resume=True, on_progress=lambda stage, *_: again.append(stage))
    assert "train" not in again
    assert "repair" in again
    convert(recipe, tmp_path / "whole")
    times = ("cost.json", "metrics.jsonl")
    assert contents(tmp_path / "moe", times) == contents(tmp_path / "whole", times)


@pytest.mark.usefixtures("model", "text")
@pytest.mark.parametrize("start", ["carved", "random"])
def test_a_resumed_run_keeps_the_basis_of_its_values(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes from the checkpoint, and is found once: calibration text is run again only if there is no checkpoint."""
    rotated = ("attention.pruning=per_token", "attention.rotate_values=true")
    recipe = pico_recipe(tmp_path, "train.steps=4", f"start={start}", *rotated)
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(recipe, whole)
    rotations = load_file(whole / "masks" / "step-000004" / "masks.safetensors")["attention.value_rotations"]
    dense, calibration = load_dense(recipe.model, torch.float32), Corpus.load(whole / "corpus.safetensors").calibration
    meant = torch.stack(value_rotations(dense, calibration.input_ids, calibration.mask))
    torch.testing.assert_close(rotations, meant, atol=1e-4, rtol=0)
    shutil.copytree(whole, run)
    shutil.rmtree(run / "masks" / "step-000004")
    for name in ("carve_", "value_rotations"):
        monkeypatch.delattr(steps, name)
    train(recipe, run, resume=True)
    assert contents(run / "masks") == contents(whole / "masks")
    made = plan(run, tmp_path / "plan")
    assert all(torch.equal(layer.value_rotation, r) for layer, r in zip(made.layers, rotations, strict=True))


@pytest.mark.usefixtures("model", "text")
def test_a_resumed_run_of_fine_grained_experts_keeps_its_partition(tmp_path: Path) -> None:
    keys = ("experts.form=fine", "experts.num_experts=64")
    recipe = pico_recipe(tmp_path, "active=0.6", *keys)
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(recipe, whole)
    shutil.copytree(whole, run)
    shutil.rmtree(run / "masks" / "step-000004")
    train(recipe, run, resume=True)
    assert contents(run / "masks") == contents(whole / "masks")
    assert steps_of(run) == steps_of(whole)
    carved = load_file(whole / "masks" / "step-000004" / "masks.safetensors")["expert_of_neuron"]
    for layer, expert in zip(plan(run, tmp_path / "plan").layers, carved, strict=True):
        assert torch.equal(layer.expert_masks, torch.arange(64)[:, None] == expert)


def test_when_no_checkpoint_is_whole_it_says_so(tomoe: CommandLine, tmp_path: Path, place: Path) -> None:
    shutil.copytree(place / "whole", tmp_path / "run")
    for file in (tmp_path / "run").glob("masks/*/masks.safetensors"):
        file.write_bytes(b"nothing")
    refused(tomoe(*learning(place), "-o", tmp_path / "run", "--resume"), "no checkpoint")


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Writing past `size` bytes of a file fails inside the block, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_while_training_keeps_the_last_checkpoint(tomoe: CommandLine, tmp_path: Path, place: Path) -> None:
    run = tmp_path / "run"
    # the checkpoint of step 0 has no moments yet; the moments of step 2 are twice the masks and do not fit
    masks = len(last_masks(place / "whole"))
    with files_no_larger_than(masks + masks // 2):
        outcome = tomoe(*learning(place), "-o", run)
    assert outcome.code == 2
    assert "Traceback" not in outcome.err
    assert "step 2" in outcome.err.splitlines()[-1]
    assert sorted(path.name for path in (run / "masks").iterdir()) == ["step-000000"]
    assert tomoe(*learning(place), "-o", run, "--resume").code == 0
    assert last_masks(run) == last_masks(place / "whole")


def test_a_full_disk_while_saving_the_model_loses_nothing(
    tomoe: CommandLine, tmp_path: Path, model: Path, text: Path
) -> None:
    options = [model, "--data", text, *small(train_steps="0")]
    out = tmp_path / "out"
    assert tomoe("convert", *options, "-o", tmp_path / "whole").code == 0
    weights = (tmp_path / "whole" / "model.safetensors").stat().st_size
    with files_no_larger_than(weights - 1):
        outcome = tomoe("convert", *options, "-o", out)
    assert outcome.code == 2, outcome
    assert "Traceback" not in outcome.err
    assert str(out) in outcome.err.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "out", "text.txt", "whole"]
    assert not (out / "config.json").exists()
    assert tomoe("convert", *options, "-o", out, "--resume").code == 0
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_a_finished_conversion_that_lost_its_report_writes_it_on_resume(
    tomoe: CommandLine, tmp_path: Path, model: Path, text: Path
) -> None:
    options, out = ["convert", model, "--data", text, "-o", tmp_path / "out", *small()], tmp_path / "out"
    assert tomoe(*options).code == 0
    timed = ("cost.json", "README.md", ".README.md.sha256", "evaluation.json", "report.html")
    before = contents(out, but=timed)
    (out / "report.html").unlink()
    assert tomoe(*options, "--resume").code == 0
    assert (out / "report.html").is_file()
    assert contents(out, but=timed) == before


def poison(monkeypatch: pytest.MonkeyPatch, steps: range) -> None:
    """The loss of these steps (counted from 0) is NaN."""
    real, calls = objective.distill_loss, iter(range(10**6))

    def loss(*args: Any) -> Tensor:
        value: Tensor = real(*args)
        return value * float("nan") if next(calls) in steps else value

    monkeypatch.setattr(objective, "distill_loss", loss)


def test_a_loss_that_is_not_finite_skips_the_step(
    tomoe: CommandLine, tmp_path: Path, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, range(2, 4))
    run = tmp_path / "run"
    outcome = tomoe("train", model, "--data", text, "-o", run, *small(train_steps="6", train_save_every="1"))
    assert outcome.code == 0
    assert "step 3: the loss was not finite" in outcome.err
    assert [row["skipped"] for row in steps_of(run)] == [False, False, True, True, False, False]
    masks = load_file(run / "masks" / "step-000006" / "masks.safetensors")
    assert all(bool(t.isfinite().all()) for t in masks.values())


def test_too_many_in_a_row_stop_the_run_and_the_last_good_checkpoint_stays(
    tomoe: CommandLine, tmp_path: Path, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [model, "--data", text, "-o", tmp_path / "run", *small(train_steps="12", train_max_nonfinite_steps="3")]
    with monkeypatch.context() as only_here:
        poison(only_here, range(5, 12))
        outcome = tomoe("train", *options)
    assert outcome.code == 2
    assert "3 steps in a row" in outcome.err.splitlines()[-1]
    last = tmp_path / "run" / "masks" / "step-000004"
    assert sorted((tmp_path / "run" / "masks").glob("step-*"))[-1] == last
    assert all(bool(t.isfinite().all()) for t in load_file(last / "masks.safetensors").values())
    assert tomoe("train", *options, "--resume").code == 0
    assert steps_of(tmp_path / "run")[-1]["step"] == 12
    assert torch.isfinite(torch.tensor([row["loss"] for row in steps_of(tmp_path / "run")])).all()


def test_a_kill_while_a_checkpoint_is_made_again_leaves_a_whole_one(
    tomoe: CommandLine, tmp_path: Path, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was cut off at step 0 writes step 0 again; the kill comes in the middle of the first deletion."""
    options = [model, "--data", text, *small(train_steps="6")]
    assert tomoe("train", *options, "-o", tmp_path / "run", "--set", "train.steps=0").code == 0
    run = run_folder.RunFolder(tmp_path / "run")
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    run.save(0, net, optimizer, {"bad_steps": 0})

    def killed(folder: Path, ignore_errors: bool = False) -> None:
        if folder.exists():
            (folder / "state.json").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(run_folder.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        run.save(0, net, optimizer, {"bad_steps": 0})
    checkpoint = run.last()
    assert checkpoint is not None
    assert checkpoint.step == 0


@pytest.mark.parametrize("killed_at", ["recipe.json", "masks"])
def test_a_kill_while_an_older_run_goes_leaves_nothing_of_it_to_resume(
    tomoe: CommandLine, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    """--force was killed before the older masks were gone: --resume then starts over, and does not adopt them."""
    run, options = tmp_path / "run", learning(place, train_steps="4", seed="1")
    assert tomoe(*options, "-o", tmp_path / "whole").code == 0
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
    assert contents(run / "masks") == contents(tmp_path / "whole" / "masks")
    assert steps_of(run) == steps_of(tmp_path / "whole")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_keeps_its_last_step(
    tomoe: CommandLine, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, signum: int
) -> None:
    """A scheduler's warning in the middle of step 4: the three whole steps are kept, and the rest ends in the same bytes."""
    options = learning(place, train_save_every="100")
    real, calls = objective.distill_loss, iter(range(10**6))

    def loss(*args: Any) -> Tensor:
        if next(calls) == 3:
            signal.raise_signal(signum)
        return real(*args)

    run = tmp_path / "run"
    with monkeypatch.context() as only_here:
        only_here.setattr(objective, "distill_loss", loss)
        outcome = tomoe(*options, "-o", run)
    assert outcome.code == 128 + signum
    assert "--resume" in outcome.err.splitlines()[-1]
    assert sorted(path.name for path in (run / "masks").iterdir()) == ["step-000000", "step-000003"]
    assert tomoe(*options, "-o", run, "--resume").code == 0
    assert last_masks(run) == last_masks(place / "whole")
    assert steps_of(run) == steps_of(place / "whole")
