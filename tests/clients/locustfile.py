"""For locust: what people ask of an OpenAI-compatible server, ENOUGH times each. ENOUGH and KEY in the environment."""

import json
import os

import gevent  # type: ignore[import-untyped]  # in an environment of its own
from locust import HttpUser, between, events, task  # type: ignore[import-not-found]  # the same

KINDS = ("/v1/chat/completions", "/v1/completions", "/v1/models")


@events.init.add_listener
def end_when_enough(environment, **_):  # type: ignore[no-untyped-def]
    gevent.spawn(_end_when_enough, environment.runner)


def _end_when_enough(runner) -> None:  # type: ignore[no-untyped-def]
    asked: dict[str, int] = {}
    while any(asked.get(kind, 0) < int(os.environ["ENOUGH"]) for kind in KINDS):
        gevent.sleep(0.1)
        asked = {name: entry.num_requests for (name, _), entry in runner.stats.entries.items()}
    runner.quit()


class Person(HttpUser):  # type: ignore[misc]
    wait_time = between(0.0, 0.05)

    def on_start(self) -> None:
        self.client.headers["authorization"] = f"Bearer {os.environ['KEY']}"

    @task(3)  # type: ignore[untyped-decorator]
    def chat(self) -> None:
        body = {"messages": [{"role": "user", "content": "w40 w41"}], "max_tokens": 8, "stream": True}
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as response:
            events = [line[6:] for line in response.iter_lines() if line.startswith(b"data: ")]
            if not events or events[-1] != b"[DONE]":
                response.failure("the stream did not end as it should")
            elif not all(json.loads(event)["object"] == "chat.completion.chunk" for event in events[:-1]):
                response.failure("an event is no chunk")

    @task  # type: ignore[untyped-decorator]
    def complete(self) -> None:
        body = {"prompt": "w40 w41", "max_tokens": 8}
        with self.client.post("/v1/completions", json=body, catch_response=True) as response:
            if response.status_code == 200 and response.json()["usage"]["completion_tokens"] > 8:
                response.failure("more than asked for")

    @task  # type: ignore[untyped-decorator]
    def models(self) -> None:
        self.client.get("/v1/models")
