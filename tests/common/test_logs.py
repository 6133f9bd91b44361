import json
import logging
import sys
from collections.abc import Iterator

import pytest

from fastserve_common.logs import LogFormat, setup_logs


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


def emit(log_format: LogFormat, capsys: pytest.CaptureFixture[str]) -> str:
    setup_logs("worker", log_format=log_format)
    log = logging.getLogger("fastserve_worker.engine")
    log.debug("not asked for")
    log.info("loaded %d layers", 15, extra={"stage": 1})
    logging.getLogger("some.library").info("library chatter")
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_json_lines_carry_extra_fields_as_keys(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = emit("json", capsys).splitlines()
    record = json.loads(line)
    assert record["message"] == "loaded 15 layers"
    assert (record["level"], record["service"], record["stage"]) == ("info", "worker", 1)


def test_human_lines_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = emit("human", capsys).splitlines()
    assert line[8:] == " INFO    worker: loaded 15 layers [stage=1]"


def test_json_keeps_a_traceback_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logs("worker", log_format="json")
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("fastserve").error("failed", exc_info=sys.exc_info())
    (line,) = capsys.readouterr().err.splitlines()
    assert "ValueError: boom" in json.loads(line)["exception"]
