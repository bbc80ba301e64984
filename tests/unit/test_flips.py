"""What `bench flips` counts, and the prompts that it counts on."""

import pytest

from paceline.cluster.bench.flips import FlipCount, count_flips, flip_prompts
from paceline.worker.errors import ConfigError


@pytest.mark.parametrize(
    ("wanted", "got", "count"),
    [
        ([], [], FlipCount(0, 0, 0)),
        ([[1, 2, 3]], [[1, 2, 3]], FlipCount(1, 0, 3)),
        ([[1, 2, 3]], [[1, 9, 3]], FlipCount(1, 1, 2)),  # what follows a flip is another text
        ([[1, 2, 3]], [[1, 2]], FlipCount(1, 1, 3)),
        ([[1]], [[1, 2]], FlipCount(1, 1, 2)),
        ([[1, 2], [3], [4]], [[1, 2], [5], [4]], FlipCount(3, 1, 4)),
    ],
)
def test_outputs_are_compared_up_to_where_they_part(
    wanted: list[list[int]], got: list[list[int]], count: FlipCount
) -> None:
    assert count_flips(wanted, got) == count


def test_flips_are_counted_per_thousand_tokens_compared() -> None:
    assert FlipCount(64, 3, 1500).per_1000 == 2.0
    assert FlipCount(0, 0, 0).per_1000 == 0.0


def test_prompts_are_as_many_as_asked_for_and_all_different() -> None:
    prompts = flip_prompts(77)
    assert len(set(prompts)) == 77
    assert flip_prompts(7) == prompts[:7]
    for num_prompts in (0, 77 + 1):
        with pytest.raises(ConfigError, match=rf"num_prompts is {num_prompts}, must be in 1..77"):
            flip_prompts(num_prompts)
