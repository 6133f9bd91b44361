"""The built-in page at `/`: its files, and the state that it draws.

The page itself is open to everybody, like health: it holds nothing. Its data wants a key where the gateway wants one.
"""

from typing import Annotated, cast

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from fastserve_gateway.http.dashboard import Dashboard
from fastserve_gateway.http.dashboard_shapes import DashboardState
from fastserve_gateway.http.page_files import PAGE_FILES
from fastserve_gateway.http.routes import errors

router = APIRouter()


async def _serve(request: Request) -> Response:
    body, headers = PAGE_FILES[request.url.path]
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers)


for _path in PAGE_FILES:
    router.add_api_route(_path, _serve, methods=["GET"], include_in_schema=False)


def _dashboard(request: Request) -> Dashboard:
    return cast(Dashboard, request.app.state.dashboard)


@router.get("/dashboard/state", responses=errors(401))
async def dashboard_state(dashboard: Annotated[Dashboard, Depends(_dashboard)]) -> DashboardState:
    """What the page shows; taken once a second at most, however many ask."""
    return await dashboard.state()
