from typing import Any

import pytest

from loadgen.served_modes import read_served

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}


def overview(speculation: dict[str, Any], **more: Any) -> dict[str, Any]:
    """fp16 beside an engine with drafts, as `GET /v1/modes` tells of them."""
    fp16 = {"model": "m", "max_num_seqs": 64, "enable_prefix_caching": True}
    speculative = {**fp16, "enable_prefix_caching": False, "speculative_config": speculation, **more}
    return {
        "model": "m",
        "hardware": "h",
        "data": [
            {"id": "fp16", "engine": "fp16", "state": "ready", "lossless": True},
            {"id": "speculative", "engine": "speculative", "state": "ready", "lossless": True},
        ],
        "engines": [{"name": "fp16", "engine_args": fp16}, {"name": "speculative", "engine_args": speculative}],
    }


@pytest.mark.parametrize(
    ("told", "plain"),
    [
        (overview(NGRAM), "fp16"),
        (overview({"method": "draft_model", "model": "small"}), None),
        (overview(NGRAM, max_num_seqs=8), None),
    ],
)
def test_an_engine_is_paired_with_the_one_that_differs_by_ngram_drafts_alone(
    told: dict[str, Any], plain: str | None
) -> None:
    fp16, speculative = read_served(told, None, None).engines
    assert fp16.plain is None
    assert (speculative.speculative, speculative.plain) == (True, plain)
