"""What no CPU can tell, ready to be measured on a GPU in minutes: right numbers, speed and memory, without a network.

    python benchmarks/gpu_proof.py --part kernels --out DIR
    python benchmarks/gpu_proof.py --part model --model FOLDER_OR_GGUF --text FILE --out DIR [--other FOLDER]
    python benchmarks/gpu_proof.py --part large --out DIR [--shape 7B]
    python benchmarks/gpu_proof.py --part curve --model FOLDER_OR_GGUF --text FILE --text2 FILE --problems FOLDER --out DIR

`kernels` needs random weights alone. `model` converts a model to 50 %, and compares the result with OTHER, the same conversion
made on a CPU. `large` makes random weights of a large shape on the card, and times conversion, the paper's training, fine-tuning
of small shapes, prompts and decoding: five minutes at most. `curve` converts to 50 and 70 % and measures what 1, 2, 4 and 8
minutes of fine-tuning give back: KL on two texts, loops, HumanEval (its problems lie in FOLDER/humaneval).

Each step appends one JSON line to DIR/proof.jsonl and has a time limit of its own; a step that fails says why, and the others go
on. A table comes last. `--tiny` runs every step in a few seconds, on a CPU too.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

try:
    import torch
    import transformers
    from experts import make, make_fine
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from torch import Tensor
    from torch.profiler import ProfilerActivity, profile
    from transformers import StaticCache
    from transformers.models.llama.modeling_llama import LlamaMLP

    import tomoe
    from tomoe.data.corpus import Sequences
    from tomoe.errors import UserError
    from tomoe.evaluation.speed.throughput import benchmark
    from tomoe.evaluation.tasks import TaskSet, TaskSpec
    from tomoe.finetuning.finetune import finetune
    from tomoe.memory.estimate import least_memory, sizes_of
    from tomoe.methods.registry import resolve_method
    from tomoe.methods.tomoe.method import new_network
    from tomoe.methods.tomoe.objective import MaskStep
    from tomoe.model.base_weights import BaseWeights
    from tomoe.model.loading import free_on_device, load_config, load_dense, load_tokenizer, pick_device
    from tomoe.moe.modeling_tomoe import BACKENDS, CACHE, Router, ToMoEMLP, choose_backend, compute
    from tomoe.pipeline.stages import train
    from tomoe.pipeline.steps import open_dense
    from tomoe.plans.partition.routers import RidgeRegression
    from tomoe.plans.repair.equations import NormalEquations, refit
    from tomoe.recipe.conversion import Recipe
    from tomoe.recipe.finetuning import FinetuneRecipe
except ModuleNotFoundError as missing:
    sys.exit(f"gpu_proof.py needs the package {missing.name}, which is not installed here")

Row = dict[str, Any]
# Widths of SmolLM2-135M, Qwen2.5-0.5B and -1.5B, and Llama 3 8B.
SHAPES = {"135M": (576, 1536), "0.5B": (896, 4864), "1.5B": (1536, 8960), "8B": (4096, 14336)}
# Widths, decoder layers, heads and the vocabulary of models that are made of random weights; tiny ones are for a CPU.
LARGE = {
    "135M": (576, 1536, 30, 9, 49152),
    "0.5B": (896, 4864, 24, 14, 151936),
    "7B": (4096, 11008, 32, 32, 151936),
    "8B": (4096, 14336, 32, 32, 128256),
    "tiny": (32, 512, 2, 4, 300),
}
# Settings of a run that reads little text, for a CPU.
TINY = ["data.seq_len=16", "data.tokens=900", "data.calibration_tokens=128", "data.evaluation_tokens=128"]
# Experts of a layout, the share of the neurons that all tokens use, and what divides the width of an expert.
LAYOUTS = {"fine 256": (256, 0.125, 1), "fine 64": (64, 0.125, 1), "wide 32": (32, 0.15, 32)}
TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 1e-2}
# Weight sets that are timed in turn, so that none stays in the cache of the device.
SETS = 4
# One reading takes about so many seconds, so that waiting for the device is a small part of it.
READING = 2e-3
# Tokens up to which `few` is run: each number of them is compiled for some seconds.
MOST_FEW = 8


class Proof:
    """One run of the script: where, how large, and what was found so far."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.tiny, self.out = args, bool(args.tiny), Path(args.out)
        self.device = torch.device(pick_device(args.device))
        self.out.mkdir(parents=True, exist_ok=True)
        self.rows: list[Row] = []
        self.gb_per_s = self.tflop_per_s = 0.0
        self.moe = self.out / "moe"
        self.large = "tiny" if self.tiny else args.shape
        self.sources = f"data.sources={args.text or 'python-docs'}"
        # minutes of fine-tuning so far, by active fraction
        self.tuned: dict[float, int] = {}

    def shapes(self) -> dict[str, tuple[int, int]]:
        return {"tiny": (32, 512)} if self.tiny else SHAPES

    def counts(self, *counts: int) -> list[int]:
        return [count for count in counts if count <= (8 if self.tiny else 10**6)]

    def step(self, name: str, limit: int, work: Callable[[], Iterator[Row]]) -> None:
        """Run a step, and write down what it yields, or why it ended before it was through."""

        def late(*_: object) -> None:
            raise TimeoutError(f"took more than {limit} s")

        before, began = signal.signal(signal.SIGALRM, late), time.perf_counter()
        signal.alarm(limit)
        found: list[Row] = []
        failed: dict[str, Any] = {}
        try:
            for row in work():
                found.append(row)
        except Exception as error:
            failed = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        line = {"step": name, "seconds": round(time.perf_counter() - began, 1), "rows": found} | failed
        with (self.out / "proof.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.rows.append(line)

    def table(self) -> str:
        """All rows in Markdown."""
        lines = []
        for line in self.rows:
            lines.append(f"\n{line['step']} ({line['seconds']} s){': ' + line['failed'] if 'failed' in line else ''}\n")
            for row in line["rows"]:
                lines.append("| " + " | ".join(f"{key} {_shown(value)}" for key, value in row.items()) + " |")
        return "\n".join(lines)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, *runs: Callable[[], object], rounds: int = 9) -> float:
        """Median of one run, all of `runs` in turn between two waits for the device."""

        def reading(loops: int) -> float:
            self.wait()
            began = time.perf_counter()
            for _ in range(loops):
                for run in runs:
                    run()
            self.wait()
            return (time.perf_counter() - began) / loops / len(runs)

        reading(1)
        once = reading(1) * len(runs)
        loops = 1 if self.tiny else max(1, min(20, int(READING / once)))
        return statistics.median(reading(loops) for _ in range(1 if self.tiny else rounds))

    def graphed(self, run: Callable[[], object]) -> Callable[[], object]:
        """A run as a CUDA graph, which the host starts as one; elsewhere as it is."""
        if self.device.type != "cuda":
            return run
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def peak_gb(self) -> float:
        """The most that tensors took on the card since this was asked last."""
        if self.device.type != "cuda":
            return 0.0
        most = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return most / 1e9

    def convert(self, recipe: Recipe, out: Path) -> tuple[float, dict[str, float]]:
        """Seconds of a conversion, and the peak of each stage in GB."""
        peaks: dict[str, float] = {}

        def watch(stage: str, *_: object) -> None:
            peaks[stage] = max(peaks.get(stage, 0.0), self.peak_gb())

        began = time.perf_counter()
        tomoe.convert(recipe, out, force=True, on_progress=watch)
        return time.perf_counter() - began, peaks

    def poison(self, *shape: int, dtype: torch.dtype) -> None:
        """Leave NaN in the memory that the next tensors of such sizes get: what a kernel does not write shows."""
        held = [torch.full(shape, torch.nan, dtype=dtype, device=self.device) for _ in range(4)]
        del held

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype).to(self.device)


def _shown(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def routed(mlp: ToMoEMLP, tokens: int) -> Tensor:
    """Random experts of each token, on the CPU."""
    logits = torch.randn(tokens, mlp.num_experts, generator=torch.Generator().manual_seed(1))
    return logits.topk(mlp.top_k or 1).indices


def ceilings(proof: Proof) -> Iterator[Row]:
    """What the card can do at most: bytes copied, and products of bfloat16."""
    cuda = proof.device.type == "cuda"
    yield {
        "torch": torch.__version__, "transformers": transformers.__version__, "tomoe": tomoe.__version__,
        "device": torch.cuda.get_device_name(proof.device) if cuda else proof.device.type,
        "SMs": torch.cuda.get_device_properties(proof.device).multi_processor_count if cuda else 0,
    }  # fmt: skip
    size = 64 if proof.tiny else 8192
    a = proof.random(size, size, dtype=torch.bfloat16)
    proof.gb_per_s = 2 * a.nbytes / proof.seconds(a.clone) / 1e9
    proof.tflop_per_s = 2 * size**3 / proof.seconds(lambda: a @ a) / 1e12
    yield {"GB/s": proof.gb_per_s, "TFLOP/s": proof.tflop_per_s}


def fine(proof: Proof, name: str, hidden: int, size: int, active: float) -> tuple[LlamaMLP, ToMoEMLP]:
    """A dense MLP and its experts, random and on the device."""
    experts, shared, multiple = LAYOUTS[name]
    if proof.tiny:
        multiple = 1
    width = max(1, round(size * (1 - shared) / experts / multiple)) * multiple
    with proof.device:
        return make_fine(hidden, size, torch.bfloat16, experts, size - experts * width, active)


def tries_few(form: str, dtype: torch.dtype, tokens: int) -> bool:
    """Whether `few` is run: each size of its arguments is compiled, which takes seconds."""
    return form != "fine 64" and tokens <= MOST_FEW and (dtype == torch.bfloat16 or tokens == 1)


@torch.no_grad()
def agreement(proof: Proof) -> Iterator[Row]:
    """Every backend against float64 on the CPU, in memory that held NaN."""
    counts = proof.counts(1, 3, 8, 64, 257)
    for shape, (hidden, size) in proof.shapes().items():
        for form in ("overlapping", *LAYOUTS):
            if form == "overlapping":
                _, mlp = make(hidden, size, torch.bfloat16, 0.5, torch.Generator().manual_seed(0))
            else:
                _, mlp = fine(proof, form, hidden, size, 0.5)
            mlp = mlp.cpu()
            ids, x = routed(mlp, counts[-1]), torch.randn(counts[-1], hidden).bfloat16()
            exact = BACKENDS["experts"]["masked"].run(mlp.double(), x.double(), ids)
            for dtype, most in TOLERANCES.items():
                own: Any = mlp
                own, on = own.to(proof.device).to(dtype), x.to(proof.device, dtype)
                for name, backend in BACKENDS["experts"].items():
                    errors = []
                    for count in counts:
                        if name == "few" and not tries_few(form, dtype, count):
                            continue
                        for width in (hidden, size):
                            proof.poison(count, width, dtype=dtype)
                        y = backend.run(own, on[:count], ids[:count].to(proof.device)).cpu().double()
                        error = (y - exact[:count]).abs().max() / exact[:count].abs().max()
                        errors.append(float(error.nan_to_num(torch.inf)))
                    if errors:
                        row = {"shape": shape, "form": form, "dtype": str(dtype), "backend": name, "error": max(errors)}
                        yield row | {"passes": max(errors) < most}


@torch.no_grad()
def one_mlp(proof: Proof) -> Iterator[Row]:
    """One MLP, dense and by experts, in ms, beside what bandwidth and products allow at best."""
    for shape, (hidden, size) in list(proof.shapes().items())[-3:]:
        for form in LAYOUTS:
            for active in (0.34, 0.6):
                both = [fine(proof, form, hidden, size, active) for _ in range(SETS)]
                mlp = both[0][1]
                for tokens in proof.counts(1, 4, 8, 64, 256, 1024, 8192):
                    x, ids = proof.random(tokens, hidden, dtype=torch.bfloat16), routed(mlp, tokens).to(proof.device)
                    weights = 3 * hidden * size * 2 / proof.gb_per_s / 1e9
                    floor = active * max(weights, 6 * tokens * hidden * size / proof.tflop_per_s / 1e12)
                    row = {"shape": shape, "form": form, "active": active, "tokens": tokens}
                    row |= {"auto is": choose_backend(mlp, x), "floor": 1e3 * floor}
                    runs: dict[str, list[Callable[[], object]]] = {"dense": [partial(dense, x) for dense, _ in both]}
                    names = ["masked"]
                    if active < 0.5 and tries_few(form, torch.bfloat16, tokens):
                        names.append("few")
                    if tokens >= 64 and form != "fine 256":
                        names.append("grouped")
                    for name in names:
                        runs[name] = [partial(BACKENDS["experts"][name].run, moe, x, ids) for _, moe in both]
                    for name in list(runs) if tokens <= 256 else ():
                        runs[f"{name} in a graph"] = [proof.graphed(run) for run in runs[name]]
                    yield row | {name: 1e3 * proof.seconds(*each) for name, each in runs.items()}


@torch.no_grad()
def one_layer(proof: Proof) -> Iterator[Row]:
    """A decoder layer, compiled into CUDA graphs: its dense MLP against fine-grained experts, in ms.

    Prefills, and one token after those in a static cache.
    """
    for shape, (hidden, size) in list(proof.shapes().items())[-2:]:
        config = transformers.LlamaConfig(
            hidden_size=hidden, intermediate_size=size, num_hidden_layers=1, num_attention_heads=max(1, hidden // 128),
            vocab_size=256, max_position_embeddings=16384,
        )  # fmt: skip
        model: Any = transformers.LlamaModel(config).eval()
        model = model.to(proof.device, torch.bfloat16)
        row: Row = {"shape": shape}
        for form in ("dense", "wide 32") if proof.tiny else ("dense", "fine 256", "wide 32"):
            if form != "dense":
                model.layers[0].mlp = fine(proof, form, hidden, size, 0.34)[1]
            for tokens in proof.counts(8, 1024, 8192):
                x = proof.random(1, tokens, hidden, dtype=torch.bfloat16)
                torch.compiler.reset()
                run = model if proof.tiny else torch.compile(model, dynamic=False, mode="reduce-overhead")
                row[f"{form}, {tokens}"] = 1e3 * proof.seconds(partial(run, inputs_embeds=x, use_cache=False))
            before, x = 8 if proof.tiny else 1024, proof.random(1, 1, hidden, dtype=torch.bfloat16)
            cache = StaticCache(config, before + 64)
            model(inputs_embeds=x.expand(-1, before, -1), use_cache=True, **{CACHE: cache})
            torch.compiler.reset()
            step = model if proof.tiny else torch.compile(model, dynamic=False, mode="reduce-overhead")
            after = torch.tensor([[before]], device=proof.device)
            decode = partial(step, inputs_embeds=x, position_ids=after, use_cache=True, **{CACHE: cache})
            row[f"{form}, 1 after {before}"] = 1e3 * proof.seconds(decode)
        yield row


def training(proof: Proof) -> Iterator[Row]:
    """Five steps of one MLP, routers and rows, with AdamW."""
    hidden, size = list(proof.shapes().values())[-2 if not proof.tiny else 0]
    x = proof.random(64 if proof.tiny else 4096, hidden, dtype=torch.bfloat16)
    for form in LAYOUTS:
        moe = fine(proof, form, hidden, size, 0.5)[1].requires_grad_(True)
        optimizer = torch.optim.AdamW(moe.parameters(), lr=1e-4)
        proof.peak_gb()
        began, losses = time.perf_counter(), []
        for _ in range(5):
            loss = moe(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        routed = all(bool(p.isfinite().all()) for p in moe.router.parameters())
        finite = bool(torch.stack(losses).isfinite().all()) and routed
        row = {"form": form, "seconds": time.perf_counter() - began, "peak GB": proof.peak_gb()}
        yield row | {"loss": [float(loss) for loss in losses], "passes": finite}


def equations(proof: Proof) -> Iterator[Row]:
    """The refit of one layer and the fit of its router on random activations."""
    hidden, size = list(proof.shapes().values())[-2 if not proof.tiny else 0]
    tokens = 64 if proof.tiny else 4096
    h, gap, x = (proof.random(tokens, n, dtype=torch.bfloat16) for n in (size, hidden, hidden))
    began = time.perf_counter()
    sums = NormalEquations(size, hidden, proof.device)
    sums.add(h, gap.float(), x.float())
    made = refit(proof.random(hidden, size), sums, 1e-2)
    weight, _ = RidgeRegression(x.float()).fit(proof.random(tokens, 64).sigmoid())
    proof.wait()
    finite = bool(made.weight.isfinite().all()) and bool(weight.isfinite().all())
    row = {"seconds": time.perf_counter() - began, "passes": finite, "ridge": made.ridge}
    yield row | {"peak GB": proof.peak_gb()}


@torch.no_grad()
def routers(proof: Proof) -> Iterator[Row]:
    """Routers in products of 16 bits choose what they choose in float32."""
    hidden = list(proof.shapes().values())[-1][0]
    made = Router(hidden, 256, bias=True).to(proof.device)
    made.weight.copy_(made.weight.bfloat16())
    x = proof.random(64 if proof.tiny else 8192, hidden, dtype=torch.bfloat16)
    fast, exact = compute("router logits", made, x), made.double()
    full = torch.nn.functional.linear(x.double(), exact.weight, exact.bias)
    chosen = [torch.zeros_like(full).scatter(1, logits.topk(90).indices, 1) for logits in (fast, full)]
    equal = float((chosen[0] == chosen[1]).double().mean())
    yield {"equal": equal, "passes": equal >= 0.9999}


def recipe_of(proof: Proof) -> Recipe:
    """Half of the model, from the text."""
    sizes = [*TINY, "experts.num_experts=64", "active=0.6"] if proof.tiny else ["data.tokens=75000", "active=0.5"]
    where = [f"model={proof.args.model}", proof.sources, f"device={proof.device}"]
    return Recipe.load(None, [*where, *sizes, "train.steps=0", "train.dtype=bfloat16"])


def converts(proof: Proof) -> Iterator[Row]:
    """A conversion, its peak beside the least that it should need, and whether a second one is the same bit by bit."""
    recipe = recipe_of(proof)
    sizes = sizes_of(load_config(str(proof.args.model)), recipe)
    least = max(stage.total for stage in least_memory(sizes, *resolve_method(recipe)))
    written = []
    for name in ("moe", "again"):
        seconds, peaks = proof.convert(recipe, proof.out / name)
        written.append((proof.out / name / "model.safetensors").read_bytes())
        yield {"seconds": seconds, "estimated GB": least / 1e9, "peaks GB": peaks}
    yield {"same bits": written[0] == written[1], "free GB": free_on_device(proof.device) / 1e9}


def quality(proof: Proof) -> Iterator[Row]:
    """KL of the folder, and of the one that a CPU made."""
    folders = [str(proof.moe), *([proof.args.other] if proof.args.other else [])]
    rows = tomoe.evaluate([proof.args.model, *folders], device=str(proof.device), text=None)
    for row in rows:
        yield {"perplexity": row.measurement.perplexity, "kl": row.measurement.kl}
    if len(rows) == 3:
        yield {"passes": abs((rows[1].measurement.kl or 0) - (rows[2].measurement.kl or 0)) < 0.02}


def text(proof: Proof) -> Iterator[Row]:
    """The greedy continuation of a prompt in float32, on the device and on the CPU."""
    tokenizer = load_tokenizer(str(proof.moe))
    written = []
    for device in (proof.device, torch.device("cpu")):
        model = load_dense(str(proof.moe), torch.float32, device)
        written.append(tomoe.generate(model, tokenizer, "The sea and a boat", 4 if proof.tiny else 32))
    yield {"same text": written[0] == written[1], "text": written[0]}


def speed(proof: Proof) -> Iterator[Row]:
    """`tomoe benchmark`."""
    batches, prompts = ((1,), (8,)) if proof.tiny else ((1, 8), (128, 1024))
    found = benchmark(
        str(proof.args.model), str(proof.moe), batches, prompts, device=str(proof.device), pairs=3, seconds=20.0,
        dtype="float32" if proof.tiny else "bfloat16",
    )  # fmt: skip
    for cell in found.cells:
        row = {"phase": cell.phase, "batch": cell.batch, "prompt": cell.prompt, "experts": cell.backend}
        row |= {"dense ms": 1e3 * cell.dense_s, "moe ms": 1e3 * cell.moe_s}
        yield row | {"ratio": cell.ratio, "bound": cell.bound}


def exports(proof: Proof) -> Iterator[Row]:
    """The export for stock engines, verified, and run by transformers' own experts."""
    tomoe.export(proof.moe, "glm4_moe", proof.out / "glm4_moe", device=str(proof.device), tokens=32, force=True)
    ids = torch.arange(8, device=proof.device)[None] + 3
    model: Any = load_dense(str(proof.out / "glm4_moe"), torch.bfloat16, proof.device)
    for implementation in ("grouped_mm", "batched_mm"):
        model.set_experts_implementation(implementation)
        yield {"experts": implementation, "ms": 1e3 * proof.seconds(lambda: model(ids))}


def tunes(proof: Proof) -> Iterator[Row]:
    """Fine-tuning."""
    changes = [*TINY, "train.steps=1"] if proof.tiny else ["train.steps=200", "data.tokens=500000"]
    where = [f"model={proof.moe}", proof.sources, f"device={proof.device}"]
    began = time.perf_counter()
    finetune(FinetuneRecipe.load(None, [*where, *changes]), proof.out / "tuned", force=True)
    yield {"seconds": time.perf_counter() - began}


def random_model(proof: Proof, shape: str) -> Path:
    """The folder of a Llama of random weights, made on the device, with a tokenizer of bytes."""
    folder, (hidden, size, layers, heads, vocabulary) = proof.out / shape, LARGE[shape]
    if (folder / "config.json").exists():
        return folder
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=size, num_hidden_layers=layers, num_attention_heads=heads,
        vocab_size=vocabulary, max_position_embeddings=4096, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    torch.manual_seed(0)
    with proof.device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)
    return folder


def makes(proof: Proof) -> Iterator[Row]:
    """Random weights of the large shape."""
    folder = random_model(proof, proof.large)
    yield {"folder": str(folder), "GB": sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e9}


def small_run(proof: Proof, seq_len: int, sequences: int) -> list[str]:
    """Settings of a run that reads so many sequences."""
    length = 16 if proof.tiny else seq_len
    tokens = [f"data.seq_len={length}", f"data.tokens={length * (sequences + 24)}"]
    tokens += [f"data.calibration_tokens={8 * length}", f"data.evaluation_tokens={8 * length}"]
    return [*tokens, f"device={proof.device}", proof.sources]


def converts_large(proof: Proof) -> Iterator[Row]:
    """A conversion by default to 50 %: seconds and peak of each stage."""
    model = random_model(proof, proof.large)
    large = [proof.sources, f"device={proof.device}", "active=0.5"]
    small = [*small_run(proof, 512, 64), "active=0.6", "experts.num_experts=64"]
    seconds, peaks = proof.convert(Recipe.load(None, [f"model={model}", *(small if proof.tiny else large)]), proof.moe)
    cost = json.loads((proof.moe / "run" / "cost.json").read_text("utf-8"))
    yield {"seconds": seconds} | cost["seconds"] | {f"{name} peak GB": gb for name, gb in peaks.items()}


def trains_paper(proof: Proof) -> Iterator[Row]:
    """Steps of the paper's training of 2,048 tokens each, and one of them under the profiler."""
    model, steps = random_model(proof, proof.large), 3 if proof.tiny else 14
    small = ["experts.num_experts=2", "experts.embedding_size=8"] if proof.tiny else []
    changes = [*small_run(proof, 2048, steps), f"model={model}", "active=0.5", f"train.steps={steps}", *small]
    recipe = Recipe.load("paper", [*changes, "train.save_every=1000"])
    proof.peak_gb()
    train(recipe, proof.out / "paper", force=True)
    rows = metrics(proof.out / "paper")
    seconds = statistics.median(row["seconds"] for row in rows[1:])
    yield {"seconds a step": seconds, "tokens/s": rows[-1]["tokens"] / seconds, "peak GB": proof.peak_gb()}
    base = BaseWeights.of(recipe)
    dense, _ = open_dense(*resolve_method(recipe), base)
    net = new_network(recipe, dense)
    step = MaskStep(dense, net, recipe)
    ids = torch.randint(250, (1, recipe.data.seq_len))
    yield profiled(proof, partial(step, Sequences(ids, torch.ones_like(ids, dtype=torch.bool)), 1, 0))


def metrics(run: Path) -> list[Row]:
    """The steps of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]


def profiled(proof: Proof, run: Callable[[], object]) -> Row:
    """A run under the profiler: seconds on the device, launches, and what takes longest."""
    for _ in range(2):
        run()
    proof.wait()
    cuda = proof.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as found:
        run()
        proof.wait()
    own = (lambda e: e.self_device_time_total) if cuda else (lambda e: e.self_cpu_time_total)
    events = sorted(found.key_averages(), key=own, reverse=True)
    launches = sum(event.count for event in events if "LaunchKernel" in event.key)
    most = [f"{event.key[:40]} {own(event) / 1e3:.1f} ms" for event in events[:8]]
    return {"device seconds": sum(map(own, events)) / 1e6, "launches": launches, "most": most}


def tunes_shapes(proof: Proof) -> Iterator[Row]:
    """Fine-tuning of small shapes: tokens a second, and the share of what the card can do."""
    for shape in ("tiny",) if proof.tiny else ("135M", "0.5B"):
        model, moe = random_model(proof, shape), proof.out / f"{shape} moe"
        small = ["experts.num_experts=64"] if proof.tiny else ["repair.mode=none"]
        active = "active=0.6" if proof.tiny else "active=0.5"
        tomoe.convert(Recipe.load(None, [*small_run(proof, 512, 8), f"model={model}", active, *small]), moe, force=True)
        weights = sum(math.prod(t.shape) for t in load_dense(str(model), torch.bfloat16).parameters())
        steps, batch = (2, 2) if proof.tiny else (12, 0)
        words = [*small_run(proof, 512, 64 * steps), f"model={moe}", f"train.steps={steps}"]
        out = proof.out / f"{shape} tuned"
        proof.peak_gb()
        with suppress(UserError):
            # random weights need not get better
            finetune(FinetuneRecipe.load(None, [*words, f"train.batch_size={batch}"]), out, force=True)
        rows = metrics(out / "run")
        rate = statistics.median(row["tokens_per_second"] for row in rows[len(rows) // 2 :])
        # two operations a weight and token in the teacher, six in the student
        share = 8 * weights * rate / proof.tflop_per_s / 1e12 if proof.tflop_per_s else 0.0
        row = {"shape": shape, "tokens a step": rows[-1]["tokens"], "tokens/s": rate}
        yield row | {"share of the card": share, "peak GB": proof.peak_gb(), "loss": rows[-1]["loss"]}


def speed_large(proof: Proof) -> Iterator[Row]:
    """Prompts, and decoding eagerly and compiled with a static cache: dense beside MoE."""
    proof.args.model = str(random_model(proof, proof.large))
    yield from speed(proof)


def tunes_curve(proof: Proof) -> Iterator[Row]:
    """What minutes of fine-tuning give back, at 50 and 70 %: each stage goes on where the one before ended."""
    texts = [text for text in (proof.args.text, proof.args.text2) if text]
    problems = None if proof.args.problems is None else Path(proof.args.problems)
    specs = [TaskSpec("loops"), *([TaskSpec("humaneval")] if problems else [])]
    tasks = TaskSet(specs, problems, limit=2 if proof.tiny else None, batch_size=164, run_code=True)
    for active in (0.6,) if proof.tiny else (0.5, 0.7):
        folder = proof.out / f"{active:.0%}"
        tomoe.convert(recipe_of(proof).changed([f"active={active}"]), folder, force=True)
        yield {"active": active, "minutes": 0} | measured(proof, folder, texts, tasks)
        steps, rate = (1, 1.0) if proof.tiny else (20, 0.0)
        for minutes in (0, 1, 1, 2, 4)[: 2 if proof.tiny else 5]:
            # the first few steps only tell how many a minute holds
            count = max(1, round(60 * minutes / rate)) if minutes and not proof.tiny else steps
            out = proof.out / f"{active:.0%} after {proof.tuned.get(active, 0) + minutes}"
            row, seconds = tuned_once(proof, folder, out, count)
            rate = rate if proof.tiny else seconds
            if minutes:
                proof.tuned[active] = proof.tuned.get(active, 0) + minutes
                folder = out if (out / "config.json").exists() else folder
                yield {"active": active, "minutes": proof.tuned[active]} | row | measured(proof, folder, texts, tasks)


def tuned_once(proof: Proof, folder: Path, out: Path, steps: int) -> tuple[Row, float]:
    """One run of fine-tuning: what it says, and its seconds a step."""
    sources = proof.sources if proof.tiny else f"data.sources=python-packages,{proof.args.text}"
    length, batch = (16, 2) if proof.tiny else (512, 32)
    large = [f"data.tokens={(steps + 4) * length * batch + 50_000}", f"train.batch_size={batch}"]
    words = [sources, f"model={folder}", f"device={proof.device}", f"train.steps={steps}", f"dense={proof.args.model}"]
    began, said = time.perf_counter(), "better"
    try:
        finetune(FinetuneRecipe.load(None, [*words, *(TINY if proof.tiny else large)]), out, force=True)
    except UserError as error:
        said = str(error).partition("(")[0]
    rows = metrics(out / "run")
    row = {"outcome": said, "steps": steps, "seconds": time.perf_counter() - began, "tokens": steps * length * batch}
    return row, statistics.median(line["seconds"] for line in rows[len(rows) // 2 :])


def measured(proof: Proof, folder: Path, texts: list[str], tasks: TaskSet) -> Row:
    """KL on each text and what the tasks say."""
    row: Row = {}
    for i, text in enumerate(texts):
        found = tomoe.evaluate(
            [proof.args.model, folder], text, device=str(proof.device), tokens=256 if proof.tiny else 65_536,
            context=16 if proof.tiny else 512,
        )[1].measurement  # fmt: skip
        row[f"KL {Path(text).stem} {i}"] = found.kl
    model = load_dense(str(folder), torch.float32 if proof.device.type == "cpu" else torch.bfloat16, proof.device)
    scores = [] if proof.tiny else tasks.run(model, load_tokenizer(str(folder)))
    return row | {score.task: score.value for score in scores}


# The steps of each part, with their limits in seconds.
PARTS: dict[str, list[tuple[Callable[[Proof], Iterator[Row]], int]]] = {
    "kernels": [
        (ceilings, 20),
        (agreement, 180),
        (one_mlp, 150),
        (one_layer, 120),
        (training, 30),
        (equations, 30),
        (routers, 20),
    ],
    "model": [(converts, 120), (quality, 60), (text, 60), (speed, 240), (exports, 60), (tunes, 120)],
    "large": [
        (ceilings, 10),
        (makes, 30),
        (converts_large, 110),
        (trains_paper, 60),
        (tunes_shapes, 120),
        (speed_large, 70),
    ],
    "curve": [(tunes_curve, 3000)],
}


def main(words: list[str] | None = None) -> Proof:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=sorted(PARTS), required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", help="folder or .gguf file (part model)")
    parser.add_argument("--text", help="a text file; by default the documentation of Python (part large)")
    parser.add_argument("--text2", help="another text to measure on (part curve)")
    parser.add_argument("--problems", help="a folder that holds humaneval/*.jsonl, whose programs are run (part curve)")
    parser.add_argument("--shape", choices=LARGE, default="7B", help="of part large")
    parser.add_argument("--other", help="the same conversion, made on a CPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", help="names of the steps to run, with commas between (all of the part)")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(words)
    if args.part in ("model", "curve") and not (args.model and args.text):
        parser.error(f"part {args.part} needs --model and --text")
    proof = Proof(args)
    for step, limit in PARTS[args.part]:
        if args.steps and step.__name__ not in args.steps.split(","):
            continue
        proof.step(step.__name__, limit, partial(step, proof))
    print(proof.table())
    return proof


if __name__ == "__main__":
    main()
