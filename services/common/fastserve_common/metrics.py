"""A Prometheus endpoint of its own for services that speak no HTTP otherwise."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from fastserve_common.settings import SettingsError


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """A scrape every few seconds is no news."""


def _text_only(app: WSGIApplication) -> WSGIApplication:
    """In the text format, whatever is asked for: in OpenMetrics, which Prometheus prefers, the client library writes
    `fastserve_ready` for `fastserve:ready`, and no rule, dashboard or autoscaler would find it."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> object:
        environ.pop("HTTP_ACCEPT", None)
        return app(environ, start_response)

    return answer  # type: ignore[return-value]  # what the app gives, unseen


def serve_registry(registry: CollectorRegistry, host: str, port: int) -> tuple[int, Callable[[], None]]:
    """Start an HTTP endpoint on a thread of its own. Returns its port and what stops it. Raises OSError."""
    host = host.removeprefix("[").removesuffix("]")
    kind = _Server6 if ":" in host else _Server
    server = make_server(host, port, _text_only(make_wsgi_app(registry)), kind, _Handler)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop


@contextlib.contextmanager
def metrics_endpoint(listen: str, registry: CollectorRegistry) -> Iterator[str]:
    """Serve `registry` at `http://HOST:PORT/metrics` while the block runs; yields HOST:PORT. Empty `listen`: nothing.

    Raises SettingsError when it cannot listen there.
    """
    if not listen:
        yield ""
        return
    host, _, port = listen.rpartition(":")
    try:
        bound, stop = serve_registry(registry, host or "127.0.0.1", int(port))
    except (OSError, ValueError, OverflowError) as error:
        raise SettingsError(f"--metrics-listen: cannot listen on {listen}: {error}") from error
    try:
        yield f"{host}:{bound}"
    finally:
        stop()
