"""Answers that continue one reading of their prompt: the same scores as each read with its prompt."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from conftest import make_pico, make_plan
from pico_tokenizer import make_tokenizer
from tomoe.evaluation import tasks
from tomoe.evaluation.shared_prompts import Request, Score, batches, shared_prompts, shared_scores
from tomoe.moe.fold import fold


def request(prompt: list[int], *answer: int) -> Request:
    return ("", ""), prompt, list(answer)


def random_requests(vocab: int) -> list[Request]:
    """Two prompts of one length and one longer, with three, two and four answers of one to five tokens, out of order."""
    generator = torch.Generator().manual_seed(0)

    def tokens(n: int) -> list[int]:
        return torch.randint(1, vocab, (n,), generator=generator).tolist()

    prompts = [tokens(9), tokens(9), tokens(14)]
    pairs = [(0, 1), (2, 5), (1, 3), (0, 4), (2, 1), (1, 1), (2, 2), (0, 2), (2, 5)]
    return [request(prompts[prompt], *tokens(n)) for prompt, n in pairs]


@torch.no_grad()
def one_by_one(model: PreTrainedModel, requests: list[Request]) -> list[Score]:
    """Every answer read with its prompt, without a cache."""
    scores = []
    for _, prompt, answer in requests:
        log_probs = (
            model(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        )
        picked = log_probs[range(len(answer)), answer]
        scores.append((float(picked.sum()), bool((log_probs.argmax(-1) == torch.tensor(answer)).all())))
    return scores


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_scores_are_those_of_prompt_and_answer_together(dense: PreTrainedModel, rows: int) -> None:
    requests = random_requests(dense.config.vocab_size)
    for read in (dense, fold(dense, make_plan(dense, "per_token"))):
        # one answer that the model would write itself
        requests[0] = request(requests[0][1], int(read(torch.tensor([requests[0][1]])).logits[0, -1].argmax()))
        expected = one_by_one(read, requests)
        found = dict(shared_scores(read, requests, 100, rows))
        assert sorted(found) == list(range(len(requests)))
        for n, (value, greedy) in enumerate(expected):
            assert found[n][0] == pytest.approx(value, abs=1e-4)
            assert found[n][1] == greedy
        assert expected[0][1]
        assert not all(greedy for _, greedy in expected)


def test_prompts_longer_than_a_sliding_window() -> None:
    model = make_pico("mistral", sliding_window=6)
    requests = random_requests(model.config.vocab_size)
    found = dict(shared_scores(model, requests, 100, 64))
    assert [found[n][0] for n in range(len(requests))] == pytest.approx(
        [value for value, _ in one_by_one(model, requests)], abs=1e-4
    )
    wide = make_pico("mistral", sliding_window=None)  # the window matters, or the test would say nothing
    assert one_by_one(wide, requests)[1][0] != pytest.approx(found[1][0], abs=1e-4)


def test_only_prompts_that_are_worth_it_are_shared() -> None:
    several = [request([1, 2, 3], 4), request([1, 2, 3], 5, 6, 7)]
    alone, window = request([3, 2, 1], 4), [request([0], 4, 5), request([0], 6, 7)]
    asked = [alone, several[0], *window, several[1]]
    assert shared_prompts(asked, 6) == [([1, 2, 3], [1, 4])]
    assert shared_prompts(asked, 5) == []  # lm-eval cuts the beginning of such a prompt
    longer = [request([1, 2, 3, 4], 1), request([1, 2, 3, 4], 2)]
    assert shared_prompts([*asked, *longer], 6) == [([1, 2, 3, 4], [5, 6]), ([1, 2, 3], [1, 4])]


def test_a_batch_has_prompts_of_one_length_and_a_bounded_number_of_answers() -> None:
    prompts = [([1, 2], [0, 1, 2]), ([1, 3], [3, 4]), ([1, 4], [5, 6]), ([1], [7, 8])]
    assert list(batches(prompts, 4)) == [prompts[:1], prompts[1:3], prompts[3:]]
    assert list(batches(prompts, 1)) == [[prompt] for prompt in prompts]
    assert list(batches(prompts, 100)) == [prompts[:3], prompts[3:]]


def test_lm_eval_gets_what_it_would_compute_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="tasks are the extra `eval`")
    tokenizer = make_tokenizer()
    model = make_pico("llama", vocab_size=len(tokenizer))
    requests = [*random_requests(len(tokenizer)), request([5, 6, 7], 8), request([5], 8, 9), request([5], 9, 9)]
    told: list[tuple[int, int]] = []
    wrapped = tasks._wrapped(model, tokenizer, 4, lambda done, total: told.append((done, total)))
    ours = wrapped._loglikelihood_tokens(requests)
    assert told == [(n + 1, len(requests)) for n in range(len(requests))]
    monkeypatch.setattr(tasks, "shared_scores", lambda *_: [])
    theirs = wrapped._loglikelihood_tokens(requests)
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-4)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


def test_windows_of_a_text_are_not_counted_one_by_one() -> None:
    """Texts of a single token share a prompt of one; lm-eval counts the texts when it has put their windows together."""
    pytest.importorskip("lm_eval", reason="tasks are the extra `eval`")
    tokenizer = make_tokenizer()
    told: list[tuple[int, int]] = []
    model = make_pico("llama", vocab_size=len(tokenizer))
    wrapped = tasks._wrapped(model, tokenizer, 4, lambda done, total: told.append((done, total)))
    windows = [(None, [5], [8]), (None, [5], [9])]
    scores = wrapped._loglikelihood_tokens(windows)
    assert [value for value, _ in scores] == pytest.approx([value for value, _ in one_by_one(model, windows)], abs=1e-4)
    assert told == []
