"""The same server by OpenAI's client: python docs/examples/openai_client.py [URL]"""

import sys

from openai import OpenAI


def main(url: str = "http://localhost:8000/v1") -> None:
    with OpenAI(base_url=url, api_key="unused") as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "What is a queue?"}], max_tokens=32, stream=True
        )
        for chunk in stream:
            sys.stdout.write(chunk.choices[0].delta.content or "")
    sys.stdout.write("\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
