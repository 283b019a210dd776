"""One or more read-only calls: the answer stands in a document, a table, a file or a device, and nowhere else."""

from __future__ import annotations

from random import Random

from .answers import Phrase
from .generator import Draft
from .task import Task
from .vocabulary import PROJECTS, codes, figure
from .world import Setting


def handbook(rng: Random, keys: list[str]) -> Setting:
    """Documents of which each names one project's access code."""
    numbers = codes(rng, len(keys))
    documents = [
        {
            "id": f"doc-{figure(rng, 1000, 9000)}",
            "title": f"Project {key} handbook",
            "text": f"Project {key} sits in building {rng.randrange(2, 30)}. The access code is {number}.",
        }
        for key, number in zip(keys, numbers, strict=True)
    ]
    return {"corpus": {"documents": documents}}


def access_code(rng: Random, draft: Draft) -> Task:
    keys = rng.sample(PROJECTS, 3)
    setting = handbook(rng, keys)
    document = setting["corpus"]["documents"][0]
    answer = document["text"].rsplit(" ", 1)[1].rstrip(".")
    return draft.task(
        rng,
        user=f"Document {document['id']} has the access code of project {keys[0]}. What is the code?",
        tools=("read_document",),
        calls=[("read_document", {"id": document["id"]})],
        reply=f"The access code is {answer}.",
        answer=Phrase((answer,)),
        expect="ACT",
        setting=setting,
    )


def access_code_sufficient(rng: Random, draft: Draft) -> Task:
    keys = rng.sample(PROJECTS, 3)
    setting = handbook(rng, keys)
    document = setting["corpus"]["documents"][0]
    answer = document["text"].rsplit(" ", 1)[1].rstrip(".")
    return draft.task(
        rng,
        user=f"What is the access code of project {keys[0]}?",
        tools=("search_documents", "read_document"),
        reply=f"The access code is {answer}.",
        answer=Phrase((answer,)),
        expect="ANSWER",
        setting=setting,
        recorded=[("search_documents", {"query": keys[0]}), ("read_document", {"id": document["id"]})],
    )


def access_code_hop(rng: Random, draft: Draft) -> Task:
    keys = rng.sample(PROJECTS, 3)
    setting = handbook(rng, keys)
    document = setting["corpus"]["documents"][0]
    answer = document["text"].rsplit(" ", 1)[1].rstrip(".")
    return draft.task(
        rng,
        user=f"What is the access code of project {keys[0]}?",
        tools=("search_documents", "read_document"),
        calls=[("read_document", {"id": document["id"]})],
        reply=f"The access code is {answer}.",
        answer=Phrase((answer,)),
        expect="ACT",
        setting=setting,
        recorded=[("search_documents", {"query": keys[0]})],
    )
