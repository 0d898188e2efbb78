"""The model card's metadata, read back by the hub's own classes; where license and base model come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import huggingface_hub
import pytest
from huggingface_hub import EvalResult, ModelCard
from test_warnings import row, sound_plan

from conftest import make_pico
from tomoe.errors import Note
from tomoe.evaluation.results import ExpertUsage, Row, TaskScore
from tomoe.evaluation.tables import to_markdown
from tomoe.model import catalog
from tomoe.plans import Plan
from tomoe.recipe.conversion import Recipe
from tomoe.report import card as cards
from tomoe.report.card import base_model_info, limits, write_card
from tomoe.report.page import lost


def plan_of(*sources: str, model: str = "someone/dense-1b") -> Plan:
    plan = sound_plan()
    return replace(
        plan, recipe=Recipe(model=model, active=plan.active_fraction(), data={"sources": sources}).model_dump()
    )


def measured(data: str = "a text", tasks: tuple[TaskScore, ...] = (), **parts: object) -> list[Row]:
    rows = [row(), row()]
    m = replace(rows[1].measurement, kl=0.25, top1_agreement=0.75, data=data, perplexity=12.5)
    return [rows[0], replace(rows[1], measurement=m, tasks=tasks, **parts)]


def written(folder: Path, plan: Plan, rows: list[Row]) -> ModelCard:
    return ModelCard.load(write_card(folder / "moe", plan, rows))


def test_a_card_that_was_edited_stays_and_ours_stands_beside_it(tmp_path: Path) -> None:
    plan, card, beside = plan_of("self"), tmp_path / "README.md", tmp_path / "README.tomoe.md"
    write_card(tmp_path, plan)
    first = card.read_text()
    assert write_card(tmp_path, plan, measured()) == card
    ours = card.read_text()
    assert ours != first, "what nobody edited is replaced"
    assert not beside.exists()
    for edit in (
        lambda: card.write_text(ours + "More."),
        lambda: (tmp_path / ".README.md.sha256").write_bytes(b"\xff"),
    ):
        write_card(tmp_path, plan)
        edit()
        mine = card.read_text()
        for _ in range(2):
            with pytest.warns(Note, match=r"README\.md was edited.* README\.tomoe\.md"):
                assert write_card(tmp_path, plan, measured()) == beside
        assert (card.read_text(), beside.read_text()) == (mine, ours)
        card.unlink()
    assert write_card(tmp_path, plan, measured()) == card


def test_every_number_is_a_result_of_the_model_index(tmp_path: Path) -> None:
    score = TaskScore(
        "piqa", 5, "acc_norm", 0.625, 0.05, 100, 0, {"acc": 0.6, "acc_norm": 0.625}, "1.0", "lm-eval 0.4.13"
    )
    rows = measured("wikitext (test)", (score,))
    path = write_card(tmp_path / "moe", plan_of("wikitext", "self"), rows, command="tomoe convert x -o moe")
    assert [file for file in path.parent.iterdir() if file.name[0] != "."] == [path]
    card = ModelCard.load(path)
    results: dict[str, EvalResult] = {result.metric_type: result for result in card.data.eval_results}
    values = {kind: result.metric_value for kind, result in results.items()}
    assert values == {"perplexity": 12.5, "kl_to_dense": 0.25, "top1_agreement": 0.75, "acc_norm": 0.625}
    text = results["perplexity"]
    place = (text.dataset_type, text.dataset_config, text.dataset_split)
    assert place == ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")
    assert text.dataset_args["context_length"] == 16
    assert "stride" not in text.dataset_args
    task = results["acc_norm"]
    assert (task.dataset_type, task.dataset_args) == ("piqa", {"num_few_shot": 5, "questions": 100})
    assert {result.task_type for result in results.values()} == {"text-generation"}
    assert card.data.metrics == sorted(values)
    assert (
        card.data.to_dict().items()
        >= {
            "pipeline_tag": "text-generation",
            "library_name": "transformers",
            "base_model": "someone/dense-1b",
            "tags": ["moe", "tomoe"],
            "license": "other",
        }.items()
    )
    assert card.data.model_name == "moe"
    for part in (
        "import tomoe",
        "trust_remote_code=True",
        "150 steps",
        "look it up",
        "the dense model wrote",
        "| piqa | 5 | acc norm |",
        "No safety or fairness test was run",
        "```\ntomoe convert x -o moe\n```",
        to_markdown(rows).splitlines()[3],
    ):
        assert part in card.content


def test_the_card_admits_what_flatters() -> None:
    plan = plan_of("wikitext")
    for data, flattering in (("self, held out", True), ("wikitext, self, held out", True), ("self-help.txt", False)):
        rows = measured(data)
        assert any("wrote that text itself" in limit for limit in limits(plan, rows)) == flattering
        assert ("the dense model wrote itself" in lost(rows)) == flattering
    for steps in (150, 0):
        untrained = [
            limit for limit in limits(replace(plan, notes={"steps": steps}), rows) if "Nothing was trained" in limit
        ]
        assert bool(untrained) == (steps == 0)


def test_text_that_is_no_data_set_has_its_own_name(tmp_path: Path) -> None:
    for data, identifier in (("self, held out", "self, held out"), ("notes (draft)", "notes (draft)"), ("", "text")):
        (first, *_) = written(tmp_path, plan_of("self"), measured(data)).data.eval_results
        assert (first.dataset_type, first.dataset_split) == (identifier, None)


def test_data_sets_are_named_by_hub_id(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("words")
    named = plan_of("wikitext", "wikitext-103", "alpaca", "someone/set:part", "self", str(notes))
    card = written(tmp_path, named, measured())
    assert card.data.datasets == ["Salesforce/wikitext", "tatsu-lab/alpaca", "someone/set"]
    assert str(tmp_path) not in card.content
    assert written(tmp_path, plan_of("self"), measured()).data.datasets is None


def test_warnings_stand_in_the_card_with_their_numbers(tmp_path: Path) -> None:
    assert "## Warnings" not in written(tmp_path, plan_of("self"), measured()).content
    usage = ExpertUsage([[0.0, 0.5, 0.5]], 5000)
    card = written(tmp_path, plan_of("self"), measured(usage=usage, training_overlap=0.5))
    assert "- layer 0: expert 0 got none of the 5,000 tokens\n- 50.0% of the evaluation tokens" in card.content


def test_license_and_base_model_are_known_where_a_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "dense"
    make_pico("llama").save_pretrained(folder)
    assert base_model_info(str(folder)) == (None, None)
    (folder / "README.md").write_text("---\nlicense: MIT\n---\nwords\n")
    assert base_model_info(str(folder)) == (None, "mit")
    card = written(tmp_path, plan_of("self", model=str(folder)), [])
    assert (card.data.license, card.data.license_name, card.data.base_model) == ("mit", None, None)
    assert card.data.eval_results is None
    assert str(tmp_path) not in card.content
    for part in ("dense, turned into", "Not measured.", "mit, as the dense model"):
        assert part in card.content
    monkeypatch.setattr(cards, "try_to_load_from_cache", lambda repo, name: str(folder / name))
    assert base_model_info("someone/dense-1b") == ("someone/dense-1b", "mit")
    monkeypatch.setattr(cards, "try_to_load_from_cache", huggingface_hub.try_to_load_from_cache)
    assert base_model_info("someone/dense-1b") == ("someone/dense-1b", None)
    monkeypatch.chdir(folder)
    assert base_model_info("") == (None, None)


def test_license_of_gguf_files_and_of_known_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = catalog.MODELS
    assert base_model_info(name) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_license("Apache-2.0")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert base_model_info(str(file)) == (None, "apache-2.0")
    for damaged in (b"", b"GGUF", file.read_bytes()[:40], b"no gguf at all, but some words"):
        file.write_bytes(damaged)
        assert base_model_info(str(file)) == (None, None)


@pytest.mark.parametrize(
    "head",
    ["license: [a, b]", "license: see the file <b>there</b>", "license: other", ": :", "license: {", "- a\n- b", ""],
)
def test_what_is_no_license_is_left_out(tmp_path: Path, head: str) -> None:
    (tmp_path / "README.md").write_text(f"---\n{head}\n---\nwords\n")
    assert base_model_info(str(tmp_path)) == (None, None)
