"""Perplexity of any causal LM and, given a reference, the distance of its predictions from the reference's.

Letters: B sequences, S tokens of a sequence, T scored positions of one sequence, P spans of positions, D hidden size, V
vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, cast

import torch
import transformers
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tomoe import distributed
from tomoe.errors import UserError
from tomoe.evaluation.results import Measurement, Span
from tomoe.evaluation.usage import ExpertCounter
from tomoe.model.layerwise import LayerPass, pass_offloaded, without_layers
from tomoe.model.shape import ceil_div
from tomoe.model.tokens import check_ids
from tomoe.progress import StageCallback, no_stage_progress
from tomoe.version import __version__

CHUNK = 128  # positions whose float32 logits are alive at a time
SPAN = 1024  # positions of the first span of long sequences; each later one is as long as all before it
HIGHEST_NLL = 700.0  # nats; exp of more does not fit a float
PROBE = 8  # tokens that show how a model makes its logits
DEVICE_TOKENS = 8192  # of the sequences that a GPU runs together, which alone keep it half busy


class Predictions:
    """One model's predictions for the sequences of one text, in their order. With `keep` the hidden states of scored positions
    stay in main memory (D numbers per token), so that many models can be measured against one that ran once; models whose logits
    are not a plain matrix product with their states run again."""

    def __init__(self, model: nn.Module, keep: bool = False):
        self.model = model
        self.keep = keep
        self.chunked: bool | None = None
        self.kept: dict[int, Tensor] = {}
        # of the sequences that ran last
        self.last: dict[int, Tensor] = {}
        # of a model whose layers are on disk: all sequences behind the last one
        self.passed: LayerPass | None = None
        self.places: dict[int, int] = {}  # batches by their first sequence

    def probe(self, ids: Int[Tensor, " S"]) -> None:
        """Find out how the model makes its logits, from the first sequence, whichever this process has."""
        if self.chunked is None:
            self.chunked = _makes_plain_logits(self.model, ids)

    def together(self, length: int) -> int:
        """Return how many sequences of a length to run at once: one on a CPU, where batches save no time."""
        many = self.chunked and next(self.model.parameters()).device.type != "cpu"
        return max(1, DEVICE_TOKENS // length) if many else 1

    def pass_layers(
        self,
        groups: list[list[int]],
        input_ids: Int[Tensor, "B S"],
        mask: Bool[Tensor, "B S"],
        on_layer: StageCallback,
        on_group: Callable[[list[int]], object],
    ) -> None:
        """If layers are read from disk when they run, run all groups through one after the other, once."""
        if self.passed is not None or (groups and groups[0][0] in self.kept):
            return
        lengths = [real_length(mask[group]) for group in groups]
        batches = [(input_ids[g, :n], mask[g, :n]) for g, n in zip(groups, lengths, strict=True)]
        self.passed = pass_offloaded(self.model, batches, on_layer, lambda n: on_group(groups[n]))
        self.places = {group[0]: n for n, group in enumerate(groups)}

    def run(self, group: list[int], input_ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"]) -> None:
        """Run some of the sequences together, unless they were kept."""
        assert self.chunked is not None, "probe first"
        if group[0] not in self.kept:
            length = real_length(mask[group])
            with nullcontext() if self.passed is None else self.passed.ending(self.places[group[0]]):
                out = forward_sequences(self.model, input_ids[group, :length], mask[group, :length], inner=self.chunked)
            if self.passed is not None and not (self.keep and not self.chunked):
                self.passed.drop(self.places[group[0]])
            self.last = dict(zip(group, out.last_hidden_state if self.chunked else out.logits, strict=True))

    def sequence(self, b: int, scored: Int[Tensor, " T"]) -> tuple[Float[Tensor, "T _"], nn.Module]:
        """Return the hidden states of the scored positions and the output matrix, or logits and an identity."""
        head = cast(Any, self.model).get_output_embeddings() if self.chunked else nn.Identity()
        if b in self.kept:
            return self.kept[b], head
        states = self.last.pop(b)
        states = states[scored.to(states.device)]
        if self.keep and self.chunked:
            self.kept[b] = states.cpu()
        return states, head


def real_length(mask: Bool[Tensor, "b S"]) -> int:
    """Count the tokens of sequences that need to run: padding is at the end, and skipped if common to all."""
    return int(mask.any(0).nonzero().max()) + 1 if bool(mask.any()) else 1


def sliding(stream: Int[Tensor, " L"], context: int, stride: int) -> tuple[Int[Tensor, "B S"], Bool[Tensor, "B S"]]:
    """Cut a stream into windows of `context` tokens, each starting `stride` tokens after the one before; returns them and
    their masks, as views. Of every window but the first only the last `stride` tokens are new, and `measure` scores these
    alone: each is predicted from between `context - stride` and `context - 1` tokens before it."""
    windows = 1 + max(0, ceil_div(len(stream) - context, stride))
    short = context + (windows - 1) * stride - len(stream)
    real = torch.arange(len(stream) + short) < len(stream)
    return nn.functional.pad(stream, (0, short)).unfold(0, context, stride), real.unfold(0, context, stride)


def new_tokens(mask: Bool[Tensor, "B S"], b: int, stride: int | None) -> Bool[Tensor, " S"]:
    """Mark the real tokens of a sequence that were in no sequence before it."""
    if stride is None or b == 0:
        return mask[b]
    return mask[b] & (torch.arange(mask.shape[1], device=mask.device) >= mask.shape[1] - stride)


def measure(
    model: nn.Module | Predictions,
    input_ids: Int[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    reference: nn.Module | Predictions | None = None,
    progress: StageCallback = no_stage_progress,
    *,
    counter: ExpertCounter | None = None,
    stride: int | None = None,
    name: str = "",
    data: str = "",
    seed: int | None = None,
) -> Measurement:
    """Score every real token that follows a real token.

    Sequences run one at a time, or some at a time on a GPU; with `stride` they are the windows of `sliding`, and each token
    counts once. Logits are made CHUNK positions at a time if the model allows it, in float32. `name`, `data` and `seed` are
    only written down. Several processes divide the sequences, and each gets all numbers, but for those of `counter`. Raises
    UserError if no token can be scored, for different vocabularies, or if the output is not finite.
    """
    predictions = model if isinstance(model, Predictions) else Predictions(model)
    ref = Predictions(reference) if isinstance(reference, nn.Module) else reference
    model = predictions.model
    if not bool((mask[:, 1:] & mask[:, :-1]).any()):
        raise UserError(f"none of the {len(input_ids)} sequences has two real tokens in a row to score; give more text")
    # what is only padding need not run
    check_ids(input_ids[:, : int(mask.sum(1).max())], model)
    with torch.no_grad(), evaluating(model), evaluating(ref.model if ref else model):
        sums = _sum_sequences(predictions, ref, input_ids, mask, stride, counter, progress)
    by_span, sums = sums.sum(0), sums.sum(1)
    tokens, nll, kl, agreements = sums.sum(0).tolist()
    _check_sums(name or "the model", by_span, tokens, nll, kl)
    error = ratio_error(sums[:, 1], sums[:, 0])
    first = next(model.parameters())
    return Measurement(
        perplexity=math.exp(nll / tokens),
        standard_error=None if error is None else math.exp(nll / tokens) * error,
        nll=nll / tokens,
        tokens=int(tokens),
        blocks=int((sums[:, 0] > 0).sum()),
        context_length=input_ids.shape[1],
        stride=stride,
        kl=None if reference is None else max(0.0, kl / tokens),  # float32 rounding may leave -1e-9
        top1_agreement=None if reference is None else agreements / tokens,
        model=name,
        data=data,
        data_sha256=sequences_sha256(input_ids, mask),
        dtype=str(first.dtype).removeprefix("torch."),
        device=first.device.type,
        seed=seed,
        versions={m.__name__: str(m.__version__) for m in (torch, transformers)} | {"tomoe": __version__},
        spans=_spans(by_span, input_ids.shape[1], reference is not None),
    )


def _check_sums(name: str, by_span: Float[Tensor, "P 4"], tokens: float, nll: float, kl: float) -> None:
    """Raise UserError if the sums or their perplexity are not finite."""
    if not (math.isfinite(nll) and math.isfinite(kl)):
        raise UserError(
            f"the predictions of {name} are not finite numbers (mean loss {nll / tokens}, KL "
            f"{kl / tokens}); load it in float32 or bfloat16, and if that does not help, its weights are damaged: get or "
            "convert it again"
        )
    highest = max(float((by_span[:, 1] / by_span[:, 0]).nan_to_num().max()), nll / tokens)
    if highest > HIGHEST_NLL:
        raise UserError(
            f"{name} predicts this text so badly that its perplexity does not fit a number (mean loss "
            f"{highest:.0f} nats a token); the weights or the tokenizer are not what the model was trained with"
        )


def _spans(by_span: Float[Tensor, "P 4"], context: int, refers: bool) -> list[Span]:
    """Return measurements by position; empty if all positions are in one span."""
    if len(by_span) == 1:
        return []
    return [
        Span(min(end, context), int(tokens), math.exp(nll / tokens), max(0.0, kl / tokens) if refers else None)
        for end, (tokens, nll, kl, _) in zip(_ends(context), by_span.tolist(), strict=True)
        if tokens
    ]


def _ends(context: int) -> list[int]:
    """Return where spans of positions end: at SPAN, at twice as many tokens and so on, until the context is covered."""
    ends = [SPAN]
    while ends[-1] < context:
        ends.append(2 * ends[-1])
    return ends


def _sum_sequences(
    predictions: Predictions,
    ref: Predictions | None,
    input_ids: Int[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    stride: int | None,
    counter: ExpertCounter | None,
    progress: StageCallback,
) -> Float[Tensor, "B P 4"]:
    """Sum tokens, nll, KL and agreements of every sequence and span; the other processes send theirs."""
    ends = _ends(input_ids.shape[1])
    sums = torch.zeros(len(input_ids), len(ends), 4, dtype=torch.float64)
    both = [predictions] if ref is None else [predictions, ref]
    for each in both:
        each.probe(input_ids[0])
    own = list(distributed.rank_indices(len(input_ids)))
    size = min(each.together(input_ids.shape[1]) for each in both)
    groups = [own[first : first + size] for first in range(0, len(own), size)]

    def count(group: list[int]) -> None:
        if counter:
            counter.add(torch.stack([new_tokens(mask, b, stride) for b in group]))

    for each in both:
        each.pass_layers(groups, input_ids, mask, progress, count if each is predictions else lambda _: None)
    for group in groups:
        for each in both:
            each.run(group, input_ids, mask)
        for b in group:
            scored = (mask[b, :-1] & new_tokens(mask, b, stride)[1:]).nonzero().squeeze(1)
            states, head = predictions.sequence(b, scored)
            taught = None if ref is None else ref.sequence(b, scored)
            targets = input_ids[b, 1:][scored.to(input_ids.device)]
            # the token that is predicted, not the one before it, has the position
            bounds = torch.searchsorted(scored + 1, torch.tensor([0, *ends], device=scored.device)).tolist()
            for span, (i, j) in enumerate(pairwise(bounds)):
                reference = None if taught is None else (taught[0][i:j], taught[1])
                sums[b, span] = _score(states[i:j], head, targets[i:j], reference)
        if counter:
            counter.count(torch.stack([new_tokens(mask, b, stride) for b in group]))
        progress(min(group[-1] + distributed.world_size(), len(input_ids)), len(input_ids))
    distributed.all_reduce_(sums)
    return sums


def ratio_error(sums: Float[Tensor, " B"], tokens: Float[Tensor, " B"]) -> float | None:
    """Standard error of sum(sums) / sum(tokens), sequences being independent draws; None with fewer than two of them.

    Tokens of one sequence depend on each other, so it counts as one observation. With m the ratio, sequences of unequal
    length n_b have residuals r_b = L_b - m n_b, and se(m) = sqrt(B / (B - 1) sum r_b^2) / sum n_b (the delta method for
    a ratio; for equal lengths it is the sample deviation of the means over sqrt(B)). For exp(m) it is exp(m) se(m).
    """
    used = tokens > 0
    count, total = int(used.sum()), tokens.sum()
    if count < 2:
        return None
    residuals = (sums - sums.sum() / total * tokens)[used]
    return float((residuals.square().sum() * count / (count - 1)).sqrt() / total)


def sequences_sha256(input_ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"]) -> str:
    """SHA-256 (hex) of shape, token ids (int64) and mask: equal exactly if two models saw the same sequences."""
    digest = hashlib.sha256(str(tuple(input_ids.shape)).encode())
    for part in (input_ids.long(), mask):
        for row in part.cpu():  # overlapping windows may be views of a stream that is far smaller than all of them
            digest.update(row.contiguous().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off within the `with` block."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


def forward_sequences(model: nn.Module, input_ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"], inner: bool) -> Any:
    """Run sequences through the model, or its inner part, which returns hidden states; no mask without padding."""
    device = next(model.parameters()).device
    attention_mask = None if bool(mask.all()) else mask.long().to(device)
    part: Any = model.base_model if inner else model
    return part(input_ids=input_ids.to(device), attention_mask=attention_mask, use_cache=False)


def _makes_plain_logits(model: Any, ids: Int[Tensor, " S"]) -> bool:
    """Whether logits are output matrix times hidden states: then no [S, V] tensor is needed. Tested on a few tokens, because some
    families scale or cap their logits under names of their own."""
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return False
    few = ids[None, :PROBE]
    real = torch.ones_like(few, dtype=torch.bool)
    # whatever the layers give
    with without_layers(model):
        states = getattr(forward_sequences(model, few, real, inner=True), "last_hidden_state", None)
        if states is None:
            return False
        return torch.equal(head(states), forward_sequences(model, few, real, inner=False).logits)


def _score(
    states: Float[Tensor, "T _"],
    head: nn.Module,
    targets: Int[Tensor, " T"],
    ref: tuple[Tensor, nn.Module] | None,
) -> Float[Tensor, " 4"]:
    """Sum over one sequence's positions: count, nll, KL(reference || model), agreements (0 without reference)."""
    sums = states.new_zeros(4, dtype=torch.float64)
    sums[0] = len(targets)
    for i in range(0, len(targets), CHUNK):
        log_q = head(states[i : i + CHUNK]).float().log_softmax(-1)
        target = targets[i : i + CHUNK, None].to(log_q.device)
        sums[1] -= log_q.gather(1, target).double().sum()
        if ref is None:
            continue
        log_p = ref[1](ref[0][i : i + CHUNK].to(log_q.device)).float().log_softmax(-1)
        if log_p.shape != log_q.shape:
            raise UserError(
                f"the reference has {log_p.shape[1]} output tokens and the model {log_q.shape[1]}; "
                "KL and agreement need the same vocabulary, so leave the reference out"
            )
        sums[3] += (log_p.argmax(-1) == log_q.argmax(-1)).sum()
        p = log_p.exp()
        sums[2] += log_p.sub_(log_q).mul_(p).sum(-1).double().sum()
    return sums
