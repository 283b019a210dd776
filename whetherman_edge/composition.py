"""Puts the gate together: engine, profiles, policy, and what is remembered. Used by the daemon and by ``decide``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from whetherman_edge.config import Config
from whetherman_edge.dialects import openai_chat
from whetherman_edge.dialects.chat import ChatView, Message, Tool
from whetherman_edge.dialects.tool_cache import ToolCache
from whetherman_edge.engine import Router, StagedEngine, StaticEngine, open_engine
from whetherman_edge.errors import ArtifactError, ProfileError, ProfileNotFound
from whetherman_edge.gate.operating_point import NEVER
from whetherman_edge.gate.policy import PolicySettings
from whetherman_edge.gate.verdict import Verdict
from whetherman_edge.ledger.counters import Counters
from whetherman_edge.profiles import field, suggestions
from whetherman_edge.profiles.payoff import in_order
from whetherman_edge.profiles.schema import Profile
from whetherman_edge.profiles.store import ProfileStore
from whetherman_edge.proxy.breaker import FAILURES_MAX, Breaker
from whetherman_edge.proxy.gating import Gating, Judge
from whetherman_edge.proxy.learned import Learned
from whetherman_edge.proxy.sessions import Sessions
from whetherman_edge.router.decision import Choice

log = logging.getLogger(__name__)

# A kill loses at most this much of the evidence; a stop is written at once.
FIELD_EVERY_S = 10.0
# Models without a profile that are looked up in the stored ones; a client may make up names for ever.
MODELS_TOLD_MAX = 256

Engine = StaticEngine | StagedEngine


class MissingEngine:
    """The judge of an installation whose artifacts are missing or broken: every request passes as ``model_missing``."""

    fused_names: tuple[str, ...] = ()
    default_tau = NEVER

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def judge(self, _chat: ChatView, _deadline_s: float, _profile: Profile | None = None) -> Verdict:
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
        engine: Engine | None = None,
        fault: str = "",
        deadline: bool = True,
    ) -> None:
        self.judge = judge
        self.router = router
        self.engine = engine
        self.fault = fault
        self._counters = counters
        self.learned = Learned("unknown" if config.upstream_kind == "auto" else config.upstream_kind)
        self._tools = ToolCache()
        self._profiles = ProfileStore(check=engine.fits if engine is not None else None)
        # A command looks at requests one by one; only a daemon has dialogues, and remembers its agents.
        self._field_path = field.default_path() if deadline else None
        self._sessions = Sessions(field.read(self._field_path, time.time()) if self._field_path is not None else None)
        self._n_saved = 0
        self._profile_faults: dict[str, str] = {}
        self._breaker = Breaker(FAILURES_MAX, time.monotonic)
        self._has_deadline = deadline
        self._told_of: set[str] = set()
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Rule by these settings from now on: requests that began stay with the old ones, what was learned stays."""
        self._deadline_s = config.gate_deadline_ms / 1e3 if self._has_deadline else math.inf
        settings = PolicySettings(
            fused_names=self.judge.fused_names,
            default_tau=self.judge.default_tau,
            fallback_tau=self.engine.fallback_tau if isinstance(self.engine, StagedEngine) else None,
            force=config.force,
            loop_guard=config.loop_guard,
            tools=in_order(config.tools),
        )
        self.gating = Gating(
            config,
            judge=self.judge,
            tools=self._tools,
            settings=settings,
            profiles=self._profiles,
            learned=self.learned,
            sessions=self._sessions,
            counters=self._counters,
            deadline_s=self._deadline_s if self._has_deadline else None,
            breaker=self._breaker,
            on_unprofiled=self._tell_of_profile if self._has_deadline else lambda _model: None,
        )
        self._engine_name = config.engine

    def view(self, body: bytes) -> ChatView:
        """The gate's view of a chat-completions body. Raises ViewError."""
        return openai_chat.view(body, self._tools)

    async def verdict_on(self, body: bytes) -> Verdict:
        """The verdict on a chat body. Raises ViewError; ArtifactError without an engine."""
        verdict = self.judge.judge(self.view(body), time.monotonic() + self._deadline_s)
        return verdict if isinstance(verdict, Verdict) else await verdict

    def check_profiles(self, config: Config, *, starting: bool = False) -> None:
        """Read the configured profiles, before the first request does (``starting``) or once more for a reload.

        Raises ProfileNotFound for ``profile``, and, but at the start, ProfileError: a daemon that runs keeps what it
        has, one that starts serves in shadow and says why, as it must not stop the agents behind it. Those of
        ``[agents]`` get a warning each, because one agent's broken file must not keep the others from being served.
        """
        faults: dict[str, str] = {}
        # The one that may refuse a reload goes first: when it does, no other has been read anew.
        for name in filter(None, dict.fromkeys((config.profile, *sorted(config.agents.values())))):
            try:
                self._profiles.reload(name)
            except (ProfileNotFound, ProfileError) as exc:
                if name == config.profile and not (starting and isinstance(exc, ProfileError)):
                    raise
                faults[name] = str(exc)
                log.warning("event=profile_unusable name=%s detail=%r hint=in_shadow", name, str(exc))
        self._profile_faults = faults

    def _tell_of_profile(self, model: str) -> None:
        """Say once of a model without a profile that one was measured on it, and which line gives it to it."""
        if model in self._told_of or len(self._told_of) >= MODELS_TOLD_MAX:
            return
        self._told_of.add(model)
        near = suggestions.suggest(self._profiles.list(), model[:200], engine=self._engine_name)
        if near is not None and near.likeness != "requantised":
            log.info(
                "event=profile_at_hand model=%r profile=%s likeness=%s add=%r hint=under_agents_in_the_configuration",
                model[:200],
                near.name,
                near.likeness,
                suggestions.line(model[:200], near.name),
            )

    def field(self) -> dict[str, Any]:
        """What ``/health`` says of agents: ``unusable`` profiles and why, and what the requests showed of each agent.

        Of an agent: ``applied`` interventions of scored decisions and the test that ``stopped`` them or "", the same of
        the ``loop_guard``, and why to ``recalibrate`` or "".
        """
        agents = {
            agent: {
                "applied": record.n_applied,
                "stopped": record.stopped,
                "loop_guard": {"applied": record.loop_guard.n_applied, "stopped": record.loop_guard.stopped},
                "recalibrate": record.advice,
            }
            for agent, record in self._sessions.records().items()
        }
        return {"unusable": self._profile_faults, "agents": agents}

    async def keep_field(self) -> None:
        """Write what the requests show of agents to disk, at once when one is stopped, else now and then; for ever."""
        news = asyncio.Event()
        self._sessions.on_stop = news.set
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), FIELD_EVERY_S)
            news.clear()
            await self.save_field()

    async def save_field(self) -> None:
        """Write what changed since the last time; a disk that does not take it costs the evidence and nothing else."""
        path, n_changes = self._field_path, self._sessions.n_changes
        if path is None or n_changes == self._n_saved:
            return
        records = self._sessions.records()
        try:
            await asyncio.to_thread(field.write, path, records, time.time())
        except OSError as exc:
            log.warning("event=field_state_unwritten path=%s error=%s", path, exc.strerror)
        self._n_saved = n_changes

    def start(self) -> None:
        """Begin to open the backbone, where the engine has one; returns at once."""
        if isinstance(self.engine, StagedEngine) and self.engine.stage is not None:
            self.engine.stage.start()

    def close(self) -> None:
        """End the backbone; blocks for some seconds at most."""
        if isinstance(self.engine, StagedEngine) and self.engine.stage is not None:
            self.engine.stage.stop()

    def await_backbone(self) -> str:
        """Wait until the backbone can be asked, for commands; why it cannot, or "" (also for the static engine)."""
        engine = self.engine
        if not isinstance(engine, StagedEngine) or engine.stage is None:
            return engine.fault if isinstance(engine, StagedEngine) else ""
        return engine.stage.settled()

    def backbone(self) -> dict[str, str]:
        """What ``/health`` says of the backbone: ``state`` and ``detail``; "off" with the static engine."""
        if not isinstance(self.engine, StagedEngine):
            return {"state": "off", "detail": ""}
        return {"state": self.engine.state, "detail": self.engine.fault}

    async def second_opinion(self, query: str, options: Mapping[str, Any], choice: Choice) -> Choice:
        """A choice of the router's, with the backbone's part in it where that has one in time."""
        chooser = self.engine.chooser if isinstance(self.engine, StagedEngine) else None
        if chooser is None:
            return choice
        return await chooser.second_opinion(query, options, choice, time.monotonic() + self._deadline_s)

    def count(self) -> None:
        """Bring the backbone's counts into the counters."""
        stage = self.engine.stage if isinstance(self.engine, StagedEngine) else None
        ready = stage is not None and stage.state == "ready"
        self._counters.set_gauge("backbone_ready", float(ready), "1 when the backbone can be asked")
        if stage is None:
            return
        counts, counters = stage.counts, self._counters
        counters.set_gauge("backbone_queue", stage.waiting, "prompts waiting for the backbone worker")
        counters.set_total("backbone_jobs_total", counts.jobs)
        counters.set_total("backbone_prefix_hits_total", counts.prefix_hits)
        counters.set_total("backbone_results_reused_total", counts.answered_from_results)
        counters.set_total("backbone_aborted_total", counts.aborted)
        reused = max(counts.tokens_prompt - counts.tokens_decoded, 0)
        counters.set_total("backbone_tokens_total", counts.tokens_decoded, (("source", "decoded"),))
        counters.set_total("backbone_tokens_total", reused, (("source", "reused"),))

    def warm_up(self) -> None:
        """Judge once, so that the first request pays for no lazy import and no cold table."""
        engine = self.engine.static if isinstance(self.engine, StagedEngine) else self.engine
        if engine is None:
            return
        tool = Tool(name="search_web", description="Search the web.", parameters=(), key=b"\0" * 16)
        user = Message(role="user", text="What is the capital of France? Please look it up.")
        chat = ChatView(dialect="openai_chat", model="", messages=(user,), tools=(tool,), toolset_key=b"\0" * 16)
        engine.judge(chat, math.inf)


def open_gate(config: Config, counters: Counters, *, deadline: bool = True) -> Gate:
    """Open the engine and compose the gate; without a usable engine the gate lets everything pass, and says so."""
    router: Router | None = None
    try:
        router = Router()
        static = StaticEngine(router)
        engine: Engine = static
        if config.engine != "static":
            breaker = Breaker(FAILURES_MAX, time.monotonic) if deadline else None
            engine = open_engine(
                config.engine,
                static,
                router.table.sha256,
                breaker=breaker,
                count=lambda outcome: counters.add("backbone_requests_total", (("outcome", outcome),)),
                keep_prefixes=deadline,  # a daemon has one, a command does not
            )
            if engine.stage is None:
                log.warning("event=backbone_unusable detail=%r hint=the_static_stage_serves", engine.fault)
    except ArtifactError as exc:
        return Gate(config, counters, MissingEngine(str(exc)), router=router, fault=str(exc), deadline=deadline)
    return Gate(config, counters, engine, router=router, engine=engine, deadline=deadline)
