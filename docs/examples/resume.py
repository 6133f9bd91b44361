"""A stream that outlives its gateway: python docs/examples/resume.py [ADDRESS,ADDRESS...]

Name several gateways: when the one in use is lost, the answer goes on through another, where it stopped.
"""

import sys

from fastserve import Client, RetryPolicy, UnavailableError


def main(addresses: str = "127.0.0.1:8001") -> None:
    with Client(f"ipv4:{addresses}", retry=RetryPolicy(max_attempts=10)) as client:
        try:
            for chunk in client.stream("Tell me a long story.", max_tokens=64, request_id="story-1"):
                sys.stdout.write(chunk.text)
        except UnavailableError as error:
            sys.stdout.write(f"\nno gateway is left: {error.message}")
    sys.stdout.write("\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
