"""The bytes that each token adds to a text.

For the two families that every current decoder model uses, the text of a token sequence is the concatenation of
its tokens' bytes, read as UTF-8: byte-level BPE (GPT-2, OPT, Llama 3, Qwen: each character of the token stands for
one byte) and SentencePiece with byte fallback (Llama 2, Mistral, Gemma: the token is text, with a mark for the
space, or `<0xNN>` for one byte). Then detokenising one more token costs O(1) and is exact.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_SPACE_MARK = "\u2581"


class TokenBytes(Protocol):
    """How one family spells bytes in its vocabulary."""

    def __call__(self, token: str) -> bytes: ...


@dataclass(slots=True)
class PieceTable:
    """Token id -> bytes, filled as ids are seen (a vocabulary has up to a few hundred thousand)."""

    tokenizer: Tokenizer
    to_bytes: TokenBytes
    _special_ids: frozenset[int] = field(init=False)
    _cache: dict[int, bytes] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        added = self.tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def piece(self, token_id: int) -> bytes:
        """Empty for special tokens, and for ids that only pad the model's vocabulary."""
        known = self._cache.get(token_id)
        if known is None:
            known = self._cache[token_id] = b"" if token_id in self._special_ids else self.raw(token_id)
        return known

    def raw(self, token_id: int) -> bytes:
        """The same, special tokens spelled out."""
        token = self.tokenizer.id_to_token(token_id)
        return b"" if token is None else self.to_bytes(token)

    def longest_piece_bytes(self) -> int:
        return max((len(self.to_bytes(token)) for token in self.tokenizer.get_vocab()), default=1)


def token_bytes_of(decoder: dict[str, object]) -> TokenBytes | None:
    """How tokens spell bytes under this tokenizer.json `decoder`; None when no such rule holds for it."""
    kinds = {str(step.get("type")) for step in _steps(decoder)}
    if "ByteLevel" in kinds:
        return byte_level
    if kinds & {"ByteFallback", "Metaspace"} and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return sentence_piece
    return None


def _steps(decoder: dict[str, object]) -> Iterator[dict[str, object]]:
    nested = decoder.get("decoders")
    if isinstance(nested, list):
        for step in nested:
            if isinstance(step, dict):
                yield from _steps(step)
    else:
        yield decoder


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 stands for itself, the other 68 bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update((chr(0x100 + k), byte) for k, byte in enumerate(rest))
    return alphabet


_BYTE_OF_CHAR = _byte_alphabet()


def byte_level(token: str) -> bytes:
    """A token with a character outside the alphabet is an added one and stands for itself."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def sentence_piece(token: str) -> bytes:
    byte = _BYTE_TOKEN.match(token)
    if byte:
        return bytes([int(byte[1], 16)])
    return token.replace(_SPACE_MARK, " ").encode("utf-8", "replace")
