import json
from pathlib import Path

import pytest

from app.controller.trained_model import UNSAFE, OnnxPredictor, safe_costs
from app.routing.policies.learned import FEATURE_NAMES, PredictorRefused, check_predictor

onnx = pytest.importorskip("onnx")
helper = pytest.importorskip("onnx.helper")

ABOUT = {
    "format": "1",
    "version": "v1",
    "model": "m",
    "hardware": "h",
    "kind": "probability",
    "feature_names": json.dumps(FEATURE_NAMES),
    "modes": '["fp16", "int8"]',
    "reference": "fp16",
}


def write(path: Path, outputs: list[float], **about: str | None) -> Path:
    """A model that gives `outputs` for every row, since it multiplies the row by nothing."""
    count, float32 = len(FEATURE_NAMES), onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("MatMul", ["features", "w"], ["nothing"]),
        helper.make_node("Add", ["nothing", "b"], ["scores"]),
    ]
    graph = helper.make_graph(
        nodes,
        "constant",
        [helper.make_tensor_value_info("features", float32, [None, count])],
        [helper.make_tensor_value_info("scores", float32, [None, len(outputs)])],
        [
            helper.make_tensor("w", float32, [count, len(outputs)], [0.0] * count * len(outputs)),
            helper.make_tensor("b", float32, [len(outputs)], outputs),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    for key, value in (ABOUT | about).items():
        if value is not None:
            entry = model.metadata_props.add()
            entry.key, entry.value = key, value
    path.write_bytes(model.SerializeToString())
    return path


ROW = [1.0] * len(FEATURE_NAMES)


def test_says_what_it_was_trained_for(tmp_path: Path) -> None:
    found = OnnxPredictor(write(tmp_path / "m.onnx", [0.25, 0.75]))
    assert (found.version, found.model, found.hardware, found.modes) == ("v1", "m", "h", ("fp16", "int8"))
    assert found.feature_names == FEATURE_NAMES
    assert found.scores(ROW) == [-0.25, -0.75]
    check_predictor(found, ["fp16", "int8", "gptq"], model="m", hardware="h")


@pytest.mark.parametrize(
    "about, modes, why",
    [
        ({"feature_names": json.dumps(FEATURE_NAMES[::-1])}, ["fp16", "int8"], "their order"),
        ({}, ["fp16"], "int8"),
        ({"model": "other"}, ["fp16", "int8"], "other"),
        ({"hardware": "other"}, ["fp16", "int8"], "other"),
    ],
)
def test_a_model_for_something_else_is_refused(
    tmp_path: Path, about: dict[str, str], modes: list[str], why: str
) -> None:
    found = OnnxPredictor(write(tmp_path / "m.onnx", [0.25, 0.75], **about))
    with pytest.raises(PredictorRefused, match=why):
        check_predictor(found, modes, model="m", hardware="h")


def test_costs_are_scores_and_energy_above_the_reference_is_unsafe(tmp_path: Path) -> None:
    assert OnnxPredictor(write(tmp_path / "a.onnx", [2.0, 1.0], kind="cost")).scores(ROW) == [2.0, 1.0]
    found = OnnxPredictor(write(tmp_path / "b.onnx", [2.0, 1.0, 0.5, 0.75], kind="cost_energy"))
    assert found.scores(ROW) == [2.0, 1.0 + UNSAFE]
    assert safe_costs([2.0, 1.0, 0.5, 0.5], 0) == [2.0, 1.0]


@pytest.mark.parametrize(
    "about, why",
    [
        ({"format": None}, "format"),
        ({"format": "99"}, "99"),
        ({"modes": None}, "modes"),
        ({"modes": "{}"}, "no list"),
        ({"modes": "oops"}, "cannot be used"),
        ({"modes": '["fp16"]'}, "numbers for its 1 modes"),
        ({"kind": "odd"}, "odd"),
        ({"version": "zweite Größe"}, "version"),
        ({"version": "v1\n"}, "version"),
        ({"version": "v" * 65}, "version"),
        ({"kind": "cost_energy"}, "numbers for"),
        ({"kind": "cost_energy", "reference": "none"}, "cannot be used"),
        ({"feature_names": '["one"]'}, "fails on a row"),
    ],
)
def test_metadata_that_cannot_be_used(tmp_path: Path, about: dict[str, str | None], why: str) -> None:
    with pytest.raises(PredictorRefused, match=why):
        OnnxPredictor(write(tmp_path / "m.onnx", [0.25, 0.75], **about))


def test_files_that_are_no_model(tmp_path: Path) -> None:
    for content in (b"", b"garbage", b"{}"):
        (tmp_path / "m.onnx").write_bytes(content)
        with pytest.raises(PredictorRefused, match=r"m\.onnx"):
            OnnxPredictor(tmp_path / "m.onnx")
    with pytest.raises(OSError, match="none"):
        OnnxPredictor(tmp_path / "none.onnx")
