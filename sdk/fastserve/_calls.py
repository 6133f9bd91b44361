"""What the sync and the async client share: channel options, metadata, deadlines, and when to try again."""

import random
import time
from dataclasses import dataclass

import grpc

from fastserve.errors import DeadlineExceededError, FastServeError, UnavailableError

#: Where `fastserve serve` puts its gRPC API when nobody says otherwise.
DEFAULT_ADDRESS = "localhost:8001"

#: The largest message either end sends or accepts; the gateway has the same cap.
MAX_MESSAGE_BYTES = 32 * 1024 * 1024

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # a minute otherwise, whatever the keepalive's timeout
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
)

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When the server is UNAVAILABLE and nothing of the answer has arrived, the call is made again; the stream of a
    single answer goes on where it stopped.

    Waits grow by `multiplier` from `initial_backoff_s` to `max_backoff_s`, each drawn from [half, whole], and are
    never shorter than the server's retry hint. `max_attempts=1` turns retries off. Raises ValueError for values without
    sense.
    """

    max_attempts: int = 4
    initial_backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    multiplier: float = 2.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1 (got {self.max_attempts})")
        if self.initial_backoff_s < 0 or self.max_backoff_s < self.initial_backoff_s:
            raise ValueError("need 0 <= initial_backoff_s <= max_backoff_s")
        if self.multiplier < 1:
            raise ValueError(f"multiplier must be at least 1 (got {self.multiplier})")

    def backoff_s(self, failures: int, retry_after_s: float | None) -> float:
        """The wait after `failures` failed attempts (1, 2, ...)."""
        whole_s = min(self.initial_backoff_s * self.multiplier ** (failures - 1), self.max_backoff_s)
        return max(whole_s * random.uniform(0.5, 1.0), retry_after_s or 0.0)


class Attempts:
    """The attempts of one call under one deadline. `next_wait_s` decides; sleeping is the caller's business."""

    def __init__(self, policy: RetryPolicy, timeout_s: float | None) -> None:
        self._policy = policy
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._failures = 0

    def remaining_s(self) -> float | None:
        """Time left for an attempt; None without a deadline. Never negative."""
        return None if self._deadline_s is None else max(self._deadline_s - time.monotonic(), 0.0)

    def next_wait_s(self, error: FastServeError) -> float:
        """How long to wait before trying again. Raises `error` when that is not allowed or not worth it."""
        self._failures += 1
        if not isinstance(error, UnavailableError) or self._failures >= self._policy.max_attempts:
            raise error
        wait_s = self._policy.backoff_s(self._failures, error.retry_after_s)
        remaining_s = self.remaining_s()
        if remaining_s is not None and wait_s >= remaining_s:
            raise DeadlineExceededError(
                f"the deadline passes before a retry; last answer: {error.message}", request_id=error.request_id
            ) from error
        return wait_s


def channel_options(tls_name: str | None) -> tuple[tuple[str, int | str], ...]:
    """`tls_name`: what the server's certificate must be called; None: as the address."""
    return CHANNEL_OPTIONS if tls_name is None else (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", tls_name))


def to_metadata(api_key: str | None) -> Metadata:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def to_credentials(tls: bool | grpc.ChannelCredentials) -> grpc.ChannelCredentials | None:
    """`True`: the system's certificate authorities. Credentials: as they are (own authorities, client certificates)."""
    if tls is True:
        return grpc.ssl_channel_credentials()
    return tls or None
