"""The asyncio client: the same calls as `Client`, awaited."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self, TypeVar, Unpack

import grpc
import grpc.aio

from fastserve import _wire
from fastserve._calls import (
    CHANNEL_OPTIONS,
    DEFAULT_ADDRESS,
    Attempts,
    Metadata,
    RetryPolicy,
    channel_options,
    to_credentials,
    to_metadata,
)
from fastserve.errors import AbortedError, from_rpc
from fastserve.types import Chunk, GenerateOptions, Generation, ModelInfo, Prompt
from fastserve.v1 import inference_pb2 as pb
from fastserve.v1 import inference_pb2_grpc as rpc

T = TypeVar("T")

if TYPE_CHECKING:
    _AsyncStub = rpc.InferenceAsyncStub  # exists for the type checker only
else:
    _AsyncStub = rpc.InferenceStub


class AsyncClient:
    """Talks to a FastServe gateway over gRPC. Create it on the event loop that uses it.

    Arguments and errors are those of `Client`. Cancelling the awaiting task aborts the request on the server.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        tls: bool | grpc.ChannelCredentials = False,
        tls_name: str | None = None,
        timeout_s: float | None = None,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
    ) -> None:
        credentials = to_credentials(tls)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=channel_options(tls_name))
        self._stub = rpc.InferenceStub(self._channel)
        self._metadata = to_metadata(api_key)
        self._timeout_s = timeout_s
        self._retry = retry

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Open streams end with AbortedError, and are aborted on the server."""
        await self._channel.close()

    async def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """The whole answer. Raises DeadlineExceededError after `timeout` seconds; the request is then aborted."""
        request = _wire.to_request(prompt, options)

        def call(remaining_s: float | None) -> Awaitable[pb.GenerateResponse]:
            request.request_id = options.get("request_id") or _wire.new_request_id()
            return self._stub.Generate(request, timeout=remaining_s, metadata=self._metadata)

        return _wire.to_generation(await self._unary(call, timeout, request))

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> "AsyncStream":
        """The answer in pieces, as they are generated. Closing the returned iterator aborts the request."""
        request = _wire.to_request(prompt, options)
        attempts = Attempts(self._retry, self._timeout(timeout))
        return AsyncStream(self._stub, request, options.get("request_id", ""), self._metadata, attempts)

    async def abort(self, request_id: str, *, timeout: float | None = None) -> bool:
        """Abort a request, of this client or another. False when no live request has this id."""
        request = pb.AbortRequest(request_id=request_id)
        answer = await self._unary(lambda s: self._stub.Abort(request, timeout=s, metadata=self._metadata), timeout)
        return answer.aborted

    async def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """What is served, and its limits."""
        request = pb.GetModelInfoRequest()
        return _wire.to_model_info(
            await self._unary(lambda s: self._stub.GetModelInfo(request, timeout=s, metadata=self._metadata), timeout)
        )

    async def tokenize(self, text: str, *, add_special_tokens: bool = False, timeout: float | None = None) -> list[int]:
        """The served model's token ids of `text`."""
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        answer = await self._unary(lambda s: self._stub.Tokenize(request, timeout=s, metadata=self._metadata), timeout)
        return list(answer.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids)
        answer = await self._unary(
            lambda s: self._stub.Detokenize(request, timeout=s, metadata=self._metadata), timeout
        )
        return answer.text

    def _timeout(self, timeout: float | None) -> float | None:
        return self._timeout_s if timeout is None else timeout

    async def _unary(
        self,
        call: Callable[[float | None], Awaitable[T]],
        timeout: float | None,
        request: pb.GenerateRequest | None = None,
    ) -> T:
        attempts = Attempts(self._retry, self._timeout(timeout))
        while True:
            try:
                return await call(attempts.remaining_s())
            except grpc.RpcError as error:
                wait_s = attempts.next_wait_s(from_rpc(error, request.request_id if request else ""))
            except asyncio.CancelledError:
                _raise_cancelled(request.request_id if request else "")
            await asyncio.sleep(wait_s)


class AsyncStream(AsyncIterator[Chunk]):
    """Iterates over chunks. Use it in an `async with` block, or call `aclose`: both abort what is not finished.

    The call starts at the first `anext`. A lost gateway does not end it; see `Stream`. `request_id` is the id in use;
    it changes when a call that had no answer yet is made again without a given id.
    """

    def __init__(
        self,
        stub: _AsyncStub,
        request: pb.GenerateRequest,
        request_id: str,
        metadata: Metadata,
        attempts: Attempts,
    ) -> None:
        self._stub = stub
        self._request = request
        self._given_id = request_id
        self._metadata = metadata
        self._attempts = attempts
        self._chunks: deque[Chunk] = deque()
        self._call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse] | None = None
        self._answered = False
        self._delivered = _wire.Delivered()
        self._closed = False
        self._request.request_id = self._given_id or _wire.new_request_id()

    @property
    def request_id(self) -> str:
        return self._request.request_id

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort the request unless it has finished. Iterating on raises StopAsyncIteration."""
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    async def __anext__(self) -> Chunk:
        while not self._chunks:
            if self._closed:
                raise StopAsyncIteration
            try:
                response = await self._read()
            except grpc.RpcError as error:
                await self._recover(error)
            except asyncio.CancelledError:
                self._end_cancelled()
            else:
                self._accept(response)
        return self._chunks.popleft()

    def _end_cancelled(self) -> None:
        """Of a call that was cancelled: by the task, by `aclose`, or by closing the client."""
        if not self._closed or _task_is_cancelled():
            self._closed = True
            _raise_cancelled(self.request_id)

    async def _read(self) -> pb.GenerateResponse | None:
        """The next message; None at the end."""
        if self._call is None:
            self._call = self._stub.GenerateStream(
                self._request, timeout=self._attempts.remaining_s(), metadata=self._metadata
            )
        try:
            response = await self._call.read()
        except asyncio.CancelledError:
            self._call.cancel()
            raise
        return response if isinstance(response, pb.GenerateResponse) else None

    def _accept(self, response: pb.GenerateResponse | None) -> None:
        if response is None:
            self._closed = True
        else:
            self._answered = True
            self._delivered.add(response)
            self._chunks.extend(_wire.to_chunks(response))

    async def _recover(self, error: grpc.RpcError) -> None:
        """Arrange for another attempt, or raise. After `aclose` the cancelled call is no error."""
        if self._closed:
            return
        typed = from_rpc(error, self.request_id)
        try:
            if self._answered and not self._delivered.resume(self._request):
                raise typed from error
            await asyncio.sleep(self._attempts.next_wait_s(typed))
        except BaseException:
            self._closed = True
            raise
        self._call = None
        if not self._answered:
            self._request.request_id = self._given_id or _wire.new_request_id()


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _raise_cancelled(request_id: str) -> NoReturn:
    """Inside an `except CancelledError`: go on with the task's cancellation, or say that the client was closed."""
    if _task_is_cancelled():
        raise
    raise AbortedError("the client was closed", request_id=request_id) from None
