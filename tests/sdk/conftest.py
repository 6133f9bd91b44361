"""An Inference server in this process whose answers each test scripts."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import pytest

from fastserve.v1 import inference_pb2 as pb
from fastserve.v1 import inference_pb2_grpc as rpc

Script = Callable[[pb.GenerateRequest, grpc.ServicerContext], Iterator[pb.GenerateResponse]]


@dataclass
class FakeInference(rpc.InferenceServicer):
    """`script` produces the messages of a stream; the unary call returns its last one."""

    script: Script | None = None
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    #: Released whenever a call ends, for whatever reason.
    ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def _run(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        assert self.script is not None
        self.requests.append(request)
        self.metadata.append({k: str(v) for k, v in context.invocation_metadata()})
        context.add_callback(self.ended.release)
        yield from self.script(request, context)

    def GenerateStream(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        yield from self._run(request, context)

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        return list(self._run(request, context))[-1]

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortResponse:
        self.aborted.append(request.request_id)
        return pb.AbortResponse(aborted=request.request_id == "live")

    def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.ServicerContext) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            model="m",
            root="org/m",
            max_model_len=128,
            vocab_size=256,
            eos_token_ids=[2, 3],
            num_stages=2,
            policy="fcfs",
        )

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=[1] * request.add_special_tokens + [ord(c) for c in request.text])

    def Detokenize(self, request: pb.DetokenizeRequest, context: grpc.ServicerContext) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text="".join(map(chr, request.token_ids)))


@dataclass
class RunningFake:
    fake: FakeInference
    address: str


@pytest.fixture
def server() -> Iterator[RunningFake]:
    fake = FakeInference()
    with ThreadPoolExecutor(max_workers=4) as pool:
        grpc_server = grpc.server(pool)
        rpc.add_InferenceServicer_to_server(fake, grpc_server)
        port = grpc_server.add_insecure_port("localhost:0")
        grpc_server.start()
        yield RunningFake(fake, f"localhost:{port}")
        grpc_server.stop(grace=None).wait()


def tokens(*words: str) -> Script:
    """One message per word, counts as the gateway gives them."""

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        for position, word in enumerate(words):
            message = pb.GenerateResponse(request_id=request.request_id)
            if position == 0:
                message.prompt_info.num_prompt_tokens = 5
            message.outputs.append(pb.SequenceOutput(text=word, token_ids=[position]))
            if position == len(words) - 1:
                message.outputs[0].finish_info.reason = pb.FINISH_REASON_LENGTH
                message.usage.prompt_tokens = 5
                message.usage.completion_tokens = len(words)
            yield message

    return script


def fails(
    times: int, code: grpc.StatusCode, then: Script, *, after: int = 0, trailers: tuple[tuple[str, str], ...] = ()
) -> Script:
    """The first `times` calls end with `code` after `after` messages; later ones run `then`."""
    left = times

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        nonlocal left
        failing, left = left > 0, left - 1
        for position, message in enumerate(then(request, context)):
            if failing and position == after:
                break
            yield message
        if failing:
            context.set_trailing_metadata(trailers)
            context.abort(code, "as scripted")

    return script


def endless(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    """One token, then nothing until the client goes away."""
    gone = threading.Event()
    context.add_callback(gone.set)
    yield pb.GenerateResponse(request_id=request.request_id, outputs=[pb.SequenceOutput(text="a", token_ids=[1])])
    gone.wait(20)
