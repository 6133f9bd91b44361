"""fastserve.v1.Inference: the same requests, limits and sessions as HTTP."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from fastserve.v1 import inference_pb2, inference_pb2_grpc
from fastserve_common.channels import full_names
from fastserve_common.errors import AbortedError
from fastserve_gateway.engine.engine import Engine
from fastserve_gateway.engine.session import Session
from fastserve_gateway.request import GenerationRequest
from fastserve_gateway.rpc import codec

SERVICE_NAMES = full_names(inference_pb2.DESCRIPTOR)

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        generation, echo = await self._build(request)
        pieces: list[list[inference_pb2.SequenceOutput]] = [[] for _ in range(generation.num_answers)]
        async with self._engine.open(generation) as session:
            _abort_with_call(session, context)
            while not session.done():
                delta = await session.next()
                if delta is not None:
                    seen = pieces[delta.index]
                    seen.append(codec.output_to_wire(delta, "" if seen else echo))
            usage = codec.usage_to_wire(session.usage)
        return inference_pb2.GenerateResponse(
            request_id=generation.request_id,
            prompt_info=inference_pb2.PromptInfo(num_prompt_tokens=generation.num_prompt_tokens),
            outputs=[codec.merge_outputs(seen) for seen in pieces],
            usage=usage,
        )

    async def GenerateStream(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        generation, echo = await self._build(request)
        echoed: set[int] = set()
        async with self._engine.open(generation) as session:
            _abort_with_call(session, context)
            first = True
            while not session.done():
                delta = await session.next()
                if delta is None:
                    continue
                response = inference_pb2.GenerateResponse(request_id=generation.request_id)
                response.outputs.append(codec.output_to_wire(delta, "" if delta.index in echoed else echo))
                echoed.add(delta.index)
                if first:
                    response.prompt_info.num_prompt_tokens = generation.num_prompt_tokens
                    first = False
                if session.done():
                    response.usage.CopyFrom(codec.usage_to_wire(session.usage))
                yield response

    async def Abort(self, request: inference_pb2.AbortRequest, context: Context) -> inference_pb2.AbortResponse:
        return inference_pb2.AbortResponse(aborted=self._engine.abort(request.request_id))

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.GetModelInfoResponse:
        engine = self._engine
        return inference_pb2.GetModelInfoResponse(
            model=engine.settings.model_names[0],
            root=engine.settings.root,
            max_model_len=engine.max_model_len or 0,
            vocab_size=engine.text.vocab_size,
            eos_token_ids=sorted(engine.text.eos_token_ids),
            num_stages=engine.view.num_stages,
            policy=engine.view.policy,
        )

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        ids = await self._engine.builder.tokenize(request.text, add_special_tokens=request.add_special_tokens)
        return inference_pb2.TokenizeResponse(token_ids=ids)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        text = await self._engine.builder.detokenize(list(request.token_ids), name="token_ids")
        return inference_pb2.DetokenizeResponse(text=text)

    async def _build(self, request: inference_pb2.GenerateRequest) -> tuple[GenerationRequest, str]:
        """The request and the text to echo."""
        generation = await self._engine.build(codec.fields_from_wire(request), codec.FIELD_NAMES)
        if not generation.echo:
            return generation, ""
        (prompt,) = generation.prompts
        text = prompt.text if prompt.text is not None else await self._engine.text.prompt_text(prompt.ids)
        return generation, text


def _abort_with_call(session: Session, context: Context) -> None:
    """However the call ends - cancelled, past its deadline, connection lost - the session ends at once.

    The handler's own cancellation may come later: a handler that is suspended in a write is not woken by it.
    """

    def ended(_: object) -> None:
        session.fail(AbortedError("the call has ended"), "abort")

    context.add_done_callback(ended)  # type: ignore[arg-type]  # the stubs want a class of theirs
    task = asyncio.current_task()

    def cancel() -> None:
        if task is not None:
            task.cancel()

    session.on_stuck = cancel
