"""The separate Python environment that quantizes: llmcompressor pins other libraries than vLLM does."""

import hashlib
import re
import sys
from pathlib import Path

from app.engines.checkpoints.child import run_logged
from app.engines.checkpoints.errors import PrepareError
from app.engines.checkpoints.publish import published
from app.engines.checkpoints.steps import Steps

REQUIREMENTS = Path(__file__).parents[3] / "requirements" / "quantize.txt"
FOLDER_NAME = "quantize-env"
STAMP_NAME = "requirements.sha256"
# What a wrong set of packages breaks first: transformers' model code fails beside a torchvision of another torch.
_CHECK = "import llmcompressor.modifiers.gptq, transformers.models.llama.modeling_llama"


def ensure(home: Path, steps: Steps, lock: int) -> Path:
    """Return the environment's Python, after building the environment if it is absent or of other requirements.

    Takes one to two minutes to build. Only under the home's lock, whose descriptor is `lock`. Raises PrepareError.
    """
    folder = home / FOLDER_NAME
    python = folder / "bin" / "python"
    if _read_stamp(folder) == stamp() and python.exists():
        return python
    log = home / "logs" / f"{FOLDER_NAME}.log"
    log.unlink(missing_ok=True)
    wanted = sum(1 for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines() if "==" in line)
    # A virtual environment may be renamed as long as it is used through its Python, never through its scripts.
    with published(folder, durable=False) as partial, steps.step("quantizing environment") as advance:
        seen = 0

        def count(line: str) -> None:
            nonlocal seen
            seen += line.startswith("Collecting ")
            advance(seen, wanted * 2)  # finding the packages takes about as long as unpacking them

        partial_python = str(partial / "bin" / "python")
        run_logged([sys.executable, "-m", "venv", str(partial)], log, keep_open=lock)
        # --no-deps: the file is complete, and left to itself pip adds the torchvision that breaks transformers.
        # --no-compile: most modules are never imported; the others are compiled when they are.
        install = [
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--no-compile",
            "--disable-pip-version-check",
            "--progress-bar=off",
        ]
        run_logged([partial_python, *install, "-r", str(REQUIREMENTS)], log, keep_open=lock, on_line=count)
        run_logged([partial_python, "-c", _CHECK], log, keep_open=lock)
        (partial / STAMP_NAME).write_text(stamp(), encoding="utf-8")
    return python


def stamp() -> str:
    """Return what the environment depends on, as a hex SHA-256: the requirements and the Python that made it.

    Raises PrepareError if the requirements are not there, as in an installation without the source tree.
    """
    try:
        requirements = REQUIREMENTS.read_bytes()
    except OSError as error:
        raise PrepareError(
            f"{REQUIREMENTS} is not there: install the project with `pip install -e .` from its source tree."
        ) from error
    return hashlib.sha256(requirements + sys.version.encode()).hexdigest()


def _read_stamp(folder: Path) -> str | None:
    try:
        return (folder / STAMP_NAME).read_text(encoding="utf-8")
    except OSError:
        return None


def versions() -> dict[str, str]:
    """Return the versions of the libraries that decide what a checkpoint looks like."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", REQUIREMENTS.read_text(encoding="utf-8"), re.MULTILINE))
    return {name: pins[name] for name in ("llmcompressor", "compressed-tensors", "torch", "transformers")}
