"""Reads an HTML page of ours."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "input", "br", "img"}


class Reader(HTMLParser):
    """Checks nesting; collects elements with their attributes, and text (but for scripts) in pieces."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.data: list[str] = []
        self.feed(text)
        assert not self.open
        self.tags = [tag for tag, _ in self.elements]
        self.text = "".join(self.data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["script"]:
            self.data.append(data)

    def values(self, name: str) -> list[str]:
        """The values of an attribute, in order."""
        return [attributes[name] for _, attributes in self.elements if name in attributes]

    def token_classes(self) -> list[str]:
        """The classes of tokens that have an expert."""
        return [attributes["class"] for _, attributes in self.elements if attributes.get("data-e")]
