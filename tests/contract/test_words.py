"""Words that pages, help, messages, public docstrings and names do not use, and what to write instead. Comments may."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from typer.main import get_command

from tomoe.cli import app
from tomoe.methods import registry

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tomoe"
# the log tells what was tried in the words of its time
PAGES = [
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "log.md"),
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "run.sh")),
]
COMPARED = "longer|more|less|better|worse|slower|faster|larger|smaller|need"
AMOUNT = r"(?:m?s|seconds|tokens(?:/s)?|experts|numbers|bytes|steps|weights?|choices?|\d)"
# a pattern, what it finds, what to write
WORDS = (
    (r"\d %", "about 60 % active", "60%"),
    (r"\bverbs?\b", "every verb has help", "command"),
    (rf"(?<![Tt]here )\b(?:is|are|was|were) no (?!{COMPARED})", "x is no GGUF file", "is not a"),
    (r"\bsome (?:\d|0\.)", "it takes some 0.6 GB", "about 0.6"),
    (r"\b(?:by|to) (?:inputs|experts)\b", "converted by inputs", "to sparse inputs, to an MoE"),
    (
        r"\b(?:house|floor|shelf|cupboard|door|stranger|dial|knot|carrier)s?\b",
        "a floor for it",
        "the term of the field",
    ),
    (r"\bthe cut\b|\bbears? the\b", "MLPs bear the cut", "the reduction"),
    (r"\bflatter(?:s|ed)?\b", "its numbers flatter it", "optimistic"),
    (r"\b(?:stays?|kept|keeps?|leaves?|left|attention) (?:\w+ )?whole\b", "attention stays whole", "dense"),
    (r"\blet (?:it|the \w+) write\b|\bmodels? writes?\b", "let the MoE write", "generate"),
    (r"\bmend(?:s|ed)?\b", "mend the rows", "fix"),
    (r"\bfor want of\b", "for want of a template", "without"),
    (r"\blearn(?:s|ed)? nothing\b|\bnothing (?:was|is) learned\b", "0 learns nothing", "skips training"),
    (r"\bfrom \d+ on\b", "a number from 0 on", "0 or greater"),
    (rf"\b{AMOUNT} a (?:token|step|second|row|weight|layer|tensor)\b(?! uses)", "50 ms a token", "per token"),
    (r"\bPer cent\b", "Per cent of all", "percent"),
    (r"\bToMoE (?:cannot|starts)\b", "ToMoE starts from x", "tomoe (ToMoE is the paper)"),
    (r"\bhas? no place for\b", "x has no place for y", "does not support"),
    (r"\bone's own\b", "a method of one's own", "your own"),
)
# what docstrings may not use either
PROSE = (
    (r"\bof ours\b", "a file of ours", "that tomoe wrote"),
    (r"\bone upon another\b", "matrices, one upon another", "stacked"),
    (r"\bfrom which on\b", "the number from which on it fits", "the smallest number that"),
    (r"\bsuits?\b|\bsettle[sd]?\b", "the first that suits", "fits, supports, decides"),
    (r"\bin vain\b", "loaded in vain", "for nothing"),
)
# two patterns would also find "leads to experts" and "which experts a token needs"
DOCSTRINGS = (*(words for words in WORDS if words[2] not in ("to sparse inputs, to an MoE", "per token")), *PROSE)
# words of which no name in the code is made
PRIVATE = {
    "carrier",
    "dial",
    "dialed",
    "evened",
    "knot",
    "settle",
    "settled",
    "stranger",
    "suit",
    "trouble",
    "verb",
    "way",
}
# code, and where a link leads
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`|\]\([^)\n]*\)|\{%.*?%\}|\{\{.*?\}\}", re.MULTILINE | re.DOTALL)


def wrong(text: str, words: Sequence[tuple[str, str, str]] = WORDS) -> list[str]:
    """The words of a text that it should not use, with those around them, and what to write."""
    text = CODE.sub("", text)
    return [
        f"{' '.join(text[max(hit.start() - 40, 0) : hit.end() + 20].split())!r}: {better}"
        for pattern, _, better in words
        for hit in re.finditer(pattern, text)
    ]


def messages(module: Path) -> Iterator[str]:
    """The strings of a module that may be sentences: no docstrings, no texts of fields, no single words."""
    tree = ast.parse(module.read_text("utf-8"))
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            texts |= {id(part) for part in node.values}
            yield "".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.value


def docstrings(module: Path) -> Iterator[tuple[str, str]]:
    """Names of a module and of its public classes and functions with their docstrings, each in one line."""
    for node in ast.walk(ast.parse(module.read_text("utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            name = getattr(node, "name", module.stem)
            if not name.startswith("_") and (text := ast.get_docstring(node)):
                yield f"{module.relative_to(SOURCE)}: {name}", " ".join(text.split())


def names(module: Path) -> Iterator[str]:
    """Names that a module binds or defines, and its own."""
    yield module.stem
    for node in ast.walk(ast.parse(module.read_text("utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


@pytest.mark.parametrize(("example", "better"), [words[1:] for words in (*WORDS, *PROSE)])
def test_each_wrong_word_is_found(example: str, better: str) -> None:
    assert better in {hit.rsplit(": ", 1)[1] for hit in wrong(example, (*WORDS, *PROSE))}
    assert not wrong(f"`{example}` and [a link]({example.replace(' ', '-')})")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_use_the_terms_of_the_field(page: Path) -> None:
    assert not wrong(page.read_text("utf-8"))


def test_help_uses_the_terms_of_the_field() -> None:
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        texts = [command.help, *(getattr(parameter, "help", None) for parameter in command.params)]
        assert not [hit for text in texts if text for hit in wrong(text)], name


def test_methods_are_described_in_the_terms_of_the_field() -> None:
    for name in registry.names():
        assert not wrong(registry.find(name).summary()), name


def test_messages_use_the_terms_of_the_field() -> None:
    found = {
        module.relative_to(SOURCE).as_posix(): hits
        for module in sorted(SOURCE.rglob("*.py"))
        if (hits := [hit for text in messages(module) if text.count(" ") > 1 for hit in wrong(text)])
    }
    templates = sorted(SOURCE.rglob("*.j2"))
    found |= {template.name: hits for template in templates if (hits := wrong(template.read_text("utf-8")))}
    assert not found


def test_docstrings_use_the_terms_of_the_field() -> None:
    found = [text for module in sorted(SOURCE.rglob("*.py")) for text in docstrings(module)]
    assert len(found) > 1000
    assert not [(name, hits) for name, text in found if (hits := wrong(text, DOCSTRINGS))]


def test_names_are_terms_of_the_field() -> None:
    used = {
        (module.relative_to(SOURCE).as_posix(), name)
        for module in SOURCE.rglob("*.py")
        for name in names(module)
        if PRIVATE & {word.lower().removesuffix("s") for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", name)}
    }
    assert not used
