"""Rows as plain data: they read back, and a file that anyone wrote ends in rows or in a sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pico_files import rows_from
from tomoe.errors import UserError
from tomoe.evaluation.results import ExpertUsage, Measurement, Row, TaskScore, read_rows, to_json
from tomoe.evaluation.tables import escape_markdown, to_markdown

FACTS = {
    "total_params": 1000,
    "active_params": 900,
    "block_params": 800,
    "active_block_params": 700,
    "active_share": 0.7,
    "bytes_on_disk": 2_000_000,
    "max_positions": 64,
}


def some_rows() -> list[Row]:
    fine = ExpertUsage([[0.25, 0.75], [0.5, 0.5]], 4096, [1, 2])
    score = TaskScore("piqa", 5, "acc", 0.6, 0.01, 100, 0, {"acc": 0.6}, "1.0", "lm-eval 0.4")
    measured = [
        Measurement(
            2.0, 0.1, 0.7, 100, 10, 16, None, kl, same, name, "a text", "0" * 64, "float32", "cpu", 0, {"torch": "2"}
        )
        for name, kl, same in (("dense", None, None), ("moe", 0.1, 0.9))
    ]
    return [
        Row(measured[0], FACTS, None, None, (score,)),
        Row(measured[1], FACTS, fine, 0.5, (score,)),
    ]


def test_rows_read_back() -> None:
    rows = some_rows()
    assert rows_from(to_json(rows)) == rows


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"format": "tomoe-comparison-2", "rows": NaN}', "is not JSON"),
        (b'{"format": "tomoe-comparison-2", "rows": {}}', "evaluation.json is damaged"),
        (b'{"format": "tomoe-comparison-2"}', "evaluation.json is damaged"),
        (b"[]", "holds a list"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "evaluation.json").write_bytes(content)
    with pytest.raises(UserError, match=reason) as raised:
        read_rows(tmp_path)
    assert str(tmp_path / "evaluation.json") in str(raised.value)


def test_what_is_not_there_or_of_another_version_is_no_row(tmp_path: Path) -> None:
    assert read_rows(tmp_path) == []
    (tmp_path / "evaluation.json").write_text('{"format": "tomoe-comparison-1", "rows": []}')
    assert read_rows(tmp_path) == []


def test_markdown_takes_no_markup_from_names() -> None:
    evil = "<img src=x onerror=alert(1)> [link](http://x) `code` a|b\n# title & *bold*"
    assert escape_markdown(evil) == (
        "&lt;img src=x onerror=alert(1)&gt; \\[link\\](http://x) \\`code\\` a\\|b # title &amp; \\*bold\\*"
    )
    assert escape_markdown("SmolLM2_135M (v2), 70 %") == "SmolLM2_135M (v2), 70 %"
    rows = some_rows()
    written = to_markdown([Row(Measurement(2.0, None, 0.7, 1, 1, 8, model=evil, data=evil), FACTS), rows[1]])
    assert "<img" not in written
    assert "\n#" not in written


def test_the_experts_of_a_token_are_given_for_every_layer() -> None:
    usage = ExpertUsage([[0.25, 0.5, 0.25, 0.0], [0.25] * 4], 100, [2, 4])
    row = replace(some_rows()[1], usage=usage)
    assert rows_from(to_json([row])) == [row]
    broken = to_json([row]).replace('"per_token": [\n          2,', '"per_token": [')
    assert broken != to_json([row])
    with pytest.raises(UserError, match="not given for every layer"):
        rows_from(broken)
