"""POST /v1/completions and /v1/chat/completions."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from fastserve_gateway.engine.engine import Engine
from fastserve_gateway.http.bodies import BodyRoute
from fastserve_gateway.http.exchange import StreamedAnswer, answer_whole
from fastserve_gateway.http.middleware import REQUEST_ID
from fastserve_gateway.http.requests import ChatCompletionRequest, CompletionRequest
from fastserve_gateway.http.responses import ChatCompletionResponse, CompletionResponse
from fastserve_gateway.http.routes import GENERATION_ERRORS, EngineOf, errors
from fastserve_gateway.http.shapes import ChatShape, CompletionShape, Shape
from fastserve_gateway.request import GenerationRequest

router = APIRouter(route_class=BodyRoute)

#: Of one event, as tools that read streams take it.
_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk as JSON; in the last event `[DONE]`."}},
    "required": ["data"],
}
_STREAM = {"text/event-stream": {"schema": _EVENT}}


@router.post(
    "/v1/completions",
    responses={200: {"model": CompletionResponse, "content": _STREAM}, **errors(*GENERATION_ERRORS)},
)
async def create_completion(body: CompletionRequest, request: Request, engine: EngineOf) -> Response:
    """Continue a text. With `stream`, server-sent events."""
    generation = await engine.build(body.fields(_request_id(request)))
    echoes = await _echoes(engine, generation)
    return await _answer(engine, generation, CompletionShape(generation, engine.text, echoes), body, request)


@router.post(
    "/v1/chat/completions",
    responses={200: {"model": ChatCompletionResponse, "content": _STREAM}, **errors(*GENERATION_ERRORS)},
)
async def create_chat_completion(body: ChatCompletionRequest, request: Request, engine: EngineOf) -> Response:
    """Answer a conversation, through the model's chat template. With `stream`, server-sent events."""
    engine.builder.served_model(body.model)
    prompt = await engine.text.render_chat(
        [message.for_template() for message in body.messages],
        add_generation_prompt=body.add_generation_prompt is not False,
        variables=body.chat_template_kwargs or {},
    )
    generation = await engine.build(body.fields(prompt, _request_id(request)), body.field_names)
    return await _answer(engine, generation, ChatShape(generation, engine.text), body, request)


def _request_id(request: Request) -> str | None:
    given = getattr(request.state, REQUEST_ID, None)
    return given if isinstance(given, str) else None


async def _echoes(engine: Engine, generation: GenerationRequest) -> list[str]:
    if not generation.echo:
        return []
    return [
        prompt.text if prompt.text is not None else await engine.text.prompt_text(prompt.ids)
        for prompt in generation.prompts
    ]


async def _answer(
    engine: Engine,
    generation: GenerationRequest,
    shape: Shape,
    body: CompletionRequest | ChatCompletionRequest,
    request: Request,
) -> Response:
    if not body.stream:
        return await answer_whole(engine, generation, shape, request.receive)
    return StreamedAnswer(
        engine, generation, shape, include_usage=body.include_usage, continuous_usage=body.continuous_usage
    )
