"""The built-in page's files, and the headers they are sent with."""

import hashlib
from importlib import resources

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard/page.css": ("page.css", "text/css; charset=utf-8"),
    **{
        f"/dashboard/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in ("api", "charts", "chat", "numbers", "page")
    },
    "/dashboard/icon.svg": ("icon.svg", "image/svg+xml"),
}
#: Open to everybody, like health: they hold no data.
PAGE_PATHS = frozenset(_FILES)

#: Nothing but its own files and its own API; nobody may frame it.
_SECURITY = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Asked for again after an upgrade, sent again only when it is another one.
    "cache-control": "no-cache",
}


def _file(path: str) -> tuple[bytes, dict[str, str]]:
    name, media_type = _FILES[path]
    body = (resources.files("fastserve_gateway") / "page" / name).read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return body, {**_SECURITY, "content-type": media_type, "etag": etag}


#: By path.
PAGE_FILES = {path: _file(path) for path in _FILES}
