import json
from pathlib import Path

import pytest

from loadgen.bandwidth import ReadBandwidth
from loadgen.decode_limit import DecodeLimit, bytes_per_step, decode_limits
from tests.loadgen.conftest import write_weights

EMBEDDINGS, LAYER = ("model.embed_tokens.weight", 1000), ("model.layers.0.weight", 300)
OUTPUT = ("lm_head.weight", 1000)


@pytest.mark.parametrize(
    ("tensors", "read"),
    [
        ((EMBEDDINGS, LAYER), 1300),  # tied: the output layer reads the embeddings
        ((EMBEDDINGS, LAYER, OUTPUT), 1300),  # its own output layer: of the embeddings a step reads one row
        (((EMBEDDINGS[0], 4000), LAYER, ("lm_head.weight_packed", 500)), 800),
    ],
)
def test_embeddings_count_where_a_step_reads_them(
    tmp_path: Path, tensors: tuple[tuple[str, int], ...], read: int
) -> None:
    write_weights(tmp_path / "model.safetensors", *tensors)
    assert bytes_per_step({"model": str(tmp_path)}) == read


def test_an_index_names_the_files_that_count(tmp_path: Path) -> None:
    write_weights(tmp_path / "model-1.safetensors", EMBEDDINGS)
    write_weights(tmp_path / "model-2.safetensors", LAYER)
    write_weights(tmp_path / "consolidated.safetensors", EMBEDDINGS, LAYER)
    files = {EMBEDDINGS[0]: "model-1.safetensors", LAYER[0]: "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert bytes_per_step({"model": str(tmp_path)}) == 1300


def test_what_cannot_be_told_from_files_is_unknown(tmp_path: Path) -> None:
    assert bytes_per_step(None) is None
    assert bytes_per_step({}) is None
    assert bytes_per_step({"model": "some/model-on-the-hub"}) is None
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0no JSON!")
    assert bytes_per_step({"model": str(tmp_path)}) is None
    write_weights(tmp_path / "model.safetensors", LAYER)
    drafting = {"model": str(tmp_path), "speculative_config": {"model": "draft"}}
    assert bytes_per_step(drafting) is None, "the draft's weights are read too"
    assert bytes_per_step(drafting | {"speculative_config": {"method": "ngram"}}) == 300


def test_bandwidth_is_measured_once_for_each_number_of_threads_that_matters(tmp_path: Path) -> None:
    write_weights(tmp_path / "model.safetensors", LAYER)
    asked: list[int] = []

    def measure(threads: int) -> ReadBandwidth:
        asked.append(threads)
        return ReadBandwidth(3000.0 * threads, "cpu", threads)

    local = {"engine_args": {"model": str(tmp_path)}}
    states = [
        {"name": "a", "env": {"OMP_NUM_THREADS": "1"}, **local},
        {"name": "b", "env": {"OMP_NUM_THREADS": "2"}, **local},
        {"name": "c", "env": {"OMP_NUM_THREADS": "2"}, **local},
        {"name": "elsewhere", "env": {"OMP_NUM_THREADS": "5"}, "engine_args": {"model": "not/here"}},
    ]
    found = decode_limits(states, measure)
    assert asked == [1, 2]
    assert (found["a"].steps_per_s, found["b"].steps_per_s, found["c"].steps_per_s) == (10.0, 20.0, 20.0)
    assert (found["elsewhere"].steps_per_s, found["elsewhere"].share(1.0)) == (None, None)


def test_the_share_of_the_limit() -> None:
    limit = DecodeLimit(100, ReadBandwidth(2000.0, "cpu", 1))
    assert limit.share(100.0) == pytest.approx(0.5), "10 steps per s of 20"
    assert limit.share(None) is None
    assert DecodeLimit(100, None).as_json() == {"bytes_per_step": 100, "bandwidth": None, "steps_per_s": None}
