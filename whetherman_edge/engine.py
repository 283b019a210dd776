"""The engines on the daemon's side of the gate: the ToolRouter, the static gate that stands on it, and the backbone's.

Everything of the daemon that imports numpy is behind this module, so that ``proxy`` does not import it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from whetherman_edge.backbone import install
from whetherman_edge.backbone.head import Heads, open_heads
from whetherman_edge.backbone.manifest import Manifest, read_manifest
from whetherman_edge.backbone.persist import Key as PrefixKey
from whetherman_edge.backbone.stage import Breaker, NoBreaker, Outcome, Stage
from whetherman_edge.backbone.worker import Worker, WorkerSettings
from whetherman_edge.dialects.chat import ChatView, Message, Parameter, Tool
from whetherman_edge.errors import ArtifactError, EnvironmentFault
from whetherman_edge.gate.fusion import Fusion, Opinion
from whetherman_edge.gate.later import Later
from whetherman_edge.gate.operating_point import NEVER, OperatingPoint, read_operating_point
from whetherman_edge.gate.policy import calibrated
from whetherman_edge.gate.static_gate import FUSED_NAMES, StaticGate, packaged_sha256
from whetherman_edge.gate.verdict import Verdict
from whetherman_edge.kernels import load
from whetherman_edge.profiles.schema import Profile, check_engine, check_features
from whetherman_edge.router.card import cards_of
from whetherman_edge.router.decision import Choice, reordered
from whetherman_edge.router.scorer import Scorer
from whetherman_edge.router.table import RouterTable

# Options embedded in one go: 16 new ones take about a millisecond, 255 would hold every other request for 20.
ROUTE_PORTION = 16
# A list of more tools than this is read in portions the first time: 1,000 would hold every other request for 0.2 s.
TOOLS_AT_ONCE = 96
# Choices of tools that the ToolRouter is less sure of are put to the backbone too, this many of their likeliest tools.
ROUTE_ASK_BELOW = 0.9
CANDIDATES = 6
# Decoding is memory-bound: a fifth core adds little, and the agent's own model server wants some.
BACKBONE_THREADS_MAX = 4


class Router:
    """Table, kernels and scorer, opened once. Useful without a gate: typed decisions and ``route`` need no more."""

    def __init__(self) -> None:
        """Open the packaged table, or the one that WHETHERMAN_ROUTER names. Raises ArtifactError."""
        self.kernels = load()
        self.table = RouterTable.open(None)
        self.scorer = Scorer(self.table, self.kernels)

    async def route(self, query: str, options: Mapping[str, Any]) -> Choice:
        """As ``Scorer.route``, but the event loop gets its turn while options never seen before are embedded.

        Raises RequestError.
        """
        if len(options) > ROUTE_PORTION:
            cards = cards_of(options)
            for start in range(0, len(cards), ROUTE_PORTION):
                self.scorer.prepare(cards[start : start + ROUTE_PORTION])
                await asyncio.sleep(0)
        return self.scorer.route(query, options)


class StaticEngine:
    """A judge (``proxy.gating.Judge``) that answers at once: a verdict takes a fraction of a millisecond.

    Only a list of more than TOOLS_AT_ONCE tools that was never seen before is awaited.
    """

    def __init__(self, router: Router) -> None:
        """Open the packaged gate. Raises ArtifactError."""
        self._scorer = router.scorer
        self._gate = StaticGate.open(router.scorer, router.kernels, None)
        self.sha256 = self._gate.sha256
        self.fused_names = FUSED_NAMES
        self.default_tau = self._gate.default_tau

    def judge(
        self, chat: ChatView, _deadline_s: float, _profile: Profile | None = None
    ) -> Verdict | Awaitable[Verdict]:
        """The static verdict."""
        if len(chat.tools) > TOOLS_AT_ONCE and not self._gate.knows(chat):
            return Later(lambda: self._in_portions(chat))
        return self._gate.judge(chat)

    async def _in_portions(self, chat: ChatView) -> Verdict:
        """``judge``, but the event loop gets its turn while the tools are read."""
        for _ in self._gate.portions(chat):
            await asyncio.sleep(0)
        return self._gate.judge(chat)

    def fits(self, profile: Profile, name: str) -> None:
        """Raise ProfileError unless the profile was fitted on this gate."""
        check_engine(profile, name, "static", self.sha256)
        check_features(profile, name, self.fused_names)

    def tool_probabilities(self, chat: ChatView) -> Mapping[str, float]:
        """The ToolRouter's view of the offered tools, for the last user message."""
        query = chat.messages[chat.last_user_index].text if chat.last_user_index >= 0 else ""
        scores = self._scorer.score(query, self._scorer.slate(chat.tools, chat.toolset_key))
        return {tool.name: float(p) for tool, p in zip(chat.tools, scores.probability, strict=True)}


class Chooser:
    """Which tool, by the ToolRouter and the backbone together. ``name``: "gemma" or "auto".

    The backbone reads the likeliest tools one by one, each as the only tool of a request of one turn: whether a tool is
    needed is then whether that tool fits, which it was trained to tell. All of them in one prompt do not work: the
    states of tool lines do not hold what a tool is for (MODELS.md).
    """

    def __init__(self, name: str, stage: Stage, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._stage = stage
        self._clock = clock

    async def second_opinion(self, query: str, options: Mapping[str, Any], choice: Choice, deadline_s: float) -> Choice:
        """The ToolRouter's ``choice``, its likeliest tools put in a new order by how well each fits; as it is where
        fewer than two were read in time.

        "auto" asks only about choices that the ToolRouter is unsure of. ``options``: as ``Router.route`` took them.
        """
        weight = self._stage.match_router
        if weight is None or (self._name == "auto" and choice.confidence >= ROUTE_ASK_BELOW):
            return choice
        likeliest = sorted(choice.probabilities, key=lambda name: -choice.probabilities[name])[:CANDIDATES]
        matches: dict[str, float] = {}
        longest_s = 0.0
        for chat in chats_of(query, options, likeliest):
            started_s = self._clock()
            if started_s + longest_s > deadline_s:  # it would come late, which the stage takes for a fault
                break
            reading = await self._stage.read(chat, deadline_s)
            if reading is None:
                break
            matches[chat.tools[0].name] = reading.match
            longest_s = max(longest_s, self._clock() - started_s)
        return reordered(choice, matches, weight)

    def close(self) -> None:
        """End the stage."""
        self._stage.stop()


class StagedEngine:
    """Static stage first, the backbone where that is not decisive ("auto") or always ("gemma").

    A judge that answers at once where the static stage suffices, else within the deadline: with the fused verdict, or
    with the static one, marked as a fallback, when the backbone is late, resting or not there. ``name``: "gemma" or
    "auto". ``default_tau``: the backbone's operating point. ``stage`` None: the backbone's artifact cannot be used,
    ``fault`` says why.
    """

    def __init__(
        self,
        name: str,
        static: StaticEngine,
        stage: Stage | None,
        fusion: Fusion | None,
        fault: str = "",
        default_tau: OperatingPoint = NEVER,
    ) -> None:
        self.name = name
        self.static = static
        self.stage = stage
        self._fusion = fusion
        self._fault = fault
        self.sha256 = static.sha256
        self.fused_names = FUSED_NAMES
        self.default_tau = self.fallback_tau = static.default_tau
        self.chooser = Chooser(name, stage) if stage is not None else None
        self._low, self._high = 0.0, 1.0
        if stage is not None:
            band = stage.manifest.ask_band
            self.default_tau = default_tau
            if name == "auto":
                self._low, self._high = band.low, band.high

    @property
    def fault(self) -> str:
        """Why the backbone does not answer now; "" when it does."""
        return self._fault or (self.stage.fault if self.stage is not None else "")

    @property
    def state(self) -> str:
        """Where the backbone stands: a ``backbone.stage.State``."""
        return self.stage.state if self.stage is not None else "failed"

    def fits(self, profile: Profile, name: str) -> None:
        """Raise ProfileError unless the profile was fitted on what is loaded: the static stage, or both together."""
        if profile.engine.name == "gemma" and self.stage is not None:
            check_engine(profile, name, "gemma", self.stage.manifest.sha256)
        else:
            self.static.fits(profile, name)
        check_features(profile, name, self.fused_names)

    def judge(self, chat: ChatView, deadline_s: float, profile: Profile | None = None) -> Verdict | Awaitable[Verdict]:
        """The static verdict at once, or the fused one, awaited. Raises ProfileError."""
        static = self.static.judge(chat, deadline_s, profile)
        if isinstance(static, Verdict):
            return self._beyond(static, chat, deadline_s, profile)
        return Later(lambda: self._later(static, chat, deadline_s, profile))

    async def _later(
        self, waiting: Awaitable[Verdict], chat: ChatView, deadline_s: float, profile: Profile | None
    ) -> Verdict:
        verdict = self._beyond(await waiting, chat, deadline_s, profile)
        return verdict if isinstance(verdict, Verdict) else await verdict

    def _beyond(
        self, static: Verdict, chat: ChatView, deadline_s: float, profile: Profile | None
    ) -> Verdict | Awaitable[Verdict]:
        """From the static verdict to the engine's."""
        stage, fusion = self.stage, self._fusion
        if profile is not None and profile.engine.name == "static":
            return static
        if stage is None or fusion is None or not stage.is_open:
            return msgspec.structs.replace(static, fallback=True)
        p_need = calibrated(static, profile, self.fused_names)[0]
        if not self._low <= 1.0 - p_need <= self._high:
            return static
        return Later(lambda: self._fused(chat, static, stage, fusion, deadline_s))

    async def _fused(self, chat: ChatView, static: Verdict, stage: Stage, fusion: Fusion, deadline_s: float) -> Verdict:
        reading = await stage.read(chat, deadline_s)
        if reading is None:
            return msgspec.structs.replace(static, fallback=True)
        opinion = Opinion(reading.log_p)
        if len(reading.tool_p):
            opinion = Opinion(reading.log_p, float(reading.tool_p.max()), reading.none_p)
        return fusion.verdict(static, opinion)

    def tool_probabilities(self, chat: ChatView) -> Mapping[str, float]:
        """The ToolRouter's: asked for in the middle of a request, when there is no time for another pass."""
        return self.static.tool_probabilities(chat)


def check_packaged(profile: Profile, name: str) -> None:
    """Raise ProfileError when a profile was fitted on another artifact than the packaged one of its engine.

    For commands that open no engine; an artifact that is missing says nothing about a profile.
    """
    try:
        sha256 = packaged_sha256() if profile.engine.name == "static" else read_manifest().sha256
    except ArtifactError:
        return
    check_engine(profile, name, profile.engine.name, sha256)


def open_engine(
    name: str,
    static: StaticEngine,
    router_sha256: str,
    *,
    breaker: Breaker | None = None,
    count: Callable[[Outcome], None] = lambda _outcome: None,
    threads: int = 0,
    keep_prefixes: bool = False,
) -> StagedEngine:
    """The engine "gemma" or "auto" on the packaged backbone artifact; its stage is not started yet.

    An artifact that is missing or does not fit makes an engine without a stage, which serves the static verdicts.
    ``threads``: 0 for as many as there are cores, up to BACKBONE_THREADS_MAX. ``keep_prefixes``: save the keys and
    values of tools blocks when the backbone is closed (a command, which closes at once, only reads a daemon's).
    """
    try:
        manifest = read_manifest()
        manifest.check_stages(static.sha256, router_sha256)
        heads = open_heads(manifest)
        fusion = Fusion(heads.fusion_weights, heads.fusion_bias)
        default_tau = read_operating_point(msgspec.to_builtins(manifest.default_tau))
    except (ArtifactError, ValueError) as exc:
        return StagedEngine(name, static, None, None, str(exc))
    stage = _stage(manifest, heads, name, breaker or NoBreaker(), count, threads, keep_prefixes)
    return StagedEngine(name, static, stage, fusion, default_tau=default_tau)


def open_chooser(name: str, router_sha256: str) -> Chooser:
    """The backbone's part in a choice of tools, started and waited for. Raises ArtifactError, EnvironmentFault."""
    manifest = read_manifest()
    manifest.check_stages(manifest.gate_static_sha256, router_sha256)
    heads = open_heads(manifest)
    if not heads.has_match:  # loading weights for it would cost seconds
        raise ArtifactError("the backbone artifact has no match head, which says how well a tool fits")
    stage = _stage(manifest, heads, name, NoBreaker(), lambda _outcome: None, 0, False)
    stage.start()
    fault = stage.settled()
    if fault:
        stage.stop()
        raise EnvironmentFault(fault)
    return Chooser(name, stage)


def _stage(
    manifest: Manifest,
    heads: Heads,
    name: str,
    breaker: Breaker,
    count: Callable[[Outcome], None],
    threads: int,
    keep_prefixes: bool,
) -> Stage:
    settings = WorkerSettings(
        layer=manifest.layer,
        n_threads=threads or min(BACKBONE_THREADS_MAX, n_cores()),
        tools_max=manifest.tools_max,
        dialogue_max=manifest.dialogue_max,
        saved=install.prefixes_path(manifest),
        save=keep_prefixes,
    )
    return Stage(
        manifest,
        heads,
        locate=partial(install.require_backbone, manifest),
        make_worker=partial(_worker, settings, manifest),
        breaker=breaker,
        count=count,
        required=name == "gemma",
    )


def _worker(settings: WorkerSettings, manifest: Manifest, path: Path) -> Worker:
    found = install.find_backbone(manifest)
    if found is None or found.path != path:
        return Worker(path, settings)
    key = PrefixKey(found.sha256, manifest.layer, manifest.prompt_style)
    return Worker(path, msgspec.structs.replace(settings, saved_key=key))


def n_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def chats_of(query: str, options: Mapping[str, Any], names: Iterable[str]) -> Iterator[ChatView]:
    """A dialogue of one turn and one tool for each of these options. Raises RequestError."""
    cards = {card.name: card for card in cards_of(options)}
    for name in names:
        card = cards[name]
        tool = Tool(card.name, card.description, tuple(Parameter(one) for one in card.parameters), card.key)
        yield ChatView("route", "", (Message("user", query),), (tool,), tool.key)
