"""The served model as the gateway knows it: its words, never its weights."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer

from fastserve_common.errors import InvalidArgumentError
from fastserve_gateway.text.answer import decode_all
from fastserve_gateway.text.chat_template import ChatTemplate
from fastserve_gateway.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, dangling_bytes
from fastserve_gateway.text.files import ModelFilesError, read_model_files
from fastserve_gateway.text.pieces import PieceTable, byte_level, token_bytes_of

#: Texts up to this many characters, and as many token ids, are handled on the event loop; longer ones on a thread.
INLINE_CHARS = 2048
#: Threads for long texts. The tokenizer releases the interpreter lock while it works.
TEXT_THREADS = 2

T = TypeVar("T")


class TextModel:
    """Tokenizer, chat template and end-of-sequence ids of one model. Loaded once, then read-only."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelFilesError."""
        files = read_model_files(folder)
        try:
            self._tokenizer = Tokenizer.from_str(files.tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise ModelFilesError(f"{folder / 'tokenizer.json'}: {error}") from error
        # A server tokenises what it is given; limits are checked, never silently applied.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        to_bytes = token_bytes_of(files.decoder)
        self._exact = to_bytes is not None
        self._pieces = PieceTable(self._tokenizer, to_bytes or (lambda token: token.encode("utf-8", "replace")))
        self._template = ChatTemplate(files.chat_template, files.special_tokens) if files.chat_template else None
        self._threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")
        self.eos_token_ids = files.eos_token_ids
        #: Ids that may be sent to the model are below this.
        self.vocab_size = files.vocab_size or self._tokenizer.get_vocab_size()
        #: A text of more bytes than this times a token limit cannot fit it; None when no such bound is known.
        self.longest_piece_bytes: int | None = None
        if to_bytes is byte_level and files.keeps_text:
            self.longest_piece_bytes = self._pieces.longest_piece_bytes()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """`work` on something of `size`: here when it is small, else on one of the threads for long texts."""
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        def work() -> list[int]:
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

        return await self.run(len(text), work)

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens spelled out."""
        return await self.run(len(ids), lambda: self._tokenizer.decode(list(ids), skip_special_tokens=False))

    async def prompt_text(self, ids: Sequence[int]) -> str:
        """A prompt given as ids, as text, for `echo`: without the bytes of a character that it leaves unfinished,
        because the answer shows that character when it completes it."""

        def work() -> str:
            text = decode_all(self.detokenizer(()), ids)
            if self._exact and dangling_bytes(self._pieces, ids):
                return text.removesuffix("\ufffd")
            return text

        return await self.run(len(ids), work)

    async def render_chat(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool, variables: Mapping[str, object]
    ) -> str:
        """Raises InvalidArgumentError when the model has no chat template or the template refuses the messages."""
        template = self._template
        if template is None:
            raise InvalidArgumentError("this model has no chat template; use /v1/completions", param="messages")

        def work() -> str:
            return template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)

        size = sum(len(str(message.get("content", ""))) for message in messages)
        return await self.run(size, work)

    def detokenizer(self, prompt_ids: Sequence[int]) -> Detokenizer:
        """For one answer; `prompt_ids` are the context in which it is shown."""
        if self._exact:
            return ByteDetokenizer(self._pieces, prompt_ids)
        return WindowDetokenizer(self._tokenizer, prompt_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """One token by itself, special tokens spelled out; for log-probability listings."""
        return self._pieces.raw(token_id)
