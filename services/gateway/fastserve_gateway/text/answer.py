"""The text of one answer as its tokens arrive: detokeniser, then stop strings."""

from collections.abc import Sequence
from dataclasses import dataclass

from fastserve_gateway.text.detokenizer import Detokenizer
from fastserve_gateway.text.stops import StopScanner


@dataclass(slots=True)
class TextStep:
    """What one token did to the text."""

    text: str
    stop_string: str | None = None


class AnswerText:
    """Feed tokens in order; the texts of all steps add up to the answer."""

    def __init__(self, detokenizer: Detokenizer, scanner: StopScanner | None) -> None:
        self._detokenizer = detokenizer
        self._scanner = scanner
        #: Characters decoded so far, held-back ones included: where the next token's text begins.
        self.num_chars = 0

    def push(self, token_id: int, *, may_stop: bool) -> TextStep:
        return self._scan(self._detokenizer.push(token_id), may_stop)

    def finish(self, *, may_stop: bool) -> TextStep:
        """No token follows: show what is left. An incomplete character may still complete a stop string."""
        step = self._scan(self._detokenizer.flush(), may_stop)
        if step.stop_string is None and self._scanner is not None:
            step.text += self._scanner.flush()
        return step

    def _scan(self, text: str, may_stop: bool) -> TextStep:
        self.num_chars += len(text)
        if self._scanner is None:
            return TextStep(text)
        shown, stop = self._scanner.push(text, may_stop=may_stop)
        return TextStep(shown, stop)


def decode_all(detokenizer: Detokenizer, ids: Sequence[int]) -> str:
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])
