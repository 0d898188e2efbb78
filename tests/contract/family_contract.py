"""A tiny random model of any causal language model that transformers knows, and the contract that every conversion keeps.

`benchmarks/families.py` holds all types to it, the suite one for each kind of structure.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from margins import CLEAR, assert_same, clear_prompts, clear_tokens, margins, meaning
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from conftest import SEED, randomise
from pico_files import FINE, FINE_EXPERTS, SMALL
from pico_tokenizer import make_tokenizer
from tomoe.budget import decoder_params, mlp_params, router_params
from tomoe.methods.inputs import group_norms, plan_inputs
from tomoe.model.hooks import hooked
from tomoe.model.projections import groups_of
from tomoe.model.structure import shape_of
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import ToMoEConfig
from tomoe.pipeline.convert import convert
from tomoe.plans.inputs import Counts
from tomoe.plans.manifest import REPAIRED
from tomoe.plans.masking import masked, planned_masks
from tomoe.plans.repair.plan import repair_plan
from tomoe.recipe.conversion import Recipe, RepairSection

VOCABULARY = 259
# Whatever of these a config has. Windows and original contexts are short, so that 100 tokens reach beyond them.
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, original_max_position_embeddings=64,
    sliding_window=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, ffn_dim=512, n_inner=512, ffn_hidden_size=512,
    rotary_dim=8, is_decoder=True, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
    linear_value_head_dim=16, hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCABULARY,
    num_kv_shared_layers=0, mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=1, mamba_d_state=16, mamba_chunk_size=16,
    kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, qk_head_dim=16, v_head_dim=16,
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_group=1,
    topk_group=1, first_k_dense_replace=1, decoder_layers=4, decoder_ffn_dim=512, decoder_attention_heads=4,
    encoder_layers=4, encoder_ffn_dim=512, encoder_attention_heads=4, d_model=64,
)  # fmt: skip
TEXT = {name: SIZES[name] for name in (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "sliding_window", "pad_token_id", "bos_token_id", "eos_token_id",
)}  # fmt: skip
VISION = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, depth=1, num_attention_heads=2, num_heads=2, out_hidden_size=64,
    image_size=32, patch_size=16, head_dim=16,
)  # fmt: skip
# What single types need beside them: three lines at most each, or they are not tried.
OWN: dict[str, dict[str, Any]] = {
    "gemma3": dict(text_config=TEXT, vision_config=VISION),
    "gemma4": dict(
        text_config=TEXT | dict(vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=16),
        vision_config=VISION, audio_config=None,
    ),
    "got_ocr2": dict(
        text_config=TEXT, image_token_index=258,
        vision_config=VISION | dict(output_channels=16, mlp_dim=64, window_size=2, global_attn_indexes=[0]),
    ),
    "git": dict(vision_config=VISION),
    "qwen3_5": dict(text_config=TEXT | dict(linear_num_key_heads=2, linear_num_value_heads=4), vision_config=VISION),
    # as the published ones, which have two or three dense layers of all
    "beam": dict(mlp_layer_types=["dense", "sparse", "sparse", "sparse"]),
    "flint": dict(mlp_only_layers=[0]),
    "bamba": dict(attn_layer_indices=[1, 3]),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, num_experts=1, mamba_dt_rank=4),
    "minicpm3": dict(num_key_value_heads=4),
    "youtu": dict(num_key_value_heads=4),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]], window_size=16, num_layers=4),
    "granitemoehybrid": dict(num_local_experts=0, shared_intermediate_size=512, layer_types=["mamba", "attention"] * 2),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"], attention_window_size=16, lru_width=64),
    "bloom": dict(n_layer=4, n_head=4),
    "mpt": dict(d_model=64, n_heads=4, n_layers=4, max_seq_len=512),
    "xlstm": dict(ffn_proj_factor=8.0, qk_dim_factor=1.0, num_heads=4),
    "opt": dict(word_embed_proj_dim=64),
    "xglm": dict(d_model=64, num_layers=4, attention_heads=4, ffn_dim=512),
    "nemotron_h": dict(layers_block_type=["mamba", "mlp", "attention", "mlp"], mamba_num_heads=4, mamba_head_dim=32, n_groups=1),
    "gemma3n_text": dict(intermediate_size=[512] * 4, laurel_rank=8),
    # as the published ones, which multiply what the gate and the whole MLP give
    "falcon_h1": dict(mamba_d_ssm=128, mamba_expand=2, mlp_multipliers=[0.75, 0.5]),
}  # fmt: skip
# How much larger than at the start the weights are: 8, or less where recurrences make rounding errors large.
WEIGHTS = {"recurrent_gemma": 1.5, "qwen3_5_text": 4.0}
# Recurrences that make rounding errors of float32 larger than what is to be found (3e-5 of the largest logit, at whatever size
# of weights): these are compared in float64.
IN_FLOAT64 = {"xlstm"}
SMALLER_THAN = 20_000_000
NEW = 4  # tokens that are generated
# the classes of `without_tomoe`, by their code
REMOTE_CLASSES: dict[bytes, Any] = {}


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The config of a tiny model, of its text tower if it has several. Raises whatever the family's own class raises."""
    kind = CONFIG_MAPPING[model_type]
    known = set(kind.__dataclass_fields__) | set(getattr(kind, "attribute_map", {}))
    return kind(**{k: v for k, v in SIZES.items() if k in known} | OWN.get(model_type, {}) | changes)


def tiny_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """A random model with large weights, the same at every call. Raises ValueError if its config leaves it large."""
    return _random(AutoModelForCausalLM.from_config, tiny_config(model_type, **changes))


def _random(make: Callable[[PreTrainedConfig], PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"), no_init_weights():
        size = sum(p.numel() for p in make(copy.deepcopy(config)).parameters())
    if size > SMALLER_THAN:
        raise ValueError(f"a generic tiny config leaves it {size / 1e6:,.0f} million parameters")
    torch.manual_seed(SEED)
    return randomise(make(config), WEIGHTS.get(config.model_type, 8.0))


def write_tiny(model_type: str, folder: Path, **changes: Any) -> PreTrainedModel:
    """Save a tiny model with a tokenizer of bytes, and return it."""
    model = tiny_model(model_type, **changes)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return model


def public_class(model_type: str) -> str:
    """The class that public checkpoints of a type name: whatever reads more than text, or reads it with an encoder first."""
    for names in (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    ):
        if name := names.get(model_type):
            return str(name)
    raise KeyError(model_type)


def write_public(name: str, folder: Path) -> None:
    """Save a tiny model of a class with a tokenizer. Raises whatever the class raises, ValueError as `tiny_model`."""
    kind = getattr(transformers, name)
    _random(kind, tiny_config(kind.config_class.model_type)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def recipe_for(dense: PreTrainedModel, folder: Path, text: Path) -> Recipe:
    """Fine-grained experts that leave a token half of the neurons, not repaired."""
    shape = shape_of(dense)
    saved = 0.5 * mlp_params(shape, shape.mlp_size) - router_params(shape, FINE_EXPERTS)
    active = 1 - shape.num_layers * saved / decoder_params(shape)
    keys = SMALL | {"train.steps": "0", "model": str(folder), "data.sources": str(text), "active": f"{active:.4f}"}
    return Recipe.load(None, [*(f"{key}={value}" for key, value in keys.items()), *FINE, "repair.mode=none"])


def without_tomoe(folder: Path, **options: Any) -> PreTrainedModel:
    """The model by the code in its folder, as where tomoe is not installed; the same code is imported once."""
    code = (folder / "modeling_tomoe.py").read_bytes()
    if code not in REMOTE_CLASSES:
        REMOTE_CLASSES[code] = get_class_from_dynamic_module("modeling_tomoe.ToMoEForCausalLM", str(folder))
        # The copy has put itself in the place of the installed code.
        AutoConfig.register("tomoe", ToMoEConfig, exist_ok=True)
    return REMOTE_CLASSES[code].from_pretrained(folder, **options)


def tokens(rows: int, length: int, seed: int = 7) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def greedy(model: Any, ids: Tensor) -> Tensor:
    """A prompt and NEW tokens behind it, with a cache."""
    made: Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False
    )
    return made


def without_a_cache(model: Any, written: Tensor, end: list[int]) -> bool:
    """Whether each of the NEW tokens is what one pass over all before it predicts."""
    logits = model(written[:, :-1], use_cache=False).logits[:, -NEW:]
    logits[..., end] = logits.min()
    return torch.equal(logits.argmax(-1), written[:, -NEW:])


def left_padded(row: Tensor, full: Tensor) -> dict[str, Tensor]:
    """A row behind padding, and a full row below it."""
    length = len(full)
    padded = torch.nn.functional.pad(row, (length - len(row), 0))
    mask = torch.stack([torch.arange(length) >= length - len(row), torch.ones(length, dtype=torch.bool)]).long()
    return {"input_ids": torch.stack([padded, full]), "attention_mask": mask}


def clear_rows(folded: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A row alone and the same behind padding, without a near tie in either."""
    for seed in range(7, 100):
        row, batch = tokens(1, 12, seed)[0], left_padded(tokens(1, 12, seed)[0], tokens(1, 30, seed)[0])
        alone = {"input_ids": row[None], "attention_mask": torch.ones(1, len(row), dtype=torch.long)}
        if min(margins(folded, **alone).min(), margins(folded, **batch).min()) > CLEAR:
            return alone, batch
    raise AssertionError("no rows with wide margins")


@torch.no_grad()
def hold_inputs(dense: PreTrainedModel, folder: Path) -> set[str]:
    """The same where tokens choose inputs, half-way to the fewest: masked == folded == reloaded without tomoe, and whole prompts
    and all inputs == dense. In float64, in which no rounding turns a choice. Returns the kinds of projections that choose.
    """
    dense, ids = dense.double(), tokens(2, 40)
    everything = torch.ones_like(ids, dtype=torch.bool)
    plan = plan_inputs(dense, shape_of(dense), ids, everything, active=1.0)
    plan = replace(plan, active=(1 + plan.path[-1].active) / 2)
    out = folder / "inputs"
    folded = fold(dense, plan)
    save_moe(folded, plan, None, out)
    alone, whole = without_tomoe(out, dtype=torch.float64), dense(ids).logits
    with inputs_masked(dense, plan.inputs()):
        expected = dense(ids).logits
    assert (expected - whole).abs().max() > 1e-3, "the masks changed nothing"
    for model, what in ((folded, "folded"), (alone, "reloaded without tomoe")):
        assert_same(model(ids).logits, expected, what)
    for setting in ({"tomoe_prompts": "whole"}, {"tomoe_active": 1.0}):
        assert_same(without_tomoe(out, dtype=torch.float64, **setting)(ids).logits, whole, str(setting))
    return set(plan.names)


@torch.no_grad()
def hold(dense: PreTrainedModel, folder: Path, text: Path) -> dict[str, Any]:
    """Convert the model that `folder / "dense"` holds and check the contract; what is worth a table comes back.

    Masked == folded == reloaded without tomoe; all experts == dense; with a cache, the same text as without,
    and beside padding the same logits as alone, wherever the dense model keeps that itself; a repair lowers the error.
    """
    out = folder / "moe"
    plan = convert(recipe_for(dense, folder / "dense", text), out)
    dtype = torch.float64 if dense.config.model_type in IN_FLOAT64 else torch.float32
    dense = dense.to(dtype)
    folded, moe = fold(dense, plan), without_tomoe(out, dtype=dtype)
    # beyond windows and original contexts
    ids = clear_tokens(folded, lambda seed: tokens(2, 100, seed))
    expected = meaning(dense, plan, ids)
    full = dense(ids).logits
    assert (expected - full).abs().max() > 1e-3, "the masks changed nothing"
    assert_same(folded(ids).logits, expected, "folded")
    assert_same(moe(ids).logits, expected, "reloaded without tomoe")
    whole = without_tomoe(out, dtype=dtype, **{moe.config.top_k_key: plan.num_experts})
    assert_same(whole(ids).logits, full, "all experts")

    end = dense.generation_config.eos_token_id
    but = [] if end is None else [end] if isinstance(end, int) else end
    prompt = clear_prompts(folded, lambda seed: tokens(1, 20, seed), NEW, but)[0][None]
    written = greedy(moe, prompt)
    if without_a_cache(dense, greedy(dense, prompt), but):
        assert without_a_cache(moe, written, but), "a cache changes the text"
    with masked(dense, planned_masks(plan)):
        assert torch.equal(written, greedy(dense, prompt)), "another text than under the masks"
    alone, batch = clear_rows(folded)
    with masked(dense, planned_masks(plan)):
        beside, single = dense(**batch).logits[0, -1], dense(**alone).logits[0, -1]
        assert_same(moe(**batch).logits[0, -1], beside, "beside padding")
    if (beside - single).abs().max() <= 1e-5 * max(1.0, float(single.abs().max())):
        assert_same(moe(**batch).logits[0, -1], moe(**alone).logits[0, -1], "a padded row against the row alone")

    everything = torch.ones_like(ids, dtype=torch.bool)
    repair = repair_plan(plan, dense.float(), ids, everything, RepairSection(mode="full")).notes[REPAIRED]
    assert repair["error_after"] < repair["error_before"], repair
    return {"layers": plan.shape.num_layers, "active": plan.active_fraction(), "repair": repair}


def mask_of(x_TD: Tensor, norms_D: Tensor, count: int) -> tuple[Tensor, float]:
    """The `count` inputs of each token with the largest |x_i| norms_i, equal ones by position; and by how much, relative to it,
    the last one is above the next, wherever that is least.
    """
    # x_i alone would not do: what an input adds to the output is x_i times a column of the matrix
    scores_TD, order_TD = (x_TD.detach().float().abs() * norms_D.detach()).sort(dim=-1, descending=True, stable=True)
    margin = float((1 - scores_TD[..., count] / scores_TD[..., count - 1]).min())
    return torch.zeros_like(x_TD, dtype=torch.bool).scatter(-1, order_TD[..., :count], True), margin


@contextmanager
def inputs_masked(model: PreTrainedModel, counts: Counts) -> Iterator[list[float]]:
    """Inside the block every projection of a dense model uses so many of its inputs for a token; gives the margins of all."""
    margins = [1.0]

    def hooks() -> Iterator[RemovableHandle]:
        for i, layer in enumerate(groups_of(model)):
            for kind, group in layer.items():
                count = counts[kind][i]
                if count == group.width:
                    continue
                norms = group_norms(group)

                def choose(_: object, args: tuple[Tensor], norms: Tensor = norms, count: int = count) -> tuple[Tensor]:
                    mask, margin = mask_of(args[0], norms, count)
                    margins.append(margin)
                    return (args[0] * mask,)

                for module in group.modules:
                    yield module.register_forward_pre_hook(choose)

    with hooked(list(hooks())):
        yield margins
