"""FastServe's own API as a backend."""

import time
from dataclasses import dataclass

from fastserve._calls import RetryPolicy
from fastserve.aio import AsyncClient
from fastserve.bench.backends import BackendError, Decoding, Reply, Target
from fastserve.bench.workload import Request
from fastserve.errors import FastServeError
from fastserve.types import Chunk, GenerateOptions, Prompt


@dataclass(frozen=True, slots=True)
class _Prepared:
    prompt: Prompt
    options: GenerateOptions


class GrpcBackend:
    """Failures are never retried: they are what is measured."""

    name = "fastserve-grpc"

    def __init__(self, address: str, decoding: Decoding, api_key: str | None = None) -> None:
        self._client = AsyncClient(address, api_key=api_key, retry=RetryPolicy(max_attempts=1))
        self._decoding = decoding

    async def describe(self) -> Target:
        try:
            info = await self._client.model_info(timeout=10)
        except FastServeError as error:
            raise BackendError(_named(error)) from error
        return Target(info.model, info.root, info.vocab_size)

    async def count_tokens(self, text: str) -> int:
        try:
            return len(await self._client.tokenize(text))
        except FastServeError as error:
            raise BackendError(_named(error)) from error

    def prepare(self, request: Request) -> object:
        decoding = self._decoding
        options = GenerateOptions(
            max_tokens=request.output_tokens, temperature=decoding.temperature, ignore_eos=decoding.ignore_eos
        )
        if decoding.top_p is not None:
            options["top_p"] = decoding.top_p
        if decoding.top_k is not None:
            options["top_k"] = decoding.top_k
        if decoding.seed is not None:
            options["seed"] = decoding.seed
        return _Prepared(request.prompt, options)

    async def generate(self, prepared: object, reply: Reply) -> None:
        assert isinstance(prepared, _Prepared)
        try:
            async with self._client.stream(prepared.prompt, **prepared.options) as stream:
                async for chunk in stream:
                    _accept(chunk, reply)
        except FastServeError as error:
            raise BackendError(_named(error)) from error

    async def close(self) -> None:
        await self._client.close()


def _accept(chunk: Chunk, reply: Reply) -> None:
    if chunk.token_ids:
        reply.piece(time.perf_counter(), len(chunk.token_ids), chunk.text)
    elif chunk.text:
        reply.texts.append(chunk.text)
    if chunk.usage is not None:
        reply.input_tokens = chunk.usage.prompt_tokens
        reply.output_tokens = chunk.usage.completion_tokens
        reply.end_s = time.perf_counter()
    if chunk.finish is not None and chunk.finish.reason in ("abort", "error"):
        raise BackendError(f"the server ended the answer with {chunk.finish.reason!r}")


def _named(error: FastServeError) -> str:
    return f"{type(error).__name__}: {error.message}"
