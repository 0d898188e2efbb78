"""The text that models are evaluated on: held out by a conversion, or a file or named source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tomoe.data.corpus import Corpus, Sequences, pack
from tomoe.data.sources import evaluation_documents
from tomoe.errors import Advice, UserError

CONTEXT = 1024  # default context length, in tokens
OFFLOADED_TOKENS = 4096  # of held-out text that models are measured on which are read layer by layer


@dataclass(frozen=True)
class EvaluationText:
    """Sequences to evaluate on, with a name for reports."""

    sequences: Sequences
    name: str
    seed: int | None = None
    stride: int | None = None  # tokens from one window to the next; None: the sequences as they are
    reader: str = ""  # the model whose tokenizer made the tokens, if that is known


def held_out_text(names: Sequence[str]) -> EvaluationText:
    """Return the evaluation sequences of the first converted folder among `names`: held out, or from the recipe's evaluation
    source. Raises UserError if none has any."""
    for name in names:
        path = Path(name) / "run" / "corpus.safetensors"
        if path.is_file():
            corpus = Corpus.load(path)
            held_out = f"{', '.join(Path(source).name for source in corpus.sources)}, held out"
            return EvaluationText(corpus.evaluation, corpus.evaluation_name or held_out, corpus.seed, reader=name)
    raise UserError(
        "none of these folders holds held-out text (run/corpus.safetensors)",
        Advice("text", "to name a file or source", "FILE"),
    )


def load_text(source: str, tokenizer: PreTrainedTokenizerBase, context: int, tokens: int | None) -> EvaluationText:
    """Read at most `tokens` tokens of a file or named source, in sequences of `context`, or as a single one. Raises UserError if
    there is no text."""
    name, texts = evaluation_documents(source, tokenizer)
    return EvaluationText(pack(tokenizer, texts, context, tokens), name)
