"""Models, tokens, health, version, metrics."""

import importlib.metadata
import time

from fastapi import APIRouter
from starlette.responses import Response

from fastserve_common.errors import UnavailableError
from fastserve_gateway.codec import DEFAULT_RETRY_MS
from fastserve_gateway.engine.engine import Engine
from fastserve_gateway.http.bodies import BodyRoute
from fastserve_gateway.http.requests import DetokenizeRequest, TokenizeRequest
from fastserve_gateway.http.responses import (
    DetokenizeResponse,
    HealthResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
    VersionResponse,
)
from fastserve_gateway.http.routes import BODY_ERRORS, EngineOf, errors
from fastserve_gateway.metrics import CONTENT_TYPE

router = APIRouter(route_class=BodyRoute)

VERSION = importlib.metadata.version("fastserve")
_STARTED_S = int(time.time())


def _card(engine: Engine, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=_STARTED_S,
        owned_by="fastserve",
        root=engine.settings.root,
        max_model_len=engine.max_model_len,
    )


@router.get("/v1/models", responses=errors(401))
async def list_models(engine: EngineOf) -> ModelList:
    """`max_model_len` is the limit that is enforced."""
    return ModelList(object="list", data=[_card(engine, name) for name in engine.settings.model_names])


@router.get("/v1/models/{model:path}", responses=errors(401, 404))
async def get_model(model: str, engine: EngineOf) -> ModelCard:
    return _card(engine, engine.builder.served_model(model))


@router.post("/tokenize", responses=errors(*BODY_ERRORS, 404))
async def tokenize(body: TokenizeRequest, engine: EngineOf) -> TokenizeResponse:
    """The ids that /v1/completions (`prompt`) or /v1/chat/completions (`messages`) would use."""
    engine.builder.served_model(body.model)
    if body.messages is not None:
        text = await engine.text.render_chat(
            [message.for_template() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=body.chat_template_kwargs or {},
        )
        special = bool(body.add_special_tokens)
    else:
        text = body.prompt or ""
        special = body.add_special_tokens is not False
    ids = await engine.builder.tokenize(text, add_special_tokens=special)
    strings = None
    if body.return_token_strs:
        strings = [engine.text.token_bytes(token_id).decode("utf-8", "replace") for token_id in ids]
    return TokenizeResponse(count=len(ids), max_model_len=engine.max_model_len, tokens=ids, token_strs=strings)


@router.post("/detokenize", responses=errors(*BODY_ERRORS, 404))
async def detokenize(body: DetokenizeRequest, engine: EngineOf) -> DetokenizeResponse:
    engine.builder.served_model(body.model)
    return DetokenizeResponse(prompt=await engine.builder.detokenize(body.tokens, name="tokens"))


@router.get("/health/live")
async def live() -> HealthResponse:
    """The process answers. Waits on nothing."""
    return HealthResponse(status="live")


@router.get("/health/ready", responses=errors(503))
@router.get("/health", responses=errors(503))
async def ready(engine: EngineOf) -> HealthResponse:
    """A request sent now would be accepted: the scheduler is connected and all its stages are up."""
    reason = engine.not_ready()
    if reason is not None:
        raise UnavailableError(f"not ready: {reason}", retry_after_ms=DEFAULT_RETRY_MS)
    return HealthResponse(status="ready")


@router.get("/version", responses=errors(401))
async def version() -> VersionResponse:
    return VersionResponse(version=VERSION)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(engine: EngineOf) -> Response:
    """Prometheus text."""
    return Response(engine.metrics.render(), media_type=CONTENT_TYPE)
