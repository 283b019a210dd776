"""Edits on the original bytes: the same result as editing the decoded body, and nothing else moves."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whetherman_edge.dialects.json_spans import elements, members, whole
from whetherman_edge.dialects.splice import Splicer
from whetherman_edge.errors import ViewError

_floats = st.floats(allow_nan=False, allow_infinity=False)
_text = st.text(st.characters(codec="utf-8"), max_size=12)
_scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), _floats, _text)
_anything = st.recursive(_scalars, lambda c: st.lists(c, max_size=3) | st.dictionaries(_text, c, max_size=3))
_objects = st.dictionaries(_text, _anything, max_size=5)


@st.composite
def _spelled(draw: st.DrawFn, value: Any) -> str:
    """One of the many ways to write a JSON value: white space anywhere, any escapes."""
    space = draw(st.sampled_from(["", " ", "\n\t", "  \r\n"]))

    def spell(item: Any) -> str:
        if isinstance(item, dict):
            inner = f"{space},{space}".join(f"{spell(k)}{space}:{space}{spell(v)}" for k, v in item.items())
            return "{" + space + inner + space + "}"
        if isinstance(item, list):
            return "[" + space + f",{space}".join(spell(v) + space for v in item) + "]"
        return json.dumps(item, ensure_ascii=draw(st.booleans()))

    return space + spell(value) + space


def decoded(body: bytes) -> Any:
    return json.loads(body)


def pairs(body: bytes) -> list[tuple[str, Any]]:
    """Top-level members in their order."""
    found: list[tuple[str, Any]] = json.loads(body, object_pairs_hook=list)
    return found


@given(st.data(), _objects)
def test_spans_are_the_values(data: st.DataObject, value: dict[str, Any]) -> None:
    body = data.draw(_spelled(value)).encode()
    spans = members(body, whole(body))
    assert [(key, decoded(body[m.value.start : m.value.end])) for key, m in spans.items()] == list(value.items())
    assert all(body[m.start : m.start + 1] == b'"' for m in spans.values())


@given(st.data(), st.lists(_anything, max_size=5))
def test_element_spans_are_the_elements(data: st.DataObject, value: list[Any]) -> None:
    body = data.draw(_spelled(value)).encode()
    assert [decoded(body[s.start : s.end]) for s in elements(body, whole(body))] == value


@given(st.data(), _objects)
def test_deleting_and_setting_keys_equals_the_semantic_edit(data: st.DataObject, value: dict[str, Any]) -> None:
    body = data.draw(_spelled(value)).encode()
    gone = data.draw(st.sets(st.sampled_from([*value, "absent"]))) if value else {"absent"}
    put = data.draw(st.dictionaries(st.sampled_from([k for k in value if k not in gone] + ["new", "newer"]), _anything))
    splicer = Splicer(body)
    splicer.delete(*gone)
    for key, item in put.items():
        splicer.put(key, json.dumps(item).encode())
    result = splicer.result()
    expected = {k: v for k, v in value.items() if k not in gone} | put
    assert list(decoded(result).items()) == list(expected.items())
    for key, member in members(body, whole(body)).items():  # what was not touched is byte-identical
        if key not in gone and key not in put:
            assert body[member.start : member.value.end] in result


@given(st.data(), st.lists(_objects, min_size=1, max_size=5))
def test_keeping_elements_equals_the_semantic_edit(data: st.DataObject, tools: list[dict[str, Any]]) -> None:
    value = {"model": "m", "tools": tools, "z": [1]}
    body = data.draw(_spelled(value)).encode()
    kept = data.draw(st.sets(st.integers(0, len(tools) - 1), min_size=1))
    splicer = Splicer(body)
    splicer.keep_elements("tools", kept)
    result = splicer.result()
    assert decoded(result) == value | {"tools": [t for i, t in enumerate(tools) if i in kept]}
    spans = elements(body, members(body, whole(body))["tools"].value)
    assert all(body[spans[i].start : spans[i].end] in result for i in kept)


_contents = st.one_of(
    _text,
    st.lists(
        st.fixed_dictionaries({"type": st.just("text"), "text": _text})
        | st.fixed_dictionaries({"type": st.just("image_url"), "image_url": _objects})
        | _text,
        max_size=3,
    ),
)
_messages = st.lists(
    st.fixed_dictionaries({"role": _text, "content": _contents, "extra": _anything}), min_size=1, max_size=4
)


@given(st.data(), _messages, _text.filter(bool))
def test_appending_text_equals_the_semantic_edit(data: st.DataObject, messages: list[Any], sentence: str) -> None:
    value = {"messages": messages, "extra": 1}
    body = data.draw(_spelled(value)).encode()
    index = data.draw(st.integers(0, len(messages) - 1))
    splicer = Splicer(body)
    splicer.append_text(index, sentence)
    result = splicer.result()
    content = messages[index]["content"]
    if isinstance(content, str):
        messages[index]["content"] = f"{content}\n\n{sentence}" if content else sentence
    else:
        texts = [p for p in content if isinstance(p, dict) and p["type"] == "text"]
        if texts:
            texts[-1]["text"] = f"{texts[-1]['text']}\n\n{sentence}" if texts[-1]["text"] else sentence
        else:
            content.append({"type": "text", "text": sentence})
    assert decoded(result) == value


def test_a_body_that_is_not_edited_is_the_same_object() -> None:
    body = b'{"messages": [{"role":"user","content":"hi"}]}'
    splicer = Splicer(body)
    splicer.delete("tools")
    assert splicer.result() is body


@pytest.mark.parametrize(
    ("body", "result"),
    [
        (b'{"tools":[1], "a": 1}', b'{"a": 1}'),
        (b'{"a": 1 , "tools":[1]}', b'{"a": 1}'),
        (b'{"a": 1 ,\n "tools":[1],\n "b":2}', b'{"a": 1,\n "b":2}'),
        (b'{ "tools":[1] }', b"{  }"),
        (b'{"a":1,"tools":[1],"tool_choice":"auto","parallel_tool_calls":false,"b":2}', b'{"a":1,"b":2}'),
        (b'{"tools":[1],"a":1,"tool_choice":"auto"}', b'{"a":1}'),
        (b'{"tools":[1],"tool_choice":"auto","a":1}', b'{"a":1}'),
        (b'{"a":1,"to\\u006fls":[1]}', b'{"a":1}'),
    ],
)
def test_a_deleted_key_takes_one_comma_with_it(body: bytes, result: bytes) -> None:
    splicer = Splicer(body)
    splicer.delete("tools", "tool_choice", "parallel_tool_calls")
    assert splicer.result() == result


def test_R14_unknown_fields_order_spacing_and_escapes_survive() -> None:
    body = (
        b'{ "x" : 1.50e+3,\t"messages":[ {"role":"user","content":"caf\\u00e9 \\/ \xe2\x82\xac","cch":"a\\tb"} ,'
        b'{"reasoning_content":"r","role":"user","content":"q"} ], "tool_choice": "auto" , "y":{"k" :[ ]}}'
    )
    splicer = Splicer(body)
    splicer.append_text(1, 'Say "no" \\ \n now.')
    splicer.put("tool_choice", b'"none"')
    assert splicer.result() == (
        b'{ "x" : 1.50e+3,\t"messages":[ {"role":"user","content":"caf\\u00e9 \\/ \xe2\x82\xac","cch":"a\\tb"} ,'
        b'{"reasoning_content":"r","role":"user","content":"q\\n\\nSay \\"no\\" \\\\ \\n now."} ], '
        b'"tool_choice": "none" , "y":{"k" :[ ]}}'
    )


def test_a_message_is_added_behind_the_last_one() -> None:
    splicer = Splicer(b'{"messages": [{"role":"user"} ] }')
    splicer.append_message(b'{"role":"assistant","content":"The"}')
    assert splicer.result() == b'{"messages": [{"role":"user"},{"role":"assistant","content":"The"} ] }'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"a":1,}',
        b'{"a":NaN}',
        b'\xef\xbb\xbf{"a":1}',
        b'{"a":"\xff"}',
        b'{"a":1}{"a":1}',
        b'{"a":1,"a":1}',
        b'{"a":12,"a":1}',
        b'{"a":1,"a":12}',
        b'{"a":1,"b":2,"\\u0061":1}',
        b'{"a":[[1,2],"b"],"b":3,"a":[[1,2]]}',
    ],
)
def test_what_cannot_be_edited_with_certainty_is_refused(body: bytes) -> None:
    with pytest.raises(ViewError, match="relayed as it came"):
        Splicer(body)


@pytest.mark.parametrize(
    "message",
    [
        b"{}",
        b'{"content":null}',
        b'{"content":1}',
        b'{"content":{}}',
        b'{"content":"a","content":"b"}',
        b'{"content":[{"type":"text","text":"a","text":"b"}]}',
        b'"text"',
    ],
)
def test_a_turn_without_a_text_of_its_own_is_refused(message: bytes) -> None:
    with pytest.raises(ViewError, match="relayed as it came"):
        Splicer(b'{"messages":[' + message + b"]}").append_text(0, "x")


def test_a_missing_message_or_array_is_refused() -> None:
    splicer = Splicer(b'{"messages":[],"tools":[]}')
    for edit in (
        lambda: splicer.append_text(0, "x"),
        lambda: splicer.append_message(b"{}"),
        lambda: splicer.keep_elements("tools", {0}),
        lambda: splicer.keep_elements("functions", {0}),
    ):
        with pytest.raises(ViewError):
            edit()


@given(st.binary(max_size=40) | st.text('{}[]",:\\a1 tne', max_size=30).map(str.encode))
def test_fuzz_any_bytes_are_edited_or_refused(body: bytes) -> None:
    try:
        splicer = Splicer(body)
        splicer.delete("a")
        splicer.put("t", b"1")
        result = splicer.result()
    except ViewError:
        return
    assert decoded(result) == {k: v for k, v in decoded(body).items() if k != "a"} | {"t": 1}
