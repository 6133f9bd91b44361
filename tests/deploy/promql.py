"""Whether an expression asks for what is exposed: names, and labels in selectors and groupings.

Not a parser: what it does not recognise as a selector of ours it leaves to promtool.
"""

import re

from .exposed import TARGET_LABELS, exposed

_SELECTOR = re.compile(r"\b((?:fastserve[:_]|process_)\w+|up)\b(?!\s*\()\s*(\{[^}]*\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
#: Made by a function, not by a service.
_MADE = frozenset({"le"})


def complaints(expression: str) -> list[str]:
    """What is wrong with it; a selector must say whose metric it means, since services share names."""
    found: list[str] = []
    known = set(TARGET_LABELS | _MADE)
    selectors = list(_SELECTOR.finditer(expression))
    if not selectors:
        found.append(f"no metric of ours in {expression!r}")
    for selector in selectors:
        name, matchers = selector[1], {m[1]: (m[2], m[3]) for m in _MATCHER.finditer(selector[2] or "")}
        jobs = [job for job in exposed() if _names(matchers.get("job"), job)]
        if not jobs:
            found.append(f"{name} without one of the jobs {', '.join(exposed())}")
        for job in jobs:
            labels = exposed()[job].get(name)
            if labels is None:
                found.append(f"{job} does not expose {name}")
                continue
            known |= labels
            found += [f"{name} of {job} has no label {key}" for key in matchers if key not in labels | TARGET_LABELS]
    for grouping in _GROUPING.finditer(expression):
        found += [f"nothing has the label {key}" for key in re.findall(r"\w+", grouping[1]) if key not in known]
    return found


def _names(matcher: tuple[str, str] | None, job: str) -> bool:
    if matcher is None:
        return False
    operator, value = matcher
    return value == job if operator == "=" else operator == "=~" and re.fullmatch(value, job) is not None
