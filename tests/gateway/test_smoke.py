"""The four ways to get an answer agree."""

from pathlib import Path

from fastserve.v1 import inference_pb2

from .rig import rig


async def test_all_forms_agree(tmp_path: Path) -> None:
    async with rig(tmp_path) as r:
        whole = (await r.complete(max_tokens=11)).json()
        assert whole["choices"][0]["text"] == "hello world"
        assert whole["usage"] == {"prompt_tokens": 1, "completion_tokens": 11, "total_tokens": 12}
        events = await r.stream(prompt="x", max_tokens=11)
        assert "".join(event["choices"][0]["text"] for event in events) == "hello world"
        chat = (await r.chat(max_tokens=11)).json()
        assert chat["choices"][0]["message"]["content"] == "hello world"
        request = inference_pb2.GenerateRequest(text="x")
        request.stopping.max_new_tokens = 11
        unary = await r.stub.Generate(request)
        assert unary.outputs[0].text == "hello world"
        pieces = [response async for response in r.stub.GenerateStream(request)]
        assert "".join(output.text for piece in pieces for output in piece.outputs) == "hello world"
        await r.quiet()
