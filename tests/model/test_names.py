"""What a model's name may mean."""

from __future__ import annotations

from pathlib import Path

import pytest

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
