"""What the upstream has shown: its kind, and which interventions it refused for which model (field case R13)."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from whetherman_edge.dialects.chat import InterventionMode
from whetherman_edge.gate.intervention import Capability, without_prefill
from whetherman_edge.proxy.capability import capability_of

# Model names come from requests, so their number must be bounded.
MODELS_MAX = 256


class Learned:
    """Capability by model. ``kind`` may become known after the start, when the upstream comes up."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        # By dialect too: one server takes a prefill in its own format and refuses it in the other one's.
        self._refused: OrderedDict[tuple[str, str], frozenset[InterventionMode]] = OrderedDict()
        self._toolless: OrderedDict[str, None] = OrderedDict()

    def start_anew(self, kind: str) -> None:
        """Another upstream: nothing is known of it but, perhaps, its kind."""
        self.kind = kind
        self._refused.clear()
        self._toolless.clear()

    def capability(self, model: str, dialect: str = "openai_chat") -> Capability:
        """The kind's capability in this dialect, less what this model's server refused in it."""
        capability = capability_of(self.kind, dialect)
        refused = self._refused.get((dialect, model))
        if refused is None:
            return capability
        if "prefill" in refused:
            capability = without_prefill(capability)
        if "none" in refused:
            capability = msgspec.structs.replace(capability, honours_none=False)
        if "strip" in refused:
            capability = msgspec.structs.replace(capability, accepts_strip_with_history=False)
        return capability

    def refuses(self, model: str, mode: InterventionMode, dialect: str = "openai_chat") -> bool:
        """Whether this intervention was refused before."""
        return mode in self._refused.get((dialect, model), frozenset())

    def refused(self, model: str, mode: InterventionMode, dialect: str = "openai_chat") -> None:
        """Remember that a request with this intervention failed where the original one did not."""
        key = dialect, model
        self._refused[key] = self._refused.pop(key, frozenset()) | {mode}
        if len(self._refused) > MODELS_MAX:
            self._refused.popitem(last=False)

    def takes_no_tools(self, model: str) -> bool:
        """Whether this model's server refused tools as such (field case C11)."""
        return model in self._toolless

    def refused_tools(self, model: str) -> None:
        """Remember that it did."""
        self._toolless[model] = None
        if len(self._toolless) > MODELS_MAX:
            self._toolless.popitem(last=False)
