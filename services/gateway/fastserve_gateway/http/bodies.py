"""Large bodies are parsed and checked on a thread, in steps that let the event loop run between them.

C code that makes Python objects holds the interpreter until it is done: `json.loads` of 8 MiB stops everybody for
hundreds of milliseconds, on a thread as well as on the loop. The standard library's own decoder in Python does not;
only runs of numbers, which large bodies are made of, go to the C decoder, a few thousand at a time.
"""

import json
import re
from collections.abc import Callable, Coroutine
from json import JSONDecodeError
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]  # undocumented, unchanged since 3.1
from json.scanner import py_make_scanner  # type: ignore[attr-defined]  # the same
from typing import Any, TypeAlias

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope

from fastserve_common.errors import FastServeError, InvalidArgumentError
from fastserve_gateway.http.validation import validation_error

#: Smaller ones are parsed where they are, in a few milliseconds.
LARGE_BODY_BYTES = 256 * 1024
#: Lists and objects of a large body: far more than any request has, far fewer than would fit.
MAX_CONTAINERS = 100_000

_NUMBERS = re.compile(r"(?:[ \t\n\r]*-?[0-9]{1,19}[ \t\n\r]*,){16,4096}")

#: (text, position behind the opening bracket)
_At: TypeAlias = tuple[str, int]


class StepwiseDecoder(json.JSONDecoder):
    """Gives the same as `json.loads`, for one text. Raises JSONDecodeError, and InvalidArgumentError for too many
    containers."""

    def __init__(self) -> None:
        super().__init__()
        self._num_containers = 0
        self.parse_array = self._array
        self.parse_object = self._object
        self.scan_once = py_make_scanner(self)

    def _count(self) -> None:
        self._num_containers += 1
        if self._num_containers > MAX_CONTAINERS:
            raise InvalidArgumentError(f"the body has more than {MAX_CONTAINERS} lists and objects")

    def _object(self, at: _At, *rest: object) -> object:
        self._count()
        return JSONObject(at, *rest)

    def _array(self, at: _At, scan_once: object) -> tuple[list[object], int]:
        self._count()
        text, position = at
        numbers: list[object] = []
        while (run := _NUMBERS.match(text, position)) is not None:
            numbers += json.loads(f"[{run[0][:-1]}]")
            position = run.end()
        rest, end = JSONArray((text, position), scan_once)
        if numbers and not rest:
            raise JSONDecodeError("Expecting value", text, position)  # behind the last comma
        numbers += rest
        return numbers, end


def parse(body: bytes, model: type[BaseModel]) -> BaseModel:
    """Raises JSONDecodeError, UnicodeDecodeError, RecursionError, InvalidArgumentError."""
    data = StepwiseDecoder().decode(body.decode(json.detect_encoding(body), "surrogatepass"))
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)) from error


class _Request(Request):
    """Its `json()` is what the route's model makes of a large body; FastAPI takes an instance as it is."""

    def __init__(self, scope: Scope, receive: Receive, model: type[BaseModel]) -> None:
        super().__init__(scope, receive)
        self._model = model
        self.problem: FastServeError | None = None

    async def json(self) -> Any:  # noqa: ANN401 - as its base says
        body = await self.body()
        if len(body) <= LARGE_BODY_BYTES:
            return await super().json()
        try:
            return await self.app.state.engine.text.run(len(body), lambda: parse(body, self._model))
        except InvalidArgumentError as error:
            self.problem = error
            raise


class BodyRoute(APIRoute):
    """A route whose body may be large."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        model = self.body_field.field_info.annotation if self.body_field is not None else None
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return handle

        async def handler(request: Request) -> Response:
            large = _Request(request.scope, request.receive, model)
            try:
                return await handle(large)
            except HTTPException:
                if large.problem is not None:  # FastAPI makes one error of all that parsing raises
                    raise large.problem from None
                raise

        return handler
