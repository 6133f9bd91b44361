"""Tokens to text, one at a time: never half a character, and the pieces add up to the whole.

The non-streamed text of an answer is the sum of these pieces, so both forms agree by construction. Bytes that are
no UTF-8 become U+FFFD, one for each maximal invalid part, as the Unicode standard recommends.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

from fastserve_gateway.text.pieces import PieceTable

_utf8 = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """The characters that this token completes."""

    def flush(self) -> str:
        """What is left when no token follows: incomplete characters, as U+FFFD."""


class ByteDetokenizer:
    """For vocabularies whose tokens are bytes. O(1) per token.

    When the prompt ends in the middle of a character and the answer completes it, the answer shows the whole
    character; when it does not, the prompt's bytes are the prompt's matter and never show up in the answer.
    """

    def __init__(self, pieces: PieceTable, prompt_ids: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._decoder = _utf8("replace")
        self._dangling = dangling_bytes(pieces, prompt_ids)
        self._held = b""

    def push(self, token_id: int) -> str:
        piece = self._pieces.piece(token_id)
        if piece and self._dangling:
            piece = self._join_prompt(piece)
        return self._decoder.decode(piece) if piece else ""

    def flush(self) -> str:
        held, self._held, self._dangling = self._held, b"", b""
        return self._decoder.decode(held, final=True)

    def _join_prompt(self, piece: bytes) -> bytes:
        """Hold the answer's first bytes until it is known whose character they belong to."""
        self._held += piece
        head = self._dangling + self._held
        try:
            if not _utf8("strict").decode(head):
                return b""
            joined = head
        except UnicodeDecodeError as error:
            joined = head if error.start else self._held
        self._dangling, self._held = b"", b""
        return joined


def dangling_bytes(pieces: PieceTable, prompt_ids: Sequence[int]) -> bytes:
    """The bytes of the character that a prompt leaves unfinished: 0 to 3."""
    tail = b""
    for token_id in reversed(prompt_ids):
        piece = pieces.piece(token_id)
        tail = piece + tail
        if not piece or len(tail) >= 3:
            break
    for length in range(1, min(3, len(tail)) + 1):
        try:
            if not _utf8("strict").decode(tail[-length:]):
                return tail[-length:]
        except UnicodeDecodeError:
            continue
    return b""


class WindowDetokenizer:
    """For every other tokenizer: decode a small window with and without the new token, show the difference.

    A token's text may depend on the one before it (spaces, casing), so the window starts one token early.
    """

    #: Tokens that show no text yet; beyond that they are shown as they are, so the window stays bounded.
    MAX_PENDING = 16
    _CONTEXT = 4

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-self._CONTEXT :])
        self._shown = len(self._ids)

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return self._advance(force=len(self._ids) - self._shown > self.MAX_PENDING)

    def flush(self) -> str:
        return self._advance(force=True)

    def _advance(self, *, force: bool) -> str:
        before = self._decode(self._ids[: self._shown])
        after = self._decode(self._ids)
        if not force and (len(after) <= len(before) or after.endswith(_REPLACEMENT)):
            return ""
        del self._ids[: max(0, self._shown - 1)]
        self._shown = len(self._ids)
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids) if ids else ""
