"""Sliding windows, one run of the reference, tasks: against plain computations on pico models, and the command line."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from conftest import make_plan, tokens
from pico_files import CommandLine, refused, rows_from, write_pico, write_text
from pico_tokenizer import make_tokenizer
from tomoe.data import sources
from tomoe.data.corpus import Sequences
from tomoe.data.evaluation_text import EvaluationText, load_text
from tomoe.errors import UserError
from tomoe.evaluation import evaluate, perplexity, tasks
from tomoe.evaluation.compare import compare
from tomoe.evaluation.param_counts import model_facts
from tomoe.evaluation.perplexity import Predictions, measure, sequences_sha256, sliding
from tomoe.evaluation.results import Row, to_json
from tomoe.evaluation.tables import position_table, task_table
from tomoe.evaluation.tasks import SUITES, TaskSet, TaskSpec, parse_tasks
from tomoe.model.loading import load_dense, load_tokenizer
from tomoe.moe.fold import fold

pytestmark = pytest.mark.slow
Pico = tuple[PreTrainedModel, PreTrainedTokenizerBase]

# -- sliding windows


def naive_losses(model: PreTrainedModel, stream: torch.Tensor, context: int, stride: int) -> list[float]:
    """Each token by a forward pass of its own, from the first window that reaches it."""
    losses = []
    for t in range(1, len(stream)):
        start = 0 if t < context else math.ceil((t - context + 1) / stride) * stride
        if start < t:
            logits = model(input_ids=stream[None, start:t]).logits[0, -1].float()
            losses.append(float(F.cross_entropy(logits, stream[t])))
    return losses


# up to the context of 12 there is one window, whatever the stride
@pytest.mark.parametrize(("length", "stride"), [(7, 5), (12, 5), (13, 5), (29, 1), (29, 5), (29, 12)])
def test_sliding_perplexity_is_that_of_single_tokens(llama: PreTrainedModel, stride: int, length: int) -> None:
    stream = tokens(1, length, seed=5)[0]
    moe = fold(llama, make_plan(llama, "per_token"))
    losses = naive_losses(moe, stream, 12, stride)
    m = measure(moe, *sliding(stream, 12, stride), stride=stride)
    assert m.tokens == len(losses)
    assert m.nll == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert (m.stride, m.context_length) == (stride, 12)
    if stride < 12:
        assert m.tokens == length - 1  # every token but the first


def text_of(stream: Tensor, context: int, stride: int | None = None) -> EvaluationText:
    return EvaluationText(Sequences(*sliding(stream, context, context)), "", stride=stride)


def test_windows_are_views_and_hash_as_what_they_hold() -> None:
    stream = tokens(1, 500)[0]
    ids, mask = sliding(stream, 100, 3)
    assert ids.untyped_storage().nbytes() < 2 * stream.untyped_storage().nbytes() < ids.numel() * 8
    assert ids[7, :100].tolist() == stream[21:121].tolist()
    assert int(mask[-1].sum()) + 3 * (len(ids) - 1) == 500
    assert sequences_sha256(ids, mask) == sequences_sha256(ids.clone(), mask.clone())
    assert len({sequences_sha256(*both) for both in ((ids, mask), (ids + ~mask, mask), (ids, ~mask))}) == 3


def test_long_sequences_are_measured_by_position_too(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "SPAN", 8)
    ids = tokens(3, 40)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[2, 20:] = False
    moe = fold(llama, make_plan(llama, "off"))
    whole = measure(moe, ids, mask, llama)
    assert [(span.end, span.tokens) for span in whole.spans] == [(8, 3 * 7), (16, 3 * 8), (32, 2 * 16 + 4), (40, 2 * 8)]
    first = measure(moe, ids[:, :8], mask[:, :8], llama)
    assert first.spans == []
    assert (whole.spans[0].perplexity, whole.spans[0].kl) == (pytest.approx(first.perplexity), pytest.approx(first.kl))
    kls = [span.tokens * (span.kl or 0) for span in whole.spans]
    assert sum(kls) / whole.tokens == pytest.approx(whole.kl)
    titles, body = position_table([Row(whole, model_facts(moe))])
    assert [line[0] for line in body] == ["0 to 8", "8 to 16", "16 to 32", "32 to 40"]
    assert f"KL {kls[0] / 21:.4f}" in body[0][1]
    assert titles[0] == "position"


# -- the reference runs once


def test_the_first_model_runs_over_the_text_once(llama: PreTrainedModel) -> None:
    ids = tokens(5, 12)
    mask = torch.ones_like(ids, dtype=torch.bool)
    others = [("a", fold(llama, make_plan(llama, "off"))), ("b", fold(llama, make_plan(llama, "per_token")))]
    seen = []
    hook = llama.model.register_forward_hook(lambda _m, _i, out: seen.append(out.last_hidden_state.shape[1]))
    rows = list(compare(*zip(("dense", llama), *others, strict=True), EvaluationText(Sequences(ids, mask), "")))
    hook.remove()
    assert seen.count(12) == 5
    for row, (_, model) in zip(rows[1:], others, strict=True):
        alone = measure(model, ids, mask, llama)
        assert (row.measurement.kl, row.measurement.top1_agreement) == (alone.kl, alone.top1_agreement)
        assert alone.kl is not None
        assert alone.kl > 0


@pytest.mark.parametrize("stride", [None, 50])
def test_what_is_only_padding_does_not_run(llama: PreTrainedModel, stride: int | None) -> None:
    """A context of 60 tokens takes as long for 70 tokens of text as they need, and for 9 hardly any time. Routing counts each
    token of overlapping windows once."""
    moe = fold(llama, make_plan(llama, "off", form="fine"))
    lengths: list[int] = []
    hook = moe.model.register_forward_hook(lambda _m, _i, out: lengths.append(out.last_hidden_state.shape[1]))
    for total, expected in ((9, [9]), (70, [60, 20 if stride else 10])):
        stream = tokens(1, total)[0]
        lengths.clear()
        (row,) = compare(["moe"], [moe], text_of(stream, 60, stride))
        # the first runs see how the model makes its logits
        assert lengths[-len(expected) :] == expected
        assert row.measurement.context_length == 60
        assert row.usage is not None
        assert row.usage.tokens == total
    hook.remove()


def test_sequences_that_run_together_are_measured_as_alone(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: two at a time, one of them padded."""
    ids, mask = tokens(5, 12), torch.ones(5, 12, dtype=torch.bool)
    mask[2, 7:] = False
    moe = fold(llama, make_plan(llama, "off", form="fine"))
    pairs = [("dense", llama), ("moe", moe)]
    text = EvaluationText(Sequences(ids, mask), "")
    alone = list(compare(*zip(*pairs, strict=True), text))
    sizes: list[int] = []
    hook = moe.model.register_forward_hook(lambda _m, _i, out: sizes.append(len(out.last_hidden_state)))
    monkeypatch.setattr(Predictions, "together", lambda *_: 2)
    together = list(compare(*zip(*pairs, strict=True), text))
    hook.remove()
    assert sizes[-3:] == [2, 2, 1]
    for one, other in zip(alone, together, strict=True):
        assert other.measurement.nll == pytest.approx(one.measurement.nll, rel=1e-6)
        assert other.measurement.tokens == one.measurement.tokens
        assert other.usage == one.usage
    assert together[1].measurement.kl == pytest.approx(alone[1].measurement.kl, rel=1e-4)


def test_the_usual_context_is_that_of_the_loaded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config is read with it, not once more, and no model is loaded where there is no text."""
    model, loaded = write_pico(tmp_path / "dense"), []
    load = evaluate.load_model
    monkeypatch.setattr(evaluate, "load_model", lambda *args: loaded.append(args[0]) or load(*args))
    with pytest.raises(UserError, match="no file or folder"):
        evaluate.evaluate(model, tmp_path / "text.txt")
    assert not loaded
    (row,) = evaluate.evaluate(model, write_text(tmp_path / "text.txt"), tokens=512, dtype="float32")
    assert (row.measurement.context_length, loaded) == (256, [str(model)])


@pytest.mark.parametrize(("given", "shown"), [(".", "here"), ("..", "around"), ("../here", "here")])
def test_a_model_is_named_by_its_folder_however_that_is_reached(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, shown: str
) -> None:
    (tmp_path / "around" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "around" / "here")
    (row,) = compare([given], [llama], text_of(tokens(1, 41)[0], 12))
    assert row.name == shown


@pytest.fixture(scope="module")
def pico(tmp_path_factory: pytest.TempPathFactory) -> Pico:
    folder = str(write_pico(tmp_path_factory.mktemp("pico")))
    return load_dense(folder, torch.float32), load_tokenizer(folder)


# -- text


def test_published_perplexities_are_of_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer()
    monkeypatch.setattr(sources, "documents", lambda source, split, **_: iter([f"{source} {split}", "b", "c"]))
    given = load_text("wikitext", tokenizer, 64, None)
    stream = given.sequences.input_ids[given.sequences.mask]
    assert tokenizer.decode(stream) == "wikitext test\n\nb\n\nc<eos>"
    assert given.name == "wikitext (test)"
    assert "ptb test b c" in tokenizer.decode(load_text("ptb", tokenizer, 64, None).sequences.input_ids[0])


# -- tasks

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {data}
output_type: multiple_choice
training_split: null
validation_split: validation
test_split: null
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""
GROUP = """
group: both
task: [seas, hills]
aggregate_metric_list:
  - metric: acc
    aggregation: mean
    weight_by_size: true
metadata:
  version: 1.0
"""
QUESTIONS = [
    {"question": "the sea is", "choices": ["wide", "a town"], "answer": 0},
    {"question": "a boat went over the old and quiet", "choices": ["hills", "sea", "rain on every town"], "answer": 1},
    {"question": "rain fell", "choices": ["up", "on every quiet town", "under"], "answer": 1},
    {"question": "stars", "choices": ["went", "fell over the hills near us"], "answer": 0},
    {"question": "near us", "choices": ["a", "the sea", "town"], "answer": 2},
]


@pytest.fixture(scope="module")
def task_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lm_eval", reason="tasks are the extra `eval`")
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    for name in ("seas", "hills"):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=folder / "data.jsonl"))
    (folder / "gone.yaml").write_text(TASK.format(name="gone", data=folder / "gone.jsonl"))
    (folder / "both.yaml").write_text(GROUP)
    return folder


def right_answers(model: PreTrainedModel, tokenizer: object) -> dict[str, list[bool]]:
    """By the plain rule: the likeliest choice, of all its tokens (acc) or per character (acc_norm)."""
    found: dict[str, list[bool]] = {"acc": [], "acc_norm": []}
    for row in QUESTIONS:
        scores = []
        for choice in row["choices"]:
            given, whole = (tokenizer(text)["input_ids"] for text in (row["question"], f"{row['question']} {choice}"))
            log_probs = model(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
            scores.append(sum(float(log_probs[t - 1, whole[t]]) for t in range(len(given), len(whole))))
        lengths = [len(choice) for choice in row["choices"]]
        found["acc"].append(max(range(len(scores)), key=lambda i: scores[i]) == row["answer"])
        best = max(range(len(scores)), key=lambda i: scores[i] / lengths[i])
        found["acc_norm"].append(best == row["answer"])
    return found


def test_tasks_score_what_a_plain_computation_scores(pico: Pico, task_dir: Path) -> None:
    dense, tokenizer = pico
    moe = fold(dense, make_plan(dense, "per_token"))
    progress: list[tuple[str, int, int]] = []
    one, four = (TaskSet([TaskSpec("seas")], task_dir, batch_size=size) for size in (1, 4))
    for model in (dense, moe):
        (score,) = one.run(model, tokenizer, lambda task, i, n, _: progress.append((task, i, n)))
        plain = right_answers(model, tokenizer)
        assert score.metrics == {name: pytest.approx(sum(hits) / 5) for name, hits in plain.items()}
        assert (score.metric, score.value, score.examples) == ("acc_norm", score.metrics["acc_norm"], 5)
        mean = score.value
        assert score.standard_error == pytest.approx(math.sqrt(mean * (1 - mean) / 4))
        assert (score.shots, score.truncated) == (0, 0)
        assert four.run(model, tokenizer) == (score,)  # padding changes nothing
    assert progress[12] == ("seas", 13, 13)
    assert len(progress) == 26


def test_every_model_is_asked_the_same(pico: Pico, task_dir: Path) -> None:
    model, tokenizer = pico
    asked: list[list[int]] = []
    hook = model.model.register_forward_pre_hook(
        lambda _m, _a, given: asked.append(given["input_ids"].flatten().tolist()), with_kwargs=True
    )
    seas = TaskSet(parse_tasks("seas:2"), task_dir, limit=3, batch_size=1)
    first = seas.run(model, tokenizer)
    assert (first[0].examples, first[0].shots) == (3, 2)
    assert seas.run(model, tokenizer) == first
    hook.remove()
    half = len(asked) // 2
    assert asked[:half] == asked[half:]
    shown = {tuple(row["question"] in tokenizer.decode(ids) for row in QUESTIONS) for ids in asked}
    shown.discard((False,) * len(QUESTIONS))  # choices that continue a prompt
    assert {sum(seen) for seen in shown} == {3}  # the question itself and two examples
    assert len(shown) > 1  # not the same two for each


def test_prompts_that_do_not_fit_are_counted(pico: Pico, task_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seas = TaskSet([TaskSpec("seas", metric="acc")], task_dir)
    model, tokenizer = pico
    monkeypatch.setattr(model.config, "max_position_embeddings", 30)
    (score,) = seas.run(model, tokenizer)
    lengths = [len(f"{row['question']} {choice}") for row in QUESTIONS for choice in row["choices"]]
    assert score.truncated == sum(length > 31 for length in lengths) > 0  # the last token is only predicted
    monkeypatch.setattr(model.config, "max_position_embeddings", 20)
    with pytest.raises(UserError, match="an answer has 28 tokens, but the model takes no more than 20"):
        seas.run(model, tokenizer)


def test_a_group_is_one_line_and_a_lone_metric_is_shown(pico: Pico, task_dir: Path) -> None:
    both, seas = TaskSet([TaskSpec("both", 1, "acc"), TaskSpec("seas", 1, "acc")], task_dir).run(*pico)
    assert (both.task, both.examples, both.shots, both.metric) == ("both", 10, 1, "acc")
    assert 0 <= both.value <= 1
    assert seas.examples == 5
    with pytest.raises(UserError, match="reports no f1, but acc, acc_norm"):
        TaskSet([TaskSpec("seas", metric="f1")], task_dir).run(*pico)


def test_written_answers_do_not_depend_on_padding(pico: Pico) -> None:
    """Prompts of unequal length are padded on the left there; the MoE must write what it writes for each alone."""
    instances = pytest.importorskip("lm_eval.api.instance", reason="tasks are the extra `eval`")
    dense, tokenizer = pico
    moe = fold(dense, make_plan(dense, "per_token"))
    given = {"until": ["never"], "do_sample": False, "max_gen_toks": 6}
    asked = [instances.Instance("generate_until", {}, (row["question"], given), i) for i, row in enumerate(QUESTIONS)]
    for model in (dense, moe):
        alone, together = (
            tasks._wrapped(model, tokenizer, size, lambda _done, _all: None).generate_until(asked, disable_tqdm=True)
            for size in (1, 5)
        )
        assert alone == together
        assert any(alone)


def test_task_lists_are_read_and_refused_in_a_sentence(
    tmp_path: Path, task_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parse_tasks("piqa, boolq:32") == (TaskSpec("piqa"), TaskSpec("boolq", 32))
    for wrong in ("boolq:many", ":3", "boolq:-1"):
        with pytest.raises(UserError, match="is not a task"):
            parse_tasks(wrong)
    for nothing in ("", " , "):
        with pytest.raises(UserError, match="suite: paper, moe"):
            parse_tasks(nothing)
    with pytest.raises(UserError, match="there is no folder"):
        TaskSet([TaskSpec("seas")], tmp_path / "nowhere")
    with pytest.raises(UserError, match="cannot load the task gone"):
        TaskSet([TaskSpec("gone")], task_dir)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(UserError, match=r"pip install '\.\[eval\]'"):
        TaskSet([TaskSpec("seas")], task_dir)


def test_suites_are_those_of_the_paper() -> None:
    paper = {spec.name: (spec.shots, spec.metric) for spec in SUITES["paper"]}
    assert paper.pop("winogrande") == (0, "acc")
    assert set(paper.values()) == {(0, "acc_norm")}
    assert set(paper) == {"arc_easy", "arc_challenge", "piqa", "hellaswag"}
    shots = {spec.name: spec.shots for spec in SUITES["moe"] if spec.shots}
    assert shots == {"boolq": 32, "winogrande": 5, "arc_challenge": 25, "hellaswag": 10, "mmlu": 5}


# -- the command


def test_evaluate_puts_all_models_into_one_table(
    tomoe: CommandLine, tmp_path: Path, converted: Path, task_dir: Path
) -> None:
    dense, moe, text = (converted / name for name in ("dense", "moe", "text.txt"))
    files = ["--json", tmp_path / "rows.json", "--markdown", tmp_path / "rows.md"]
    asked = ["--tasks", "seas,hills:1", "--task-dir", task_dir, "--limit", "4", "--batch-size", "2"]
    windows = ["--text", text, "--context", "32", "--stride", "16", "--tokens", "320", "--dtype", "float32"]
    done = tomoe("evaluate", dense, moe, *windows, *asked, *files)
    assert done.code == 0, done.err
    rows = rows_from((tmp_path / "rows.json").read_text())
    assert rows_from(to_json(rows)) == rows
    assert [row.name for row in rows] == ["dense", "moe"]
    assert [score.task for score in rows[1].tasks] == ["seas", "hills"]
    assert (rows[0].measurement.stride, rows[0].measurement.tokens) == (16, 319)
    titles, body = task_table(rows)
    assert titles == ["task", "shots", "metric", "dense", "moe"]
    assert [line[0] for line in body] == ["seas", "hills", "mean"]
    mean = 50 * sum(score.value for score in rows[1].tasks)
    assert body[2][4].startswith(f"{mean:.1f} ± ")
    markdown = (tmp_path / "rows.md").read_text()
    for written in (done.out, markdown):
        for word in ("hills", "acc norm", "each starting 16 tokens after", "lm-eval 0.", body[0][4]):
            assert word in written
    assert "seas of moe 10/10" in done.err
    # the text is what the MoE was fitted on, and it is said so
    assert rows[1].training_overlap is not None
    assert rows[1].training_overlap > 0.1
    assert f"Warning: moe: {rows[1].training_overlap:.1%} of the evaluation tokens" in done.out
    assert rows[0].training_overlap is None


def test_evaluate_refuses_in_one_line(tomoe: CommandLine, converted: Path) -> None:
    dense, moe, text = (converted / name for name in ("dense", "moe", "text.txt"))
    for said, *words in (
        ("name some with --tasks, or a suite with --suite", dense, "--limit", "3"),
        ("is not a task", dense, "--tasks", "boolq:x"),
        ("--text", dense),
        ("use --text FILE for another context", dense, moe, "--stride", "4"),
        ("cannot load Salesforce/wikitext", dense, "--text", "wikitext"),
        ("between 1 and the context (16)", dense, "--text", text, "--context", "16", "--stride", "17"),
    ):
        refused(tomoe("evaluate", *words), said)
