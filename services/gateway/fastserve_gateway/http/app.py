"""The HTTP application: middleware, routes, one handler for each kind of exception, the OpenAPI document."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from fastserve_common.errors import FastServeError, NotFoundError
from fastserve_gateway.engine.engine import Engine
from fastserve_gateway.http import generate, page, system
from fastserve_gateway.http.dashboard import Dashboard
from fastserve_gateway.http.errors import HttpStatusError, error_body, error_headers, status_of
from fastserve_gateway.http.middleware import OPEN_PATHS, LimitBody, Observe, RequireKey
from fastserve_gateway.http.requests import TOKEN_ID_MARK
from fastserve_gateway.http.validation import validation_error
from fastserve_gateway.keys import KeyCheck

log = logging.getLogger(__name__)


def build_app(engine: Engine, keys: KeyCheck) -> ASGIApp:
    app = FastAPI(title="FastServe", version=system.VERSION, redoc_url=None)
    app.state.engine = engine
    app.include_router(generate.router)
    app.include_router(system.router)
    routes = [*generate.router.routes, *system.router.routes]
    if engine.settings.dashboard:
        app.state.dashboard = Dashboard(engine)
        app.include_router(page.router)
        routes += page.router.routes
    app.add_exception_handler(FastServeError, _on_domain_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]  # FastAPI's documented way to extend it
    paths = [route.path for route in routes if isinstance(route, APIRoute)]
    limited = LimitBody(app, engine.settings.max_body_bytes)
    return Observe(RequireKey(limited, keys), engine.metrics, paths)


def error_response(error: FastServeError) -> JSONResponse:
    return JSONResponse(error_body(error), status_of(error), error_headers(error))


async def _on_domain_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, FastServeError)
    if status_of(error) == 500:
        log.error("request failed: %s", error.message)
    return error_response(error)


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return error_response(validation_error(error.errors()))


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(NotFoundError(f"there is no {request.url.path[:200]} here"))
    if error.status_code == 400:
        return error_response(HttpStatusError(400, "the body cannot be read as JSON", "invalid_json"))
    code = "method_not_allowed" if error.status_code == 405 else "http_error"
    response = error_response(HttpStatusError(error.status_code, str(error.detail), code))
    response.headers.update(error.headers or {})
    return response


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    # Starlette logs it with its traceback when it raises it again behind this answer.
    return error_response(FastServeError("internal error"))


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, made true: our errors instead of its own 422, and the API key."""
    if app.openapi_schema:
        return app.openapi_schema
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schema["components"].setdefault("securitySchemes", {})["key"] = {"type": "http", "scheme": "bearer"}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if path not in OPEN_PATHS:
                # An empty alternative: without configured keys none is needed.
                operation["security"] = [{"key": []}, {}]
    _bound_token_ids(schema, app.state.engine.text.vocab_size)
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
    app.openapi_schema = schema
    return schema


def _bound_token_ids(node: object, vocab_size: int) -> None:
    """Token ids of the served model end with its vocabulary."""
    if isinstance(node, dict):
        if node.pop(TOKEN_ID_MARK, False):
            node["maximum"] = vocab_size - 1
        for child in node.values():
            _bound_token_ids(child, vocab_size)
    elif isinstance(node, list):
        for child in node:
            _bound_token_ids(child, vocab_size)
