"""FastServe: preemptive serving of large language models.

from fastserve import Client

with Client("localhost:8001") as client:
    for chunk in client.stream("Once upon a time", max_tokens=64):
        print(chunk.text, end="", flush=True)
"""

from fastserve._calls import RetryPolicy
from fastserve.aio import AsyncClient, AsyncStream
from fastserve.client import Client, Stream
from fastserve.errors import (
    AbortedError,
    AlreadyExistsError,
    AuthenticationError,
    DeadlineExceededError,
    FastServeError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    UnsupportedError,
)
from fastserve.types import (
    Answer,
    Chunk,
    Finish,
    FinishReason,
    GenerateOptions,
    Generation,
    ModelInfo,
    Prompt,
    TokenLogprobs,
    TopLogprob,
    Usage,
)

__all__ = [
    "AbortedError",
    "AlreadyExistsError",
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "AuthenticationError",
    "Chunk",
    "Client",
    "DeadlineExceededError",
    "FastServeError",
    "Finish",
    "FinishReason",
    "GenerateOptions",
    "Generation",
    "InternalError",
    "InvalidRequestError",
    "ModelInfo",
    "NotFoundError",
    "Prompt",
    "ResourceExhaustedError",
    "RetryPolicy",
    "Stream",
    "TokenLogprobs",
    "TopLogprob",
    "UnavailableError",
    "UnsupportedError",
    "Usage",
]
