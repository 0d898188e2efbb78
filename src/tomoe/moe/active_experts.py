"""`load`, and the number of fine-grained experts or inputs per token, chosen at run time as a fraction of active parameters."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tomoe.budget import active_fraction, router_params
from tomoe.errors import UserError
from tomoe.model.loading import load_config, load_model, load_tokenizer
from tomoe.model.shape import ModelShape
from tomoe.model.structure import shape_of
from tomoe.moe.kernels import prepare
from tomoe.moe.modeling_tomoe import PROMPTS, ToMoEConfig


@dataclass(frozen=True)
class Setting:
    """A config key with a value, and what it makes active."""

    key: str
    value: float
    active_fraction: float  # of the decoder parameters, for each token; with all experts above 1, by the routers
    words: str

    def __str__(self) -> str:
        return f"{self.words}: {self.active_fraction:.3f} active"


@dataclass(frozen=True)
class RuntimeSettings:
    """All settings that a model with fine-grained experts or sparse inputs can run at."""

    config: ToMoEConfig

    @cached_property
    def shape(self) -> ModelShape:
        """Sizes of the dense model."""
        return dense_shape(self.config)

    def setting(self, experts_per_token: int) -> Setting:
        """Return the setting with this many experts per token (1 to all) in the layer with the most of them."""
        config = copy(self.config)
        setattr(config, config.top_k_key, experts_per_token)
        active = active_fraction(self.shape, active_widths(config, self.shape), routers_of(config, self.shape))
        most = "" if len({config.layer_top_k(i) for i in range(self.shape.num_layers)}) == 1 else "up to "
        words = f"{most}{experts_per_token} of {config.tomoe_num_experts} experts"
        return Setting(config.top_k_key, experts_per_token, active, words)

    def nearest(self, active: float) -> Setting:
        """Return the setting with the active fraction nearest to `active`; for 1, that of all experts. Raises UserError if
        `active` is too small or above 1."""
        if self.config.chooses_inputs:
            least = self.config.tomoe_input_path[-1]["active"]
            if not least <= active <= 1:
                raise UserError(
                    f"active is {active}, but the inputs of this model were divided for {least:.3f} to 1; choose one of these"
                )
            return Setting("tomoe_active", active, active, "the largest inputs of every projection")
        if not 0 < active <= 1:
            raise UserError(f"active is {active}, but it should be above 0 and at most 1")
        if active == 1:
            return self.setting(self.config.tomoe_num_experts)
        settings = [self.setting(k) for k in range(1, self.config.tomoe_num_experts + 1)]
        return min(settings, key=lambda setting: abs(setting.active_fraction - active))


def runtime_settings(name: str) -> RuntimeSettings:
    """Return the settings that a model's config allows. Raises UserError without fine-grained experts or sparse inputs."""
    config = load_config(name)
    if isinstance(config, ToMoEConfig) and (config.chooses_inputs or is_fine(config)):
        return RuntimeSettings(config)
    raise UserError(_why_not(name, config))


def is_fine(config: Any) -> bool:
    """Whether this is the config of a converted model with fine-grained experts."""
    return getattr(config, "tomoe_expert_form", None) == "fine"


def _why_not(name: str, config: PreTrainedConfig) -> str:
    if isinstance(config, ToMoEConfig) and config.tomoe_num_experts == 1:
        return (
            f"{name} uses the same neurons for every token, so its plan alone decides what is active; method = carve makes a "
            "model that can use more or fewer"
        )
    if isinstance(config, ToMoEConfig):
        return (
            f"{name} has overlapping experts, of which every token uses one, so its plan alone decides what is active; "
            "experts.form = fine makes a model that can use more or fewer"
        )
    if getattr(config, "num_experts_per_tok", None) is not None:
        return (
            f"{name} is a model of the type {config.model_type}, which `tomoe convert` did not write; the converted folder that "
            "it was exported from can use more or fewer experts"
        )
    return (
        f"{name} is a dense model: every token uses all of its parameters; experts.form = fine converts it to one that "
        "can use more or fewer experts"
    )


def dense_shape(config: ToMoEConfig) -> ModelShape:
    """Return the sizes of the dense model that a converted one came from."""
    with torch.device("meta"):
        dense = AutoModelForCausalLM.from_config(config.dense_config())
    return shape_of(dense)


def active_widths(config: ToMoEConfig, shape: ModelShape) -> list[tuple[int, int, int]]:
    """Return (MLP width, Q/K dims, V/O dims per token) of every layer, with the config's current number of experts."""
    widths = [
        shared + config.layer_top_k(i) * size
        for i, (shared, size) in enumerate(zip(config.tomoe_shared_sizes, config.tomoe_expert_sizes, strict=True))
    ]
    if not config.prunes_attention:
        return [(width, shape.head_dim, shape.head_dim) for width in widths]
    return list(zip(widths, config.tomoe_qk_dims, config.tomoe_value_top_k, strict=True))


def routers_of(config: ToMoEConfig, shape: ModelShape) -> int:
    """Count the weights of the routers of all layers."""
    total = shape.num_layers * router_params(shape, config.tomoe_num_experts)
    if config.prunes_attention:
        of_values = router_params(shape, 0, config.tomoe_value_embedding_size)
        pairs = zip(config.tomoe_value_top_k, config.tomoe_value_dims, strict=True)
        total += of_values * sum(used < kept for used, kept in pairs)
    return total


def stored_widths(config: ToMoEConfig, shape: ModelShape) -> list[tuple[int, int, int]]:
    """Return (neurons, Q/K dims, V/O dims) that every layer stores."""
    if not config.prunes_attention:
        return [(size, shape.head_dim, shape.head_dim) for size in config.tomoe_union_sizes]
    return list(zip(config.tomoe_union_sizes, config.tomoe_qk_dims, config.tomoe_value_dims, strict=True))


def apply_setting_(model: PreTrainedModel, setting: Setting) -> None:
    """Set a loaded model to run at a setting from now on."""
    setattr(model.config, setting.key, setting.value)


def load(
    name: str | Path,
    dtype: str | torch.dtype = "bfloat16",
    device: str = "auto",
    active: float | None = None,
    prompts: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a dense model (hub id, folder, .gguf file, known name) or a converted folder, with its tokenizer, ready to decode
    (`tomoe.prepare`).

    `active`: let tokens use as many fine-grained experts as make this fraction of the decoder parameters active, or the
    nearest number of them; or so many inputs. `prompts`, of a model whose tokens choose inputs: `chosen`, all tokens do, or
    `whole`, prompts and batches of more than four tokens use all inputs; None: what its config says. Raises UserError if there
    is no such model, or none that can.
    """
    setting = None if active is None else runtime_settings(str(name)).nearest(active)
    if prompts is not None:
        check_prompts(str(name), prompts)
    model = load_model(str(name), dtype, device)
    if setting is not None:
        apply_setting_(model, setting)
    if prompts is not None:
        model.config.tomoe_prompts = prompts
    prepare(model)
    return model, load_tokenizer(str(name))


def check_prompts(name: str, prompts: str) -> None:
    """Raise UserError unless the tokens of this model choose inputs and `prompts` is a known value."""
    config = load_config(name)
    if not (isinstance(config, ToMoEConfig) and config.chooses_inputs):
        raise UserError(f"prompts is {prompts!r}, but the tokens of {name} choose no inputs; leave it out")
    if prompts not in PROMPTS:
        raise UserError(f"prompts is {prompts!r}; choose chosen or whole")
