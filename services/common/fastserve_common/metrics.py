"""A Prometheus endpoint of its own for services that speak no HTTP otherwise."""

import contextlib
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server

from fastserve_common.settings import SettingsError


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
        server, thread = start_http_server(int(port), host or "127.0.0.1", registry)
    except (OSError, ValueError, OverflowError) as error:
        raise SettingsError(f"--metrics-listen: cannot listen on {listen}: {error}") from error
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
