"""Iteration times from what must be read and computed: a roofline per stage.

For T tokens in an iteration a stage of L layers takes

    linear     = (read^k + compute^k)^(1/k), k = 1.5,  read = weights / bandwidth,  compute = 2 weights T / peak
    attention  = max(KV bytes read / bandwidth, 4 head_size heads (n start + n^2 / 2) L / peak)   summed over the items
    the rest   = L (layer_ns + sequences * sequence_ns), two all-reduces a layer, the activations to the next stage

with bandwidth and peak times the shares that kernels reach. The mean of power k is the soft knee that measured linear
layers show where reading takes as long as computing: there they take 1.6 times either. Tensor parallelism divides
weights, KV and FLOPs of a stage by its ranks; pipeline stages take as equal numbers of layers as there are, and the
last one the vocabulary projection of the tokens that are sampled.
"""

from dataclasses import dataclass, field

from fastserve_scheduler.core.commands import RunIteration
from fastserve_scheduler.core.profile import Profile
from fastserve_scheduler.sim.cost import profile_of
from fastserve_scheduler.sim.devices import Device
from fastserve_scheduler.sim.models import ModelShape

MEMORY_SHARE = 0.9
"""Of the device's memory, for weights and KV together; the rest is for activations and the runtime."""

KNEE = 1.5
"""Fitted with the devices' shares."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What an iteration asks of a whole model, per layer where it says so."""

    tokens: int
    sequences: int
    sampled: int
    #: KV positions read, and (query, key) pairs computed.
    positions: int
    pairs: float


@dataclass(slots=True)
class RooflineCost:
    """`tp` ranks in each of `pp` stages of one device each. Raises ValueError where the model does not fit."""

    model: ModelShape
    device: Device
    tp: int = 1
    pp: int = 1
    _layers: tuple[int, ...] = field(init=False)
    _work: _Work = field(init=False, repr=False, default=_Work(0, 0, 0, 0, 0.0))
    _plan: RunIteration | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if not 1 <= self.pp <= self.model.num_layers:
            raise ValueError(f"{self.model.name} has {self.model.num_layers} layers: not {self.pp} stages")
        if self.tp < 1 or self.model.num_heads % self.tp:
            raise ValueError(f"{self.model.name} has {self.model.num_heads} heads: not to be split among {self.tp}")
        whole, more = divmod(self.model.num_layers, self.pp)
        self._layers = tuple(whole + (stage < more) for stage in range(self.pp))

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers and ranks."""
        return self.model.kv_elements_per_token * self.device.element_bytes

    def stage_kv_bytes_per_token(self) -> int:
        """The largest stage's, one rank: what its link carries. A rank holds at least one KV head."""
        heads = max(1, self.model.num_kv_heads // self.tp)
        return 2 * max(self._layers) * heads * self.model.head_size * self.device.element_bytes

    def free_kv_bytes(self) -> int:
        """Device memory left for KV, all stages and ranks together. Raises ValueError when there is none."""
        devices = self.tp * self.pp
        free = round(MEMORY_SHARE * self.device.memory_bytes * devices)
        free -= self.model.num_parameters * self.device.element_bytes
        if free <= 0:
            raise ValueError(f"{self.model.name} does not fit {devices} x {self.device.name}")
        return free

    def stage_ns(self, plan: RunIteration, stage: int) -> int:
        if plan is not self._plan:
            self._plan, self._work = plan, _work_of(plan)
        return max(1, round(self._seconds(self._work, stage) * 1e9))

    def linear_ms(self, tokens: int) -> float:
        """The linear layers of all stages alone."""
        return 1000 * sum(self._linear_s(n * self.model.layer_weights / self.tp, tokens) for n in self._layers)

    def profile(self, max_model_len: int, max_batch_size: int) -> Profile:
        """What a profiler would measure of this model."""
        return profile_of(self, self.pp, max_model_len, max_batch_size)

    def _seconds(self, work: _Work, stage: int) -> float:
        model, device, layers = self.model, self.device, self._layers[stage]
        weights = layers * model.layer_weights / self.tp
        seconds = self._linear_s(weights, work.tokens) + self._attention_s(work, layers)
        if stage == self.pp - 1:
            seconds += self._linear_s(model.vocab * model.hidden / self.tp, work.sampled)
        seconds += layers * (device.layer_ns + work.sequences * device.sequence_ns) / 1e9
        activation_bytes = work.tokens * model.hidden * device.element_bytes
        if self.tp > 1:
            moved = 2 * (self.tp - 1) / self.tp * activation_bytes
            seconds += 2 * layers * (device.peer_latency_ns / 1e9 + moved / device.peer_bytes_per_second)
        if stage < self.pp - 1:
            # Ranks send their shares side by side, over the link that also reaches the host.
            seconds += device.peer_latency_ns / 1e9 + activation_bytes / self.tp / device.host_bytes_per_second
        return seconds

    def _linear_s(self, weights: float, tokens: int) -> float:
        device = self.device
        if tokens == 0:
            return 0.0
        read_s = weights * device.element_bytes / (device.bytes_per_second * device.bandwidth_share)
        compute_s = 2 * weights * tokens / (device.flops_per_second * device.compute_share)
        return float((read_s**KNEE + compute_s**KNEE) ** (1 / KNEE))

    def _attention_s(self, work: _Work, layers: int) -> float:
        model, device = self.model, self.device
        kv_heads, heads = max(1.0, model.num_kv_heads / self.tp), model.num_heads / self.tp
        num_bytes = 2 * work.positions * layers * kv_heads * model.head_size * device.element_bytes
        flops = 4 * work.pairs * layers * heads * model.head_size
        return max(
            num_bytes / (device.bytes_per_second * device.bandwidth_share),
            flops / (device.flops_per_second * device.attention_share),
        )


def _work_of(plan: RunIteration) -> _Work:
    tokens = sampled = positions = 0
    pairs = 0.0
    for item in plan.items:
        n, start = item.num_tokens, item.start
        tokens += n
        sampled += item.sample
        positions += start + n
        pairs += n * start + n * n / 2
    return _Work(tokens, len(plan.items), sampled, positions, pairs)
