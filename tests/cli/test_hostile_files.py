"""Plans, runs, corpora and model folders from strangers: each loads and is valid, or is refused in one sentence.

Never another exception, never memory for sizes that a file only claims, never a file outside of the folder.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import resource
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from conftest import make_network, make_pico, make_plan, tokens
from tomoe.data.corpus import Corpus, Sequences
from tomoe.errors import UserError
from tomoe.model.loading import load_dense
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import ToMoEConfig
from tomoe.plan import Plan
from tomoe.recipe.conversion import TrainSection
from tomoe.training.loop import make_optimizer
from tomoe.training.run_folder import RunFolder

# bytes beyond what the process holds when a test begins; most hostile sizes need far more
ROOM = 2**29
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_shipped", "little_memory")]


def cases(count: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )  # fmt: skip


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Whoever allocates what a file only claims gets a MemoryError, which no reader may raise."""
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


TRICKS = ["../../secret", "/etc/passwd", "..\\x", "a\x00b", "layers.0.", "́​日本", "", "." * 300]
numbers = st.sampled_from(
    [0, -1, 1, 2, 3, 7, 2**31, 2**40, 2**60, -(2**63), 10**30, 0.5, -0.0, math.inf, math.nan, 1e308]
)
leaves = st.one_of(numbers, st.integers(-3, 70), st.none(), st.booleans(), st.sampled_from(TRICKS), st.text(max_size=4))
values = st.one_of(
    leaves,
    st.lists(leaves, max_size=3),
    st.dictionaries(st.text(max_size=3), leaves, max_size=2),
    st.builds(lambda: [[[[]]]]),
)


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to every value in nested lists and dicts."""
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, item in below for path in ((*prefix, key), *paths(item, (*prefix, key)))]


def change(draw: st.DrawFn, value: dict[str, Any]) -> dict[str, Any]:
    """One to three values replaced, dropped or added."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        known = paths(value)
        if not known:
            break
        *way, last = draw(st.sampled_from(known))
        place = value
        for key in way:
            place = place[key]
        kind = draw(st.integers(0, 9))
        if kind == 0 and isinstance(place, dict):
            del place[last]
        elif kind == 1 and isinstance(place, dict):
            place[draw(st.sampled_from(TRICKS))] = draw(values)
        elif kind == 2 and isinstance(place, list):
            place.extend([place[last]] * draw(st.sampled_from([1, 1000])))
        else:
            place[last] = draw(values)
    return value


def garble(draw: st.DrawFn, data: bytes) -> bytes:
    """Cut off, overwritten, or something else altogether."""
    at = draw(st.integers(0, len(data)))
    return draw(
        st.sampled_from([
            data[:at], data[:at] + b"\xff\x00" + data[at + 2 :], b"[" * 100_000, b'{"a":' * 50_000, b"NaN", b"9" * 6000,
            b"\x00" * 64, data + data, b"",
        ])
    )  # fmt: skip


DTYPES = ["F32", "BOOL", "I32", "I64", "F16", "BF16", "F64", "U8", "F8_E4M3", "Q7", 3]


def change_tensors(draw: st.DrawFn, data: bytes) -> bytes:
    """A .safetensors file with parts of its header changed; sometimes with the bytes to match."""
    length = struct.unpack("<Q", data[:8])[0]
    head, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in head if name != "__metadata__"]
    meant = {name: head[name]["data_offsets"] for name in names}
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(names))
        kind = draw(st.integers(0, 7))
        if name not in meant or name not in head:
            continue
        entry = head[name]
        start, end = meant[name]
        if kind == 0:
            entry["shape"] = draw(st.lists(st.sampled_from([0, 1, 4, 48, 2**31, 2**60, 2**64, -1]), max_size=3))
        elif kind == 1:
            entry["dtype"] = draw(st.sampled_from(DTYPES))
        elif kind == 2:
            entry["data_offsets"] = draw(st.lists(st.sampled_from([0, 1, start, end, 2**60, -5]), max_size=3))
        elif kind == 3:
            head[draw(st.sampled_from([*TRICKS, "layers.0.more", "layers.9.router_weight", *names]))] = head.pop(name)
        elif kind == 4:
            del head[name]
        elif kind == 5:  # well-formed, of another shape
            entry["shape"] = draw(st.permutations(entry["shape"])) + draw(st.sampled_from([[], [1]]))
        elif kind == 6:  # well-formed, of other bytes
            body = (
                body[:start] + draw(st.sampled_from([b"\xff", b"\x00", b"\x01", b"\x7f"])) * (end - start) + body[end:]
            )
        else:
            entry["unknown"] = draw(values)
    text = json.dumps(head).encode()
    size = draw(st.sampled_from([len(text)] * 12 + [0, 2**60, len(text) + 1]))
    return struct.pack("<Q", size) + text + body


# -- plans

PLANS: dict[str, tuple[dict[str, Any], bytes]] = {}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to write hostile plans to; good ones to begin with are kept in memory."""
    folder = tmp_path_factory.mktemp("plans")
    for attention in ("off", "per_token"):
        make_plan(make_pico("llama"), attention).save(folder)
        head = json.loads((folder / "plan.json").read_text())
        head["recipe"], head["notes"], head["source"] = {"active": 0.6}, {"steps": 3}, "00" * 32
        PLANS[attention] = head, (folder / "plan.safetensors").read_bytes()
    return folder


@cases(900)
@given(data=st.data())
def test_plans(plans: Path, data: st.DataObject) -> None:
    head, tensors = PLANS[data.draw(st.sampled_from(["off", "per_token"]))]
    kind = data.draw(st.sampled_from(["head", "head", "tensors", "tensors", "both", "raw"]))
    if kind in ("head", "both"):
        head = change(data.draw, head)
    if kind in ("tensors", "both"):
        tensors = change_tensors(data.draw, tensors)
    elif kind == "raw" and data.draw(st.booleans()):
        tensors = garble(data.draw, tensors)
    if "tensors_sha256" in head and data.draw(st.integers(0, 9)):
        head = head | {"tensors_sha256": hashlib.sha256(tensors).hexdigest()}
    text = json.dumps(head).encode()
    (plans / "plan.json").write_bytes(garble(data.draw, text) if kind == "raw" else text)
    (plans / "plan.safetensors").write_bytes(tensors)
    plan = outcome(lambda: Plan.load(plans), plans)
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


@cases(350)
@given(data=st.data())
def test_runs(run: tuple[RunFolder, Any, Any, Path], data: st.DataObject) -> None:
    folder, net, optimizer, good = run
    place = folder.checkpoints / "step-000003"
    state = json.loads((good / "state.json").read_text())
    for name in ("masks.safetensors", "optimizer.safetensors"):
        (place / name).write_bytes((good / name).read_bytes())
    kind = data.draw(st.sampled_from(["state", "state", "tensors", "raw"]))
    if kind == "state":
        state = change(data.draw, state)
    if kind == "tensors":
        file = place / data.draw(st.sampled_from(["masks.safetensors", "optimizer.safetensors"]))
        file.write_bytes(change_tensors(data.draw, file.read_bytes()))
        state["sha256"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    text = json.dumps(state).encode()
    (place / "state.json").write_bytes(garble(data.draw, text) if kind == "raw" else text)

    def read() -> Any:
        found = folder.last()
        if found is not None:
            folder.restore(found, net, optimizer)
        return found

    found = outcome(read, folder.path)
    if found is not None:
        assert found.step == 3
        assert all(
            slots[key].shape in (p.shape, ())
            for p, slots in optimizer.state.items()
            for key in ("exp_avg", "step")
            if key in slots
        )


def test_metrics_survive_a_cut_line(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.rows() == []
    run.metrics.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert run.rows() == [{"step": 1}, {"step": 2}]


def test_a_checkpoint_cannot_ask_for_other_files(run: tuple[RunFolder, Any, Any, Path]) -> None:
    folder, _, _, good = run
    place = folder.checkpoints / "step-000003"
    shutil.rmtree(place)
    shutil.copytree(good, place)
    state = json.loads((good / "state.json").read_text())
    digest = hashlib.sha256(b"secret").hexdigest()
    state["sha256"]["../../../secret"] = digest
    (place / "state.json").write_text(json.dumps(state))
    assert outcome(folder.last, folder.path) is not None  # its own two files are whole
    state["sha256"] = {"../../../secret": digest}
    (place / "state.json").write_text(json.dumps(state))
    assert outcome(folder.last, folder.path) is None


@cases(350)
@given(data=st.data())
def test_corpora(run: tuple[RunFolder, Any, Any, Path], data: st.DataObject) -> None:
    folder = run[0].path
    ids = tokens(2, 4)
    parts = [Sequences(ids + i, torch.ones_like(ids).bool()) for i in range(3)]
    corpus, path = Corpus(*parts, ("self",), "pico", 0), folder / "corpus.safetensors"
    if not path.exists():
        corpus.save(path)
        CORPUS.append(path.read_bytes())
    kind = data.draw(st.sampled_from(["tensors", "about", "raw"]))
    good = CORPUS[0]
    if kind == "about":
        length = struct.unpack("<Q", good[:8])[0]
        head = json.loads(good[8 : 8 + length])
        about = json.dumps(change(data.draw, json.loads(head["__metadata__"]["tomoe_corpus"])))
        head["__metadata__"]["tomoe_corpus"] = data.draw(st.sampled_from([about, about, "[" * 10_000, "3", about[:9]]))
        text = json.dumps(head).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + good[8 + length :])
    else:
        path.write_bytes(change_tensors(data.draw, good) if kind == "tensors" else garble(data.draw, good))
    found = outcome(lambda: Corpus.load(path), folder)
    assert found is None or found.digest() == corpus.digest()


CORPUS: list[bytes] = []


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


@cases(500)
@given(data=st.data())
def test_configs(folders: Path, data: st.DataObject) -> None:
    """The modelling file may not import tomoe: its config says ValueError, which `load_dense` turns into a UserError."""
    config = json.loads((folders / "good" / "config.json").read_text())
    config = change(data.draw, {k: v for k, v in config.items() if k not in ("model_type", "auto_map")})
    own = {k: v for k, v in config.items() if k in ToMoEConfig.__annotations__ or k in SIZES}
    good = {k: v for k, v in json.loads((folders / "good" / "config.json").read_text()).items() if k != "model_type"}
    try:
        made = ToMoEConfig(**good | own)
    except (ValueError, StrictDataclassError):  # the second is transformers' own, of its own keys
        return
    assert made.dense_model_type is None or all(0 < width <= 48 for width in made.expert_sizes)


SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim")


@cases(220)
@given(data=st.data())
def test_folders(folders: Path, data: st.DataObject) -> None:
    source, hostile = folders / data.draw(st.sampled_from(["good", "good", "dense"])), folders / "hostile"
    shutil.rmtree(hostile, ignore_errors=True)
    shutil.copytree(source, hostile)
    config, weights = hostile / "config.json", hostile / "model.safetensors"
    kind = data.draw(st.sampled_from(["config", "config", "config", "weights", "weights", "raw config", "raw weights"]))
    if kind == "config":
        config.write_text(json.dumps(change(data.draw, json.loads(config.read_text()))))
    elif kind == "weights":
        weights.write_bytes(change_tensors(data.draw, weights.read_bytes()))
    else:
        file = config if kind == "raw config" else weights
        file.write_bytes(garble(data.draw, file.read_bytes()))
    model = outcome(lambda: load_dense(str(hostile), torch.float32), hostile)
    if model is not None:
        assert sum(p.numel() for p in model.parameters()) < 2**20


INDEXES = [
    {"weight_map": {"lm_head.weight": "../secret.safetensors"}},
    {"weight_map": {"lm_head.weight": "SECRET"}},
    {"weight_map": {"lm_head.weight": ".."}},
    {"weight_map": {"lm_head.weight": "..\\secret.safetensors"}},
    {"weight_map": {"lm_head.weight": 7}},
    {"weight_map": ["model.safetensors"]},
    {"weight_map": None},
    {},
]


@pytest.mark.parametrize("index", INDEXES, ids=str)
def test_shards_lie_in_the_folder(folders: Path, index: dict[str, Any]) -> None:
    hostile = folders / "hostile"
    shutil.rmtree(hostile, ignore_errors=True)
    shutil.copytree(folders / "good", hostile)
    (hostile / "model.safetensors").unlink()
    text = json.dumps(index).replace("SECRET", str(folders / "secret.safetensors"))
    (hostile / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match="outside of its folder"):
        load_dense(str(hostile), torch.float32)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", 3, ""])
def test_weights_are_named_by_no_config(folders: Path, name: object) -> None:
    hostile = folders / "hostile"
    shutil.rmtree(hostile, ignore_errors=True)
    shutil.copytree(folders / "good", hostile)
    config = json.loads((hostile / "config.json").read_text()) | {"transformers_weights": name}
    (hostile / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no file of that folder"):
        load_dense(str(hostile), torch.float32)


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        ({"num_hidden_layers": 10**9}, "layers by its config"),
        ({"intermediate_size": 2**24}, "parameters by its config"),
        ({"vocab_size": 2**40}, "parameters by its config"),
        ({"hidden_size": 2**60}, "cannot be used"),
        ({"num_attention_heads": 0}, "cannot be used"),
    ],
    ids=str,
)
def test_a_dense_folder_cannot_claim_more_than_it_holds(folders: Path, claim: dict[str, int], words: str) -> None:
    hostile = folders / "hostile"
    shutil.rmtree(hostile, ignore_errors=True)
    shutil.copytree(folders / "dense", hostile)
    config = json.loads((hostile / "config.json").read_text()) | claim
    (hostile / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=words):
        load_dense(str(hostile), torch.float32)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_not_opened(folders: Path, name: str) -> None:
    """They run code when they are read. The canary would be a folder that unpickling makes."""
    hostile, canary = folders / "hostile", folders / "canary"
    shutil.rmtree(hostile, ignore_errors=True)
    shutil.copytree(folders / "dense", hostile)
    (hostile / "model.safetensors").unlink()
    (hostile / name).write_bytes(b"cos\nmkdir\n(V" + str(canary).encode() + b"\ntR.")
    with pytest.raises(UserError, match=f"{name} may run code"):
        load_dense(str(hostile), torch.float32)
    (hostile / "model.safetensors").write_bytes(
        save(load_file(folders / "dense" / "model.safetensors"), {"format": "pt"})
    )
    assert load_dense(str(hostile), torch.float32) is not None
    assert not canary.exists()
