"""Logs: one line per event, JSON for machines or short text for people. Always to standard error."""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["human", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

#: Of the request that the current task serves: every line of the task carries it. "": none.
request_id: ContextVar[str] = ContextVar("request_id", default="")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """What a line says besides its message."""
    found = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    if current := request_id.get():
        found.setdefault("request_id", current)
    return found


class JsonFormatter(logging.Formatter):
    """Every `extra=` field becomes a key of its own (`request_id`, `job_id`, ...)."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(_fields(record))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class HumanFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {service}: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        extra = " ".join(f"{key}={value}" for key, value in _fields(record).items())
        line = super().format(record)
        return f"{line} [{extra}]" if extra else line


def setup_logs(service: str, *, level: LogLevel = "info", log_format: LogFormat = "human") -> None:
    """Replaces the root handlers. Libraries stay at warning."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if log_format == "json" else HumanFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in (
        "fastserve",
        "fastserve_common",
        *(f"fastserve_{s}" for s in ("gateway", "scheduler", "worker", "kvstore")),
    ):
        logging.getLogger(name).setLevel(level.upper())
