"""What comes after a conversion, as functions: load, generate, evaluate, benchmark, apply, push. The commands call them too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe import distributed
from tomoe.conversion import Listener, fold_plan, pick_device, silent
from tomoe.data.corpus import Blocks, Corpus, joined, pack
from tomoe.data.sources import documents, find
from tomoe.errors import UserError
from tomoe.evaluation import throughput
from tomoe.evaluation.compare import Row, compare
from tomoe.evaluation.overlap import shared_share
from tomoe.evaluation.param_counts import model_facts
from tomoe.evaluation.perplexity import sliding
from tomoe.evaluation.tasks import TaskScore, TaskSet
from tomoe.files import own_name
from tomoe.model import catalog as fetch
from tomoe.model.hub import HUB_ID, find_plan, push
from tomoe.model.loading import load_dense, load_tokenizer
from tomoe.moe.modeling_tomoe import choose_backend
from tomoe.plan import Plan
from tomoe.recipe.conversion import Recipe
from tomoe.report.card import write_card, write_plan_card
from tomoe.report.summary import shown_name

PROMPT = "The three most important things about the sea are"  # what both models go on from in the report
CONTEXT = 1024
# Published perplexities are of one stream: documents (so many at most) with this between them, and no end-of-text tokens.
PUBLISHED = {"wikitext": ("\n\n", None), "wikitext-103": ("\n\n", None), "ptb": (" ", None), "c4": (" ", 1100)}


def load(name: str, dtype: str = "bfloat16", device: str = "auto") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A dense model (hub id, folder, .gguf file, fetchable name) or a converted folder, with its tokenizer.

    Raises UserError where there is no such model.
    """
    return load_model(name, dtype, device), load_tokenizer(name)


def load_model(name: str, dtype: str, device: str, stream: bool = False) -> PreTrainedModel:
    return load_dense(name, getattr(torch, dtype), pick_device(device), stream=stream)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    """How the model goes on from the prompt. Temperature 0 takes the most likely token, any other draws, from the seed.

    Raises UserError for a prompt without a token.
    """
    given = tokenizer(prompt, return_tensors="pt").to(model.device)
    if given["input_ids"].shape[1] == 0:
        raise UserError("there is no text to go on from: the prompt has no token")
    greedy = temperature == 0
    with torch.inference_mode(), torch.random.fork_rng():  # generate knows the global generator only
        torch.manual_seed(seed)
        written = cast(Any, model).generate(
            **given, max_new_tokens=max_new_tokens, do_sample=not greedy,
            temperature=None if greedy else temperature, top_p=None, top_k=None if greedy else 0,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )  # fmt: skip
    return str(tokenizer.decode(written[0, given["input_ids"].shape[1] :], skip_special_tokens=True))


@dataclass(frozen=True)
class EvaluationText:
    """Blocks to measure on, and the words that name them beside every number."""

    blocks: Blocks
    name: str
    seed: int | None = None
    stride: int | None = None  # tokens from one window to the next; None: the blocks as they are
    sources: tuple[str, ...] = ()  # that `blocks.source_ids` count


def held_out_text(names: Sequence[str]) -> EvaluationText:
    """The evaluation blocks that the first converted folder among `names` kept. Raises UserError where none did."""
    for name in names:
        kept = Path(name) / "run" / "corpus.safetensors"
        if kept.is_file():
            corpus = Corpus.load(kept)
            sources = tuple(Path(source).name for source in corpus.sources)
            return EvaluationText(corpus.evaluation, f"{', '.join(sources)}, held out", corpus.seed, sources=sources)
    raise UserError(
        "none of these folders keeps held-out text (run/corpus.safetensors); name a text file or source with --text"
    )


def read_text(source: str, tokenizer: PreTrainedTokenizerBase, context: int, tokens: int | None) -> EvaluationText:
    """A file or named source, from its beginning, in blocks of `context` tokens. Raises UserError where there is no text."""
    split = find(source).held_out or "train"
    texts: Iterable[str] = documents(source, split)
    if source in PUBLISHED:
        separator, most = PUBLISHED[source]
        texts = [separator.join(islice(texts, most))]
    blocks = pack(tokenizer, texts, context, tokens)
    return EvaluationText(blocks, own_name(source) if Path(source).exists() else f"{source} ({split})")


def evaluate(
    names: Sequence[str],
    text: str | None = None,
    *,
    context: int | None = None,
    stride: int | None = None,
    tokens: int | None = None,
    tasks: TaskSet | None = None,
    dtype: str = "bfloat16",
    device: str = "auto",
    stream: bool = False,
    listen: Listener = silent,
) -> list[Row]:
    """Every named model on the same text; the first one (the dense one) is the reference of the others.

    Without `text` it is what a converted folder among them held out. `tokens` bounds the text; `stride` makes windows of
    `context` tokens overlap, so that each token is predicted from at least `context - stride` others; `tasks` are put to
    every model too. With `stream` their layers stay in their files and are read for every block. Several processes share the
    text out and each gets all numbers; tasks are put by process 0 alone, which alone has their scores. Raises UserError for a
    model or text that is not there.
    """
    if text is None:
        given = held_out_text(names)
        size = given.blocks.input_ids.shape[1]
        if context not in (None, size) or stride is not None:
            raise UserError(
                f"the held-out text is in separate blocks of {size} tokens; name a text with --text for another context "
                "or a stride"
            )
        if tokens is not None:
            given = replace(given, blocks=given.blocks.first(tokens))
    else:
        context = context or CONTEXT
        if stride is not None and not 0 < stride <= context:
            raise UserError(f"the stride is {stride}, but it should be between 1 and the context ({context})")
        given = replace(read_text(text, load_tokenizer(names[0]), context, tokens), stride=stride)

    def loaded() -> Iterator[tuple[str, PreTrainedModel]]:
        for name in names:
            yield name, load_model(name, dtype, device, stream)

    return compare_on(loaded(), given, listen, tasks)


def compare_on(
    models: Iterable[tuple[str, PreTrainedModel]],
    given: EvaluationText,
    listen: Listener = silent,
    tasks: TaskSet | None = None,
) -> list[Row]:
    """`models` are (name, model) pairs; a name that is a converted folder is compared with the text it was fitted on."""
    names: list[str] = []

    def noted() -> Iterator[tuple[str, PreTrainedModel]]:
        for name, model in models:
            names.append(name)
            yield name, model

    def scores(name: str, model: PreTrainedModel) -> tuple[TaskScore, ...]:
        assert tasks is not None
        return tasks.run(
            model, load_tokenizer(name), lambda task, i, n: listen(f"{task} of {own_name(name)}", i, n, {})
        )

    text, blocks = (given.blocks.input_ids, given.blocks.mask), given.blocks
    if given.stride is not None:
        text = sliding(blocks.input_ids[blocks.mask], blocks.input_ids.shape[1], given.stride)
    own = blocks.source_ids if given.stride is None else None
    rows = compare(
        noted(), *text, stride=given.stride, data=given.name, seed=given.seed,
        sources=None if own is None else [given.sources[i] for i in own.tolist()],
        tasks=scores if tasks and not distributed.rank() else None,
        progress=lambda name, i, n: listen(f"evaluating {name}", i, n, {}),
    )  # fmt: skip
    return [
        replace(row, training_overlap=training_overlap(name, blocks)) for name, row in zip(names, rows, strict=True)
    ]


def training_overlap(name: str, text: Blocks) -> float | None:
    """Share of the text that a converted folder was fitted on; None where the folder does not keep its text."""
    kept = sorted((Path(name) / "run").glob("*corpus.safetensors"))  # of a fine-tuned model, also what came earlier
    if not kept:
        return None
    fitted = [part for corpus in map(Corpus.load, kept) for part in (corpus.train, corpus.calibration)]
    return shared_share(text, joined(fitted))


def benchmark(
    dense: str,
    moe: str,
    batches: Sequence[int] = (1, 8, 64),
    prompts: Sequence[int] = (128, 1024),
    *,
    text: str | None = None,
    pairs: int = 9,
    seconds: float = 60.0,
    threads: int | None = None,
    dtype: str = "bfloat16",
    device: str = "auto",
    listen: Listener = silent,
) -> throughput.Benchmark:
    """Time both models beside each other on the same text: without `text`, on what the MoE held out.

    Cells that would take longer than `seconds` are left out. Raises UserError for a model or text that is not there.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if text is None:
        given = held_out_text([moe])
    else:
        given = read_text(text, load_tokenizer(dense), 128, max(batches) * (max(prompts) + throughput.STEPS))
    ids = given.blocks.input_ids[given.blocks.mask]
    models: dict[str, Any] = {}
    memory: dict[str, throughput.Memory] = {}
    for name in (dense, moe):
        before = throughput.resident_bytes(torch.device(pick_device(device)))
        model = models[name] = load_model(name, dtype, device)
        per_token = throughput.cache_bytes_per_token(model, ids[None, :16].to(model.device))
        after = throughput.resident_bytes(model.device)
        grown = None if before is None or after is None else after - before
        memory[name] = throughput.Memory(throughput.weight_bytes(model), grown, per_token)
    pair = throughput.Pair(models[dense], models[moe], ids, expert_backends, seconds, pairs)
    cells, left_out = throughput.run_cells(pair, batches, prompts, lambda i, n: listen("benchmark", i, n, {}))
    return throughput.Benchmark(
        own_name(dense), own_name(moe), given.name, model_facts(models[moe])["active_share"], memory[dense],
        memory[moe], tuple(cells), tuple(left_out),
    )  # fmt: skip


def expert_backends(model: Any, tokens: int) -> str:
    """How a converted model runs its experts when it gets so many tokens at once: what its config names, or `auto` takes."""
    asked = getattr(model.config, "expert_backend", "-")
    if asked != "auto":
        return str(asked)
    with torch.no_grad():
        x = torch.empty(tokens, model.config.hidden_size, dtype=model.dtype, device=model.device)
        chosen = [choose_backend(layer.mlp, x) for layer in model.model.layers]
    return ", ".join(dict.fromkeys(chosen))


def next_commands(recipe: Recipe, out: Path) -> list[tuple[str, str]]:
    """What to try after a conversion, as (command, what it does)."""
    found = [
        (f'tomoe generate {out} "Once upon a time"', "let the MoE write"),
        (f"tomoe inspect {out}", "see what every layer keeps"),
        (f"tomoe evaluate {recipe.model} {out} --text FILE", "measure both on text of your own"),
    ]
    if recipe.train.steps == 0:
        found.append(
            (f"tomoe convert {recipe.model} --active {recipe.active} -o OUT", "learn as well: takes longer, loses less")
        )
    else:
        found.append((f"tomoe convert {recipe.model} --active {recipe.active} --steps {4 * recipe.train.steps} -o OUT",
                      "learn longer: loses less"))  # fmt: skip
    if "self" in recipe.data.sources:
        found.append((f"tomoe convert {recipe.model} --data FILE.txt -o OUT", "learn on text of your own kind"))
    return found


def apply_plan(plan: str, model: str | None, out: Path, dtype: str | None = None, force: bool = False) -> Plan:
    """Make the MoE from a plan (folder or hub id) and the dense weights it was made for; write the folder and its card.

    `model` may be left out where the plan names it; a plan from the hub may name no folder of this machine. Raises
    UserError for other weights than the plan's, and for whatever else the user can mend.
    """
    folder = find_plan(plan)
    made = Plan.load(folder)
    named = str(made.recipe.get("model", ""))
    if model is None and not Path(plan).is_dir() and not (HUB_ID.fullmatch(named) or named in fetch.names()):
        raise UserError(
            f"the plan {plan} does not say where its dense model is to be had; name it: tomoe apply {plan} MODEL"
        )
    fold_plan(folder, model, out, dtype, force)
    command = f"tomoe apply {shown_name(plan)} {shown_name(model or named)} -o {own_name(out)}"
    write_card(out, made, base_model=model or named, command=command)
    return made


def push_folder(folder: Path, repo: str, private: bool = False) -> tuple[str, list[str]]:
    """Upload a plan or a model (converted or exported), with a card where it has none.

    Returns its address, and the names in its recipe that are paths of this machine. Raises UserError where the folder is
    neither, or the hub does not take it.
    """
    exported = (folder / "config.json").is_file() or any(folder.glob("*.gguf"))
    if exported and not (folder / "plan.json").exists():
        return push(folder, repo, private), []
    plan = Plan.load(folder)
    if not (folder / "README.md").exists():
        write_card(folder, plan) if (folder / "config.json").exists() else write_plan_card(folder, plan, repo)
    recipe = Recipe(**plan.recipe)
    named = [name for name in (recipe.model, *recipe.data.sources) if "/" in name]
    return push(folder, repo, private), [n for n in named if shown_name(n) != n]
