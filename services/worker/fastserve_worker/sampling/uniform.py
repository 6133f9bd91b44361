"""The one random number of a draw: a pure function of (seed, output position).

No generator state exists, so nothing can be lost by a preemption, restarted by a prefill, or shared by batch mates.
The function is the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
2014) applied to the seed and then to the sum with the position, on plain integers: the same on every machine.
"""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_DOUBLE_BITS = 53


def mix64(value: int) -> int:
    """A bijection of 64-bit integers with good avalanche."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, output_position: int) -> float:
    """In [0, 1), a multiple of 2**-53. `seed`: any 64-bit integer, signed or not."""
    return (mix64(mix64(seed & _MASK) + output_position * _GOLDEN) >> (64 - _DOUBLE_BITS)) * 2.0**-_DOUBLE_BITS
