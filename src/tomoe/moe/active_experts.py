"""How many fine-grained experts, or inputs, a token uses, chosen when a model runs, as a fraction of active parameters."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tomoe.budget import active_params, decoder_params
from tomoe.errors import UserError
from tomoe.model.loading import load_config
from tomoe.model.shape import ModelShape
from tomoe.model.structure import shape_of
from tomoe.moe.modeling_tomoe import ToMoEConfig


@dataclass(frozen=True)
class ExpertSetting:
    """So many experts for each token, and what that makes active."""

    experts_per_token: int  # the largest number of experts of a token in any layer, `num_experts_per_tok` of the config
    num_experts: int
    active_fraction: float  # of the decoder parameters, for each token
    equal: bool  # whether all layers use so many

    def __str__(self) -> str:
        most = "" if self.equal else "up to "
        return f"{most}{self.experts_per_token} of {self.num_experts} experts: {self.active_fraction:.3f} active"


@dataclass(frozen=True)
class InputSetting:
    """So much of the path from all inputs to few."""

    active_fraction: float  # of the decoder parameters, for each token

    def __str__(self) -> str:
        return f"the largest inputs of every projection: {self.active_fraction:.3f} active"


Setting = ExpertSetting | InputSetting


@dataclass(frozen=True)
class ActiveInputs:
    """All settings that a model can run at whose tokens choose inputs."""

    least: float  # the smallest fraction of the decoder parameters

    def nearest(self, active: float) -> InputSetting:
        """Return the setting. Raises UserError unless it is between the smallest fraction and 1."""
        if not self.least <= active <= 1:
            raise UserError(
                f"active is {active}, but the inputs of this model were divided for {self.least:.3f} to 1; choose one of these"
            )
        return InputSetting(active)


@dataclass(frozen=True)
class ActiveExperts:
    """All settings that a model with fine-grained experts can run at."""

    config: ToMoEConfig
    shape: ModelShape  # sizes of the dense model

    def setting(self, experts_per_token: int) -> ExpertSetting:
        """Return what so many experts a token (1 to all) make active."""
        config = copy(self.config)
        setattr(config, config.top_k_key, experts_per_token)
        active = active_params(self.shape, active_widths(config, self.shape)) / decoder_params(self.shape)
        top_ks = {config.layer_top_k(i) for i in range(self.shape.num_layers)}
        return ExpertSetting(experts_per_token, config.tomoe_num_experts, active, len(top_ks) == 1)

    def nearest(self, active: float) -> ExpertSetting:
        """Return the setting whose active fraction is nearest to `active`. Raises UserError unless that is in (0, 1]."""
        if not 0 < active <= 1:
            raise UserError(f"active is {active}, but it should be above 0 and at most 1")
        settings = [self.setting(k) for k in range(1, self.config.tomoe_num_experts + 1)]
        return min(settings, key=lambda setting: abs(setting.active_fraction - active))


def dial_of(name: str) -> ActiveExperts | ActiveInputs:
    """Read from a model's config what it can run at. Raises UserError if it has neither fine-grained experts nor inputs."""
    config = load_config(name)
    if isinstance(config, ToMoEConfig) and config.chooses_inputs:
        return ActiveInputs(config.tomoe_input_path[-1]["active"])
    if not is_fine(config):
        raise UserError(_why_not(name, config))
    assert isinstance(config, ToMoEConfig)
    return ActiveExperts(config, dense_shape(config))


def is_fine(config: Any) -> bool:
    """Whether a config is that of a converted model with fine-grained experts."""
    return getattr(config, "tomoe_expert_form", None) == "fine"


def _why_not(name: str, config: PreTrainedConfig) -> str:
    if isinstance(config, ToMoEConfig):
        return (
            f"{name} has overlapping experts, of which every token uses one, so its plan alone decides what is active; "
            "experts.form = fine makes a model that can use more or fewer"
        )
    if getattr(config, "num_experts_per_tok", None) is not None:
        return (
            f"{name} is no folder that `tomoe convert` wrote but a model of the type {config.model_type}; the converted "
            "folder that it was exported from can use more or fewer experts"
        )
    return (
        f"{name} is a dense model: all of its parameters work on every token; experts.form = fine converts it to one that "
        "can use more or fewer experts"
    )


def dense_shape(config: ToMoEConfig) -> ModelShape:
    """Return the sizes of the dense model that a converted one came from."""
    with torch.device("meta"):
        dense = AutoModelForCausalLM.from_config(config.dense_config())
    return shape_of(dense)


def active_widths(config: ToMoEConfig, shape: ModelShape) -> list[tuple[int, int, int]]:
    """Return (MLP width, Q/K dims, V/O dims of a token) of every layer, with as many experts as the config says now."""
    widths = [
        shared + config.layer_top_k(i) * size
        for i, (shared, size) in enumerate(zip(config.tomoe_shared_sizes, config.tomoe_expert_sizes, strict=True))
    ]
    if not config.prunes_attention:
        return [(width, shape.head_dim, shape.head_dim) for width in widths]
    return list(zip(widths, config.tomoe_qk_dims, config.tomoe_value_top_k, strict=True))


def stored_widths(config: ToMoEConfig, shape: ModelShape) -> list[tuple[int, int, int]]:
    """Return (neurons, Q/K dims, V/O dims) that every layer stores."""
    if not config.prunes_attention:
        return [(size, shape.head_dim, shape.head_dim) for size in config.tomoe_union_sizes]
    return list(zip(config.tomoe_union_sizes, config.tomoe_qk_dims, config.tomoe_value_dims, strict=True))


def use_(model: PreTrainedModel, setting: Setting) -> None:
    """Let a loaded model run at a setting from now on."""
    config: Any = model.config
    if isinstance(setting, InputSetting):
        assert config.chooses_inputs, "only a model of the form inputs can use other inputs"
        config.tomoe_active = setting.active_fraction
        return
    assert is_fine(config), "only fine-grained experts can be used in other numbers"
    setattr(config, config.top_k_key, setting.experts_per_token)
