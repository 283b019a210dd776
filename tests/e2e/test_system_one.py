"""The System One API as its own tools see it: jevcompat's conformance suite and the official SDK against the daemon."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typesafe_sdk
from typesafe_sdk import AsyncTypeSafeClient, Choice, Noul, Score, TypeSafeClient

from tests.e2e.conftest import serving
from whetherman_edge.client import DecisionClient, DecisionError

pytestmark = pytest.mark.e2e

KEY = "k3y-for-tests"
TICKET = "I was charged twice for my March invoice. Please send the money back today. " * 30
QUESTIONS = {
    "refund": Noul(instructions="Is it about an invoice?", criteria={"true": "money back", "false": None}),
    "team": Choice(
        instructions=["Route the ticket."],
        criteria={"Billing": {"owns": ["invoices", "refunds"]}, "환불": None, "Technical": ["bugs", "outages"]},
    ),
    "anger": Score(instructions="How angry?", criteria=["Calm", {"label": "Annoyed"}, "Furious"]),
}
AUTH = {"auth.bearer", "auth.missing", "auth.invalid"}


class _OpenAIServer(http.server.BaseHTTPRequestHandler):
    """As much of a model server as these tests need: a list of models."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        found = self.path == "/v1/models"
        body = b'{"object": "list", "data": [{"id": "qwen", "object": "model"}]}' if found else b"{}"
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def model_server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _OpenAIServer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def sidecar(model_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URL of a daemon without a key, and its decision socket."""
    home = tmp_path_factory.mktemp("home")
    path = str(home / "d.sock")
    environment = {"WHETHERMAN_DECISION_SOCKET": f"unix:{path}"}
    with serving("--upstream", model_server, home=home, env=environment) as daemon:
        yield daemon.url, path


@pytest.fixture(scope="module")
def url(sidecar: tuple[str, str]) -> str:
    return sidecar[0]


@pytest.fixture(scope="module")
def keyed_url(model_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("home")
    with serving("--upstream", model_server, home=home, env={"WHETHERMAN_API_KEY": KEY}) as daemon:
        yield daemon.url


def conformance(url: str, report: Path, *flags: str) -> tuple[int, dict[str, str], str]:
    """Exit code, status by requirement, and what was printed."""
    command = [str(Path(sys.executable).parent / "jevcompat"), "test", url, "--json", str(report), *flags]
    clean = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=clean)
    results = json.loads(report.read_text())["results"]
    return done.returncode, {result["id"]: result["status"] for result in results}, done.stdout + done.stderr


def test_jevcompat_without_a_key(url: str, tmp_path: Path) -> None:
    code, status, printed = conformance(url, tmp_path / "r.json")
    assert code == 0, printed
    assert {name for name, value in status.items() if value != "pass"} == AUTH, printed


def test_jevcompat_with_a_key(keyed_url: str, tmp_path: Path) -> None:
    code, status, printed = conformance(keyed_url, tmp_path / "r.json", "--key", KEY)
    assert code == 0, printed
    assert {name for name, value in status.items() if value != "pass"} == {"auth.ignored-when-off"}, printed


def test_jevcompat_while_the_upstream_is_away(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: refused
        with serving("--upstream", f"http://127.0.0.1:{unused.getsockname()[1]}", home=tmp_path) as daemon:
            code, status, printed = conformance(daemon.url, tmp_path / "r.json")
    assert code == 0, printed
    assert status["http.models"] == "pass", printed


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the bodies that the SDK compressed."""
    from typesafe_sdk._core.compression import COMPRESSORS

    sizes: list[int] = []
    compress = COMPRESSORS["zstd"]

    def counted(body: bytes) -> bytes:
        sizes.append(len(body))
        return compress(body)

    monkeypatch.setitem(COMPRESSORS, "zstd", counted)
    return sizes


@pytest.mark.parametrize("compression", ["zstd", False])
def test_the_official_sdk(url: str, compression: Any, packed: list[int]) -> None:
    with TypeSafeClient(api_key="any", base_url=url, compression=compression) as client:
        answer = client.system_one(state=TICKET, questions=QUESTIONS)
        listed = client.models.list()
    assert bool(packed) is (compression == "zstd")
    assert answer.request_id
    assert answer.model == "whetherman-edge-0"
    assert answer.nouls["refund"].noul > 0.5
    assert answer.choices["team"].choice == "Billing"
    assert set(answer.choices["team"].probabilities) == {"Billing", "환불", "Technical"}
    assert answer.scores["anger"].legend[1] == {"label": "Annoyed"}
    assert answer.usage.input_tokens > 0
    assert [model.name for model in listed.models] == ["whetherman-edge-0", "jev-latest"]


def test_the_official_sdk_async_with_a_key(keyed_url: str, packed: list[int]) -> None:
    async def run() -> None:
        async with AsyncTypeSafeClient(api_key=KEY, base_url=keyed_url) as client:
            states = [{"query": f"{TICKET} {i}"} for i in range(8)]
            answers = await asyncio.gather(*(client.system_one(state=s, questions=QUESTIONS) for s in states))
            assert {answer.choices["team"].choice for answer in answers} == {"Billing"}

    asyncio.run(run())
    assert len(packed) == 8


def test_the_official_sdks_errors(url: str, keyed_url: str) -> None:
    bad = {"q": {"type": "score", "criteria": {"0": "low", "1": "high"}}}
    with TypeSafeClient(api_key="any", base_url=url) as client:
        with pytest.raises(typesafe_sdk.TypeSafeUnprocessableEntityError, match="list of levels"):
            client.system_one(state="x", questions=bad)  # type: ignore[arg-type]
        with pytest.raises(typesafe_sdk.TypeSafeNotFoundError, match="jev-latest"):
            client.system_one(state="x", questions=QUESTIONS, model="no-such-model")
        with pytest.raises(typesafe_sdk.TypeSafeBadRequestError, match="32k tokens"):
            client.system_one(state="x" * 200_000, questions=QUESTIONS)
    with (
        TypeSafeClient(api_key="wrong", base_url=keyed_url) as client,
        pytest.raises(typesafe_sdk.TypeSafeAuthenticationError, match="API key"),
    ):
        client.system_one(state="x", questions=QUESTIONS)


def test_the_decision_socket_routes_as_http_does(sidecar: tuple[str, str]) -> None:
    url, path = sidecar
    options = {"Billing": "Payments and invoices", "Weather": "Forecasts"}
    with DecisionClient(path) as client, TypeSafeClient(api_key="any", base_url=url) as sdk:
        routed = client.route("charged twice", options)
        choice = sdk.system_one(state="charged twice", questions={"q": Choice(criteria=options)}).choices["q"]
        assert routed["choice"] == choice.choice == "Billing"
        assert routed["probabilities"] == pytest.approx(choice.probabilities, abs=2e-6)
        with pytest.raises(DecisionError, match="options"):
            client.route("q", {})
