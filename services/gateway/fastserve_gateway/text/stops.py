"""Stop strings in a stream of characters, by an Aho-Corasick automaton: O(1) amortised per character.

The answer ends where the first stop string is complete; of several that end at the same character the longest
counts. That depends on the text alone, never on how it was cut into tokens or messages. The automaton's depth is
the length of the longest suffix that may still become a stop string: exactly what must be held back.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class StopAutomaton:
    """Built once per request, shared by its answers; never changes afterwards."""

    stops: Sequence[str]
    _next: list[dict[str, int]] = field(init=False)
    _fail: list[int] = field(init=False)
    _depth: list[int] = field(init=False)
    #: Per state: index of the longest stop that ends here, or -1.
    _match: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._next, self._fail, self._depth, self._match = [{}], [0], [0], [-1]
        for index, stop in enumerate(self.stops):
            self._insert(stop, index)
        self._link()

    def _insert(self, stop: str, index: int) -> None:
        state = 0
        for char in stop:
            following = self._next[state].get(char)
            if following is None:
                following = len(self._next)
                self._next[state][char] = following
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._match.append(-1)
            state = following
        if self._match[state] < 0:
            self._match[state] = index

    def _link(self) -> None:
        """Breadth first, so that a shorter suffix is linked before the states that fall back to it."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            if self._match[state] < 0:
                self._match[state] = self._match[self._fail[state]]
            for char, following in self._next[state].items():
                self._fail[following] = self.step(self._fail[state], char)
                queue.append(following)

    def step(self, state: int, char: str) -> int:
        while True:
            following = self._next[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fail[state]

    def depth(self, state: int) -> int:
        return self._depth[state]

    def match(self, state: int) -> str | None:
        index = self._match[state]
        return None if index < 0 else self.stops[index]


class StopScanner:
    """One answer's way through the automaton, and the characters it holds back."""

    def __init__(self, automaton: StopAutomaton, *, include_stop: bool) -> None:
        self._automaton = automaton
        self._include_stop = include_stop
        self._state = 0
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Characters that are safe to show now, and the stop string that ended the answer, if one did.

        `may_stop=False` (before `min_tokens`): a stop string that ends here is ordinary text.
        """
        state, step, match = self._state, self._automaton.step, self._automaton.match
        for position, char in enumerate(text, start=1):
            state = step(state, char)
            stop = match(state)
            if stop is not None and may_stop:
                whole = self._held + text[:position]
                self._held, self._state = "", 0
                return (whole if self._include_stop else whole[: len(whole) - len(stop)]), stop
        self._state = state
        whole = self._held + text
        shown = len(whole) - self._automaton.depth(state)
        self._held = whole[shown:]
        return whole[:shown], None

    def flush(self) -> str:
        """What was held back, when the answer ends for another reason."""
        held, self._held, self._state = self._held, "", 0
        return held
