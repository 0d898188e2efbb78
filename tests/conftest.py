"""Pico models: one per family, with everything random that an initialiser would leave at 0 or 1; random plans for them.

Whatever function speaks of shapes in its signature is imported with these shapes checked at every call.
"""
# ruff: noqa: E402  (shapes are checked only in modules that are imported after the hook)

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# imports leave no garbage to look for
gc.disable()

import jaxtyping

SOURCE = Path(__file__).parents[1] / "src" / "tomoe"


def _module(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)


SHAPED = {_module(path) for path in SOURCE.rglob("*.py") if "from jaxtyping import" in path.read_text("utf-8")}
_jaxtyped = jaxtyping.jaxtyped


def _only_shapes(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    """What the import hook decorates with: functions without shapes stay as they are, which halves the start of the tests."""

    def decorated(found: Any) -> Any:
        words = getattr(found.__init__ if isinstance(found, type) else found, "__annotations__", {}).values()
        return _jaxtyped(found, typechecker=typechecker) if any(", '" in str(word) for word in words) else found

    return decorated


jaxtyping.jaxtyped = _only_shapes
jaxtyping.install_import_hook(sorted(SHAPED), "beartype.beartype")

import pytest
import torch
from jaxtyping import Float, Int, config
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

from tomoe.budget import active_fraction
from tomoe.memory import estimate
from tomoe.methods.tomoe.extract import extract_plan
from tomoe.methods.tomoe.fine_grained import FineNetwork
from tomoe.methods.tomoe.network import MaskNetwork
from tomoe.methods.tomoe.networks import mask_network
from tomoe.methods.tomoe.objective import MaskStep
from tomoe.methods.tomoe.projection import Projection
from tomoe.model.mlp import Mlp, MlpNames, WeightMatrix
from tomoe.model.structure import check_without_weights, shape_of
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.plans import ALWAYS, Plan
from tomoe.plans.partition.activations import Activations
from tomoe.plans.partition.layouts import FineLayout, OverlappingLayout
from tomoe.recipe.conversion import AttentionSection, Recipe, SamplingSection

if TYPE_CHECKING:  # the first imports this file
    from pico_files import CommandLine
    from tomoe.exporting.choice import ChosenTarget
    from tomoe.exporting.target import Options

gc.enable()
# Pico matrices are too small to split over threads, and the tests run side by side; what they assert must hold with more, too.
torch.set_num_threads(int(os.environ.get("TOMOE_TEST_THREADS", "1")))
logging.disable_progress_bar()

PICO = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, dict(num_key_value_heads=4)),
    "llama3": (LlamaConfig, LlamaForCausalLM, dict(rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True)),
    "mistral": (MistralConfig, MistralForCausalLM, dict(head_dim=8, sliding_window=6)),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, dict(head_dim=16)),
    "phi": (PhiConfig, PhiForCausalLM, dict(num_key_value_heads=4, partial_rotary_factor=0.5, hidden_act="gelu_new")),
}
EMBEDDING_SIZE = 16
# Added to the seed of every pico model: what a test asserts must hold for other weights, too.
SEED = int(os.environ.get("TOMOE_TEST_SEED", "0"))
ATTENTION_MODES = ("off", "static", "per_token")
# every way of attention; grouped heads with biases, partial rotary dims without a gate, and heads with norms
PAIRS = (("qwen2", "off"), ("phi", "static"), ("qwen3", "per_token"))
FORMS = ("overlapping", "fine")
# grouped heads and biases: the family that `./run.sh check` runs
QUICK_FAMILY = "qwen2"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is tried on every family as slow, but for one of them."""
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        words = {w for value in values for w in (value if isinstance(value, tuple) else (value,)) if isinstance(w, str)}
        if words & FAMILIES.keys() and QUICK_FAMILY not in words:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What is there before the first test stays: looking for garbage in it takes a thirtieth of the time."""
    gc.freeze()


def randomise(model: PreTrainedModel, factor: float = 8.0) -> PreTrainedModel:
    """Weights large enough that attention and experts matter; biases and norms that can be got wrong."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.normal_(1.0 if "norm" in name and "bias" not in name else 0.0, 0.3)
        else:
            # some gates start at zero
            if not bool(parameter.any()):
                parameter.data.normal_(0, 0.02)
            parameter.data.mul_(factor)
    return model.eval().requires_grad_(False)


def make_pico(family: str, **changes: object) -> PreTrainedModel:
    """A model of a few thousand weights; the same at every call."""
    config_class, model_class, own = FAMILIES[family]
    torch.manual_seed(SEED)
    return randomise(model_class(config_class(**PICO | own | changes)))


def tokens(rows: int = 2, length: int = 12, seed: int = 0) -> Int[Tensor, "rows length"]:
    """Ordinary tokens: neither padding nor the end."""
    return torch.randint(3, PICO["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def make_network(
    model: PreTrainedModel, attention: str, spread: float = 1.0, rotate: bool = False, form: str = "overlapping",
    **sizes: int,
) -> MaskNetwork:  # fmt: skip
    """A mask network whose logits differ from dim to dim, so that a share of the dims is really dropped.

    With `rotate`, values are rotated at random, which every part of a conversion must carry as well as the best rotation.
    `sizes` are those of an OverlappingLayout; fine-grained experts have four neurons, and are 8 unless they say otherwise.
    """
    shape = shape_of(model)
    # the budget is the paper's: the router of a pico model is as large as a tenth of its neurons
    overlapping = OverlappingLayout(**{"num_experts": 4, "width_multiple": 1, "counts_routers": False} | sizes)
    number = sizes.get("num_experts", 8)
    layout = FineLayout(number, 4, shape.mlp_size - number * 4, 3) if form == "fine" else overlapping
    pruned = AttentionSection(pruning=attention, rotate_values=rotate)
    net = mask_network(shape, layout, EMBEDDING_SIZE, pruned, SamplingSection(), seed=0)
    if rotate:
        drawn = torch.randn(net.attention.value_rotations.shape, generator=torch.Generator().manual_seed(2))
        net.attention.value_rotations.copy_(torch.linalg.qr(drawn)[0])
    generator = torch.Generator().manual_seed(1)
    for projection in projections(net):
        projection.start.normal_(-3, spread, generator=generator)
    if isinstance(net, FineNetwork):
        partition_(net, generator)
    return net


def projections(net: MaskNetwork) -> list[Projection]:
    """What gives mask logits: of neurons, and of dims of attention."""
    return [*getattr(net, "neurons", ()), *(() if net.attention is None else net.attention.dims)]


def mask_step(model: PreTrainedModel, net: MaskNetwork, recipe: Recipe) -> MaskStep:
    """The step function of a recipe."""
    return MaskStep(model, net, recipe)


def partition_(net: FineNetwork, generator: torch.Generator) -> None:
    """Random fine-grained experts of four neurons; the layers differ in k, and one expert is always chosen."""
    for i in range(net.shape.num_layers):
        expert = torch.full((net.shape.mlp_size,), -1)
        order = torch.randperm(len(expert), generator=generator)[: 4 * net.layout.num_experts]
        expert[order] = torch.arange(len(order)) // 4
        net.expert_of_neuron[i], net.experts_per_token[i] = expert, 3 - i % 2
        net.routers[i].bias.data.normal_(0, 0.5, generator=generator)
        net.routers[i].bias.data[i] = ALWAYS


def fine_fraction(net: FineNetwork) -> float:
    """The active fraction of fine-grained experts with attention whole: nothing else can take up the rest of a budget."""
    s = net.shape
    widths = [(net.width(i), s.head_dim, s.head_dim) for i in range(s.num_layers)]
    return active_fraction(s, widths, net.counted_routers())


def activations(
    x: Float[Tensor, "T D"], h: Float[Tensor, "T F"], weight: Float[Tensor, " T"], down: Float[Tensor, "D F"]
) -> Activations:
    """What an MLP reads, what its down projection reads, and the weight of each token, all of one sequence.

    The MLP has this down projection; its gate and up projection are random, so `h` is not what they compute.
    """
    (neurons, hidden), names = (h.shape[1], x.shape[1]), MlpNames("gate", "up", "down")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module = nn.ModuleDict({name: nn.Linear(hidden, neurons, bias=False) for name in ("gate", "up")})
        module["down"] = nn.Linear(neurons, hidden, bias=False)
    module.requires_grad_(False)["down"].weight.copy_(down)
    gate, up, down_proj = (WeightMatrix(module[name]) for name in ("gate", "up", "down"))
    mlp = Mlp(0, module, "mlp", module, names, gate, up, down_proj, nn.functional.silu, None)
    return Activations(mlp, x, h, weight, down, torch.zeros(len(x), dtype=torch.long))


_plans: dict[tuple[object, ...], Plan] = {}


def make_plan(model: PreTrainedModel, attention: str, active: float = 0.6, **options: object) -> Plan:
    """A plan that prunes everything which `attention` allows; a pico model is too coarse for the usual tolerance.

    Pico models of one config have the same weights, so their plan is made once.
    """
    if options.get("form") == "fine" and attention == "off":
        active = fine_fraction(make_network(model, attention, **options))
    key = (model.config.to_json_string(), attention, active, *options.items())
    if key not in _plans:
        ids = tokens()
        net = make_network(model, attention, **options)
        _plans[key] = extract_plan(net, model, active, (ids, torch.ones_like(ids, dtype=torch.bool)), tolerance=0.02)
    return _plans[key]


def pico_moe(family: str, attention: str = "per_token", **options: object) -> tuple[ToMoEForCausalLM, Plan]:
    """A converted pico model, and its plan."""
    dense = make_pico(family)
    plan = make_plan(dense, attention, **options)
    return fold(dense, plan), plan


def pico_folder(
    folder: Path, family: str, attention: str = "per_token", **options: object
) -> tuple[ToMoEForCausalLM, Plan]:
    """The same, saved in a folder."""
    moe, plan = pico_moe(family, attention, **options)
    save_moe(moe, plan, None, folder)
    return moe, plan


def write_export(
    choice: ChosenTarget, moe: ToMoEForCausalLM, tokenizer: PreTrainedTokenizerBase | None, out: Path, options: Options
) -> None:
    """Write the folder `out` and verify nothing."""
    from tomoe.exporting.target import Job

    out.mkdir(exist_ok=True)
    choice.target.write(Job(moe, tokenizer, options), out)


@pytest.fixture(params=FAMILIES)
def dense(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_pico(request.param)


@pytest.fixture
def llama() -> PreTrainedModel:
    return make_pico("llama3")


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def as_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch the checks of shapes off, as users run it: what a bad file does then is what matters, and hundreds of steps take
    half of the time."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """`torch.set_num_threads`, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As many threads as a forked process has: two round otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def short_reports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have short texts and, except in tests marked `figures`, no figures: both take most of a small conversion."""
    monkeypatch.setattr("tomoe.report.build.LOOP_LENGTH", 8)
    if "figures" not in request.keywords:
        monkeypatch.setattr("tomoe.report.build.all_figures", lambda *_: [])


@pytest.fixture(scope="session", autouse=True)
def one_look_at_a_config() -> Iterator[None]:
    """What a structure computes without weights is looked at once for a config, and found fit again without another look."""
    fit: set[tuple[type, str]] = set()

    def once(model: PreTrainedModel) -> None:
        key = (type(model), model.config.to_json_string())
        if key not in fit:
            check_without_weights(model)
            fit.add(key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "check_without_weights", once)
        yield


@pytest.fixture(scope="module")
def always_better() -> Iterator[None]:
    """Fine-tuning finds every step better than the start."""
    from pico_files import always_better

    with pytest.MonkeyPatch.context() as patch:
        always_better(patch)
        yield


@pytest.fixture
def tomoe(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    from pico_files import CommandLine

    return CommandLine(capsys)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a pico model, with its tokenizer."""
    from pico_files import write_pico

    return write_pico(tmp_path / "dense")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    from pico_files import write_text

    return write_text(tmp_path / "text.txt")


def read_only(folder: Path) -> Iterator[Path]:
    """A folder that tests share and none writes into."""
    from pico_files import contents

    before = contents(folder)
    yield folder
    assert contents(folder) == before, "a test wrote into the shared conversion"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `dense` and `text.txt`, for all tests of a module."""
    from pico_files import write_pico, write_text

    place = tmp_path_factory.mktemp("place")
    write_pico(place / "dense")
    write_text(place / "text.txt")
    return place


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with `dense`, `text.txt` and the conversion `moe` (60 % active, no training); made once, to be read only."""
    from pico_files import carved

    yield from read_only(carved(tmp_path_factory.mktemp("converted"), "--active", "0.6"))


@pytest.fixture(scope="session")
def converted_fine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same with fine-grained experts, not repaired: with all of them a token it is the dense model."""
    from pico_files import FINE, carved

    options = (word for key in FINE for word in ("--set", key))
    yield from read_only(carved(tmp_path_factory.mktemp("fine"), "--active", "0.6", "--repair", "none", *options))


@pytest.fixture(scope="session")
def converted_inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same, where tokens choose inputs instead of experts."""
    from pico_files import INPUTS, succeed, write_pico, write_text

    folder = tmp_path_factory.mktemp("inputs")
    dense, text = write_pico(folder / "dense"), write_text(folder / "text.txt")
    succeed("convert", dense, "-o", folder / "moe", "--data", text, "--active", "0.6", *INPUTS)
    yield from read_only(folder)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with `dense`, `text.txt`, and `one`, what one process learns of them; to be read only."""
    from launcher import launch, train
    from pico_files import write_pico, write_text

    folder = tmp_path_factory.mktemp("alone")
    # a family with a norm of queries; layers are not a multiple of the processes, which carve unequal shares; texts of its own
    # are as long as its context
    write_pico(folder / "dense", "qwen3", num_hidden_layers=3, max_position_embeddings=32)
    write_text(folder / "text.txt")
    assert launch(1, *train(folder, folder / "one")) == [0]
    yield from read_only(folder)
