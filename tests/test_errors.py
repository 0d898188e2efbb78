"""Errors: what is wrong, and settings that help, which Python and the command line call by names of their own."""

from __future__ import annotations

import ast
import re

import pytest

from conftest import SOURCE
from tomoe.errors import Advice, UserError, enough_memory, is_out_of_memory

OPTION = re.compile(r"(?<![\w-])--[a-z]")
# an option of another program
ELSEWHERE = "llama-gguf-split"


def test_an_error_is_one_sentence_with_its_ways_out() -> None:
    error = UserError("out holds a model", "choose another folder", Advice("force", "to replace it"))
    assert str(error) == "out holds a model; choose another folder, or use force=True to replace it"
    assert error.told(lambda advice: f"--{advice.name}").endswith("or use --force to replace it")
    # a command without that option does not name it
    assert error.told(lambda _: None) == "out holds a model; choose another folder"
    assert str(UserError("out holds a model")) == "out holds a model"
    assert (error.wrong, len(error.advice)) == ("out holds a model", 2)


def test_out_of_memory_is_an_error_with_advice() -> None:
    for error in (
        MemoryError("no"),
        RuntimeError("can't allocate memory: 8 bytes"),
        RuntimeError("CUDA out of memory"),
    ):
        assert is_out_of_memory(error)
        words = r"^memory ran out \(.*\); use offload=True to read layers$"
        with pytest.raises(UserError, match=words), enough_memory(Advice("offload", "to read layers")):
            raise error
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), enough_memory():
        raise RuntimeError("shapes differ")


def test_messages_below_the_command_line_name_no_option_of_it() -> None:
    """Whoever calls Python has no options; `Advice` gives a setting the name that it has for the reader."""
    for path in SOURCE.rglob("*.py"):
        if "cli" in path.relative_to(SOURCE).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("UserError", "ValueError", "warnings.warn", "RowError", "Advice"):
                parts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                said = [part for part in parts if isinstance(part, str) and OPTION.search(part)]
                assert not [part for part in said if ELSEWHERE not in part], (path.name, said)
