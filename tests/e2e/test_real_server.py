"""The whole way, for real: the official OpenAI client, our daemon, and a llama.cpp server with a model behind it.

Nothing is asserted about how well a 0.5B model writes, only what the daemon owes: the decision in the headers, the
right bytes upstream, and the model's own answer passed on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.conftest import START_S, RecordingHop, serving
from tests.fakes.upstream import TIME_FACTOR
from whetherman_edge.backbone import store
from whetherman_edge.gate.verdict import LABELS

pytestmark = [pytest.mark.e2e, pytest.mark.model]

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 300.0 * TIME_FACTOR
TOKENS_MAX = 24

INVOICE = {
    "type": "function",
    "function": {
        "name": "create_invoice",
        "description": "Create an invoice for a customer.",
        "parameters": {
            "type": "object",
            "properties": {"customer": {"type": "string"}, "amount": {"type": "number"}},
            "required": ["customer", "amount"],
        },
    },
}
# One request a decision, such that no guard of the policy vetoes it: an invoice for real is never ANSWER, and so on.
ASKED = {
    "ACT": "Create an invoice for Ada Lovelace over 120 euros.",
    "ANSWER": "What is the capital of France? Answer in one sentence.",
    "ASK": "I need an invoice.",
    "DECLINE": "Please water the plants in my office.",
}


class Agent:
    """An agent with the official client; a hop of its own keeps the bodies it sends, byte for byte."""

    def __init__(self, url: str) -> None:
        self.hop = RecordingHop(int(url.rsplit(":", 1)[1])).__enter__()
        self._openai = openai.OpenAI(base_url=f"{self.hop.url}/v1", api_key="unused", timeout=ANSWER_S, max_retries=0)

    @property
    def sent(self) -> list[bytes]:
        return [one.body for one in self.hop.chats()]

    def ask(self, text: str, *, stream: bool, **headers: str) -> tuple[dict[str, str], str, list[str]]:
        """One turn with one tool on offer. Returns our headers, the text, and the names of the calls."""
        raw = self._openai.chat.completions.with_raw_response.create(
            model="qwen-0.5b",
            messages=[{"role": "user", "content": text}],
            tools=[INVOICE],
            temperature=0,
            max_tokens=TOKENS_MAX,
            stream=stream,
            extra_headers=headers,
        )
        ours = {name: value for name, value in raw.headers.items() if name.startswith("x-whetherman-")}
        parts: list[str] = []
        calls: list[str] = []
        answer = raw.parse()
        for choice in self._choices(answer, stream):
            message = choice.delta if stream else choice.message
            parts.append(message.content or "")
            calls += [call.function.name for call in message.tool_calls or () if call.function.name]
        return ours, "".join(parts), calls

    def models(self) -> list[str]:
        return [model.id for model in self._openai.models.list().data]

    def close(self) -> None:
        self._openai.close()
        self.hop.__exit__()

    @staticmethod
    def _choices(answer, stream: bool) -> Iterator:
        if not stream:
            yield from answer.choices
            return
        with answer:
            for chunk in answer:
                yield from chunk.choices


@pytest.fixture
def agent_for() -> Iterator[Callable[[str], Agent]]:
    agents: list[Agent] = []

    def make(url: str) -> Agent:
        agents.append(Agent(url))
        return agents[-1]

    yield make
    for agent in agents:
        agent.close()


def check_headers(headers: dict[str, str]) -> None:
    """All six are there and well-formed."""
    assert set(headers) == {
        f"x-whetherman-{key}" for key in ("decision", "applied", "reason", "confidence", "engine", "ms")
    }
    assert headers["x-whetherman-decision"] in LABELS
    assert headers["x-whetherman-applied"] in ("yes", "no")
    assert 0.0 <= float(headers["x-whetherman-confidence"]) <= 1.0
    assert 0.0 <= float(headers["x-whetherman-ms"]) < 1000.0 * TIME_FACTOR


def test_shadow_changes_nothing(hop, agent_for, tmp_path):
    """Without a profile: every decision is reported, the upstream gets the client's bytes, stream and not."""
    with serving("--upstream", hop.url, home=tmp_path) as daemon:
        agent = agent_for(daemon.url)
        for text in (ASKED["ANSWER"], ASKED["ACT"]):
            for stream in (False, True):
                headers, content, calls = agent.ask(text, stream=stream)
                check_headers(headers)
                assert headers["x-whetherman-applied"] == "no"
                assert headers["x-whetherman-engine"] == "static"
                assert content or calls
        assert [one.sha256 for one in hop.chats()] == [hashlib.sha256(body).hexdigest() for body in agent.sent]
        assert "qwen-0.5b" in agent.models()
    assert daemon.process.returncode == 0
    assert not any("capital of France" in line or "Lovelace" in line for line in daemon.log)


def test_forced_act_is_byte_identical(hop, agent_for, tmp_path):
    with serving("--upstream", hop.url, "--force", "ACT", "--mode", "enforce", home=tmp_path) as daemon:
        agent = agent_for(daemon.url)
        for stream in (False, True):
            headers, content, calls = agent.ask(ASKED["ACT"], stream=stream)
            check_headers(headers)
            assert headers["x-whetherman-decision"] == "ACT"
            assert headers["x-whetherman-applied"] == "no"
            assert content or calls
        assert [one.body for one in hop.chats()] == agent.sent


@pytest.mark.parametrize("label", ["ANSWER", "ASK", "DECLINE"])
def test_forced_decision_steers_the_model(hop, agent_for, tmp_path, label):
    with serving("--upstream", hop.url, "--force", label, "--mode", "enforce", home=tmp_path) as daemon:
        agent = agent_for(daemon.url)
        for stream in (False, True):
            hop.seen.clear()
            agent.hop.seen.clear()
            headers, content, calls = agent.ask(ASKED[label], stream=stream)
            check_headers(headers)
            assert headers["x-whetherman-decision"] == label
            assert content or calls
            first = hop.chats()[0]
            if headers["x-whetherman-applied"] == "yes":
                assert headers["x-whetherman-reason"] == "forced"
                assert "Paris" in content or label != "ANSWER"
                check_edit(json.loads(agent.sent[0]), first.json())
                assert len(hop.chats()) == 1
            else:  # the model wrote a call all the same: the request went out once more as it came
                assert headers["x-whetherman-reason"] == "leaked_call"
                assert [one.body for one in hop.chats()[1:]] == agent.sent
            # The client can always turn it off for one request.
            headers, _, _ = agent.ask(ASKED[label], stream=stream, **{"x-whetherman-mode": "off"})
            assert headers["x-whetherman-applied"] == "no"
            assert hop.chats()[-1].body == agent.sent[-1]
    assert any("force" in line for line in daemon.log if "level=warning" in line)


def check_edit(sent: dict, received: dict) -> None:
    """What reached the model is what was sent, but for what an intervention may do, and it did something."""
    assert received != sent
    changed = {key for key in sent.keys() | received.keys() if sent.get(key) != received.get(key)}
    assert changed <= {"messages", "tools", "tool_choice"}
    if "messages" in changed:
        before, after = sent["messages"][-1], received["messages"][len(sent["messages"]) - 1]
        assert after["content"].startswith(before["content"])
        assert after["role"] == before["role"]
    if "tools" in changed:
        assert "tools" not in received
    assert received.get("tool_choice") in (None, "none")


def curl_of_readme(url: str) -> str:
    """The first curl of the README, with our address in place of the documented one."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    command = next(block for block in blocks if block.startswith("curl "))
    assert "http://127.0.0.1:8088/" in command
    return command.replace("http://127.0.0.1:8088", url)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_first_run_as_the_readme_says(weights, tmp_path):
    """Empty home, the README's own curl, then Ctrl-C: a chat answer, our headers, and nothing left behind."""
    weights("smollm2-135m")
    models = {"WHETHERMAN_MODELS": str(store.models_dir())}
    with serving("--upstream", "embedded", home=tmp_path, env=models) as daemon:
        server = children(daemon.process.pid)
        assert len(server) == 1
        done = subprocess.run(
            ["bash", "-c", curl_of_readme(daemon.url)], capture_output=True, text=True, check=True, timeout=ANSWER_S
        )
        head, _, body = done.stdout.replace("\r\n", "\n").partition("\n\n")
        status, *lines = head.split("\n")
        assert status == "HTTP/1.1 200 OK"
        pairs = (line.partition(": ")[::2] for line in lines)
        check_headers({name: value for name, value in pairs if name.startswith("x-whetherman-")})
        assert "Paris" in json.loads(body)["choices"][0]["message"]["content"]
        assert daemon.interrupt() == 0
        assert all(ended(pid) for pid in server)
    assert any("embedded_ignores_tools" in line for line in daemon.log)


def test_ctrl_c_while_the_model_loads(weights, tmp_path):
    weights("smollm2-135m")
    env = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("WHETHERMAN_", "XDG_"))},
        "HOME": str(tmp_path),
        "WHETHERMAN_MODELS": str(store.models_dir()),
    }
    command = [sys.executable, "-m", "whetherman_edge", "serve", "--port", "0", "--upstream", "embedded"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env) as process:
        assert process.stderr is not None
        while not children(process.pid):
            assert process.poll() is None
        server = children(process.pid)
        process.send_signal(signal.SIGINT)
        log = process.stderr.read()
        assert process.wait(START_S) == 0, log
    assert all(ended(pid) for pid in server)
    assert "Traceback" not in log


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the closed pipe ends it, once it has loaded")
def test_a_killed_daemon_leaves_no_server_behind(weights, tmp_path):
    weights("smollm2-135m")
    models = {"WHETHERMAN_MODELS": str(store.models_dir())}
    with serving("--upstream", "embedded", home=tmp_path, env=models) as daemon:
        (server,) = children(daemon.process.pid)
        descriptor = os.pidfd_open(server)
        try:
            daemon.process.kill()
            daemon.process.wait()
            assert select.select([descriptor], [], [], START_S)[0]
        finally:
            os.close(descriptor)
