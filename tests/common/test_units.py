import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastserve_common.units import GIB, MIB, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("17", 17),
        ("512MiB", 512 * MIB),
        ("2GiB", 2 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("64 kib", 65536),
        ("1G", GIB),
        ("1gb", 10**9),
    ],
)
def test_sizes_as_people_write_them(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.GiB", "12 parsecs", "1e9", "0x10"])
def test_what_is_not_a_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="512MiB"):
        parse_bytes(text)


@given(st.integers(0, 4096), st.sampled_from(["KiB", "MiB", "GiB"]))
def test_whole_sizes_survive_the_round_trip(count: int, unit: str) -> None:
    num_bytes = parse_bytes(f"{count}{unit}")
    assert parse_bytes(format_bytes(num_bytes).removesuffix(" bytes")) == num_bytes or "." in format_bytes(num_bytes)
