"""The steering sentences. The wording is part of the intervention: a model told to "reply directly" reasons
less.

Constants only: a sentence that changed from request to request (a time, a score) would cost the upstream its prompt
cache (C02). Each says what to do and that no call is wanted; English, as all prompts of this kind are read best in it,
with the language of the reply left to the user's.
"""

from __future__ import annotations

from whetherman_edge.gate.verdict import Label

DEFAULT_WORDING = "reason"

# Label, wording, sentence. "reason" lets the model work it out first, "direct" saves output tokens.
FIRST_STEP: dict[tuple[Label, str], str] = {
    ("ANSWER", "reason"): (
        "You can answer this yourself: think it through step by step, then reply in plain text, without calling a tool."
    ),
    ("ANSWER", "direct"): "You can answer this yourself. Reply directly, without calling a tool.",
    ("ASK", "reason"): (
        "A detail is missing. Do not call a tool yet: think about which one, then ask me one short question about it."
    ),
    ("ASK", "direct"): "Do not call a tool yet. Ask me one short clarifying question about what is missing.",
    ("DECLINE", "reason"): (
        "None of the tools can do this. Do not call one: think about what exactly cannot be done here, then tell me so."
    ),
    ("DECLINE", "direct"): "No available tool can do this. Do not call one; say briefly what you cannot do.",
}

# On later steps the sentence stands behind a tool's result, where "I" and "me" would be the tool.
LATER_STEP: dict[tuple[Label, str], str] = {
    ("ANSWER", "reason"): (
        "[You have what you need: think it through, then answer the user in plain text, without calling a tool.]"
    ),
    ("ANSWER", "direct"): "[No further call is needed. Answer the user now, without calling a tool.]",
    ("ASK", "reason"): (
        "[A detail is missing that no tool can find. Think which one, then ask the user one short question about it.]"
    ),
    ("ASK", "direct"): "[Do not call a tool now. Ask the user one short clarifying question about what is missing.]",
    ("DECLINE", "reason"): (
        "[No tool can do the rest. Think about what exactly cannot be done, then tell the user so; call no tool.]"
    ),
    ("DECLINE", "direct"): "[No available tool can do the rest. Do not call one; tell the user what cannot be done.]",
}

LOOP = (
    "[This call has already come back with this same result; calling again will not change it. Answer the user now from"
    " the results so far, in plain text, without calling a tool. If something could not be done, say so.]"
)

# Trailing assistant text for ``prefill``: opens a sentence that a call does not fit behind.
PREFIXES: dict[Label, str] = {
    "ANSWER": "Here is my answer:",
    "ASK": "Before I go on, one question:",
    "DECLINE": "I can't do this with the tools I have:",
}


def wordings() -> tuple[str, ...]:
    """Names of the wordings, the default one first."""
    names = {name for _, name in FIRST_STEP}
    return (DEFAULT_WORDING, *sorted(names - {DEFAULT_WORDING}))


def sentence(label: Label, wording: str, *, later: bool, looping: bool) -> str:
    """The sentence for a decision; an unknown wording gets the default one."""
    if looping:
        return LOOP
    table = LATER_STEP if later else FIRST_STEP
    return table.get((label, wording)) or table[label, DEFAULT_WORDING]
