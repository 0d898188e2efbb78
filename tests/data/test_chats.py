"""Chats become the text that the model was trained on: by its own template, in every command that reads text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from pico_files import CommandLine, fine, refused, write_pico, write_text
from pico_tokenizer import make_tokenizer
from tomoe.data.corpus import Corpus, pack
from tomoe.data.sources import documents
from tomoe.errors import UserError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if tools %}{{ tools | length }} tools{% endif %}"
)
ASKED, SAID = {"role": "user", "content": "the sea?"}, {"role": "assistant", "content": "a boat"}
SHARED = [{"from": "human", "value": "the sea?"}, {"from": "gpt", "value": "a boat"}]
TUNED = [f"--set=data.{key}" for key in ("seq_len=16", "tokens=512", "evaluation_tokens=64", "calibration_tokens=64")]
CHAT = "<bos>[user]the sea?[assistant]a boat"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    made = make_tokenizer()
    made.chat_template = TEMPLATE
    return made


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": [ASKED, SAID]}, CHAT),
        ({"conversations": SHARED, "id": 3}, CHAT),
        ({"conversations": [ASKED, SAID]}, CHAT),
        ({"prompt": [ASKED], "completion": [SAID]}, CHAT),
        ({"prompt": "the sea?", "completion": [SAID]}, CHAT),
        ({"prompt": "the sea", "completion": " and a boat"}, "the sea and a boat"),
        ({"messages": [ASKED, SAID], "tools": [{"name": "look"}]}, f"{CHAT}1 tools"),
        ({"messages": [ASKED, SAID], "system": ""}, CHAT),
        ({"text": "plain", "messages": [ASKED]}, "plain"),
        ({"instruction": "why", "context": "here", "response": "because"}, "why\nhere\nbecause"),
        ({"messages": [ASKED, SAID | {"tool_calls": None}]}, CHAT),
    ],
)
def test_rows_that_hold_chats(
    row: dict[str, Any], text: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert list(documents(write_rows(tmp_path / "a.jsonl", row), tokenizer=tokenizer)) == [text]


def test_a_chat_in_a_named_column_and_in_parquet(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    import pyarrow
    from pyarrow import parquet

    row = {"dialog": [ASKED, SAID]}
    assert list(documents(write_rows(tmp_path / "a.jsonl", row), "train", "dialog", tokenizer)) == [CHAT]
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": [ASKED, SAID]}]), tmp_path / "b.parquet")
    assert list(documents(str(tmp_path / "b.parquet"), tokenizer=tokenizer)) == [CHAT]


def test_a_token_that_opens_every_text_is_there_once(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(opens_with_bos=True)
    tokenizer.chat_template = TEMPLATE
    source = write_rows(tmp_path / "a.jsonl", {"messages": [ASKED, SAID]})
    (text,) = documents(source, tokenizer=tokenizer)
    assert pack(tokenizer, [text], 64).input_ids[0].tolist().count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"messages": [{"role": "system", "content": "be kind"}, ASKED]},
            r"refuses a chat of .*\(no system here\).* system, user",
        ),
        ({"conversations": SHARED, "system": "be kind"}, r"begins with the roles system, user, assistant"),
        ({"messages": "[]"}, "no column 'text', its columns are 'messages'"),
        ({"messages": [{"speaker": "me"}]}, "no column 'text'"),
        ({"prompt": "alone"}, "no column 'text'"),
        ({"prompt": 3, "completion": 4}, "no column 'text'"),
        ({"text": [1, 2]}, "holds a list, but it should hold text, or a list of messages"),
        ({"text": {"role": "user"}}, "holds a dict"),
    ],
)
def test_rows_that_hold_no_chat(
    row: dict[str, Any], words: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(UserError, match=words):
        list(documents(write_rows(tmp_path / "a.jsonl", row), tokenizer=tokenizer))


def test_files_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfthe sea")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a boat"}\n')
    assert list(documents(str(tmp_path))) == ["the sea", "a boat"]


def test_every_command_reads_chats(tomoe: CommandLine, tmp_path: Path) -> None:
    dense = write_pico(tmp_path / "dense")
    lines = [line for line in write_text(tmp_path / "text.txt").read_text().split("\n") if line]
    rows = [{"messages": [{"role": "user", "content": line}, SAID]} for line in lines]
    chats = write_rows(tmp_path / "chats.jsonl", *rows)
    options = ["--data", chats, *fine(), "--active", "0.6", "--repair", "none"]
    refused(tomoe("carve", dense, "-o", tmp_path / "moe", *options), "this model's tokenizer has no chat template")
    refused(tomoe("evaluate", dense, "--text", chats), "this model's tokenizer has no chat template")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(dense)
    done = tomoe("carve", dense, "-o", tmp_path / "moe", *options)
    assert done.code == 0, done.err
    read = Corpus.load(tmp_path / "moe" / "run" / "corpus.safetensors")
    ids = torch.cat([read.train.input_ids, read.evaluation.input_ids]).flatten().tolist()
    assert "[user]" in tokenizer.decode(ids)
    for command in (
        ["evaluate", dense, tmp_path / "moe", "--text", chats, "--tokens", "256"],
        ["finetune", tmp_path / "moe", "-o", tmp_path / "tuned", "--data", chats, "--steps", "1", *TUNED],
    ):
        done = tomoe(*command)
        assert done.code == 0, done.err
