"""What a front refuses from its model's sizes alone."""

import pytest

from paceline.cluster.front.served_model import ServedModel
from paceline.worker.errors import InvalidRequest


@pytest.mark.parametrize(
    ("num_positions", "way_out"),
    [
        (100, "; shorten it: the model has no more positions"),
        (400, "; shorten it, or have the server started with a --max-model-len of up to 400"),
        (0, "; shorten it"),
    ],
)
def test_too_long_a_prompt_names_a_longer_context_only_where_there_is_one(
    num_positions: int, way_out: str
) -> None:
    model = ServedModel(("m",), "/m", "Llama", 100, 264, (2,), "float32", num_positions)
    model.check_prompt_len(99, "prompt")
    with pytest.raises(InvalidRequest) as caught:
        model.check_prompt_len(100, "prompt")
    assert caught.value.message.startswith("prompt has 100 tokens, model 'm' accepts 99 ")
    assert caught.value.message.endswith(way_out)
