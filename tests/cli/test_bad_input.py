"""Whatever a user can fix ends in one line on stderr and exit code 2; nothing is written, nothing lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pico_files import CARVED, CommandLine, contents, fine, refused, small, write_pico

pytestmark = pytest.mark.usefixtures("as_shipped")


def test_a_model_that_is_nowhere(tomoe: CommandLine, tmp_path: Path, text: Path) -> None:
    refused(tomoe("convert", tmp_path / "nowhere", "-o", tmp_path / "out", "--data", text, *small()), "nowhere")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("active", ["nan", "inf", "1.5"])
def test_a_plan_with_active_outside_its_range(tomoe: CommandLine, tmp_path: Path, converted: Path, active: str) -> None:
    refused(tomoe("plan", converted / "moe" / "run", "-o", tmp_path / "plan", f"--active={active}"), "active")
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize(("active", "words"), [("0.55", "change experts.num_experts"), ("0.05", "can be cut to")])
def test_a_budget_that_fine_grained_experts_cannot_meet(
    tomoe: CommandLine, tmp_path: Path, model: Path, active: str, words: str
) -> None:
    """Before any text is read, which is not there."""
    nowhere = tmp_path / "nowhere.txt"
    options = ["--active", active, "--data", nowhere, *fine(), "--set", "experts.num_experts=16"]
    refused(
        tomoe("convert", model, "-o", tmp_path / "out", *options),
        "decoder parameters" if active == "0.05" else "512 neurons",
        words,
    )
    refused(tomoe("doctor", model, *options[:2], *options[4:]), words)
    assert not (tmp_path / "out").exists()


def test_fine_grained_experts_are_divided_for_one_budget(
    tomoe: CommandLine, tmp_path: Path, converted_fine: Path, model: Path, text: Path
) -> None:
    run = tmp_path / "run"
    learning = [*fine(train_steps="1"), "--active", "0.6"]
    assert tomoe("train", model, "-o", run, "--data", text, *learning).code == 0
    command = ["plan", run, "-o", tmp_path / "plan", "--active"]
    refused(tomoe(*command, "0.5"), "for active = 0.6", "--active")
    assert tomoe(*command, "0.6").code == 0
    # where nothing was trained there is nothing to make a plan of
    bare = converted_fine / "moe" / "run"
    refused(tomoe("plan", bare, "-o", tmp_path / "other"), "method carve trains nothing", "convert again")
    untrained = [*fine(train_steps="0"), "--method", "tomoe", "--active", "0.6"]
    assert tomoe("convert", model, "-o", tmp_path / "moe", "--data", text, *untrained).code == 0
    done = tomoe("plan", tmp_path / "moe" / "run", "-o", tmp_path / "other")
    refused(done, "the run trained nothing (train.steps = 0); convert again")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("text", "words"), [(None, "no file or folder"), ("the sea", "16")])
def test_text_that_is_too_little(tomoe: CommandLine, tmp_path: Path, model: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "words.txt").write_text(text)
    options = ["-o", tmp_path / "out", "--data", tmp_path / "words.txt", *small()]
    refused(tomoe("convert", model, *options), "words.txt" if text != "the sea" else "data.seq_len", words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["convert", "train"])
def test_an_output_that_cannot_be_written(
    tomoe: CommandLine, tmp_path: Path, model: Path, text: Path, command: str
) -> None:
    refused(tomoe(command, model, "-o", text / "out", "--data", text, *small()), "text.txt")


@pytest.mark.slow
def test_an_existing_output_stays_without_force(
    tomoe: CommandLine, tmp_path: Path, converted: Path, model: Path, text: Path
) -> None:
    out = shutil.copytree(converted / "moe", tmp_path / "out")
    before = contents(out)
    refused(tomoe("convert", model, "-o", out, "--data", text, *small(), *CARVED), "--force")
    refused(tomoe("apply", out, model, "-o", out), "--force")
    refused(tomoe("train", model, "-o", out / "run", "--data", text, *small()), "--force")
    assert contents(out) == before


@pytest.mark.slow
def test_a_plan_is_not_overwritten_unasked_and_that_of_a_model_never(
    tomoe: CommandLine, tmp_path: Path, converted: Path
) -> None:
    out, run, plan = shutil.copytree(converted / "moe", tmp_path / "out"), tmp_path / "run", tmp_path / "plan"
    learning = ["--data", converted / "text.txt", *small(train_steps="1")]
    assert tomoe("train", converted / "dense", "-o", run, *learning).code == 0
    assert tomoe("plan", run, "-o", plan).code == 0
    before = contents(out), contents(plan)
    refused(tomoe("plan", run, "-o", plan, "--active", "0.9"), "--force")
    refused(tomoe("plan", run, "-o", out, "--force"), "holds a model")
    assert (contents(out), contents(plan)) == before
    assert tomoe("plan", run, "-o", plan, "--active", "0.9", "--force").code == 0
    assert contents(plan) != before[1]


@pytest.mark.slow
def test_the_dense_model_is_never_overwritten(
    tomoe: CommandLine, tmp_path: Path, converted: Path, model: Path, text: Path
) -> None:
    before = contents(model)
    refused(tomoe("convert", model, "-o", model, "--data", text, "--force", *small()), "holds the input model")
    refused(tomoe("apply", converted / "moe", model, "-o", model, "--force"), "holds the input model")
    assert contents(model) == before


@pytest.mark.slow
def test_a_run_goes_on_from_its_own_recipe_and_weights_and_no_others(
    tomoe: CommandLine, tmp_path: Path, model: Path, text: Path
) -> None:
    """Nor is it planned with another teacher than the one that it learned from."""
    run, command = tmp_path / "run", ["train", model, "-o", tmp_path / "run", "--data", text]
    options = [*command, *small(train_steps="2")]
    assert tomoe(*options).code == 0
    before = contents(run)
    refused(tomoe(*command, "--resume", *small(train_steps="9")), "train.steps")
    weights = load_file(model / "model.safetensors")
    save_file({name: 2 * t for name, t in weights.items()}, model / "model.safetensors", metadata={"format": "pt"})
    refused(tomoe(*options, "--resume"), "changed since", "--force")
    refused(tomoe("plan", run, "-o", tmp_path / "plan"), "changed since")
    assert contents(run) == before
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert tomoe(*options, "--resume").code == 0
    assert tomoe("plan", run, "-o", tmp_path / "plan").code == 0
    assert tomoe(*command, "--resume", "--force", *small(train_steps="1")).code == 0
    assert [path.name for path in sorted(run.glob("masks/step-*"))] == ["step-000000", "step-000001"]


@pytest.mark.slow
def test_force_loses_nothing_when_the_new_input_is_bad(
    tomoe: CommandLine, tmp_path: Path, converted: Path, model: Path, text: Path
) -> None:
    out = shutil.copytree(converted / "moe", tmp_path / "out")
    before = contents(out)
    refused(tomoe("convert", tmp_path / "nowhere", "-o", out, "--data", text, "--force", *small()))
    refused(tomoe("train", tmp_path / "nowhere", "-o", out / "run", "--data", text, "--force", *small()))
    refused(tomoe("convert", model, "-o", out, "--data", tmp_path / "none.txt", "--force", *small()))
    assert contents(out) == before


@pytest.mark.parametrize("other", [{"intermediate_size": 256}, {"rms_norm_eps": 1e-6}])
def test_a_plan_for_another_model(
    tomoe: CommandLine, tmp_path: Path, converted: Path, other: dict[str, object]
) -> None:
    stranger = write_pico(tmp_path / "stranger", family="qwen2" if "rms_norm_eps" in other else "llama", **other)
    refused(tomoe("apply", converted / "moe", stranger, "-o", tmp_path / "out"), "plan was made for")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_nothing(tomoe: CommandLine, tmp_path: Path) -> None:
    refused(tomoe("inspect", tmp_path), "holds no")
    refused(tomoe("plan", tmp_path, "-o", tmp_path / "plan"), "holds no run")
    refused(tomoe("apply", tmp_path, "-o", tmp_path / "out"), "holds no plan")


@pytest.mark.parametrize(
    "command",
    ["report {}", "export {} -o new", "finetune {} -o new", "repair {} -o new", "generate {} sea", "route {} sea"],
)
def test_a_conversion_that_was_interrupted(tomoe: CommandLine, tmp_path: Path, command: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.json").write_text("{}")
    refused(tomoe(*command.format(tmp_path).split()), "is not finished", "--resume")


@pytest.mark.parametrize("name", ["gpu", "", "cpu:x"])
def test_a_device_that_does_not_exist(tomoe: CommandLine, tmp_path: Path, model: Path, text: Path, name: str) -> None:
    asked = [*small(), "--set", f"device={name}"]
    refused(tomoe("convert", model, "-o", tmp_path / "out", "--data", text, *asked), f"no device {name!r}", "auto")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_float16_without_learning_is_no_bad_input(tomoe: CommandLine, tmp_path: Path, model: Path, text: Path) -> None:
    half = small(train_dtype="float16")
    assert tomoe("convert", model, "-o", tmp_path / "out", "--data", text, *half, *CARVED).code == 0


def test_nothing_to_go_on_from(tomoe: CommandLine, model: Path) -> None:
    refused(tomoe("generate", model, ""), "nothing to continue")
