"""The vLLM plugin against a stand-in: what it registers, and what it does around the generic backend."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from test_remote_code import narrow
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from conftest import make_pico, make_plan, tokens
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.serving import vllm as plugin


class Registry:
    """vLLM's ModelRegistry, as far as a plugin may use it."""

    known: dict[str, str] = {}

    @classmethod
    def get_supported_archs(cls) -> set[str]:
        return set(cls.known)

    @classmethod
    def register_model(cls, architecture: str, model: str) -> None:
        assert architecture not in cls.known, "registered twice"
        cls.known[architecture] = model


class Generic(nn.Module):
    """What the generic backend does to a model: bfloat16 for all parameters, linear layers of its own, one attention."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.config._attn_implementation = "engine"
        self.model = AutoModel.from_config(self.config).to(vllm_config.model_config.dtype)
        for module in list(self.model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    own = nn.Linear(
                        child.in_features, child.out_features, child.bias is not None, dtype=child.weight.dtype
                    )
                    setattr(module, name, own)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        parameters = {f"model.{name}": p for name, p in self.model.named_parameters()}
        loaded = set()
        for name, tensor in weights:
            if not name.startswith("lm_head"):
                parameters[name].data.copy_(tensor)
                loaded.add(name)
        return loaded


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Registry]]:
    """A package of that name."""
    package = ModuleType("vllm")
    package.ModelRegistry = Registry
    backend = ModuleType("vllm.model_executor.models.transformers")
    backend.TransformersForCausalLM = Generic
    for name in ("vllm.model_executor", "vllm.model_executor.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    monkeypatch.setattr(Registry, "known", {})
    monkeypatch.setitem(AttentionInterface._global_mapping, "engine", narrow([]))
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "engine", sdpa_mask)
    yield Registry
    sys.modules.pop("tomoe.serving.vllm_model", None)


def test_the_entry_point_registers_once_and_by_name(vllm: type[Registry]) -> None:
    declared = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    module, _, name = declared["project"]["entry-points"]["vllm.general_plugins"]["tomoe"].partition(":")
    register = getattr(import_module(module), name)
    for _ in range(2):
        register()
    (architecture,) = vllm.known
    moe = fold(make_pico("llama"), make_plan(make_pico("llama"), "none"))
    assert architecture == type(moe).__name__ == plugin.ARCHITECTURE
    module, _, name = vllm.known[architecture].partition(":")
    assert "tomoe.serving.vllm_model" not in sys.modules, "the class was imported with the registration"
    assert issubclass(getattr(import_module(module), name), Generic)


def served(moe: ToMoEForCausalLM, dtype: torch.dtype) -> Any:
    from tomoe.serving.vllm_model import ToMoEForCausalLM as Served

    config = type(moe.config)(**{k: v for k, v in moe.config.to_dict().items() if k not in ("model_type", "auto_map")})
    return Served(vllm_config=SimpleNamespace(model_config=SimpleNamespace(hf_config=config, dtype=dtype)))


@pytest.mark.parametrize("family", ["llama3", "qwen3", "phi"])
def test_the_backend_with_our_changes_computes_the_same(vllm: type[Registry], family: str) -> None:
    """In float32; the attention function is the stand-in's own, and is handed one width for all."""
    moe = fold(make_pico(family), make_plan(make_pico(family), "dynamic"))
    model = served(moe, torch.float32)
    loaded = model.load_weights(iter(moe.state_dict().items()))
    assert {name for name in moe.state_dict() if not name.startswith("lm_head")} == loaded
    with torch.no_grad():
        meant = moe.model(tokens()).last_hidden_state
        torch.testing.assert_close(model.model(tokens()).last_hidden_state, meant, rtol=0, atol=1e-5)


def test_routers_stay_float32_and_numbers_stay_whole(vllm: type[Registry]) -> None:
    moe = fold(make_pico("llama"), make_plan(make_pico("llama"), "dynamic"))
    model = served(moe, torch.bfloat16)
    model.load_weights(iter(moe.state_dict().items()))
    for name, parameter in model.model.named_parameters():
        assert parameter.dtype == (torch.float32 if "router." in name else torch.bfloat16), name
    for name, buffer in moe.model.named_buffers():
        if name.endswith(("expert_neurons", "rotary_ids")):
            assert torch.equal(model.model.get_buffer(name), buffer)
    broken = {n: t + 999 if n.endswith("expert_neurons") else t for n, t in moe.state_dict().items()}
    with pytest.raises(ValueError, match="neurons of an expert"):
        model.load_weights(iter(broken.items()))
