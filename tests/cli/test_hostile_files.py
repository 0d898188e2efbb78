"""Plans, runs, corpora and model folders from strangers: each loads and is valid, or is refused in one sentence.

Never another exception, never memory for sizes that a file only claims, never a file outside of the folder.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import random
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save

from conftest import FORMS, make_network, make_pico, make_plan, tokens
from damage import change, copy_folder, damage
from tomoe.data.corpus import Corpus, Sequences
from tomoe.errors import UserError
from tomoe.model.loading import load_dense
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import ToMoEConfig
from tomoe.plans import Plan
from tomoe.recipe.conversion import TrainSection
from tomoe.training.loop import make_optimizer
from tomoe.training.run_folder import RunFolder

# bytes beyond what the process holds when a test begins; most hostile sizes need far more
ROOM = 2**29
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_shipped", "little_memory")]


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Whoever allocates what a file only claims gets a MemoryError, which no reader may raise."""
    # models of earlier tests delete their temporary folders now, and not while somebody listens
    gc.collect()
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else None
    if pages is not None:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


opened: list[str] | None = None


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if opened is not None and event == "open" and isinstance(arguments[0], str | bytes):
        opened.append(str(arguments[0]))


sys.addaudithook(_listen)


def outcome(read: Callable[[], Any], folder: Path) -> Any:
    """What was read, or None where it was refused in a sentence; fails for anything else."""
    global opened
    opened = []
    try:
        return read()
    except UserError as error:
        return None if 10 < len(str(error)) < 1000 else pytest.fail(f"no sentence: {error}")
    finally:
        names, opened = opened, None
        code = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]), "/dev", "/proc", "/sys")
        strange = [n for n in names if n.startswith("/") and not n.startswith((str(folder), *code))]
        assert not strange, f"it touched {strange}"


def cases(count: int) -> pytest.MarkDecorator:
    """Twenty folders a test, each damaged by draws from a seed of its own."""
    return pytest.mark.parametrize("first", range(0, count, 20))


def seeds(first: int) -> Iterator[random.Random]:
    return (random.Random(seed) for seed in range(first, first + 20))


# -- plans


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good plans, one a form of attention and experts."""
    folder = tmp_path_factory.mktemp("plans")
    for attention in ("off", "per_token"):
        for form in FORMS:
            plan = make_plan(make_pico("llama"), attention, form=form)
            plan = replace(plan, recipe={"active": 0.6}, notes={"steps": 3}, source="00" * 32)
            plan.save(folder / f"{attention} {form}")
    return folder


@cases(300)
def test_plans(plans: Path, tmp_path: Path, first: int) -> None:
    for draw in seeds(first):
        folder = copy_folder(draw.choice(sorted(plans.iterdir())), tmp_path / "plan")
        damage(folder, folder / draw.choice(["plan.json", "plan.safetensors"]), draw)
        plan = outcome(lambda folder=folder: Plan.load(folder), folder)
        if plan is not None:
            assert 0 < plan.active_fraction() <= 1
            assert len(plan.describe()) == plan.shape.num_layers
            assert all(layer.router_weight.isfinite().all() for layer in plan.layers)
            json.dumps([plan.notes, plan.recipe, plan.dense_config], allow_nan=False)


# -- runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, Any, Any, Path]:
    """A checkpoint, its network and optimizer, and a file beside the run that nobody may ask for."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "run")
    net = make_network(make_pico("llama"), "off")
    optimizer = make_optimizer(net, TrainSection())
    sum(p.float().sum() for p in net.parameters()).backward()
    optimizer.step()
    folder.checkpoints.mkdir(parents=True)
    folder.save(3, net, optimizer, {"loss": 1.0})
    shutil.copytree(folder.checkpoints / "step-000003", folder.path / "good")
    (folder.path.parent / "secret").write_text("secret")
    return folder, net, optimizer, folder.path / "good"


@cases(200)
def test_runs(run: tuple[RunFolder, Any, Any, Path], first: int) -> None:
    folder, net, optimizer, good = run
    place = folder.checkpoints / "step-000003"

    def read() -> Any:
        found = folder.last()
        if found is not None:
            folder.restore(found, net, optimizer)
        return found

    for draw in seeds(first):
        copy_folder(good, place)
        damage(place, place / draw.choice(["state.json", "masks.safetensors", "optimizer.safetensors"]), draw)
        found = outcome(read, folder.path)
        if found is not None:
            assert found.step == 3
            assert all(t.shape in (p.shape, ()) for p, slots in optimizer.state.items() for t in slots.values())


def test_metrics_survive_a_cut_line(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.rows() == []
    run.metrics.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert run.rows() == [{"step": 1}, {"step": 2}]


def test_a_checkpoint_cannot_ask_for_other_files(run: tuple[RunFolder, Any, Any, Path]) -> None:
    folder, _, _, good = run
    place = copy_folder(good, folder.checkpoints / "step-000003")
    (place / "state.json").unlink()
    state = json.loads((good / "state.json").read_text())
    digest = hashlib.sha256(b"secret").hexdigest()
    state["sha256"]["../../../secret"] = digest
    (place / "state.json").write_text(json.dumps(state))
    assert outcome(folder.last, folder.path) is not None  # its own two files are whole
    state["sha256"] = {"../../../secret": digest}
    (place / "state.json").write_text(json.dumps(state))
    assert outcome(folder.last, folder.path) is None


@cases(200)
def test_corpora(tmp_path: Path, first: int) -> None:
    ids = tokens(2, 4)
    corpus = Corpus(*(Sequences(ids + i, torch.ones_like(ids).bool()) for i in range(3)), ("self",), "pico", 0)
    path = tmp_path / "corpus.safetensors"
    for draw in seeds(first):
        path.unlink(missing_ok=True)
        corpus.save(path)
        damage(tmp_path, path, draw)
        found = outcome(lambda: Corpus.load(path), tmp_path)
        assert found is None or found.digest() == corpus.digest()


# -- model folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`good`, a converted model; `dense`, a dense one; `hostile` is made of them again and again."""
    place = tmp_path_factory.mktemp("folders")
    dense = make_pico("llama")
    plan = make_plan(dense, "per_token")
    save_moe(fold(dense, plan), plan, None, place / "good")
    dense.save_pretrained(place / "dense")
    (place / "secret.safetensors").write_bytes((place / "good" / "model.safetensors").read_bytes())
    return place


SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim")


@cases(200)
def test_configs(folders: Path, tmp_path: Path, first: int) -> None:
    """The modeling file may not import tomoe: its config says ValueError, which `load_dense` turns into a UserError."""
    good = json.loads((folders / "good" / "config.json").read_text())
    good.pop("model_type")
    own = {key: value for key, value in good.items() if key in ToMoEConfig.__annotations__ or key in SIZES}
    for draw in seeds(first):
        changed = copy.deepcopy(own)
        change(changed, draw)
        try:
            made = ToMoEConfig(**good | {key: value for key, value in changed.items() if key in own})
        except (ValueError, StrictDataclassError):  # the second is transformers' own, of its own keys
            continue
        assert not made.tomoe_dense_type or all(0 < width <= 48 for width in made.tomoe_expert_sizes)


@cases(140)
def test_folders(folders: Path, first: int) -> None:
    for draw in seeds(first):
        hostile = copy_folder(folders / draw.choice(["good", "good", "dense"]), folders / "hostile")
        damage(hostile, hostile / draw.choice(["config.json", "model.safetensors"]), draw)
        model = outcome(lambda hostile=hostile: load_dense(str(hostile), torch.float32), hostile)
        if model is not None:
            assert sum(p.numel() for p in model.parameters()) < 2**20


def shards(weight: object) -> dict[str, Any]:
    return {"weight_map": {"lm_head.weight": weight}}


OUTSIDE = [shards(name) for name in ("../secret.safetensors", "/secret.safetensors", "..", "..\\secret.safetensors", 7)]
CLAIMS: list[tuple[str, str, dict[str, Any], str]] = [
    *(("good", "model.safetensors.index.json", index, "outside of its folder") for index in OUTSIDE),
    ("good", "model.safetensors.index.json", {"weight_map": ["model.safetensors"]}, "outside of its folder"),
    ("good", "model.safetensors.index.json", {"weight_map": None}, "outside of its folder"),
    ("good", "model.safetensors.index.json", {}, "outside of its folder"),
    *(
        ("good", "config.json", {"transformers_weights": name}, "not a file in that folder")
        for name in ("../secret.safetensors", "/etc/passwd", 3, "")
    ),
    ("dense", "config.json", {"num_hidden_layers": 10**9}, "layers by its config"),
    ("dense", "config.json", {"intermediate_size": 2**24}, "parameters by its config"),
    ("dense", "config.json", {"vocab_size": 2**40}, "parameters by its config"),
    ("dense", "config.json", {"hidden_size": 2**60}, "cannot be used"),
    ("dense", "config.json", {"num_attention_heads": 0}, "cannot be used"),
]


@pytest.mark.parametrize(("source", "name", "claim", "words"), CLAIMS, ids=str)
def test_a_folder_claims_no_more_than_it_holds_and_names_no_file_outside(
    folders: Path, source: str, name: str, claim: dict[str, Any], words: str
) -> None:
    hostile = copy_folder(folders / source, folders / "hostile")
    file = hostile / name
    values = json.loads(file.read_text()) if file.exists() else {}
    # an index is read where no file holds all weights
    (file if file.exists() else hostile / "model.safetensors").unlink()
    file.write_text(json.dumps(values | claim).replace('"/secret', f'"{folders}/secret'))
    with pytest.raises(UserError, match=words):
        load_dense(str(hostile), torch.float32)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_not_opened(folders: Path, name: str) -> None:
    """They run code when they are read. The canary would be a folder that unpickling makes."""
    hostile, canary = copy_folder(folders / "dense", folders / "hostile"), folders / "canary"
    (hostile / "model.safetensors").unlink()
    (hostile / name).write_bytes(b"cos\nmkdir\n(V" + str(canary).encode() + b"\ntR.")
    with pytest.raises(UserError, match=f"{name} may run code"):
        load_dense(str(hostile), torch.float32)
    (hostile / "model.safetensors").write_bytes(
        save(load_file(folders / "dense" / "model.safetensors"), {"format": "pt"})
    )
    assert load_dense(str(hostile), torch.float32) is not None
    assert not canary.exists()
