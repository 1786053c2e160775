"""A trained model from an ONNX file, for the policy `learned`. `python -m loadgen train` writes such files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import numpy as np

from app.routing.policies.learned import PredictorRefused
from app.routing.profile import VERSION_PATTERN

FORMAT_VERSION = "1"
INPUT, OUTPUT = "features", "scores"

Kind = Literal["probability", "cost", "cost_energy"]
"""What the outputs of a file are, with M modes.

`probability`: (1, M) how likely each is the best. `cost`: (1, M) log of latency in ms. `cost_energy`: (1, 2 M) the
same, then log of energy in J.
"""

UNSAFE = 1e3
"""Added to the score of a mode that is predicted to need more energy than the reference: it loses to any that is safe,
and among themselves the order stays."""


class OnnxPredictor:
    """Scores modes with ONNX Runtime, in this thread: a decision is shorter than handing it to another."""

    def __init__(self, path: Path) -> None:
        """Reads and tries the model.

        Raises:
            OSError: the file cannot be read.
            PredictorRefused: it is no model, or not one that `train` wrote, or ONNX Runtime is not installed.
        """
        content = path.read_bytes()
        # Imported here: a controller without a trained model does without the runtime.
        try:
            import onnxruntime
        except ImportError as error:
            raise PredictorRefused(
                f"onnxruntime cannot be imported ({error}): pip install 'modeswitch[learned]'."
            ) from error

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4  # its complaints come as exceptions too
        try:
            self._session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime's exceptions share no base class
            raise PredictorRefused(f"{path} is no ONNX model: {str(error).splitlines()[0][:200]}") from error
        self._read(path, self._session.get_modelmeta().custom_metadata_map)
        self._try_out(path)

    def _read(self, path: Path, about: Mapping[str, str]) -> None:
        try:
            if about["format"] != FORMAT_VERSION:
                raise ValueError(f"its format is {about['format']}, not {FORMAT_VERSION}")
            self.version, self.model, self.hardware = about["version"], about["model"], about["hardware"]
            if not re.fullmatch(VERSION_PATTERN, self.version):
                raise ValueError(f"its version {self.version[:80]!r} is not made of up to 64 letters, digits and signs")
            self.feature_names = _names(about["feature_names"])
            self.modes = _names(about["modes"])
            self._kind = about["kind"]
            if self._kind not in ("probability", "cost", "cost_energy"):
                raise ValueError(f"its kind is {self._kind}")
            self._reference = self.modes.index(about["reference"]) if self._kind == "cost_energy" else 0
        except KeyError as error:
            raise PredictorRefused(
                f"{path} was not written by `train`: it does not say its {error.args[0]}."
            ) from error
        except ValueError as error:
            raise PredictorRefused(f"{path} cannot be used: {error}.") from error

    def _try_out(self, path: Path) -> None:
        wanted = len(self.modes) * (2 if self._kind == "cost_energy" else 1)
        try:
            found = self._run([0.0] * len(self.feature_names)).shape
        except Exception as error:  # as above
            raise PredictorRefused(f"{path} fails on a row: {str(error).splitlines()[0][:200]}") from error
        if found != (1, wanted):
            raise PredictorRefused(f"{path} gives {found} numbers for its {len(self.modes)} modes, not (1, {wanted}).")

    def _run(self, row: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float32]]:
        outputs = self._session.run([OUTPUT], {INPUT: np.array([row], dtype=np.float32)})
        return np.asarray(outputs[0], dtype=np.float32)

    def scores(self, row: Sequence[float]) -> list[float]:
        """One score per mode of `modes`, lower is better. `row` has the values of `feature_names`, in order."""
        found: list[float] = self._run(row)[0].tolist()
        if self._kind == "probability":
            return [-value for value in found]
        if self._kind == "cost":
            return found
        return safe_costs(found, self._reference)


def safe_costs(found: Sequence[float], reference: int) -> list[float]:
    """Latency scores of M modes from their log latencies and log energies (2 M values), the unsafe ones put last."""
    modes = len(found) // 2
    most = found[modes + reference]
    return [
        latency + (UNSAFE if energy > most and isfinite(most) else 0.0)
        for latency, energy in zip(found[:modes], found[modes:], strict=True)
    ]


def _names(text: str) -> tuple[str, ...]:
    names = json.loads(text)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{text[:80]} is no list of names")
    return tuple(names)
