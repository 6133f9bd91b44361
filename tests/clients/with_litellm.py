"""Run by the interpreter that has litellm: URL KEY. One JSON object on standard output."""

import json
import sys

import litellm  # type: ignore[import-not-found]  # in an environment of its own

url, key = sys.argv[1:]
litellm.suppress_debug_info = True  # it would say it on standard output
ask = {
    "model": "openai/words",
    "api_base": f"{url}/v1",
    "api_key": key,
    "messages": [{"role": "user", "content": "w40 w41 w42"}],
    "max_tokens": 8,
    "temperature": 0,
    "num_retries": 0,
}
whole = litellm.completion(**ask)
pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **ask)]
text = litellm.text_completion(
    **{key: value for key, value in ask.items() if key not in ("messages", "model")},
    model="text-completion-openai/words",
    prompt="w40 w41",
)
refused = ""
try:
    litellm.completion(**{**ask, "api_key": "wrong"})
except litellm.AuthenticationError as error:
    refused = type(error).__name__
sys.stdout.write(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "usage": whole.usage.completion_tokens,
            "stream": "".join(pieces),
            "pieces": len(pieces),
            "text": text.choices[0].text,
            "refused": refused,
        }
    )
)
