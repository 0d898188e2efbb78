"""Chats become the text that the model was trained on: by its own template, in every command that reads text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from pico_files import CARVED, CommandLine, fine, refused, write_pico, write_text
from pico_tokenizer import make_tokenizer
from tomoe.data.corpus import Corpus, pack
from tomoe.data.sources import documents
from tomoe.errors import Note, UserError

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
        ({"messages": [ASKED, SAID | {"tool_calls": []}]}, CHAT),
        ({"messages": json.dumps([ASKED, SAID])}, CHAT),
        ({"conversation": json.dumps(SHARED)}, CHAT),
        ({"messages": {"role": ["user", "assistant"], "content": ["the sea?", "a boat"]}}, CHAT),
        ({"messages": [ASKED | {"content": [{"type": "text", "text": "the sea?"}]}, SAID]}, CHAT),
        ({"messages": [ASKED | {"content": ["the", {"type": "input_text", "text": "sea?"}]}]}, "<bos>[user]the\nsea?"),
        ({"messages": [ASKED, SAID | {"content": None}]}, "<bos>[user]the sea?[assistant]"),
        ({"messages": [ASKED, SAID | {"content": 12}]}, "<bos>[user]the sea?[assistant]12"),
        ({"messages": [ASKED, {"role": "tool", "content": {"a": None}}]}, '<bos>[user]the sea?[tool]{"a": null}'),
        ({"messages": [ASKED, SAID], "tools": json.dumps([{"name": "look"}])}, f"{CHAT}1 tools"),
        ({"messages": [ASKED, SAID], "tools": ""}, CHAT),
        ({"prompt": json.dumps([ASKED]), "completion": "a boat"}, CHAT),
        ({"prompt": "1 + 1 = ", "completion": 2}, "1 + 1 = 2"),
        ({"text": "", "messages": [ASKED, SAID]}, CHAT),
        ({"text": None, "conversations": SHARED, "messages": []}, CHAT),
        ({"text": 3}, "3"),
        ({"instruction": "add", "input": float("nan"), "output": 2.5}, "add\n2.5"),
        ({"instruction": "is it?", "output": False}, "is it?\nfalse"),
        ({"conversation": "a transcript"}, "a transcript"),
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


CALLS = (
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }} "
    "{{ WRITTEN }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    "call",
    [
        {"function": {"name": "look", "arguments": {"at": "sea", "how": None}}},
        {"type": "function", "function": {"name": "look", "arguments": '{"at": "sea", "how": null}'}},
        {"name": "look", "arguments": {"at": "sea", "how": None}},
    ],
)
@pytest.mark.parametrize(
    "written", ["call.function.arguments | tojson", "'' ~ call.function.arguments", "'' + call.function.arguments"]
)
def test_arguments_of_calls_are_what_the_template_takes(call: dict[str, Any], written: str, tmp_path: Path) -> None:
    """As an object, or as text, also where the template would take an object and write it as Python does."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CALLS.replace("WRITTEN", written)
    shared = {"from": "function_call", "value": json.dumps(call.get("function", call))}
    for said in (
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "tool_calls": json.dumps([call])},
        shared,
    ):
        key, asked = ("conversations", SHARED[0]) if said is shared else ("messages", ASKED)
        source = write_rows(tmp_path / "a.jsonl", {key: [asked, said]})
        assert list(documents(source, tokenizer=tokenizer)) == ['the sea?look {"at": "sea", "how": null}']


def test_a_template_that_takes_parts_gets_parts(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}"
    assert list(documents(write_rows(tmp_path / "a.jsonl", {"messages": [ASKED, SAID]}), tokenizer=tokenizer)) == [
        "the sea?;a boat;"
    ]


def test_a_system_message_is_there_once(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    row = {"messages": [{"role": "system", "content": "be kind"}, ASKED], "system": "be kind"}
    (text,) = documents(write_rows(tmp_path / "a.jsonl", row), tokenizer=tokenizer)
    assert text == "[system]be kind[user]the sea?"


def test_parquet_fills_in_no_nulls(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    import pyarrow
    from pyarrow import parquet

    tokenizer.chat_template = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    rows = [{"messages": [ASKED, SAID], "tools": [{"name": key, "parameters": {key: 1}}]} for key in ("a", "b")]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    plain = documents(write_rows(tmp_path / "a.jsonl", *rows), tokenizer=tokenizer)
    assert list(documents(str(tmp_path / "a.parquet"), tokenizer=tokenizer)) == list(plain)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": []}, "row 2 holds nothing in its column 'messages'"),
        ({"messages": None}, "row 2 holds nothing in its column 'messages'"),
        ({"messages": "[]"}, "row 2 holds a list or object as JSON text in its column 'messages'"),
        ({"text": None}, "row 2 holds nothing in its column 'text'"),
        ({"id": 3}, "row 2 has no column 'text', its columns are 'id'"),
        ({"messages": [ASKED | {"content": [{"type": "image", "url": "x"}]}]}, "of user with a part of the kind image"),
        ({"messages": [ASKED], "tools": "look"}, "tools that are neither a list nor JSON text of one"),
        ({"messages": [{"role": "system", "content": "be kind"}]}, r"template refuses \(no system here\)"),
        ({"instruction": "list", "output": ["a", "b"]}, "row 2 holds a list in its column 'output'"),
    ],
)
def test_rows_are_judged_one_by_one(
    row: dict[str, Any], words: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    source = write_rows(tmp_path / "a.jsonl", {"messages": [ASKED, SAID]}, row, {"text": "plain"}, row)
    with pytest.warns(Note, match=f"2 of 4 rows of .*a.jsonl are left out; the first: .*{words}"):
        assert list(documents(source, tokenizer=tokenizer)) == [CHAT, "plain"]


def test_a_source_without_text_is_not_read_to_its_end(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", *[{"body": "x"}] * 1000, {"text": "late"})
    with pytest.raises(UserError, match="none of the 1,000 rows"):
        list(documents(source))
    source = write_rows(tmp_path / "a.jsonl", *[{"body": "x"}] * 999, {"text": "late"})
    with pytest.warns(Note, match="999 of 1,000 rows"):
        assert list(documents(source)) == ["late"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"messages": [{"role": "system", "content": "be kind"}, ASKED]},
            r"template refuses \(no system here\).* system, user",
        ),
        ({"conversations": SHARED, "system": "be kind"}, r"begins with the roles system, user, assistant"),
        ({"messages": "[]"}, "a list or object as JSON text in its column 'messages'"),
        ({"messages": [{"speaker": "me"}]}, "holds a list in its column 'messages'"),
        ({"prompt": "alone"}, "no column 'text', its columns are 'prompt'.*data.text_column"),
        ({"prompt": ["x"], "completion": None}, "no text or chat in its columns 'prompt' and 'completion'"),
        ({"text": [1, 2]}, "holds a list in its column 'text', but it should hold text, or a list of messages"),
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


@pytest.mark.usefixtures("always_better")
def test_every_command_reads_chats(tomoe: CommandLine, tmp_path: Path) -> None:
    dense = write_pico(tmp_path / "dense")
    lines = [line for line in write_text(tmp_path / "text.txt").read_text().split("\n") if line]
    rows = [{"messages": [{"role": "user", "content": line}, SAID]} for line in lines]
    chats = write_rows(tmp_path / "chats.jsonl", *rows)
    options = ["--data", chats, *fine(), *CARVED, "--active", "0.6", "--repair", "none"]
    refused(tomoe("convert", dense, "-o", tmp_path / "moe", *options), "this model's tokenizer has no chat template")
    refused(tomoe("evaluate", dense, "--text", chats), "this model's tokenizer has no chat template")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(dense)
    done = tomoe("convert", dense, "-o", tmp_path / "moe", *options)
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
