"""The gates that ``bench ab`` compares. Each is the product's own request path, served on a port of its own.

``serve`` puts together what the daemon serves a chat with (App, Exchange, Gating), so splicing, the choice of
intervention, back-off and the second try after a leaked call are the daemon's. What differs is the judge, the profile
and the mode.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import aiohttp
import msgspec

from whetherman_edge import composition
from whetherman_edge.bench import ab_judges
from whetherman_edge.bench.ab_hop import Hop
from whetherman_edge.calibrate.probe import Probe
from whetherman_edge.config import Config
from whetherman_edge.dialects.registry import PATHS
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.engine import StagedEngine, StaticEngine
from whetherman_edge.errors import EnvironmentFault, ProfileNotFound, UsageError
from whetherman_edge.gate.policy import PolicySettings
from whetherman_edge.gate.verdict import Engine, Mode
from whetherman_edge.ledger.counters import Counters
from whetherman_edge.profiles.schema import InterventionChoice, Profile, Tau
from whetherman_edge.profiles.store import ProfileStore
from whetherman_edge.proxy.app import App
from whetherman_edge.proxy.breaker import FAILURES_MAX, Breaker
from whetherman_edge.proxy.exchange import Exchange
from whetherman_edge.proxy.gating import Gating, Judge, Profiles
from whetherman_edge.proxy.guard import Guard
from whetherman_edge.proxy.http_server import HttpServer
from whetherman_edge.proxy.learned import Learned
from whetherman_edge.proxy.sessions import Sessions
from whetherman_edge.proxy.upstream import Target, Upstream

NONE: Final = "none"
ORACLE: Final = "oracle"
ALWAYS_PROMPT: Final = (
    "Call a tool only if it is necessary. If you can answer from what you know or from the conversation, answer "
    "directly without calling a tool."
)
GATES: Final[dict[str, str]] = {
    NONE: "no gate: requests go out as they come",
    "loop_guard": "the loop guard only",
    "rules": "a few written rules with the guards, no model",
    "always_prompt": "no gate; the system prompt says to call tools only if necessary",
    "prompted": "the agent's model itself is asked first; its tokens and time count",
    "static": "the static engine at its default threshold, no profile",
    "shared": "the shared backbone at its default threshold, no profile",
    "tau": "the shared score with the profile's thresholds, without its layer",
    "own": "the agent's own profile: the product",
    "other": "another agent's profile",
    ORACLE: "skips exactly where replays of the task show that the calls are not needed",
}
_PROMPTED_TOKENS_MAX: Final = 8


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What all gates of one bench share. ``profile``, ``other``: names, "" for none; ``deadline_ms``: of the gate."""

    model: str
    kind: str
    key: str = ""
    profile: str = ""
    other: str = ""
    engine: Engine = "auto"
    deadline_ms: int = 250


class Gate:
    """One gate, being served. ``url``: where the agent sends its requests."""

    def __init__(self, name: str, url: str, oracle: ab_judges.Oracle | None = None) -> None:
        self.name = name
        self.url = url
        self._oracle = oracle

    def headers(self, run: str) -> dict[str, str]:
        """Request headers of one run, ``run`` being its name.

        The oracle gets an agent name a run: it is to show what could be won, so it never backs off.
        """
        named = {"x-whetherman-profile": f"{ab_judges.STAND_IN}+{run}"} if self._oracle is not None else {}
        return {"x-session-id": run, **named}

    def prepare(self, probe: Probe, skip_from: int | None) -> Probe:
        """Get ready for one run; returns the task as this gate's agent sees it."""
        if self._oracle is not None:
            self._oracle.skip_from = skip_from
            self._oracle.n_recorded = sum(message["role"] == "assistant" for message in probe.messages)
        return always_told(probe) if self.name == "always_prompt" else probe


class _Named:
    """One profile under any name."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def load(self, name: str) -> Profile:
        """The profile. Raises ProfileNotFound for a name that is not the stand-in's."""
        if not name.startswith(ab_judges.STAND_IN):
            raise ProfileNotFound(f"no profile named {name!r} in this gate")
        return self._profile


class Gates:
    """Opens the engines once and serves the gates of one bench. ``hop``: what stands before the model server."""

    def __init__(self, setting: Setting, hop: Hop) -> None:
        self._setting = setting
        self._hop = hop
        self._engines: dict[str, StaticEngine | StagedEngine] = {}
        self._composed: list[composition.Gate] = []
        self._session: aiohttp.ClientSession | None = None

    @contextlib.asynccontextmanager
    async def opened(self, names: Sequence[str]) -> AsyncIterator[dict[str, Gate]]:
        """The named gates, served inside the block. Raises EnvironmentFault, UsageError for what cannot be opened."""
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._close)
            self._session = await stack.enter_async_context(aiohttp.ClientSession())
            yield {name: await stack.enter_async_context(self._gate(name)) for name in names}

    def profile(self, name: str) -> Profile:
        """A profile that fits the engine. Raises ProfileNotFound, ProfileError, EnvironmentFault."""
        return ProfileStore(check=self._engine(self._setting.engine).fits).load(name)

    def _close(self) -> None:
        for gate in self._composed:
            gate.close()

    def _engine(self, name: Engine) -> StaticEngine | StagedEngine:
        """An engine, opened once, its backbone ready. Raises EnvironmentFault."""
        if name not in self._engines:
            gate = composition.open_gate(Config(engine=name), Counters())
            if gate.engine is None:
                raise EnvironmentFault(gate.fault)
            self._composed.append(gate)
            gate.start()
            fault = gate.await_backbone()
            if fault and name == "gemma":
                raise EnvironmentFault(fault)
            self._engines[name] = gate.engine
        return self._engines[name]

    def _gate(self, name: str) -> contextlib.AbstractAsyncContextManager[Gate]:
        setting = self._setting
        if name in (NONE, "always_prompt"):
            return self._served(name, ab_judges.NeverSkip(), "off", "")
        if name in ("own", "other"):
            wanted = setting.profile if name == "own" else setting.other
            if not wanted:
                raise UsageError(f"gate {name}: expected --{'profile' if name == 'own' else 'other-profile'} NAME")
            self.profile(wanted)
            engine = self._engine(setting.engine)
            return self._served(name, engine, None, wanted, ProfileStore(check=engine.fits))
        if name == "tau":
            if not setting.profile:
                raise UsageError("gate tau: expected --profile NAME")
            judge: Judge = ab_judges.SharedScore(self._engine(setting.engine))
            return self._stood_in(name, judge, self.profile(setting.profile).tau)
        if name == "static":
            judge = ab_judges.AtOperatingPoint(self._engine("static"))
        elif name == "shared":
            engine = self._engine(setting.engine)
            if isinstance(engine, StagedEngine) and engine.fault:
                raise EnvironmentFault(f"gate shared: {engine.fault}")
            fallback_tau = engine.fallback_tau if isinstance(engine, StagedEngine) else None
            judge = ab_judges.AtOperatingPoint(engine, fallback_tau)
        else:
            judge = self._judge(name)
        return self._stood_in(name, judge, ab_judges.SURE)

    def _judge(self, name: str) -> Judge:
        judges: dict[str, Judge] = {
            "loop_guard": ab_judges.NeverSkip(),
            "rules": ab_judges.Rules(),
            "prompted": ab_judges.Prompted(self._ask),
            ORACLE: ab_judges.Oracle(),
        }
        return judges[name]

    def _stood_in(self, name: str, judge: Judge, tau: Tau) -> contextlib.AbstractAsyncContextManager[Gate]:
        """Enforced under a stand-in profile, with the intervention of the agent's own profile, if there is one."""
        choice = self.profile(self._setting.profile).intervention if self._setting.profile else InterventionChoice()
        profiles = _Named(ab_judges.stand_in(tau, choice))
        return self._served(name, judge, "enforce", ab_judges.STAND_IN, profiles)

    @contextlib.asynccontextmanager
    async def _served(
        self, name: str, judge: Judge, mode: Mode | None, profile: str, profiles: Profiles | None = None
    ) -> AsyncIterator[Gate]:
        setting = self._setting
        config = Config(
            port=0,
            upstream=self._hop.url,
            agents={setting.model: profile} if profile else {},  # named for it: also one of another agent's
            mode=mode,
            shadow_share=0.0 if name == ORACLE else Config().shadow_share,
            gate_deadline_ms=setting.deadline_ms,
            ledger="off",
        )
        deadline_s = None if name == "prompted" else setting.deadline_ms / 1e3
        async with serve(config, judge, profiles or ProfileStore(()), setting.kind, deadline_s) as url:
            yield Gate(name, url, judge if isinstance(judge, ab_judges.Oracle) else None)

    async def _ask(self, messages: list[dict[str, Any]]) -> str:
        """One question to the agent's model; "" when it gives no reply, which counts as a needed call."""
        assert self._session is not None
        body = {
            "model": self._setting.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": _PROMPTED_TOKENS_MAX,
        }
        headers = {"authorization": f"Bearer {self._setting.key}"} if self._setting.key else {}
        url = f"{self._hop.url}/v1/chat/completions"
        async with self._session.post(url, json=body, headers=headers) as response:
            if response.status != 200:
                return ""
            try:
                return str((await response.json())["choices"][0]["message"]["content"] or "")
            except (ValueError, LookupError, TypeError, aiohttp.ContentTypeError):
                return ""


@contextlib.asynccontextmanager
async def serve(
    config: Config, judge: Judge, profiles: Profiles, kind: str, deadline_s: float | None
) -> AsyncIterator[str]:
    """The daemon's request path on a free loopback port. kind: of the upstream, as ``proxy.capability`` names it."""
    counters = Counters()
    gating = Gating(
        config,
        judge=judge,
        tools=ToolCache(),
        settings=PolicySettings(fused_names=judge.fused_names, default_tau=judge.default_tau),
        profiles=profiles,
        learned=Learned(kind),
        sessions=Sessions(),
        counters=counters,
        deadline_s=deadline_s,
        breaker=Breaker(FAILURES_MAX, time.monotonic),
    )
    upstream = Upstream(Target.parse(config.upstream))
    exchange = Exchange(
        upstream,
        counters,
        gating,
        gate_body_bytes_max=config.gate_body_bytes_max,
        body_bytes_max=config.body_bytes_max,
    )
    gated = {path: functools.partial(exchange.chat, dialect=dialect) for path, dialect in PATHS.items()}
    app = App(guard=Guard(host=config.host), counters=counters, own={}, gated=gated, relay=exchange.relay)
    server = HttpServer(app.handle)
    listener = socket.create_server((config.host, 0))
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(upstream.close)
        accepting = await asyncio.get_running_loop().create_server(server, sock=listener)
        stack.push_async_callback(server.shutdown, 0.1)
        stack.callback(accepting.close)
        yield f"http://{config.host}:{listener.getsockname()[1]}"


def always_told(probe: Probe) -> Probe:
    """The task with ALWAYS_PROMPT at the end of its system text, or as one."""
    messages: list[Mapping[str, Any]] = list(probe.messages)
    if messages and messages[0]["role"] == "system" and isinstance(messages[0]["content"], str):
        messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n{ALWAYS_PROMPT}"}
    else:
        messages.insert(0, {"role": "system", "content": ALWAYS_PROMPT})
    return msgspec.structs.replace(probe, messages=tuple(messages))
