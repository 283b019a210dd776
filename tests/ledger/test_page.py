"""The page's script: what a refresh may touch. In a real browser: ``tests/isolated/page_in_browser.py``."""

from __future__ import annotations

import re
from importlib import resources


def script() -> str:
    return (resources.files("whetherman_edge.ledger") / "page/page.js").read_text("utf-8")


def test_only_one_function_takes_nodes_away():
    """Focus, selection and open lists are lost with their node, so whatever renews the page goes through ``settle``."""
    whole = re.compile(r"^(?:async )?function (\w+)\(.*?^}", re.MULTILINE | re.DOTALL)
    functions = {found[1]: found[0] for found in whole.finditer(script())}
    takes_away = re.compile(r"replaceChildren|replaceWith|\.remove\(\)|removeChild|innerHTML|\.options\.length =")
    assert [name for name, text in functions.items() if takes_away.search(text)] == ["settle"]
    users = {name for name, text in functions.items() if "settle(" in text}
    assert users == {"settle", "alike", "cards", "table", "days", "choices", "showRows"}
