"""Every exception this package raises on purpose.

    WhethermanError
    ├── UsageError            the caller asked for something that does not exist or does not parse (exit 2, HTTP 4xx)
    │   ├── ConfigError       a configuration key, environment variable or flag is wrong
    │   ├── RequestError      a request body breaks our own API (``/v1/decide``, ``/v1/systemone``, ``route``)
    │   │                     (dialects.system_one adds InvalidBody and Refusal: its 422s, and 4xx of other kinds)
    │   └── ProfileNotFound   no profile of that name
    ├── EnvironmentFault      the machine lacks something or a file is broken (exit 3, HTTP 5xx)
    │   ├── ArtifactError     a weights or table file is missing, truncated, corrupt or of another version
    │   ├── ProfileError      a profile file is broken or was fitted on another artifact
    │   ├── PortTaken         the listening address is in use
    │   └── UpstreamMissing   no model server answers
    │       └── UpstreamReset it answered no longer: the connection ended inside a request or response
    ├── FrameError            bytes on the decision socket that are no frames (service.frames)
    └── ViewError             a chat body cannot be viewed or edited; the proxy relays it untouched
        └── OverLimit         it has more turns, calls, tools or members than the gate reads

Messages say what was expected, what came (elided), and the fix.
"""

from __future__ import annotations


class WhethermanError(Exception):
    """Base of all our own errors."""

    exit_code: int = 1


class UsageError(WhethermanError):
    exit_code = 2


class ConfigError(UsageError):
    """A configuration value is wrong; the message names the key, where it was set, and what is allowed."""


class RequestError(UsageError, ValueError):
    """A request breaks one of our own contracts.

    ``loc`` is the path to the offending field as in FastAPI's 422 bodies, ``kind`` its machine-readable type.
    """

    def __init__(self, message: str, loc: tuple[str | int, ...] = ("body",), kind: str = "value_error") -> None:
        super().__init__(message)
        self.loc = loc
        self.kind = kind


class ProfileNotFound(UsageError):
    """No profile of that name; the message lists those that exist."""


class EnvironmentFault(WhethermanError):
    exit_code = 3


class ArtifactError(EnvironmentFault):
    """A weights or table file is missing, truncated, corrupt, or of another version."""


class ProfileError(EnvironmentFault):
    """A profile file is broken, incomplete, or was fitted on another engine artifact."""


class PortTaken(EnvironmentFault):
    """The listening address is in use."""


class UpstreamMissing(EnvironmentFault):
    """No model server was found or the configured one does not answer."""


class UpstreamReset(UpstreamMissing):
    """The upstream ended the connection before the response was complete."""


class ViewError(WhethermanError):
    """A chat body cannot be viewed or spliced. Never reaches the client: the proxy relays the original bytes."""


class OverLimit(ViewError):
    """A chat body has more of something than the gate reads while the event loop waits."""
