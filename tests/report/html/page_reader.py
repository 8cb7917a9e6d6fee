"""Reads a page as a browser's parser would be asked to, only strictly: a tree, or an AssertionError."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "br", "input"}
BLOCKS = {
    "div", "p", "ul", "dl", "table", "figure", "section", "details", "aside", "pre", "h1", "h2", "h3", "h4",
    "header", "footer", "main", "nav", "fieldset",
}  # fmt: skip
# Elements that may stand only in these, or hold only these.
ONLY_IN = {
    "li": {"ul"}, "dt": {"dl"}, "dd": {"dl"}, "tr": {"thead", "tbody"}, "td": {"tr"}, "th": {"tr"},
    "thead": {"table"}, "tbody": {"table"}, "summary": {"details"}, "figcaption": {"figure"},
    "legend": {"fieldset"}, "tspan": {"text"},
}  # fmt: skip
PHRASING = {
    "p",
    "span",
    "bdi",
    "b",
    "h1",
    "h2",
    "h3",
    "h4",
    "summary",
    "dt",
    "code",
    "pre",
    "a",
    "figcaption",
}


@dataclass
class Node:
    tag: str
    attributes: dict[str, str | None]
    parent: "Node | None"
    children: list["Node | str"] = field(default_factory=list)

    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text() for c in self.children)

    def all(self) -> Iterator["Node"]:
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.all()

    def up(self) -> Iterator["Node"]:
        """The node and what it lies in."""
        yield self
        if self.parent is not None:
            yield from self.parent.up()

    def classes(self) -> list[str]:
        return (self.attributes.get("class") or "").split()

    def find(self, tag: str) -> list["Node"]:
        return [n for n in self.all() if n.tag == tag]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("", {}, None)
        self.at = self.root

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} has an attribute twice: {names}"
        allowed = ONLY_IN.get(tag)
        assert allowed is None or self.at.tag in allowed, f"{tag} in {self.at.tag}"
        if tag in BLOCKS:
            assert self.at.tag not in PHRASING, f"{tag} in {self.at.tag}"
        # HTML names of SVG elements come in lower case from the parser; a browser puts them right.
        node = Node(tag, dict(attrs), self.at)
        self.at.children.append(node)
        if tag not in VOID:
            self.at = node

    def handle_endtag(self, tag):
        assert self.at.tag == tag, f"</{tag}> closes {self.at.tag}"
        assert self.at.parent is not None
        self.at = self.at.parent

    def handle_data(self, data):
        self.at.children.append(data)

    def handle_decl(self, decl):
        assert decl == "doctype html"

    def handle_comment(self, data):
        raise AssertionError(f"comment: {data}")

    handle_pi = unknown_decl = handle_comment


def read(page: str) -> Node:
    """The tree under <html>; fails on tags that do not nest, or stand where HTML does not allow them."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert reader.at is reader.root, f"{reader.at.tag} is not closed"
    (html,) = (c for c in reader.root.children if isinstance(c, Node))
    ids = [n.attributes["id"] for n in html.all() if "id" in n.attributes]
    assert len(ids) == len(set(ids)), "an id stands twice"
    return html


def look_up(data: Any, path: str) -> Any:
    """The field of a decoded RUN.json at a path; deployments by their name."""
    for key in path.split("."):
        if isinstance(data, list) and not key.isdigit():
            data = next(entry for entry in data if entry["name"] == key)
        else:
            data = None if data is None else data[int(key) if isinstance(data, list) else key]
    return data
