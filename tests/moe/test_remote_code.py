"""The modelling file as transformers and serving engines take it: AutoModel, attention functions, shards, hostile configs."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AttentionInterface, AutoModel, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from conftest import pico_folder, pico_moe, tokens
from tomoe.moe.modeling_tomoe import ToMoEConfig, ToMoEForCausalLM, ToMoEModel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_grad")]


@pytest.mark.parametrize("family", ["llama3", "phi"])
def test_the_base_model_is_the_causal_one_without_its_output_matrix(family: str, tmp_path: Path) -> None:
    moe, _ = pico_folder(tmp_path / "moe", family)
    base, report = AutoModel.from_pretrained(tmp_path / "moe", output_loading_info=True)
    assert isinstance(base, ToMoEModel)
    assert not report["missing_keys"]
    hidden = base(tokens()).last_hidden_state
    assert torch.equal(moe.lm_head(hidden), moe(tokens()).logits)
    assert {f"model.{name}" for name in base.state_dict()} == {
        n for n in moe.state_dict() if not n.startswith("lm_head")
    }
    base.save_pretrained(tmp_path / "base")
    again = AutoModel.from_pretrained(tmp_path / "base")
    assert torch.equal(again(tokens()).last_hidden_state, hidden)


def narrow(seen: list[tuple[int, int, int]]) -> Callable[..., tuple[Tensor, None]]:
    """Attention that, as FlashAttention does, gives back as many value dims as the queries have."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: Any) -> Any:
        seen.append((q.shape[-1], k.shape[-1], v.shape[-1]))
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=True)
        return out[..., : q.shape[-1]].transpose(1, 2).contiguous(), None

    return attend


@pytest.mark.parametrize(("family", "attention"), [("qwen2", "static"), ("qwen3", "per_token"), ("phi", "per_token")])
def test_other_attention_functions_are_handed_the_dense_width(
    family: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (moe, _), seen = pico_moe(family, attention), []
    assert min(moe.config.tomoe_qk_dims) < moe.model.layers[0].self_attn.head_dim, "nothing to be padded"
    if attention == "per_token":
        assert any(qk < v for qk, v in zip(moe.config.tomoe_qk_dims, moe.config.tomoe_value_dims, strict=True)), (
            "no V to be cropped"
        )
    meant = moe(tokens()).logits
    monkeypatch.setitem(AttentionInterface._global_mapping, "narrow", narrow(seen))
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "narrow", sdpa_mask)
    for model in (moe, moe.model):  # an engine holds the base model alone
        model.set_attn_implementation("narrow")
        torch.testing.assert_close(moe(tokens()).logits, meant, rtol=0, atol=1e-5)
        head_dim = moe.model.layers[0].self_attn.head_dim
        assert set(seen) == {(head_dim,) * 3}
        assert len(seen) == moe.config.num_hidden_layers
        model.set_attn_implementation("sdpa")
        seen.clear()


def test_each_rule_for_shards_names_a_part_and_none_names_shared_rows() -> None:
    """Rows that experts share cannot be sliced without renumbering the experts."""
    from fnmatch import fnmatch

    for family in ("qwen3", "phi"):
        moe, _ = pico_moe(family)
        names = {name.rpartition(".")[0] for name, _ in moe.named_parameters()}
        rules = [rule for rule in moe.tp_plan if "embed_tokens" not in rule]
        named = {rule.rpartition(".")[2] for rule in rules}
        assert named >= {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}
        # One name for the output projection, whether it is the family's own or a pruned one, is a rule for each.
        assert all(
            any(fnmatch(f"model.layers.1.self_attn.{part}", rule) for rule in rules) for part in named - {"lm_head"}
        )
        for rule in rules:
            found = {name for name in names if fnmatch(name, rule)}
            assert not any(".mlp" in name or "router" in name for name in found)
        for name in moe.pp_plan:
            moe.get_submodule(name)
        assert "model.layers" in moe.pp_plan


# on two processes, forked when most is imported; the first looks at everything else meanwhile
ELSEWHERE = """
import os
import sys
sys.modules["tomoe"] = None  # from here on `import tomoe` fails
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging
logging.disable_progress_bar()
torch.set_num_threads(1)
child = os.fork()
rank = 0 if child else 1
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)
held = load_file("held.safetensors")

@torch.no_grad()
def check(logits, family, error=1e-5):
    torch.testing.assert_close(logits, held[family], rtol=0, atol=error)

def load(folder, auto=AutoModelForCausalLM, **options):
    return auto.from_pretrained(folder, trust_remote_code=True, **options).requires_grad_(False)

for family in ("qwen3", "phi"):
    sharded = load(family, distributed_config=DistributedConfig(tp_size=2, tp_plan="auto"))
    q = sharded.model.layers[0].self_attn.q_proj.weight
    assert q.to_local().shape[0] * 2 == q.shape[0]
    check(sharded(held["ids"]).logits, family, 1e-4)
    if rank:
        continue
    model, base = load(family), load(family, AutoModel)
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    assert type(base).__name__ == "ToMoEModel"
    check(model(held["ids"]).logits, family)
    check(model.lm_head(base(held["ids"]).last_hidden_state), family)
    model.save_pretrained(family + "-again")
    for folder in (family + "-again", family + "-resaved"):
        check(load(folder)(held["ids"]).logits, family)
assert not any(name.startswith("tomoe.") for name in sys.modules)
dist.destroy_process_group()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_folders_load_where_tomoe_is_not(tmp_path: Path) -> None:
    """In processes that cannot import tomoe, by `tp_plan="auto"` with gloo, too; some were saved again by a user of
    transformers."""
    held = {"ids": tokens()}
    for family in ("qwen3", "phi"):
        moe, _ = pico_folder(tmp_path / family, family)
        held[family] = moe(tokens()).logits
        AutoModelForCausalLM.from_pretrained(tmp_path / family).save_pretrained(tmp_path / f"{family}-resaved")
    save_file(held, tmp_path / "held.safetensors")
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    modules = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "elsewhere.py"],
        env=environment | modules,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


HOSTILE: dict[str, dict[str, Any]] = {
    "no experts": {"tomoe_num_experts": 0},
    "many experts": {"tomoe_num_experts": 2**40},
    "half an expert": {"tomoe_num_experts": 2.5},
    "experts in words": {"tomoe_num_experts": "four"},
    "too few layers": {"tomoe_expert_sizes": [1]},
    "a number for a list": {"tomoe_union_sizes": 7},
    "negative width": {"tomoe_expert_sizes": [1, -1]},
    "wider than the union": {"tomoe_expert_sizes": [48, 48], "tomoe_union_sizes": [48, 47]},
    "union beyond the dense MLP": {"tomoe_union_sizes": [2**40, 48]},
    "true as a size": {"tomoe_union_sizes": [True, 48]},
    "pairs beyond the head": {"tomoe_rotary_pairs": [2**40, 1]},
    "no queries": {"tomoe_qk_dims": [0, 2]},
    "queries beyond the head": {"tomoe_qk_dims": [8, 9]},
    "values beyond the head": {"tomoe_value_dims": [9, 8]},
    "more values than there are": {"tomoe_value_dims": [8, 7], "tomoe_value_top_k": [8, 8]},
    "router without a size": {"tomoe_value_top_k": [1, 1], "tomoe_value_embedding_size": 0},
    "router of a great size": {"tomoe_value_top_k": [1, 1], "tomoe_value_embedding_size": 2**40},
    "a dense model of great sizes": {"hidden_size": 2**40},
    "no heads": {"num_attention_heads": 0},
    "endless layers": {"num_hidden_layers": 2**40},
    "itself as the family": {"tomoe_dense_type": "tomoe"},
    "no family": {"tomoe_dense_type": ["llama"]},
    "null sizes": {"tomoe_value_dims": None},
    "nested sizes": {"tomoe_value_dims": [[8], [8]]},
}


def test_hostile_configs_are_refused_before_anything_is_allocated() -> None:
    good = {k: v for k, v in pico_moe("llama")[0].config.to_dict().items() if k not in ("model_type", "auto_map")}
    ToMoEConfig(**good)
    tracemalloc.start()
    for name, changes in HOSTILE.items():
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        with pytest.raises(ValueError, match=r"the config (has|names)") as caught:
            ToMoEConfig(**good | changes)
        assert "\n" not in str(caught.value), name
        assert tracemalloc.get_traced_memory()[1] - before < 2**20, name
    tracemalloc.stop()


def test_an_expert_backend_that_is_not_there_is_refused_before_the_first_token() -> None:
    config = pico_moe("llama")[0].config
    config.tomoe_expert_backend = "imagined"
    for auto in (AutoModel, AutoModelForCausalLM):
        with pytest.raises(ValueError, match="expert backend 'imagined'"):
            auto.from_config(config)


def test_what_engines_ask_a_model_class() -> None:
    """They read the source of the file and flags of the class; experts that share rows are no stack of weights to swap."""
    for model in (ToMoEModel, ToMoEForCausalLM):
        assert model.is_backend_compatible()
        assert model._can_set_attn_implementation()
        assert not model._can_set_experts_implementation()
    source = Path(sys.modules[ToMoEModel.__module__].__file__ or "").read_text()
    assert "ALL_ATTENTION_FUNCTIONS.get_interface(" in source
    config = pico_moe("llama")[0].config
    assert config.num_experts_per_tok == 1
    assert config.get_text_config() is config, "nested configs look like multimodal models"
