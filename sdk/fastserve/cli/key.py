"""`fastserve key`: make an API key and the hash that a gateway is given."""

import argparse
import hashlib
import secrets
import sys
from collections.abc import Sequence

from fastserve.cli.arguments import Parser
from fastserve_common.settings import SettingsError

PREFIX = "fsk-"
#: Of randomness: more than anybody can search through, so that a fast hash keeps the key.
KEY_BYTES = 32
#: Fewer characters than this could be guessed from their hash.
MIN_KEY_CHARS = 20


def run(argv: Sequence[str]) -> int:
    """Raises SettingsError for a key that is too short."""
    args = _parser().parse_args(argv)
    if args.hash:
        print(hash_of(_from_stdin()))
        return 0
    key = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    print(f"key   {key}\nhash  {hash_of(key)}")
    return 0


def hash_of(key: str) -> str:
    """What `--api-key` and key files take instead of the key."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def _from_stdin() -> str:
    key = sys.stdin.readline().strip()
    if len(key) < MIN_KEY_CHARS:
        raise SettingsError(f"a key needs {MIN_KEY_CHARS} characters: the hash of a shorter one gives it away")
    return key


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="fastserve key", description="Make an API key: callers get the key, gateways its hash.")
    parser.add_argument("--hash", action="store_true", help="print the hash of the key on standard input instead")
    return parser
