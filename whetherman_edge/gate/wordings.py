"""The steering sentences. The wording is part of the intervention: a model told to "reply directly" reasons
less.

Constants only: a sentence that changed from request to request (a time, a score) would cost the upstream its prompt
cache (C02). Each opens with what to write now, and none names what is not wanted: a small model that reads "without
calling a tool" calls one. That it is to be prose is said by a length, which leaves longer answers free. Measured with
Qwen2.5-Coder 0.5B, the tools still in the prompt, in nine dialogues whose last result answers the question: "think it
through, then answer the user in plain text, without calling a tool" got an answer in three, "write your final answer to
the user now, in a sentence or two" in eight. English, as all prompts of this kind are read best in it, with the
language of the reply left to the user's.
"""

from __future__ import annotations

from whetherman_edge.gate.verdict import Label

DEFAULT_WORDING = "reason"

# Label, wording, sentence. "reason" lets the model work an answer out first, "direct" saves output tokens; a question
# or a refusal needs no working out, so those have one sentence for both.
FIRST_STEP: dict[tuple[Label, str], str] = {
    ("ANSWER", "reason"): "Reply in plain words, thinking it through first.",
    ("ANSWER", "direct"): "Reply in plain words.",
    ("ASK", "reason"): "Reply with one short question to me, about the detail that is missing.",
    ("DECLINE", "reason"): "Reply in plain words: say what exactly cannot be done here, and why.",
}

# On later steps the sentence stands behind a tool's result, where "I" and "me" would be the tool.
LATER_STEP: dict[tuple[Label, str], str] = {
    ("ANSWER", "reason"): "[Write your final answer to the user now, in a sentence or two if that is enough.]",
    ("ANSWER", "direct"): "[Write your final answer to the user now, in a sentence or two.]",
    ("ASK", "reason"): "[Write one short question to the user now, about the detail that is missing.]",
    ("DECLINE", "reason"): "[Write to the user now, in plain words, what exactly cannot be done, and why.]",
}

LOOP = (
    "[Write your final answer to the user now, in a sentence or two if that is enough. If something could not be done,"
    " say so.]"
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
