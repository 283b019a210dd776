"""Stop withholding from an agent that does not go along: a small value per agent and the pure rule on it.

"Never worse" also after calibration: a model that writes calls although the tools were withheld costs one more request
each time, and one that ignores the note gains nothing. The daemon keeps one AgentState per agent (model and profile).
"""

from __future__ import annotations

from typing import Literal

import msgspec

Outcome = Literal["kept", "leaked", "ignored"]

# A leak costs a whole second request and field case R06 wants the agent marked, so few are enough; an ignored note
# costs one sentence.
LEAKS_MAX = 3
IGNORED_MAX = 8
# Below these shares of all withheld requests the failures are noise of an agent that mostly goes along.
LEAKED_SHARE_MAX = 0.10
IGNORED_SHARE_MAX = 0.34
# Agents that pass over a note may answer once the tools are gone: Qwen2.5-Coder-0.5B on a llama.cpp server called again
# after each note behind a result (5 of 5) and answered when stripped. So notes give way before withholding ends.
NOTES_IGNORED_MAX = 3
NOTES_IGNORED_SHARE_MAX = 0.2
# The counts are halved here, so that they follow an agent whose model file or template was changed.
WINDOW = 200


class AgentState(msgspec.Struct, frozen=True, gc=False):
    """Counts of applied interventions and of those that failed, in a window of about WINDOW requests."""

    withheld: int = 0
    leaked: int = 0
    ignored: int = 0

    def after(self, outcome: Outcome) -> AgentState:
        """The state after one more applied intervention.

        ``leaked``: tools were withheld, and the model wrote a call all the same. ``ignored``: they were left in place
        with a note, and it called.
        """
        withheld = self.withheld + 1
        leaked = self.leaked + (outcome == "leaked")
        ignored = self.ignored + (outcome == "ignored")
        if withheld > WINDOW and not AgentState(withheld, leaked, ignored).backed_off:
            return AgentState(withheld // 2, leaked // 2, ignored // 2)
        return AgentState(withheld, leaked, ignored)

    @property
    def notes_ignored(self) -> bool:
        """True when this agent calls in spite of notes: tools are better taken away from it, where that is safe."""
        return self.ignored >= NOTES_IGNORED_MAX and self.ignored > self.withheld * NOTES_IGNORED_SHARE_MAX

    @property
    def backed_off(self) -> bool:
        """True when this agent is to be left alone. It stays so, as no further request is withheld, until a restart."""
        leaks = self.leaked >= LEAKS_MAX and self.leaked > self.withheld * LEAKED_SHARE_MAX
        ignores = self.ignored >= IGNORED_MAX and self.ignored > self.withheld * IGNORED_SHARE_MAX
        return leaks or ignores
