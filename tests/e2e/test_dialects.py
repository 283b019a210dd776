"""The other dialects for real: official clients, our daemon as a process, and a llama.cpp server that speaks them.

llama.cpp serves Responses and Messages itself. It has no ``/api/chat``, so Ollama's dialogue goes to its OpenAI side.
Nothing is asserted about how well a 0.5B model writes.
"""

from __future__ import annotations

import anthropic
import openai
import pytest

from tests.e2e.conftest import serving
from tests.e2e.test_real_server import ANSWER_S, ASKED, INVOICE, TOKENS_MAX, check_headers

pytestmark = [pytest.mark.e2e, pytest.mark.model]

SCHEMA = INVOICE["function"]["parameters"]
QUESTION = [{"role": "user", "content": ASKED["ANSWER"]}]


def ask_responses(url: str):
    tool = {"type": "function", "name": "create_invoice", "description": "Create an invoice.", "parameters": SCHEMA}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=ANSWER_S, max_retries=0) as client:
        raw = client.responses.with_raw_response.create(
            model="qwen-0.5b", input=QUESTION, tools=[tool], temperature=0, max_output_tokens=TOKENS_MAX
        )
        answer = raw.parse()
        return raw.headers, answer.output_text, [item for item in answer.output if item.type == "function_call"]


def ask_messages(url: str):
    tool = {"name": "create_invoice", "description": "Create an invoice.", "input_schema": SCHEMA}
    with anthropic.Anthropic(base_url=url, api_key="unused", timeout=ANSWER_S, max_retries=0) as client:
        raw = client.messages.with_raw_response.create(
            model="qwen-0.5b",
            messages=QUESTION,
            tools=[tool],
            max_tokens=TOKENS_MAX,
            extra_body={"temperature": 0},
        )
        content = raw.parse().content
        text = "".join(block.text for block in content if block.type == "text")
        return raw.headers, text, [block for block in content if block.type == "tool_use"]


def ask_chat(url: str):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", timeout=ANSWER_S, max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="qwen-0.5b", messages=QUESTION, tools=[INVOICE], temperature=0, max_tokens=TOKENS_MAX
        )
        message = raw.parse().choices[0].message
        return raw.headers, message.content or "", message.tool_calls or []


@pytest.mark.parametrize("ask", [ask_responses, ask_messages, ask_chat])
def test_a_dialogue_in_each_dialect(hop, tmp_path, ask):
    sent = {}
    for label in ("ACT", "ANSWER"):
        hop.seen.clear()
        with serving("--upstream", hop.url, "--force", label, "--mode", "enforce", home=tmp_path) as daemon:
            headers, text, calls = ask(daemon.url)
        ours = {name: value for name, value in headers.items() if name.startswith("x-whetherman-")}
        check_headers(ours)
        assert ours["x-whetherman-decision"] == label
        assert text or calls
        sent[label] = [one for one in hop.seen if one.line.startswith("POST ")]
        if label == "ANSWER" and ours["x-whetherman-applied"] == "yes":
            assert "Paris" in text
            assert len(sent[label]) == 1
            assert sent[label][0].body != sent["ACT"][0].body
        else:  # the client's own bytes: it sends the same ones each time
            assert sent[label][-1].body == sent["ACT"][0].body
