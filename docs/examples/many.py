"""Many answers at a time, each with a deadline: python docs/examples/many.py [ADDRESS]"""

import asyncio
import sys

from fastserve import AsyncClient, DeadlineExceededError, ResourceExhaustedError


async def ask(client: AsyncClient, prompt: str) -> str:
    try:
        answer = await client.generate(prompt, max_tokens=16, timeout=60)
    except DeadlineExceededError:
        return "too late"
    except ResourceExhaustedError as error:
        return f"the queue is full; again in {error.retry_after_s} s"
    return answer.answers[0].text


async def run(address: str) -> None:
    prompts = [f"The number after {number} is" for number in range(8)]
    async with AsyncClient(address) as client:
        for prompt, text in zip(prompts, await asyncio.gather(*(ask(client, p) for p in prompts)), strict=True):
            sys.stdout.write(f"{prompt} -> {text!r}\n")


def main(address: str = "localhost:8001") -> None:
    asyncio.run(run(address))


if __name__ == "__main__":
    main(*sys.argv[1:])
