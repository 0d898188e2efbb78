"""The folder on disk: what is in it, that it loads anywhere, that writing it loses nothing, and that nothing is written which
would compute something else once it is loaded.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conftest import make_pico, make_plan, pico_folder, pico_moe, tokens
from pico_tokenizer import make_tokenizer
from tomoe.errors import UserError
from tomoe.moe import modeling_tomoe
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import FoldedLayers, fold, has_room
from tomoe.moe.modeling_tomoe import CACHE, ToMoEForCausalLM
from tomoe.plans import Plan


def logits(model: ToMoEForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits


def test_what_is_in_the_folder(tmp_path: Path) -> None:
    moe, plan = pico_moe("llama3")
    out = tmp_path / "deep" / "moe"
    save_moe(moe, plan, None, out)
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_tomoe.py",
        "plan.json",
        "plan.safetensors",
        "SHA256SUMS",
    }
    assert list(out.parent.iterdir()) == [out]
    assert (out / "modeling_tomoe.py").read_bytes() == Path(modeling_tomoe.__file__).read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "modeling_tomoe.ToMoEConfig",
        "AutoModel": "modeling_tomoe.ToMoEModel",
        "AutoModelForCausalLM": "modeling_tomoe.ToMoEForCausalLM",
    }
    assert config["model_type"] == "tomoe"
    assert config["tomoe_dense_type"] == "llama"
    assert config["tomoe_expert_sizes"] == [layer.width for layer in plan.counts]
    assert Plan.load(out).widths() == plan.widths()


def test_others_may_read_the_weights_where_they_may_read_the_config(tmp_path: Path) -> None:
    moe, plan = pico_moe("llama")
    before = os.umask(0o027)
    try:
        save_moe(moe, plan, None, tmp_path / "moe")
    finally:
        os.umask(before)
    assert {oct(file.stat().st_mode & 0o777) for file in (tmp_path / "moe").iterdir()} == {"0o640"}


@pytest.mark.parametrize("family", ["llama3", "qwen2", "phi"])
def test_neurons_are_stored_once_and_dropped_dims_not_at_all(family: str, tmp_path: Path) -> None:
    _, plan = pico_folder(tmp_path / "moe", family, "static")
    stored, dense = load_file(tmp_path / "moe" / "model.safetensors"), make_pico(family)
    s = plan.shape
    for i, layer in enumerate(plan.counts):
        prefix = f"model.layers.{i}."
        assert (
            stored[f"{prefix}mlp.up_proj"].shape
            == stored[f"{prefix}mlp.down_proj"].shape
            == (layer.union, s.hidden_size)
        )
        assert len({tuple(row.tolist()) for row in stored[f"{prefix}mlp.up_proj"]}) == layer.union
        assert stored[f"{prefix}self_attn.q_proj.weight"].shape == (s.num_heads * layer.qk_dims, s.hidden_size)
        assert stored[f"{prefix}self_attn.k_proj.weight"].shape == (
            s.num_kv_heads * layer.qk_dims,
            s.hidden_size,
        )
        assert stored[f"{prefix}self_attn.v_proj.weight"].shape == (s.num_kv_heads * layer.value_top_k, s.hidden_size)
        assert stored[f"{prefix}self_attn.o_proj.weight"].shape == (s.hidden_size, s.num_heads * layer.value_top_k)
    assert all("router." not in name or t.dtype == torch.float32 for name, t in stored.items())
    assert ("lm_head.weight" in stored) == (not dense.config.tie_word_embeddings)


def test_the_cache_shrinks_with_the_keys() -> None:
    moe, plan = pico_moe("llama", "static")
    with torch.no_grad():
        cache = moe(tokens(2, 12), use_cache=True)[CACHE]
    for i, layer in enumerate(cache.layers):
        assert layer.keys.shape == (2, plan.shape.num_kv_heads, 12, plan.counts[i].qk_dims)
        assert layer.values.shape == (2, plan.shape.num_kv_heads, 12, plan.layers[i].value_top_k)
    assert plan.counts[0].qk_dims < plan.shape.head_dim


@pytest.mark.parametrize("family", ["llama3", "qwen2", "phi"])
def test_loading_misses_nothing_and_saving_again_keeps_everything(family: str, tmp_path: Path) -> None:
    moe, _ = pico_folder(tmp_path / "one", family)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "one", output_loading_info=True)
    assert isinstance(loaded, ToMoEForCausalLM)
    assert not any(report.values()), report
    assert torch.equal(logits(loaded), logits(moe))
    loaded.save_pretrained(tmp_path / "two")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    assert torch.equal(logits(again), logits(moe))
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (tmp_path / "one" / "config.json").read_text() == (tmp_path / "two" / "config.json").read_text()


@pytest.mark.parametrize("family", ["qwen3", "phi"])
def test_bfloat16_is_kept_and_routers_stay_float32(family: str, tmp_path: Path) -> None:
    exact = make_pico(family)
    plan = make_plan(exact, "per_token")
    exact.save_pretrained(tmp_path / "dense")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16)
    folded = fold(dense, plan)
    save_moe(folded, plan, None, tmp_path / "moe")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    routers = [name for name, _ in loaded.named_parameters() if "router." in name]
    assert any("value_router." in name for name in routers)
    for moe in (folded, loaded):
        assert {name: p.dtype for name, p in moe.named_parameters() if "router." in name} == dict.fromkeys(
            routers, torch.float32
        )
        assert {p.dtype for name, p in moe.named_parameters() if "router." not in name} == {torch.bfloat16}
        assert moe.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(logits(loaded), logits(folded))


def test_a_model_is_not_overwritten_unasked(tmp_path: Path) -> None:
    out = tmp_path / "moe"
    first, _ = pico_folder(out, "llama", active=0.6)
    second, other = pico_moe("llama", active=0.8)
    with pytest.raises(UserError, match=r"already holds a model.*force=True to replace it"):
        save_moe(second, other, None, out)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(first))
    save_moe(second, other, None, out, force=True)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(second))
    assert Plan.load(out).widths() == other.widths()


def test_the_run_stays_and_what_was_found_of_an_older_model_goes(tmp_path: Path) -> None:
    moe, plan = pico_moe("llama")
    out = tmp_path / "moe"
    (out / "run" / "masks").mkdir(parents=True)
    (out / "run" / "masks" / "state.json").write_text("{}")
    (out / "figures").mkdir()
    plan.save(out)
    for stale in ("report.html", "evaluation.json", "figures/layers.svg", "model-00001-of-00002.safetensors"):
        (out / stale).write_text("of an older, larger model")
    (out / "mine.txt").write_text("mine")
    save_moe(moe, plan, None, out)
    assert (out / "run" / "masks" / "state.json").read_text() == "{}"
    assert (out / "mine.txt").read_text() == "mine"
    assert not [name for name in ("report.html", "evaluation.json", "figures", ".tomoe.part") if (out / name).exists()]
    assert sorted(path.name for path in out.glob("*.safetensors")) == ["model.safetensors", "plan.safetensors"]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(moe))


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("error", [no_space(), SafetensorError("No space left on device")], ids=["plan", "weights"])
def test_a_full_disk_loses_nothing(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "moe"
    first, _ = pico_folder(out, "llama", active=0.6)
    second, other = pico_moe("llama", active=0.8)

    def fail(*_: object, **__: object) -> None:
        raise error

    if isinstance(error, OSError):
        monkeypatch.setattr(Plan, "save", fail)
    else:
        monkeypatch.setattr(ToMoEForCausalLM, "save_pretrained", fail)
    with pytest.raises(UserError, match=r"cannot write the model to .*moe: No space left on device"):
        save_moe(second, other, None, out, force=True)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(first))
    assert list(tmp_path.iterdir()) == [out]


def test_a_tokenizer_that_does_not_fit_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library `tokenizers` raises a plain Exception; any other is a fault of the program, and stays what it is."""
    moe, plan = pico_moe("llama", active=0.6)
    tokenizer = make_tokenizer()
    raised: list[Exception] = [Exception("No space left on device (os error 28)"), ValueError("a fault")]

    def fail(*_: object, **__: object) -> None:
        raise raised[0]

    monkeypatch.setattr(type(tokenizer), "save_pretrained", fail)
    with pytest.raises(UserError, match=r"cannot write the model to .*moe: No space left on device"):
        save_moe(moe, plan, tokenizer, tmp_path / "moe")
    raised.pop(0)
    with pytest.raises(ValueError, match="a fault"):
        save_moe(moe, plan, tokenizer, tmp_path / "moe")
    assert not list(tmp_path.iterdir())


def test_a_kill_while_files_move_leaves_the_run_and_no_half_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, plan = pico_moe("llama", active=0.6)
    second, other = pico_moe("llama", active=0.8)
    out = tmp_path / "moe"
    save_moe(first, plan, None, out)
    (out / "run").mkdir()
    (out / "run" / "state.json").write_text("{}")
    moved: list[Path] = []
    replace = Path.replace

    def killed(path: Path, target: Path) -> Path:
        if target.parent == out:
            moved.append(target)
            if len(moved) == 3:
                raise KeyboardInterrupt
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            save_moe(second, other, None, out, force=True)
    assert not (out / "config.json").exists()
    assert (out / "run" / "state.json").exists()
    save_moe(second, other, None, out)  # no force needed: it holds no model
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(second))
    assert (out / "run" / "state.json").exists()
    assert list(tmp_path.iterdir()) == [out]


def test_a_folder_that_is_a_link_or_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is written inside it: the folder around may be another disk, or closed to the user."""
    moe, plan = pico_moe("llama")
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    save_moe(moe, plan, None, tmp_path / "link")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "disk")), logits(moe))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    save_moe(moe, plan, None, Path())
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "here")), logits(moe))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "here", "link"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    moe, plan = pico_moe("llama")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot write the model to"):
        save_moe(moe, plan, None, tmp_path / "file" / "moe")
    with pytest.raises(UserError, match="cannot write the model to"):
        save_moe(moe, plan, None, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_buffer_that_no_checkpoint_holds(tmp_path: Path) -> None:
    """The rotary frequencies of the running model are not those that its config gives."""
    moe, plan = pico_moe("llama", "off", form="fine")
    moe.model.rotary_emb.inv_freq = moe.model.rotary_emb.inv_freq * 3
    with pytest.raises(
        UserError, match=r"loaded from its folder, on its first tokens .*layer 0 is the first to differ"
    ):
        save_moe(moe, plan, None, tmp_path / "moe", check=True)
    assert not (tmp_path / "moe" / "config.json").exists()


def test_a_window_that_short_texts_do_not_reach(tmp_path: Path) -> None:
    dense = make_pico("mistral", sliding_window=100, max_position_embeddings=256)
    plan = make_plan(dense, "off", form="fine")
    moe = fold(dense, plan)
    forward = moe.model.layers[1].forward
    moe.model.layers[1].forward = lambda x, **kwargs: forward(
        x * (1 + 0.1 * (torch.arange(x.shape[1]) >= 100)[None, :, None]), **kwargs
    )
    with pytest.raises(UserError, match="beyond the window of 100 tokens"):
        save_moe(moe, plan, None, tmp_path / "moe", check=True)


def test_what_is_folded_once_is_what_is_folded_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU with room each layer is folded once; elsewhere again to be written and to be compared. The bytes are the same."""
    dense = make_pico("mistral")
    plan = make_plan(dense, "off", form="fine")
    folded: list[int] = []
    fold_layer = FoldedLayers._folded
    monkeypatch.setattr(FoldedLayers, "_folded", lambda layers, i: (folded.append(i), fold_layer(layers, i))[1])
    written = []
    for lazily in (False, True):
        folded.clear()
        save_moe(fold(dense, plan, lazily=lazily), plan, None, tmp_path / str(lazily), check=True)
        written.append((sorted(folded) == [0, 1], (tmp_path / str(lazily) / "model.safetensors").read_bytes()))
    assert (written[0][0], written[1][0]) == (True, False)
    assert written[0][1] == written[1][1]


@pytest.mark.parametrize(("free", "room"), [(2 * 10**6, False), (3 * 10**6, True)])
def test_room_on_a_gpu(free: int, room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(empty_cache=lambda: emptied.append(True)))
    monkeypatch.setattr("tomoe.moe.fold.free_on_device", lambda _: free)
    weights = [torch.zeros(250_000)]
    assert has_room(SimpleNamespace(device=torch.device("cuda"), parameters=lambda: weights)) is room
    assert emptied
    assert not has_room(SimpleNamespace(device=torch.device("cpu"), parameters=lambda: weights))
