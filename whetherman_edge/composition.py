"""Puts the gate together: engine, profiles, policy, and what is remembered. Used by the daemon and by ``decide``."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from whetherman_edge.config import Config
from whetherman_edge.dialects import openai_chat
from whetherman_edge.dialects.chat import ChatView, Message, Tool
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.engine import Router, StaticEngine
from whetherman_edge.errors import ArtifactError, ProfileError, ProfileNotFound
from whetherman_edge.gate.policy import PolicySettings
from whetherman_edge.gate.verdict import Verdict
from whetherman_edge.ledger.counters import Counters
from whetherman_edge.profiles.schema import Profile, Tau, check_engine, check_features
from whetherman_edge.profiles.store import Check, ProfileStore
from whetherman_edge.proxy.gating import Gating, Judge
from whetherman_edge.proxy.learned import Learned
from whetherman_edge.proxy.sessions import Sessions

log = logging.getLogger(__name__)


class MissingEngine:
    """The judge of an installation whose artifacts are missing or broken: every request passes as ``model_missing``."""

    fused_names: tuple[str, ...] = ()
    default_tau = Tau()

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def judge(self, _chat: ChatView, _deadline_s: float) -> Verdict:
        """Always raises ArtifactError."""
        raise ArtifactError(self._fault)

    def tool_probabilities(self, _chat: ChatView) -> Mapping[str, float]:
        """Always raises ArtifactError."""
        raise ArtifactError(self._fault)


class Gate:
    """The composed gate. ``engine`` and ``router`` are None when they could not be opened; ``fault`` then says why.

    ``judge``: what gives the verdicts, the engine or a stand-in for it. ``deadline`` False: no time limit (offline).
    """

    def __init__(
        self,
        config: Config,
        counters: Counters,
        judge: Judge,
        *,
        router: Router | None = None,
        engine: StaticEngine | None = None,
        fault: str = "",
        deadline: bool = True,
    ) -> None:
        self.judge = judge
        self.router = router
        self.engine = engine
        self.fault = fault
        self.learned = Learned("unknown" if config.upstream_kind == "auto" else config.upstream_kind)
        self._tools = ToolCache()
        self._profiles = ProfileStore(check=_fits(engine) if engine is not None else None)
        settings = PolicySettings(
            fused_names=judge.fused_names,
            default_tau=judge.default_tau,
            force=config.force,
            loop_guard=config.loop_guard,
        )
        self.gating = Gating(
            config,
            judge=judge,
            view=self.view,
            settings=settings,
            profiles=self._profiles,
            learned=self.learned,
            sessions=Sessions(),
            counters=counters,
            deadline_s=config.gate_deadline_ms / 1e3 if deadline else None,
        )

    def view(self, body: bytes) -> ChatView:
        """The gate's view of a chat-completions body. Raises ViewError."""
        return openai_chat.view(body, self._tools)

    async def verdict_on(self, body: bytes) -> Verdict:
        """The verdict on a chat body. Raises ViewError; ArtifactError without an engine."""
        verdict = self.judge.judge(self.view(body), math.inf)
        return verdict if isinstance(verdict, Verdict) else await verdict

    def check_profiles(self, config: Config) -> None:
        """Look at the configured profiles before the first request does.

        Raises ProfileNotFound or ProfileError for ``profile``; those of ``[agents]`` get a warning each, because one
        agent's broken file must not keep the others from being served.
        """
        if config.profile:
            self._profiles.load(config.profile)
        for name in sorted(set(config.agents.values())):
            try:
                self._profiles.load(name)
            except (ProfileNotFound, ProfileError) as exc:
                log.warning("event=profile_unusable name=%s detail=%r", name, str(exc))

    def warm_up(self) -> None:
        """Judge once, so that the first request pays for no lazy import and no cold table."""
        if self.engine is None:
            return
        tool = Tool(name="search_web", description="Search the web.", parameters=(), key=b"\0" * 16)
        user = Message(role="user", text="What is the capital of France? Please look it up.")
        chat = ChatView(dialect="openai_chat", model="", messages=(user,), tools=(tool,), toolset_key=b"\0" * 16)
        self.engine.judge(chat, math.inf)


def open_gate(config: Config, counters: Counters, *, deadline: bool = True) -> Gate:
    """Open the engine and compose the gate; without a usable engine the gate lets everything pass, and says so."""
    router: Router | None = None
    try:
        router = Router()
        if config.engine == "gemma":
            raise ArtifactError("engine: expected the gemma backbone, this build has none; use --engine static or auto")
        engine = StaticEngine(router)
    except ArtifactError as exc:
        return Gate(config, counters, MissingEngine(str(exc)), router=router, fault=str(exc), deadline=deadline)
    return Gate(config, counters, engine, router=router, engine=engine, deadline=deadline)


def _fits(engine: StaticEngine) -> Check:
    """Checks that a profile was fitted on the artifact that is loaded."""

    def check(profile: Profile, name: str) -> None:
        check_engine(profile, name, "static", engine.sha256)
        check_features(profile, name, engine.fused_names)

    return check
