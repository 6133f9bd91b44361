"""Size: one file one idea, a function fits a screen. Complexity and statements are ruff's business."""

from .repository import ROOT, functions, product_files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def test_files_hold_one_idea() -> None:
    too_long = {
        str(path.relative_to(ROOT)): lines
        for path in product_files()
        if (lines := len(path.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert too_long == {}


def test_functions_fit_a_screen() -> None:
    too_long = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"
        for path in product_files()
        for function in functions(path)
        if (function.end_lineno or 0) - function.lineno >= MAX_FUNCTION_LINES
    ]
    assert too_long == []
