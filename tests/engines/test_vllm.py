"""Stock exports in vLLM itself, on the CPU: what it writes and predicts is what transformers does with the same folder, or it
says why it cannot.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from family_contract import tiny_model
from test_export_equation import CASES as MIXTRAL_CASES
from test_family_export_equation import FAMILIES as CLASSES
from test_family_export_equation import fitting
from test_fine_export_equation import CASES as GLM4_CASES
from torch import Tensor
from transformers import AutoModelForCausalLM

from conftest import make_pico, make_plan, tokens, write_export
from pico_files import CommandLine, proved, write_text
from pico_tokenizer import make_tokenizer
from tomoe.exporting.choice import TARGETS, choose_target
from tomoe.exporting.stock.fine_grained import FineGrained
from tomoe.exporting.target import Options
from tomoe.model.catalog import MODELS, cache_folder
from tomoe.model.loading import load_tokenizer
from tomoe.moe.fold import fold

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (./run.sh engines)"),
]
# little memory for keys and values, and no thread bound to a core that others may be using
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
# seconds; the engine takes most of a minute to start, and many times that on a machine that is busy
PATIENCE = 3000


@dataclass(frozen=True)
class Predicted:
    """What a model says to one prompt: log-probs of its tokens, of the most likely ones there, and the ids it writes."""

    log_probs: Tensor
    most_likely: Tensor
    written: list[int]


def ask_vllm(requests: list[dict[str, Any]], place: Path) -> list[Any]:
    """Run `vllm_process.predict` for each request; `place` is a folder for what goes to and fro.

    What comes back is a list of Predicted for each, or what vLLM says if it fails at a request that `may_fail`.
    """
    (place / "requests.json").write_text(json.dumps(requests), encoding="utf-8")
    script = Path(__file__).with_name("vllm_process.py")
    ran = subprocess.run(
        [sys.executable, script, place / "requests.json", place / "answers.json"],
        env=os.environ | ENVIRONMENT,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ran.returncode == 0, ran.stderr[-4000:] + ran.stdout[-2000:]
    answers = json.loads((place / "answers.json").read_text("utf-8"))

    def predicted(answer: dict[str, Any]) -> Predicted:
        return Predicted(torch.tensor(answer["log_probs"]), torch.tensor(answer["most_likely"]), answer["written"])

    return [answer if isinstance(answer, str) else [*map(predicted, answer)] for answer in answers]


@torch.no_grad()
def ask_transformers(folder: Path, prompts: list[list[int]], new_tokens: int, **changes: Any) -> list[Predicted]:
    """The same from transformers, in float32 and without code of tomoe."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **changes).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        log_probs = model(ids).logits[0, :-1].log_softmax(-1)
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        own = log_probs.gather(1, ids[0, 1:, None]).squeeze(1)
        answers.append(Predicted(own, log_probs.amax(-1), written[0, len(prompt) :].tolist()))
    return answers


def assert_alike(engine: list[Predicted], reference: list[Predicted], tolerance: float) -> None:
    """The same ids written; log-probs within `tolerance`."""
    for answer, expected in zip(engine, reference, strict=True):
        difference = float((answer.log_probs - expected.log_probs).abs().max())
        assert difference <= tolerance, f"log-probs of the prompt differ by {difference:.2g}"
        assert torch.allclose(answer.most_likely, expected.most_likely, rtol=0, atol=tolerance)
        assert answer.written == expected.written


def assert_routed_alike(engine: list[Predicted], reference: list[Predicted], tolerance: float) -> None:
    """Log-probs within `tolerance` at nine tenths of the positions.

    Both round alike to the last bit only; where fine-grained experts are almost tied, one may choose another than the other.
    """
    pairs = zip(engine, reference, strict=True)
    off = torch.cat([(answer.log_probs - expected.log_probs).abs() for answer, expected in pairs])
    assert float((off <= tolerance).float().mean()) >= 0.9, off


@contextmanager
def serving(folder: Path, log: Path, *options: str) -> Iterator[str]:
    """`vllm serve FOLDER` on a free port, until the block ends; the address of its API."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    vllm = str(Path(sys.executable).with_name("vllm"))
    command = [vllm, "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as file:
        server = subprocess.Popen(
            [*command, *options], env=os.environ | ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait(60)


def wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Return once the server answers; fail with its log if it ends, or takes too long."""
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        assert server.poll() is None, log.read_text("utf-8")[-4000:]
        try:
            urllib.request.urlopen(address, timeout=5)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
        else:
            return
    pytest.fail(f"no answer within {PATIENCE} s: {log.read_text('utf-8')[-4000:]}")


def post(address: str, **body: Any) -> dict[str, Any]:
    """The answer to a JSON request."""
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        result: dict[str, Any] = json.load(answer)
    return result


# vLLM's attention on the CPU wants heads of 32 or more dims, its experts hidden sizes that 32 divides
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 96}
HEADS = {"mistral": {"head_dim": 32}, "qwen3": {"head_dim": 32}}
PROMPTS = tokens(2, 20, seed=5).tolist()  # beyond the sliding window of mistral
NEW_TOKENS = 8

Exports = dict[tuple[str, str, str], Path]
Answers = dict[tuple[str, str, str], list[Predicted]]
CASES = [(*case, "mixtral") for case in MIXTRAL_CASES]
FINE_CASES = [(*case, "glm4_moe") for case in GLM4_CASES]
# of fine-grained experts in the exports: eight, and one of zeros for the layer that chooses fewer
ALL_EXPERTS = 9


def write_pico_export(family: str, attention: str, target: str, folder: Path) -> None:
    """The export of a pico model that vLLM can run, with a tokenizer; the dense model beside it."""
    tokenizer, fine = make_tokenizer(), target == "glm4_moe"
    dense = make_pico(family, **SIZES | HEADS.get(family, {}), vocab_size=len(tokenizer))
    form = {"form": "fine"} if fine else {}
    moe = fold(dense, make_plan(dense, attention, active=0.8, **form))
    options = Options() if fine else Options(width_multiple=32)
    write_export(choose_target(moe, target), moe, tokenizer, folder, options)
    dense.save_pretrained(folder.with_name(f"{folder.name}-dense"))


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    """A folder for every family, attention and target."""
    place = tmp_path_factory.mktemp("exports")
    folders = {case: place / "-".join(case) for case in CASES + FINE_CASES}
    for case, folder in folders.items():
        write_pico_export(*case, folder)
    return folders


def predict_all(exports: Exports, place: Path, **overrides: int) -> Answers:
    """What vLLM predicts for all of them: it starts once."""
    requests = [{"folder": str(f), "prompts": PROMPTS, "new_tokens": NEW_TOKENS, **overrides} for f in exports.values()]
    return dict(zip(exports, ask_vllm(requests, place), strict=True))


@pytest.fixture(scope="module")
def predicted(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return predict_all(exports, tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def predicted_with_all_experts(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    fine = {case: exports[case] for case in FINE_CASES}
    return predict_all(fine, tmp_path_factory.mktemp("vllm"), num_experts_per_tok=ALL_EXPERTS)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_vllm_predicts_what_transformers_does(case: tuple[str, str, str], exports: Exports, predicted: Answers) -> None:
    assert_alike(predicted[case], ask_transformers(exports[case], PROMPTS, NEW_TOKENS), tolerance=1e-4)


@pytest.mark.parametrize("case", FINE_CASES, ids="-".join)
def test_vllm_chooses_among_fine_grained_experts_as_transformers_does(
    case: tuple[str, str, str], exports: Exports, predicted: Answers
) -> None:
    reference = ask_transformers(exports[case], PROMPTS, NEW_TOKENS)
    assert_routed_alike(predicted[case], reference, tolerance=1e-4)


@pytest.mark.parametrize("case", FINE_CASES, ids="-".join)
def test_with_all_experts_vllm_writes_what_the_dense_model_writes(
    case: tuple[str, str, str], exports: Exports, predicted: Answers, predicted_with_all_experts: Answers
) -> None:
    """The number of experts is an override of the config; with all of them no router decides."""
    answer = predicted_with_all_experts[case]
    reference = ask_transformers(exports[case], PROMPTS, NEW_TOKENS, num_experts_per_tok=ALL_EXPERTS)
    assert_alike(answer, reference, tolerance=1e-4)
    if case[1] == "off":
        dense = exports[case].with_name(f"{exports[case].name}-dense")
        assert_alike(answer, ask_transformers(dense, PROMPTS, NEW_TOKENS), tolerance=1e-2)
    planned = torch.cat([a.log_probs for a in predicted[case]])
    assert float((planned - torch.cat([a.log_probs for a in answer])).abs().max()) > 0.05, (
        "the override changed nothing"
    )


@pytest.mark.parametrize("target", ["mixtral", "glm4_moe"])
def test_the_server_answers_with_the_text_that_transformers_writes(
    target: str, exports: Exports, tmp_path: Path
) -> None:
    attention = "static" if target == "mixtral" else "off"
    folder, prompt = exports["llama", attention, target], "the sea and a boat"
    tokenizer = make_tokenizer()
    (expected,) = ask_transformers(folder, [tokenizer(prompt).input_ids], NEW_TOKENS)
    with serving(folder, tmp_path / "log", "--dtype", "float32", "--max-model-len", "64", "--enforce-eager") as address:
        answer = post(
            f"{address}/completions",
            model=str(folder),
            prompt=prompt,
            max_tokens=NEW_TOKENS,
            temperature=0,
            ignore_eos=True,
            return_token_ids=True,
        )
    (choice,) = answer["choices"]
    assert choice["token_ids"] == expected.written
    text = tokenizer.decode(expected.written, skip_special_tokens=True)
    # the server holds back half a character at the end
    assert choice["text"].startswith(text.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert answer["usage"]["completion_tokens"] == NEW_TOKENS


# Classes with a family's own attention
FAMILY_SIZES: dict[str, Any] = {key: value for key, value in SIZES.items() if key != "hidden_size"} | {"head_dim": 32}
OTHERWISE: dict[str, dict[str, Any]] = {
    # tokens beyond a window of cohere2 differ in vLLM's dense model alike
    "cohere2": {"sliding_window": 64},
}
# What vLLM 0.32 says of others on a CPU, in float32.
REFUSED = {"qwen3_5_text": "failed to be inspected"}
# Its dense model differs alike, from the second token on.
DIFFERS = {"lfm2"}


@pytest.fixture(scope="module")
def family_answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """The folder of each family, and what vLLM predicts with it."""
    place, tokenizer = tmp_path_factory.mktemp("families"), make_tokenizer()
    for family, (name, changes) in CLASSES.items():
        target = cast(FineGrained, TARGETS[name])
        dense = tiny_model(family, **FAMILY_SIZES | changes | OTHERWISE.get(family, {}))
        moe = fold(dense, fitting(make_plan(dense, "off", form="fine"), target))
        write_export(choose_target(moe, name), moe, tokenizer, place / family, Options(width_multiple=32))
    request = {"prompts": PROMPTS, "new_tokens": NEW_TOKENS, "may_fail": True}
    found = ask_vllm([request | {"folder": str(place / family)} for family in CLASSES], place)
    return {family: (place / family, answer) for family, answer in zip(CLASSES, found, strict=True)}


@pytest.mark.parametrize("family", CLASSES)
def test_vllm_predicts_what_a_family_s_class_does(family: str, family_answers: dict[str, tuple[Path, Any]]) -> None:
    folder, answer = family_answers[family]
    if family in REFUSED:
        assert REFUSED[family] in answer
        return
    assert not isinstance(answer, str), answer
    expected = ask_transformers(folder, PROMPTS, NEW_TOKENS)
    if family in DIFFERS:
        with pytest.raises(AssertionError):
            assert_routed_alike(answer, expected, tolerance=1e-4)
    else:
        assert_routed_alike(answer, expected, tolerance=1e-4)


NAME = "smollm2-135m"
# A conversion without learning, on a text that is soon read.
QUICK = (
    "data.seq_len=128",
    "data.tokens=3072",
    "data.calibration_tokens=1024",
    "data.evaluation_tokens=512",
    "experts.form=overlapping",
    "experts.num_experts=2",
)


@pytest.mark.skipif(not (cache_folder() / NAME / MODELS[NAME].gguf).is_file(), reason=f"{NAME} is not in the cache")
@pytest.mark.usefixtures("as_shipped")
def test_the_mixtral_export_of_a_real_model_writes_the_same_text(tomoe: CommandLine, tmp_path: Path) -> None:
    text, made, out = write_text(tmp_path / "text.txt", sentences=400), tmp_path / "moe", tmp_path / "export"
    settings = [word for setting in QUICK for word in ("--set", setting)]
    done = tomoe("convert", NAME, "-o", made, "--data", text, "--active", "0.8", *settings)
    assert done.code == 0, done.err
    proved(tomoe("export", made, "--format", "mixtral", "-o", out, "--tokens", "256"), out)
    tokenizer, new = load_tokenizer(NAME), 24
    texts = ("The three most important things about the sea are", "In 1815, Napoleon was defeated at Waterloo by")
    prompts = [tokenizer(text).input_ids for text in texts]
    (answers,) = ask_vllm([{"folder": str(out), "prompts": prompts, "new_tokens": new}], tmp_path)
    assert_alike(answers, ask_transformers(out, prompts, new), tolerance=1e-3)
    assert [a.written for a in answers] == [a.written for a in ask_transformers(made, prompts, new)]
