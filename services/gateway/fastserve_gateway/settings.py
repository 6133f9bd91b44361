"""What an operator can set."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from fastserve_common.tls import ClusterSettings
from fastserve_gateway.keys import digest_of

MIB = 1024 * 1024


class GatewaySettings(ClusterSettings):
    """The FastServe gateway: OpenAI HTTP and gRPC in front of a scheduler."""

    state: str = Field(description="where the cluster meets: sqlite:///path or redis://host:port")
    model_dir: Path = Field(description="folder with tokenizer.json, config.json and, for chat, a chat template")
    model_root: str = Field("", description="what the model was loaded from, shown in /v1/models (default: the folder)")
    served_model_name: tuple[str, ...] = Field((), description="name(s) in the API (default: the root)")

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 picks one")
    grpc_port: int | None = Field(
        None, ge=-1, le=65535, description="gRPC port; 0 picks one, -1 turns gRPC off (default: the HTTP port + 1)"
    )
    ssl_certfile: Path | None = Field(None, description="TLS certificate chain, for HTTP and gRPC")
    ssl_keyfile: Path | None = Field(None, description="TLS private key, for HTTP and gRPC")
    api_key: tuple[str, ...] = Field(
        (), repr=False, description="accept only callers with one of these keys, or `sha256:` hashes; may be repeated"
    )
    api_key_file: Path | None = Field(
        None, description="file with more keys or hashes, one per line; read again when it changes"
    )

    group: tuple[str, ...] = Field(
        (), description="use schedulers of this group only; may be repeated (default: of all groups in the state store)"
    )
    max_model_len: int | None = Field(
        None, ge=1, description="prompt + answer in tokens; lowers the scheduler's limit, never raises it"
    )
    seed: int | None = Field(
        None, description="draw the seeds of requests that bring none from this one (default: from the system)"
    )
    max_concurrent_requests: int = Field(
        4096, ge=1, description="answers in progress at once (n counts n); more are refused with 429"
    )
    max_concurrent_requests_per_key: int = Field(
        0, ge=0, description="answers of one API key in progress at once, over all gateways; 0: no limit"
    )
    rate_limit_requests_per_min: int = Field(
        0, ge=0, description="requests that one API key may make in a minute, over all gateways; 0: no limit"
    )
    rate_limit_tokens_per_min: int = Field(
        0, ge=0, description="prompt tokens and max_tokens that one API key may ask for in a minute; 0: no limit"
    )
    max_body_bytes: int = Field(8 * MIB, ge=1024, description="largest HTTP body; larger is refused with 413")
    max_prompt_bytes: int = Field(4 * MIB, ge=1, description="largest prompt text, in UTF-8 bytes")
    max_buffered_tokens: int = Field(
        4096, ge=1, description="tokens a slow reader may fall behind before its request is aborted"
    )
    request_timeout: float = Field(0.0, ge=0, description="longest life of a request, in seconds; 0: no limit")
    reconnect_timeout: float = Field(
        30.0, ge=0, description="seconds that requests wait for a lost scheduler before they fail with 503"
    )
    drain_timeout: float = Field(
        30.0, ge=0, description="seconds that requests in progress may go on after the signal to stop"
    )
    dashboard: bool = Field(True, description="serve the built-in page at /")
    vllm_metric_names: bool = Field(False, description="repeat metrics that vLLM has too under its prefix, `vllm:`")

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            for key in self.api_key:
                digest_of(key)
        except ValueError as error:
            raise ValueError(f"--api-key: {error}") from error
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("--ssl-certfile and --ssl-keyfile must be given together")
        return self

    @property
    def root(self) -> str:
        return self.model_root or str(self.model_dir)

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.served_model_name or (self.root,)
