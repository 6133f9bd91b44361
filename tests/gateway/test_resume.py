"""An answer that goes on behind tokens which its caller got through another gateway."""

import asyncio
from array import array
from pathlib import Path

import grpc
import grpc.aio
import pytest

from fastserve.v1 import inference_pb2, scheduler_pb2
from fastserve_gateway.engine import link

from .fake_scheduler import Script
from .rig import Rig, rig

#: Characters of several bytes, a stop string that does not come, one that comes.
IDS = [*"aé€ STO? no, ST END".encode()]


def request(*, delivered: list[int] | None = None, request_id: str = "") -> inference_pb2.GenerateRequest:
    made = inference_pb2.GenerateRequest(text="x", request_id=request_id)
    made.stopping.max_new_tokens = len(IDS)
    made.stopping.stop_strings.extend(["STOP", "END"])
    made.delivered.ids.extend(delivered or [])
    return made


async def ask(r: Rig, asked: inference_pb2.GenerateRequest) -> list[inference_pb2.GenerateResponse]:
    return [response async for response in r.stub.GenerateStream(asked)]


def texts(responses: list[inference_pb2.GenerateResponse]) -> list[tuple[str, list[int]]]:
    return [(output.text, list(output.token_ids)) for response in responses for output in response.outputs]


async def test_text_goes_on_where_it_stopped_wherever_that_was(tmp_path: Path) -> None:
    async with rig(tmp_path, Script(ids=IDS)) as r:
        whole = texts(await ask(r, request()))
        expected = "".join(text for text, _ in whole)
        assert expected == "aé€ STO? no, ST "
        for cut in range(1, len(IDS)):
            shown, ids = "", list[int]()
            for text, new in whole:
                if len(ids) >= cut:
                    break
                shown, ids = shown + text, ids + new
            rest = await ask(r, request(delivered=ids))
            assert shown + "".join(text for text, _ in texts(rest)) == expected, cut
            assert ids + [i for _, new in texts(rest) for i in new] == IDS
            assert list(array("I", r.fake.jobs[-1].submit.delivered_token_ids)) == ids
            assert rest[-1].usage.completion_tokens == len(IDS)
            assert rest[-1].outputs[-1].finish_info.stop_string == "END"
        await r.quiet()


async def test_a_scheduler_that_has_not_noticed_the_loss_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "RESUBMIT_PAUSE_S", 0.01)
    refused = Script(reject=scheduler_pb2.REJECT_REASON_DUPLICATE_ID)
    scripts = [refused, refused, Script(ids=IDS)]
    async with rig(tmp_path, lambda _: scripts.pop(0)) as r:
        rest = await ask(r, request(delivered=IDS[:3], request_id="lost"))
        assert rest[-1].outputs[-1].finish_info.stop_string == "END"
        scripts.append(refused)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await ask(r, request(request_id="new"))
        assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
        await r.quiet()


async def test_what_cannot_go_on_is_refused(tmp_path: Path) -> None:
    async with rig(tmp_path, Script(ids=IDS)) as r:
        several = request(delivered=[97])
        several.sampling.num_sequences = 2
        for asked, problem in (
            (several, "one answer"),
            (request(delivered=[97] * (len(IDS) + 1)), "the answer may have"),
            (request(delivered=[10**6]), "vocabulary"),
            (request(delivered=[*b"END"]), "end the answer already"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await asyncio.wait_for(ask(r, asked), 30)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert problem in str(error.value.details())
        await r.quiet()
