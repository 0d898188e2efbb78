"""What a model's name may mean, and what starts without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import SOURCE
from tomoe.errors import UserError
from tomoe.model.names import resolve


def test_folders_files_and_hub_ids(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"")
    assert resolve(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    with pytest.raises(UserError, match=r"did you mean .*a\.gguf\?"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path
    with pytest.raises(UserError, match="is a file"):
        resolve(str(tmp_path / "config.json"))
    assert resolve("owner/name") == "owner/name"
    for nothing in (str(tmp_path / "none"), "none", "some/none.gguf", "./none"):
        with pytest.raises(UserError, match=r"no folder or \.gguf file.*smollm2-135m"):
            resolve(nothing)
    with pytest.raises(UserError, match=r"did you mean smollm2-135m\?"):
        resolve("smollm-135m")


def test_names_recipes_and_sources_are_understood_without_torch() -> None:
    """The command line refuses typing mistakes at once. The package itself is a stub here: it may import what it likes."""
    check = f"""
import sys, types
tomoe = sys.modules["tomoe"] = types.ModuleType("tomoe")
tomoe.__path__ = [{str(SOURCE)!r}]
from tomoe import distributed, errors, files, progress
from tomoe.data import sources
from tomoe.model import catalog, names, shape
from tomoe.recipe import base, conversion, finetuning
conversion.Recipe.load("paper", ["active=0.5"])
with distributed.process_group():
    assert (distributed.rank(), distributed.world_size()) == (0, 1)
    assert distributed.on_rank_zero(lambda: True)
heavy = {{"torch", "transformers", "huggingface_hub", "datasets"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", check], check=True)
