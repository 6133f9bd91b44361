"""Plans as they come over the wire: what is kept decoded of one request is never another's."""

from fastserve.v1 import sampling_pb2, stage_pb2
from fastserve_common.packed import pack_u32
from fastserve_worker import codec
from fastserve_worker.messages import StageInfo

INFO = StageInfo(
    stage=0,
    num_stages=1,
    num_blocks=8,
    block_size=16,
    max_model_len=64,
    vocab_size=100,
    fingerprint="f",
    kv_block_bytes=64,
    device="cpu",
    dtype="float32",
    hidden_size=2,
    hidden_dtype="float32",
)


def item(job_id: int, position: int, sampling: sampling_pb2.SamplingParams) -> stage_pb2.PlanItem:
    return stage_pb2.PlanItem(
        job_id=job_id,
        start=3,
        num_tokens=1,
        block_table=pack_u32([job_id]),
        token_ids=pack_u32([7]),
        sample=True,
        output_position=position,
        sampling=sampling,
        suppressed_token_ids=pack_u32([position]),
    )


def test_each_row_is_drawn_by_its_own_parameters_and_position() -> None:
    warm = sampling_pb2.SamplingParams(temperature=0.5, top_k=3, seed=9, logit_bias={4: 1.5}, logprobs=0)
    plain = sampling_pb2.SamplingParams()
    plan = stage_pb2.IterationPlan(seq=1, epoch=1, items=[item(1, 5, warm), item(2, 6, plain), item(3, 7, warm)])
    first, second, third = [row.draw for row in codec.decode_plan(plan, INFO).rows if row.draw is not None]
    assert (first.temperature, first.top_k, first.seed, first.logprobs) == (0.5, 3, 9, 0)
    assert dict(first.logit_bias) == {4: 1.5}
    assert (second.temperature, second.top_p, second.repetition_penalty, second.logprobs) == (0.0, 1.0, 1.0, None)
    assert not second.logit_bias
    assert [draw.output_position for draw in (first, second, third)] == [5, 6, 7]
    assert [draw.suppressed for draw in (first, second, third)] == [pack_u32([n]) for n in (5, 6, 7)]
    assert third == first._replace(output_position=7, suppressed=pack_u32([7]))


def test_what_is_kept_decoded_is_limited() -> None:
    decoder = codec.decode_sampling
    for seed in range(codec.MAX_KNOWN_SAMPLINGS + 1):
        decoder(sampling_pb2.SamplingParams(seed=seed).SerializeToString())
    assert decoder.cache_info().currsize == codec.MAX_KNOWN_SAMPLINGS
