"""What transformers' own tests ask of any model: attentions, tuples, configs without weights, quantizers, damaged files."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    CompileConfig,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
)
from transformers.quantizers.quantizers_utils import should_convert_module

from conftest import FORMS, make_pico, make_plan, pico_folder, pico_moe, tokens, write_export
from pico_tokenizer import make_tokenizer
from tomoe.errors import UserError
from tomoe.exporting.choice import choose_target
from tomoe.exporting.target import Options
from tomoe.model.hooks import hooked
from tomoe.model.loading import load_dense
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import CACHE, ToMoEConfig, ToMoEForCausalLM, ToMoEModel

pytestmark = pytest.mark.usefixtures("no_grad")


def test_quantizers_leave_the_routers_alone() -> None:
    """They read `_keep_in_fp32_modules`, not the strict list; most ask for a module's name, torchao for its weight's."""
    moe, _ = pico_moe("llama")
    linear = [name for name, module in moe.named_modules() if isinstance(module, torch.nn.Linear)]
    for suffix in ("", ".weight"):
        skipped = {n for n in linear if not should_convert_module(n + suffix, list(moe._keep_in_fp32_modules))}
        assert skipped == {name for name in linear if "router" in name}
        assert any("value_router" in name for name in skipped)


@pytest.mark.parametrize("attention", ["off", "per_token"])
def test_what_stays_in_float32_is_there_and_named_in_one_list(attention: str) -> None:
    """As transformers' own tests demand: a pattern is in one list, and fits a module of this very model."""
    moe, _ = pico_moe("llama", attention)
    strict, others = set(moe._keep_in_fp32_modules_strict), set(moe._keep_in_fp32_modules)
    assert not strict & others
    for name in strict | others:
        assert any(re.search(rf"(^|\.){name}(\.|$)", key) for key in moe.state_dict()), name
    assert any("value_router" in name for name in strict) == (attention == "per_token")


def test_eight_bits_of_bitsandbytes_leave_the_routers_in_float32(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    pico_folder(tmp_path / "moe", "llama")
    config = BitsAndBytesConfig(load_in_8bit=True)
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", quantization_config=config, dtype=torch.bfloat16)
    dtypes = {name: p.dtype for name, p in packed.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if "router." in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if name.endswith("q_proj.weight")} == {torch.int8}


@pytest.mark.parametrize("family", ["qwen2", "phi"])
def test_attentions_are_returned(family: str) -> None:
    (moe, _), ids = pico_moe(family), tokens(2, 7)
    inner = ToMoEModel(moe.config).eval()
    inner.load_state_dict(moe.model.state_dict())
    for model in (moe, inner):
        model.set_attn_implementation("eager")
        out = model(ids, output_attentions=True, output_router_logits=True, output_hidden_states=True)
        assert len(out.attentions) == len(out.router_logits) == moe.config.num_hidden_layers
        assert len(out.hidden_states) == moe.config.num_hidden_layers + 1
        for weights in out.attentions:
            assert weights.shape == (2, moe.config.num_attention_heads, 7, 7)
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
            assert not weights.triu(1).any(), "a token attends to later ones"
    assert moe(ids).attentions is None
    assert not any(m._forward_hooks for layer in moe.model.layers for m in (layer.self_attn, layer.mlp.router))
    moe.config.output_attentions = True
    assert len(moe(ids).attentions) == moe.config.num_hidden_layers


def test_asking_adds_nothing_to_modules_that_another_thread_may_be_running() -> None:
    """Hooks come and go in a dict that a thread in the middle of the module goes through."""
    moe, _ = pico_moe("llama")
    seen: list[int] = []
    parts = [part for layer in moe.model.layers for part in (layer.mlp.router, layer.self_attn)]
    note = lambda *_: seen.append(sum(len(part._forward_hooks) for part in parts))  # noqa: E731
    with hooked([moe.model.layers[0].register_forward_pre_hook(note)]):
        moe(tokens(2, 7), output_attentions=True, output_router_logits=True)
    assert seen == [0]


@pytest.mark.parametrize("part", ["", "mlp.router", "self_attn"])
def test_two_threads_ask_one_model_for_router_logits_and_attentions(part: str) -> None:
    """As a server does: one call runs in another thread while the first is in the middle of a layer, or of what it asks."""
    (moe, _), ids, others = pico_moe("llama"), tokens(2, 7), tokens(1, 5, seed=1)
    moe.set_attn_implementation("eager")
    asked = {"output_attentions": True, "output_router_logits": True}
    alone, started, second = [moe(x, **asked) for x in (ids, others)], [], []
    with ThreadPoolExecutor(1) as pool:

        def meanwhile(*_: object) -> None:
            if not started:
                started.append(True)
                second.append(pool.submit(torch.no_grad()(moe), others, **asked).result())

        with hooked([moe.model.layers[1].get_submodule(part).register_forward_hook(meanwhile)]):
            first = moe(ids, **asked)
    for out, expected in zip([first, *second], alone, strict=True):
        for name in ("router_logits", "attentions"):
            assert len(out[name]) == len(expected[name])
            for ours, theirs in zip(out[name], expected[name], strict=True):
                torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("slides", [True, False])
def test_a_sliding_window_switched_by_the_config_reaches_masks_and_caches(slides: bool) -> None:
    """Qwen2 derives from `use_sliding_window` which layers slide; transformers' caches read the outcome off the config."""
    values = pico_moe("qwen2")[0].config.to_dict() | {
        "use_sliding_window": slides,
        "sliding_window": 3,
        "max_window_layers": 1,
    }
    for name in ("layer_types", "auto_map"):
        values.pop(name)
    torch.manual_seed(0)
    moe = ToMoEForCausalLM(ToMoEConfig(**values)).eval()
    moe.set_attn_implementation("eager")
    ids = tokens(1, 8)
    full, last = moe(ids, output_attentions=True).attentions
    assert moe.config.layer_types == ["full_attention", "sliding_attention" if slides else "full_attention"]
    assert bool(full[..., -1, 0].all())
    assert bool(last[..., -1, :5].any()) != slides
    cache = DynamicCache(config=moe.config)
    for i in range(8):
        stepwise = moe(ids[:, i : i + 1], **{CACHE: cache}).logits
    assert [layer.keys.shape[-2] for layer in cache.layers] == [8, 2 if slides else 8]
    torch.testing.assert_close(stepwise[:, -1], moe(ids).logits[:, -1], atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_is_used_by_its_old_and_its_new_name(name: str) -> None:
    """transformers calls the argument `cache` from 5.24 on; code that is older or newer says either."""
    (moe, _), ids = pico_moe("qwen2", "static"), tokens(1, 8)
    for model, expected in ((moe.model, moe.model(ids).last_hidden_state), (moe, moe(ids).logits)):
        cache = DynamicCache(config=moe.config)
        model(ids[:, :5], **{name: cache})
        rest = model(ids[:, 5:], **{name: cache})
        assert rest[CACHE] is cache
        assert cache.get_seq_length() == 8
        torch.testing.assert_close(rest[0], expected[:, 5:], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_continuous_batching_writes_what_generate_writes() -> None:
    """Its paged cache is laid out by the dense head width, also under sdpa."""
    (moe, _), ids = pico_moe("llama"), tokens(2, 7)
    moe.generation_config.eos_token_id = None  # generate takes it from there; the paged cache does not
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    rows = [moe.generate(row[None], generation_config=settings)[0, 7:].tolist() for row in ids]
    # by default it takes most of the memory that is free
    pages = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32)
    batch = moe.generate_batch(ids.tolist(), settings, pages)
    assert sorted(out.generated_tokens for out in batch.values()) == sorted(rows)


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "form"), [("per_token", "overlapping"), ("off", "fine")])
def test_decoding_with_a_static_cache_is_one_graph(attention: str, form: str) -> None:
    """`generate(cache_implementation="static")` compiles it on a GPU by itself, and here when it is asked; same tokens."""
    (moe, _), ids = pico_moe("llama", attention, form=form), tokens(2, 7)
    settings = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    asked = CompileConfig(fullgraph=True, backend="eager")
    asked._compile_all_devices = True
    torch.compiler.reset()
    counters.clear()
    compiled = moe.generate(ids, cache_implementation="static", compile_config=asked, **settings)
    assert torch.equal(compiled, moe.generate(ids, **settings))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_tuples_for_those_who_want_them() -> None:
    (moe, _), ids = pico_moe("qwen2"), tokens()
    out = moe(ids, labels=ids, use_cache=False)
    values = moe(ids, labels=ids, use_cache=False, return_dict=False)
    assert isinstance(values, tuple)
    assert [torch.equal(a, b) for a, b in zip(values, out.to_tuple(), strict=True)] == [True, True]
    hidden = moe.model(ids, use_cache=False, return_dict=False)
    assert torch.equal(hidden[0], moe.model(ids).last_hidden_state)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["qwen2", "phi"])
def test_what_can_be_trained_gets_a_gradient(family: str, form: str, tmp_path: Path) -> None:
    """DistributedDataParallel, and so `accelerate launch`, ends with an error where one parameter gets none."""
    pico_folder(tmp_path / "moe", family, form=form)
    for config in ({}, {"output_router_logits": True}):
        moe, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", **config), tokens()
        whole = moe(ids).logits
        with torch.enable_grad():
            out = moe.train()(ids, labels=ids)
            out.loss.backward()
        # the chosen expert counts exactly 1, and its probability still has a gradient
        torch.testing.assert_close(out.logits, whole, rtol=0, atol=1e-5)
        trained = {name for name, p in moe.named_parameters() if p.requires_grad}
        assert {name for name, p in moe.named_parameters() if p.grad is not None and p.grad.any()} == trained
        assert {name for name, _ in moe.named_parameters()} - trained == {
            name for name in moe.state_dict() if "value_router" in name
        }


def test_arguments_of_the_base_model_can_be_read() -> None:
    names = list(inspect.signature(type(ToMoEModel(pico_moe("llama")[0].config)).forward).parameters)
    assert names[:7] == [
        "self", "input_ids", "attention_mask", "position_ids", CACHE, "inputs_embeds", "use_cache",
    ]  # fmt: skip
    (moe, _), ids = pico_moe("llama"), tokens()
    assert torch.equal(moe.model(ids, torch.ones_like(ids)).last_hidden_state, moe.model(ids).last_hidden_state)


@pytest.mark.parametrize(("family", "attention"), [("qwen2", "static"), ("qwen3", "per_token"), ("phi", "per_token")])
def test_a_config_alone_makes_a_model_that_can_be_saved(family: str, attention: str, tmp_path: Path) -> None:
    config = pico_moe(family, attention)[0].config
    torch.manual_seed(0)
    moe = AutoModelForCausalLM.from_config(config).eval()
    moe.check_ids()
    used = [layer.mlp.expert_rows.unique().numel() for layer in moe.model.layers]
    assert used == config.tomoe_union_sizes, "rows that no expert uses"
    for name, p in moe.named_parameters():
        assert bool(p.isfinite().all()), name
        if p.dim() == 2:
            assert 0 < float(p.std()) < 0.5, name
    logits = moe(tokens()).logits
    assert bool(logits.isfinite().all())
    assert float(logits.std()) > 0
    moe.save_pretrained(tmp_path / "moe")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "moe")(tokens()).logits, logits)
    torch.manual_seed(0)
    assert torch.equal(AutoModelForCausalLM.from_config(config).eval()(tokens()).logits, logits)


def not_finite(number: float) -> Callable[[Tensor], Tensor]:
    return lambda weight: weight.index_fill(0, torch.tensor(1), number)


DAMAGED = [
    ("layers.1.mlp.expert_neurons", lambda ids: ids + 1, "layer 1 numbers its neurons of an expert"),
    ("layers.1.mlp.expert_neurons", lambda ids: ids - 10**9, "layer 1 numbers its neurons of an expert"),
    ("layers.1.mlp.expert_neurons", lambda ids: ids.flip(1), "layer 1 numbers its neurons of an expert"),
    ("layers.1.mlp.expert_neurons", lambda ids: ids * 0, "layer 1 numbers its neurons of an expert"),
    ("layers.1.self_attn.rotary_ids", lambda ids: ids + 64, "layer 1 numbers its rotary pairs"),
    ("layers.1.self_attn.rotary_ids", lambda ids: ids - 1, "layer 1 numbers its rotary pairs"),
    ("layers.1.mlp.router.weight", not_finite(torch.nan), "numbers that are not finite"),
    ("layers.0.input_layernorm.weight", not_finite(torch.inf), "numbers that are not finite"),
    ("norm.weight", not_finite(torch.nan), "numbers that are not finite"),
    ("layers.0.self_attn.q_norm", not_finite(torch.inf), "numbers that are not finite"),
]


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    """Routers and norms that are not finite, and ids that point outside the matrices or twice at one row."""
    pico_folder(tmp_path / "moe", "qwen3", "static")
    file = tmp_path / "moe" / "model.safetensors"
    stored = load_file(file)
    for name, damage, words in DAMAGED:
        key = f"model.{name}"
        save_file(stored | {key: damage(stored[key]).contiguous()}, file, {"format": "pt"})
        for load in (AutoModelForCausalLM.from_pretrained, AutoModel.from_pretrained):
            with pytest.raises(ValueError, match=words) as refused:
                load(tmp_path / "moe")
            assert "finite" not in words or name in str(refused.value)
    with pytest.raises(UserError, match=words) as sentence:
        load_dense(str(tmp_path / "moe"), torch.float32)
    assert "\n" not in str(sentence.value)


def test_a_tokenizer_s_pointer_to_foreign_code_is_not_passed_on(tmp_path: Path) -> None:
    """The dense model's tokenizer may name code of its own; readers of OUT would be asked to run it."""
    tokenizer = make_tokenizer()
    pointer = {"AutoTokenizer": ["attacker/repo--evil.EvilTokenizer", None]}
    # transformers writes it from either
    tokenizer.init_kwargs["auto_map"] = tokenizer._auto_map = pointer
    dense = make_pico("llama", vocab_size=len(tokenizer))
    plan = make_plan(dense, "static")
    moe = fold(dense, plan)
    save_moe(moe, plan, tokenizer, tmp_path / "moe")
    for name in ("hf", "mixtral"):
        write_export(choose_target(moe, name), moe, tokenizer, tmp_path / name, Options())
    for folder in ("moe", "hf", "mixtral"):
        written = (tmp_path / folder / "tokenizer_config.json").read_text()
        assert "auto_map" not in written
        assert "attacker" not in written
    assert tokenizer.init_kwargs["auto_map"] == pointer, "the caller's tokenizer was changed"
