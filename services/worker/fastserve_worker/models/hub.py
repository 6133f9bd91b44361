"""Models of the Hugging Face hub: only the files that serving needs. HF_HOME, HF_TOKEN and HF_HUB_OFFLINE count."""

import logging
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from fastserve_worker.models.errors import PrepareError

log = logging.getLogger(__name__)

_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
#: Everything below the top level, and second copies of the weights in other layouts.
_UNWANTED = ["*/*", "consolidated*", "*.msgpack", "*.h5", "*.onnx"]


def download(repo_id: str, revision: str | None) -> Path:
    """The local snapshot of a model. Pickled weights are fetched only where there are no safetensors.

    Raises PrepareError with a sentence that says what to do.
    """
    log.info("fetching %s", repo_id)
    folder = _snapshot(repo_id, revision, [*_SMALL_FILES, "*.safetensors"])
    if not any(folder.glob("*.safetensors")):
        folder = _snapshot(repo_id, revision, [*_SMALL_FILES, "*.bin"])
    return folder


def _snapshot(repo_id: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=patterns, ignore_patterns=_UNWANTED))
    except HFValidationError as error:
        raise PrepareError(
            f"{repo_id!r} is neither a file, nor a folder, nor the name of a model on the hub (owner/name)"
        ) from error
    except GatedRepoError as error:
        raise PrepareError(
            f"{repo_id} is gated: accept its terms on the hub, then set HF_TOKEN to a token of that account"
        ) from error
    except RepositoryNotFoundError as error:
        raise PrepareError(
            f"the hub has no model {repo_id}, or it is private: check the name, or set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise PrepareError(f"{repo_id} has no revision {revision!r}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise PrepareError(
            f"{repo_id} is not in the local hub cache and the hub cannot be reached: "
            "connect, unset HF_HUB_OFFLINE, or give a folder or a .gguf file"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise PrepareError(f"cannot fetch {repo_id} from the hub: {error}") from error
