"""Importance matrices: how much each column of a matrix matters to its output, on text of the conversion.

The importance of a column is the sum over tokens of the square of its input, as llama.cpp's llama-imatrix measures it. Its
quantizers weight the rounding error of the column by it.

Letters: D hidden size, F neurons of a layer, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe.data.corpus import Corpus
from tomoe.exporting.agreement import record
from tomoe.model.hooks import hooked, input_of
from tomoe.moe.checkpoint import load_moe
from tomoe.moe.modeling_tomoe import Router, ToMoEForCausalLM, ToMoEMLP, route
from tomoe.progress import ProgressCallback, stage_callback

CORPUS = Path("run") / "corpus.safetensors"


@dataclass
class Importance:
    """squares: by name of a parameter of the converted model, the sum of squares of each of its inputs, [D] or [F]; tokens:
    how many they were summed over."""

    squares: dict[str, Float[Tensor, " n"]] = field(default_factory=dict)
    tokens: int = 0

    def add(self, name: str, x: Float[Tensor, "*batch n"]) -> None:
        """Add the inputs of a parameter."""
        found = x.detach().float().square().flatten(0, -2).sum(0).cpu()
        self.squares[name] = self.squares[name] + found if name in self.squares else found

    def as_weights(self, moe: ToMoEForCausalLM) -> ToMoEForCausalLM:
        """A copy of the model whose matrices hold, in each column, its importance instead of numbers: what an export gathers,
        reorders and pads of them is the importance of what it writes. It takes no memory of matrices."""
        copied: dict[int, Any] = {id(t): t for t in chain(moe.parameters(), moe.buffers())}
        for name, p in moe.named_parameters():
            if name in self.squares:
                squares = self.squares[name]
                # of the matrices of an MLP each row is a neuron
                view = squares[:, None] if name.endswith("down_proj") else squares[None]
                copied[id(p)] = nn.Parameter(view.expand(p.shape), requires_grad=False)
        return deepcopy(moe, copied)


def of_folder(
    folder: Path, tokens: int, device: str, offload: bool, on_progress: ProgressCallback
) -> Importance | None:
    """Measure a converted model in float32 on at most `tokens` tokens of the text that it was made from; None without text."""
    if not (folder / CORPUS).is_file():
        return None
    text = Corpus.load(folder / CORPUS).fitting_text(tokens)
    moe = load_moe(folder, "float32", device, offload)
    return measured(moe, text.input_ids, text.mask, stage_callback(on_progress, "measuring importance"))


def measured(moe: ToMoEForCausalLM, ids: Tensor, mask: Tensor, on_progress: Callable[[int, int], None]) -> Importance:
    """The importance on sequences, whose mask is true for real tokens."""
    importance = Importance(tokens=int(mask.sum()))
    with hooked(_watching(moe, importance)):
        states = record(moe, ids.to(moe.device), mask.to(moe.device), on_progress).states
    head = moe.get_output_embeddings()
    (name,) = [name for name, module in moe.named_modules() if module is head]
    for state in states:
        importance.add(f"{name}.weight", state)
    return importance


def _watching(moe: ToMoEForCausalLM, importance: Importance) -> Iterator[RemovableHandle]:
    for name, module in moe.named_modules():
        if isinstance(module, ToMoEMLP):
            yield module.register_forward_pre_hook(_mlp_hook(name, importance), with_kwargs=True)
        elif isinstance(module, nn.Linear) and not isinstance(module, Router):

            def inputs(_: nn.Module, args: Any, name: str = name) -> None:
                importance.add(f"{name}.weight", args[0])

            yield module.register_forward_pre_hook(inputs)


def _mlp_hook(name: str, importance: Importance) -> Callable[[Any, Any, Any], None]:
    def hook(mlp: ToMoEMLP, args: Any, kwargs: Any) -> None:
        x_TD = input_of(args, kwargs).flatten(0, -2)
        # all tokens count for gate and up, so that an expert that few tokens choose has the importance of many
        for part in ("gate_proj", "up_proj"):
            importance.add(f"{name}.{part}", x_TD)
        expert_ids_Tk, _ = route(mlp.router(x_TD), mlp.top_k)
        used_TF = torch.zeros(len(x_TD), len(mlp.up_proj), dtype=torch.bool, device=x_TD.device)
        used_TF[:, : mlp.shared_size] = True
        used_TF.scatter_(1, mlp.expert_rows.long()[expert_ids_Tk].flatten(1), True)
        importance.add(f"{name}.down_proj", mlp.activations(x_TD, slice(None)) * used_TF)

    return hook
