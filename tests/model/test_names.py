"""What the name of a model means, here and in another folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from pico_files import INPUTS, CommandLine, refused, write_pico, write_text
from tomoe.errors import UserError
from tomoe.model.names import located, resolve
from tomoe.recipe.conversion import Recipe


@pytest.mark.slow
def test_a_relative_folder_is_never_a_name_on_the_hub(
    tomoe: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in another folder, models/dense would be somebody else's repository."""
    dense = write_pico(tmp_path / "work" / "models" / "dense")
    (tmp_path / "work" / "texts").mkdir()
    write_text(tmp_path / "work" / "texts" / "own.txt")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    sources = ("--data", "texts/own.txt", "--active", "0.6")
    done = tomoe("convert", "models/dense", "-o", "out", *sources, *INPUTS)
    assert done.code == 0, done.err
    assert tomoe("convert", "models/dense", "-o", "out", *sources, *INPUTS, "--resume").code == 0

    def card() -> dict[str, object]:
        return dict(yaml.safe_load((tmp_path / "work" / "out" / "README.md").read_text().split("---")[1]))

    first = card()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert tomoe("report", tmp_path / "work" / "out").code == 0
    assert card() == first
    assert "base_model" not in first
    assert "datasets" not in first
    done = tomoe("evaluate", tmp_path / "work" / "out", "--active", "0.5", "--tokens", "100")
    assert done.code == 0, done.err
    recorded = json.loads((tmp_path / "work" / "out" / "recipe.json").read_text())
    assert recorded["model"] == str(dense)


def test_what_is_no_file_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known names win over folders, as they do when a model is loaded; and what nobody has set stays unset."""
    for folder in ("smollm2-135m", "dense", "wikitext"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2-135m", "owner/name", ""):
        assert located(Recipe(model=name)) == Recipe(model=name)
    kept = located(Recipe(model="dense", data={"sources": ["wikitext", "owner/texts"]}))
    assert (kept.model, kept.data.sources) == (str(tmp_path / "dense"), ("wikitext", "owner/texts"))
    assert "sources" not in located(Recipe(model="dense")).data.model_fields_set


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "tokenizer.json", "model.safetensors.index.json", "generation_config.json"],
)
def test_links_that_lead_nowhere_are_named(tomoe: CommandLine, model: Path, name: str) -> None:
    """As a cache of the hub leaves them whose blobs were moved or deleted."""
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to("../../blobs/0123abcd")
    refused(
        tomoe("doctor", model), f"{name} is a link that leads to no file (../../blobs/0123abcd)", "get the model again"
    )


def test_a_gguf_file_may_be_such_a_link(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to("blobs/0123abcd")
    with pytest.raises(UserError, match="is a link that leads to no file"):
        resolve(str(tmp_path / "model.gguf"))
