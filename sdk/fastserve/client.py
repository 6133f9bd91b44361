"""The blocking client. One channel, safe to share between threads."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

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
from fastserve.errors import FastServeError, from_rpc
from fastserve.types import Chunk, GenerateOptions, Generation, ModelInfo, Prompt
from fastserve.v1 import inference_pb2 as pb
from fastserve.v1 import inference_pb2_grpc as rpc

T = TypeVar("T")


class Client:
    """Talks to a FastServe gateway over gRPC. Connects at the first call.

    `address`: "host:port" or "unix:path". `tls`: True, or credentials of `grpc.ssl_channel_credentials` (authorities
    of one's own, a certificate to show). `tls_name`: the DNS name that the server's certificate must have, where it is
    not the host of `address`. `timeout_s`: the deadline of every call that does not give its own; None is none. Every
    method raises the errors of `fastserve.errors`; UnavailableError only after the retries.
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
            self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=channel_options(tls_name))
        self._stub = rpc.InferenceStub(self._channel)
        self._metadata = to_metadata(api_key)
        self._timeout_s = timeout_s
        self._retry = retry

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Open streams end with AbortedError, and are aborted on the server."""
        self._channel.close()

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """The whole answer. Raises DeadlineExceededError after `timeout` seconds; the request is then aborted."""
        request = _wire.to_request(prompt, options)

        def call(remaining_s: float | None) -> pb.GenerateResponse:
            request.request_id = options.get("request_id") or _wire.new_request_id()
            return self._stub.Generate(request, timeout=remaining_s, metadata=self._metadata)

        return _wire.to_generation(self._unary(call, timeout, request))

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]) -> "Stream":
        """The answer in pieces, as they are generated. Closing the returned iterator aborts the request."""
        request = _wire.to_request(prompt, options)
        attempts = Attempts(self._retry, self._timeout(timeout))
        return Stream(self._stub, request, options.get("request_id", ""), self._metadata, attempts)

    def abort(self, request_id: str, *, timeout: float | None = None) -> bool:
        """Abort a request, of this client or another. False when no live request has this id."""
        request = pb.AbortRequest(request_id=request_id)
        return self._unary(lambda s: self._stub.Abort(request, timeout=s, metadata=self._metadata), timeout).aborted

    def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """What is served, and its limits."""
        request = pb.GetModelInfoRequest()
        return _wire.to_model_info(
            self._unary(lambda s: self._stub.GetModelInfo(request, timeout=s, metadata=self._metadata), timeout)
        )

    def tokenize(self, text: str, *, add_special_tokens: bool = False, timeout: float | None = None) -> list[int]:
        """The served model's token ids of `text`."""
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        answer = self._unary(lambda s: self._stub.Tokenize(request, timeout=s, metadata=self._metadata), timeout)
        return list(answer.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, timeout: float | None = None) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids)
        return self._unary(lambda s: self._stub.Detokenize(request, timeout=s, metadata=self._metadata), timeout).text

    def _timeout(self, timeout: float | None) -> float | None:
        return self._timeout_s if timeout is None else timeout

    def _unary(
        self,
        call: Callable[[float | None], T],
        timeout: float | None,
        request: pb.GenerateRequest | None = None,
    ) -> T:
        attempts = Attempts(self._retry, self._timeout(timeout))
        while True:
            try:
                return call(attempts.remaining_s())
            except grpc.RpcError as error:
                time.sleep(attempts.next_wait_s(from_rpc(error, request.request_id if request else "")))


class Stream(Iterator[Chunk]):
    """Iterates over chunks. Use it in a `with` block, or call `close`: both abort what is not finished.

    When the gateway is lost in the middle of a single answer, the stream goes on through another one (or the same, back
    again) where it stopped, as often as the retry policy says.

    `request_id` is the id in use; it changes when a call that had no answer yet is made again without a given id.
    For one thread at a time; `close` may be called from any.
    """

    def __init__(
        self,
        stub: rpc.InferenceStub,
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
        self._answered = False
        self._delivered = _wire.Delivered()
        self._closed = threading.Event()
        self._start()

    @property
    def request_id(self) -> str:
        return self._request.request_id

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Abort the request unless it has finished. Iterating on raises StopIteration."""
        self._closed.set()
        self._call.cancel()

    def __next__(self) -> Chunk:
        while not self._chunks:
            if self._closed.is_set():
                raise StopIteration
            try:
                response = next(self._call)
            except StopIteration:
                self._closed.set()
                raise
            except grpc.RpcError as error:
                self._recover(error)
                continue
            self._answered = True
            self._delivered.add(response)
            self._chunks.extend(_wire.to_chunks(response))
        return self._chunks.popleft()

    def _start(self) -> None:
        if not self._answered:
            self._request.request_id = self._given_id or _wire.new_request_id()
        self._call = self._stub.GenerateStream(
            self._request, timeout=self._attempts.remaining_s(), metadata=self._metadata
        )
        if self._closed.is_set():  # closed by another thread while this one was about to start again
            self._call.cancel()

    def _recover(self, error: grpc.RpcError) -> None:
        """Start again, or raise. After `close` the cancelled call is no error."""
        if self._closed.is_set():
            return
        typed = from_rpc(error, self.request_id)
        try:
            if self._answered and not self._delivered.resume(self._request):
                raise typed from error
            wait_s = self._attempts.next_wait_s(typed)
        except FastServeError:
            self._closed.set()
            raise
        if not self._closed.wait(wait_s):
            self._start()
