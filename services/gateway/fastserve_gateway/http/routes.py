"""What routes share: the engine, and the documented errors of an operation."""

from typing import Annotated, Any, cast

from fastapi import Depends, Request

from fastserve_gateway.engine.engine import Engine
from fastserve_gateway.http.errors import ErrorResponse

Responses = dict[int | str, dict[str, Any]]

#: What any operation with a body may answer.
BODY_ERRORS = (400, 401, 408, 413, 431)
#: What a generation may answer besides.
GENERATION_ERRORS = (*BODY_ERRORS, 404, 429, 499, 500, 503, 504)


def errors(*statuses: int) -> Responses:
    return {status: {"model": ErrorResponse} for status in statuses}


def _engine(request: Request) -> Engine:
    return cast(Engine, request.app.state.engine)


EngineOf = Annotated[Engine, Depends(_engine)]
