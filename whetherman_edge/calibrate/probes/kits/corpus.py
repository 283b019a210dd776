"""A small collection of documents with search. Its facts are drawn by the generators, so nobody can know them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from whetherman_edge.calibrate.probe import Tool
from whetherman_edge.calibrate.probes.world import Kit, ToolFault, schema

_HITS_MAX: Final = 3
_STOP: Final = frozenset(
    "the a an of in on for to and or is are was what which who how when where does do by at with".split()
)


class Corpus(Kit):
    """search_documents, read_document. Setting: "documents": [{"id", "title", "text"}]."""

    name: ClassVar[str] = "corpus"
    tools: ClassVar[tuple[Tool, ...]] = (
        Tool(
            "search_documents",
            "Search the company's internal documents; returns ids and titles of the best matches, three a page.",
            schema({"query": "str: a few words"}, {"page": "int: from 1"}),
        ),
        Tool(
            "read_document",
            "Return the full text of one internal document.",
            schema({"id": "str: id of the document, as search_documents returns it"}),
        ),
    )

    def __init__(self, setting: Mapping[str, Any]) -> None:
        super().__init__(setting)
        self._documents: list[dict[str, str]] = list(setting.get("documents", ()))

    def search_documents(self, query: str, page: int = 1) -> str:
        words = _words(query)
        scored = []
        for order, document in enumerate(self._documents):
            title, text = _words(document["title"]), _words(document["text"])
            if score := 3 * len(words & title) + len(words & text):
                scored.append((-score, order, document))
        hits = [document for _, _, document in sorted(scored, key=lambda item: item[:2])]
        if not hits:
            return "no documents match"
        first = (max(page, 1) - 1) * _HITS_MAX
        shown = [f"{document['id']}: {document['title']}" for document in hits[first : first + _HITS_MAX]]
        if not shown:
            return f"no more results; there are {len(hits)}"
        more = len(hits) - first - len(shown)
        return "\n".join(shown + ([f"({more} more: page {max(page, 1) + 1})"] if more > 0 else []))

    def read_document(self, id: str) -> str:  # noqa: A002 - the argument's name in the tool
        wanted = id.strip().lower()
        for document in self._documents:
            if wanted in (document["id"].lower(), document["title"].lower()):
                return f"{document['title']}\n{document['text']}"
        raise ToolFault(f"no document {id[:40]!r}; use an id from search_documents")


def _words(text: str) -> set[str]:
    """Content words, without a plural's s."""
    return {word.rstrip("s") or word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in _STOP}
