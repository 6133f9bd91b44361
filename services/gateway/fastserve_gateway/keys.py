"""API keys of callers: given plainly or as hashes, from settings and from a file that may change while serving.

Keys are random and long (`fastserve key` makes them), so that a plain SHA-256 of one cannot be turned back: nothing
slower is needed, and a check costs every request the same microseconds.
"""

import hashlib
import hmac
import logging
import re
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from fastserve_common.errors import UnauthenticatedError

log = logging.getLogger(__name__)

HASH_PREFIX = "sha256:"
#: How often the file is looked at, at most.
RELOAD_PERIOD_S = 1.0
#: A larger one is no list of keys.
MAX_FILE_BYTES = 1024 * 1024

_HASH = re.compile(r"sha256:[0-9a-fA-F]{64}")
_READ_BY_OTHERS = stat.S_IROTH


def digest_of(entry: str) -> bytes:
    """SHA-256 of the key that `entry` is, or is the hash of. Raises ValueError, without showing it."""
    if entry.startswith(HASH_PREFIX):
        if not _HASH.fullmatch(entry):
            raise ValueError("a hash is `sha256:` and 64 hexadecimal digits")
        return bytes.fromhex(entry.removeprefix(HASH_PREFIX))
    if not entry or not entry.isascii() or not entry.isprintable() or " " in entry:
        raise ValueError("a key must be non-empty, visible ASCII without spaces")
    return hashlib.sha256(entry.encode()).digest()


class KeyFile:
    """Keys or hashes, one per line or separated by commas; `#` begins a comment.

    Plain keys in a file that everybody on the machine may read are refused; hashes are no secret.
    """

    def __init__(self, path: Path, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Raises ValueError or OSError with a sentence."""
        self._path, self._clock_s = path, clock_s
        self._seen = self._version()
        self._digests = self._read()
        self._looked_s = clock_s()

    def digests(self) -> tuple[bytes, ...]:
        """As the file is now. One that cannot be used changes nothing: the keys before it stay."""
        now_s = self._clock_s()
        if now_s - self._looked_s >= RELOAD_PERIOD_S:
            self._looked_s = now_s
            self._look()
        return self._digests

    def _look(self) -> None:
        try:
            version = self._version()
            if version == self._seen:
                return
            self._seen = version
            self._digests = self._read()
        except (OSError, ValueError) as error:
            log.error("the keys stay as they were: %s", error)
        else:
            log.info("read the API keys again", extra={"keys": len(self._digests)})

    def _version(self) -> tuple[int, int, int]:
        found = self._path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _read(self) -> tuple[bytes, ...]:
        with self._path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
            mode = self._path.stat().st_mode
        if len(raw) > MAX_FILE_BYTES:
            raise ValueError(f"{self._path} has more than {MAX_FILE_BYTES} bytes")
        lines = raw.decode("utf-8", "replace").splitlines()
        entries = [part.strip() for line in lines for part in line.partition("#")[0].split(",") if part.strip()]
        if not entries:
            raise ValueError(f"{self._path} has no key: without keys everybody would be let in")
        if mode & _READ_BY_OTHERS and not all(entry.startswith(HASH_PREFIX) for entry in entries):
            raise ValueError(
                f"{self._path} holds plain keys and everybody may read it: chmod o-r, or keep hashes in it"
            )
        try:
            return tuple(digest_of(entry) for entry in entries)
        except ValueError as error:
            raise ValueError(f"{self._path}: {error}") from error


class KeyCheck:
    """Whether a caller may. No keys and no file: everybody may."""

    def __init__(self, keys: Iterable[str], file: KeyFile | None = None) -> None:
        """Raises ValueError for a key that cannot be one."""
        self._digests = tuple(digest_of(key) for key in keys)
        self._file = file

    def check(self, authorization: str | None) -> str:
        """`authorization`: the header or metadata value. Returns a name for the caller, the same for the same key and
        "" when nobody needs one. Raises UnauthenticatedError.
        """
        accepted = self._digests if self._file is None else (*self._digests, *self._file.digests())
        if not accepted:
            return ""
        scheme, _, given = (authorization or "").partition(" ")
        presented = hashlib.sha256(given.strip().encode("utf-8", "surrogatepass")).digest()
        # Every key is compared, so that the time does not tell which one was close.
        matches = [hmac.compare_digest(presented, digest) for digest in accepted]
        if scheme.lower() != "bearer" or not any(matches):
            problem = "an API key is required" if not given else "the API key is not valid"
            raise UnauthenticatedError(f"{problem}: send `Authorization: Bearer KEY`")
        return presented.hex()
