"""Print an answer as it is generated: python docs/examples/stream.py [ADDRESS]"""

import sys

from fastserve import Client


def main(address: str = "localhost:8001") -> None:
    with Client(address) as client, client.stream("Once upon a time", max_tokens=32) as stream:
        for chunk in stream:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    sys.stdout.write("\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
