"""A light English stemmer and the function words, used when the artifact is built (never at run time)."""

from __future__ import annotations

FUNCTION_WORDS = frozenset(
    """
    a about after again all also am an and any anything are as at be because been before being between both but
    by can could d did do does doing don down each either else even ever every few for from further get gets
    getting give go going gonna got had has have having he hello her here hers hey hi him his how i if im in
    into is it its itself just kindly let lets like ll m make many may maybe me might mine more most much must
    my myself need needs no nor not now of off ok okay on once one ones only or other our ours out over own
    please pls put re s same see shall she should show so some something still such t tell than thank thanks
    that the their them then there these they thing things this those through to too under until up us use used
    user users using ve very via want wants was we were what when where which while who whom whose why will with
    within without would you your yours
    """.split()
)

_RULES = (
    ("ational", "ate"),
    ("ization", "ize"),
    ("isation", "ize"),
    ("fulness", "ful"),
    ("ousness", "ous"),
    ("iveness", "ive"),
    ("ements", ""),
    ("ement", ""),
    ("ations", "ate"),
    ("ation", "ate"),
    ("ators", "ate"),
    ("ator", "ate"),
    ("ities", ""),
    ("ity", ""),
    ("ments", ""),
    ("ment", ""),
    ("ings", ""),
    ("ing", ""),
    ("ies", "y"),
    ("ied", "y"),
    ("edly", ""),
    ("ness", ""),
    ("ions", ""),
    ("ion", ""),
    ("ers", ""),
    ("ors", ""),
    ("ally", "al"),
    ("ed", ""),
    ("er", ""),
    ("or", ""),
    ("ly", ""),
    ("sses", "ss"),
    ("xes", "x"),
    ("ches", "ch"),
    ("shes", "sh"),
    ("es", "e"),
    ("s", ""),
)


def stem_word(token: str) -> str:
    """A crude stem: one suffix off, a doubled consonant and a final e dropped. ``##`` pieces keep their mark."""
    mark, word = ("##", token[2:]) if token.startswith("##") else ("", token)
    if len(word) < 4 or not word.isalpha() or not word.isascii():
        return token
    for suffix, instead in _RULES:
        rest = word[: len(word) - len(suffix)]
        if word.endswith(suffix) and len(rest) >= 3 and not word.endswith("ss") and any(c in "aeiouy" for c in rest):
            word = rest + instead
            break
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "aeiouls":
        word = word[:-1]
    if len(word) > 4 and word.endswith("e"):
        word = word[:-1]
    if len(word) > 3 and word.endswith("y"):
        word = word[:-1] + "i"
    return mark + word
