"""FastAPI's and pydantic's complaints about a body, as one error that names one field."""

from collections.abc import Mapping, Sequence

from fastserve_common.errors import InvalidArgumentError

#: Parts of a location that are pydantic's own and mean nothing to a caller.
_INTERNAL_PARTS = frozenset({"body", "str", "list", "constrained-str"})

_WORDS = {
    "extra_forbidden": "is not a field of this request",
    "missing": "is required",
    "model_attributes_type": "must be a JSON object (send `Content-Type: application/json`)",
    "model_type": "must be a JSON object (send `Content-Type: application/json`)",
    "dict_type": "must be a JSON object (send `Content-Type: application/json`)",
}


def validation_error(errors: Sequence[Mapping[str, object]]) -> InvalidArgumentError:
    """`errors`: as pydantic lists them. The first one is told."""
    first = errors[0]
    kind = str(first.get("type", ""))
    if kind == "json_invalid":
        return InvalidArgumentError("the body is not valid JSON")
    context = first.get("ctx")
    param = str(context.get("param", "")) if isinstance(context, Mapping) else ""
    location = first.get("loc")
    if not param and isinstance(location, Sequence):
        param = _path(location)
    message = str(first.get("msg", ""))
    if kind in _WORDS:
        message = f"{param or 'the body'} {_WORDS[kind]}"
    elif not message.startswith(param) or not param:
        message = f"{param or 'the body'}: {message}"
    return InvalidArgumentError(message, param=param)


def _path(location: Sequence[object]) -> str:
    """`messages[0].content`; pydantic's names of union members are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _INTERNAL_PARTS and not ("[" in str(part) and path):
            path += f".{part}" if path else str(part)
    return path[:200]
