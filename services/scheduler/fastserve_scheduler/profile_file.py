"""Reading a profile by its path, whatever it was measured of."""

import json
from dataclasses import dataclass
from pathlib import Path

from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.profiler import SCHEMA, profile_from_json


class ProfileFileError(ValueError):
    """A sentence for the person who named the file."""


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """A profile with what it was measured of."""

    profile: Profile
    fingerprint: str
    device: str
    dtype: str
    num_stages: int


def read_profile(path: Path) -> StoredProfile:
    """A file that `fastserve profile` wrote. Raises ProfileFileError."""
    try:
        stored = json.loads(path.read_text())
        if stored["schema"] != SCHEMA:
            raise ProfileFileError(f"{path} has profile schema {stored['schema']}, this version reads {SCHEMA}")
        key = stored["key"]
        profile = profile_from_json(stored["profile"])
        return StoredProfile(profile, key["fingerprint"], key["device"], key["dtype"], int(key["num_stages"]))
    except OSError as error:
        raise ProfileFileError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ProfileFileError):
            raise
        raise ProfileFileError(f"{path} is not a profile: {error}") from error
