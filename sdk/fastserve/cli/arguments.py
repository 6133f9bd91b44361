"""Flags that the client commands share."""

import argparse
import os
from pathlib import Path
from typing import NoReturn

import grpc

from fastserve._calls import DEFAULT_ADDRESS
from fastserve.types import GenerateOptions
from fastserve_common.settings import SettingsError

#: Exit status after Ctrl-C, as shells report it.
EXIT_INTERRUPTED = 130

API_KEY_ENV = "FASTSERVE_API_KEY"


class Parser(argparse.ArgumentParser):
    """Wrong flags are one sentence, like every command's."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def add_api_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-key",
        default=os.environ.get(API_KEY_ENV),
        metavar="KEY",
        help=f"sent to the server (default: ${API_KEY_ENV})",
    )


def add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address", default=DEFAULT_ADDRESS, help=f"gRPC API of the server (default: {DEFAULT_ADDRESS})"
    )
    parser.add_argument("--tls", action="store_true", help="connect with TLS")
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="the same, with this authority (PEM)")
    parser.add_argument("--tls-name", metavar="NAME", help="DNS name in the server's certificate (default: its host)")


def tls(args: argparse.Namespace) -> bool | grpc.ChannelCredentials:
    """The flags of `add_address`. Raises SettingsError when the file cannot be read."""
    if args.tls_ca is None:
        return bool(args.tls)
    try:
        return grpc.ssl_channel_credentials(args.tls_ca.read_bytes())
    except OSError as error:
        raise SettingsError(f"--tls-ca: cannot read {args.tls_ca}: {error.strerror}") from error


def add_sampling(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--max-tokens", type=int, metavar="N", help="length of the answer at most (default: the server's)")
    add("--temperature", type=float, metavar="T", help="0 is greedy (default: 1)")
    add("--top-p", type=float, metavar="P")
    add("--top-k", type=int, metavar="K")
    add("--seed", type=int, metavar="N", help="makes a sampled answer repeatable")


def sampling(args: argparse.Namespace) -> GenerateOptions:
    """The flags of `add_sampling` that were given."""
    options = GenerateOptions()
    if args.max_tokens is not None:
        options["max_tokens"] = args.max_tokens
    if args.temperature is not None:
        options["temperature"] = args.temperature
    if args.top_p is not None:
        options["top_p"] = args.top_p
    if args.top_k is not None:
        options["top_k"] = args.top_k
    if args.seed is not None:
        options["seed"] = args.seed
    return options
