"""Quantizes a dense checkpoint; run as a script by the quantizing environment's own Python.

It imports nothing of this project: that environment pins another transformers than the one that serves.
`python -P quantize.py DENSE OUT SCHEME CALIBRATION`, where CALIBRATION is a JSON list of conversations in OpenAI's
message form.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

# 64 samples of 256 tokens: the time of GPTQ and AWQ grows with the product, and 16,000 tokens are ten times the
# widest row of the embedded model.
SAMPLE_TOKENS = 256
# The head stays dense: it decides every token, and in small models it shares its weights with the embedding.
DENSE_LAYERS = ["lm_head"]
# Group 64, because vLLM's CPU kernel takes 32, 64, 128 or whole rows and small models' widths (576) are no multiple
# of 128; symmetric and without act-order, because that kernel takes nothing else.
W4A16 = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=64),
)


def modifiers(scheme: str) -> list[Modifier]:
    if scheme == "int8":
        # Plain rounding, with activations scaled token by token at run time: seconds, and no calibration. On the
        # embedded model it is within 0.03 nats of the dense one (KL, chats); GPTQ has little left to win.
        return [QuantizationModifier(targets="Linear", scheme="W8A8", ignore=DENSE_LAYERS)]
    groups = {"group_0": W4A16}
    if scheme == "gptq":
        return [GPTQModifier(config_groups=groups, ignore=DENSE_LAYERS)]
    if scheme == "awq":
        if not torch.accelerator.is_available():
            # llmcompressor 0.13 pins memory for transfers to a GPU without asking whether there is one, and fails.
            IntermediatesCache.pin_memory = lambda *_arguments, **_options: None
        # Half the usual grid of scales: with 20 the embedded model takes 20 minutes on two cores.
        return [AWQModifier(n_grid=10), QuantizationModifier(config_groups=groups, ignore=DENSE_LAYERS)]
    raise ValueError(f"unknown scheme: {scheme}")


def calibration_set(conversations: list[list[dict[str, str]]], tokenizer: Any) -> Dataset:
    """Return one sample of at most SAMPLE_TOKENS tokens for each conversation, through the model's chat template."""
    texts = [rendered(conversation, tokenizer) for conversation in conversations]
    samples = [tokenizer(text, add_special_tokens=False).input_ids[:SAMPLE_TOKENS] for text in texts]
    return Dataset.from_dict({"input_ids": samples, "attention_mask": [[1] * len(tokens) for tokens in samples]})


def rendered(conversation: list[dict[str, str]], tokenizer: Any) -> str:
    """Return the text of a conversation; a base model without a chat template gets its bare content."""
    if tokenizer.chat_template is None:
        return "\n\n".join(message["content"] for message in conversation)
    text: str = tokenizer.apply_chat_template(conversation, tokenize=False)
    return text


def to_16_bit(model: Any, dtype: torch.dtype) -> None:
    """Bring what was not quantized back to `dtype`; scales and weights still to be packed keep their 32 bits."""
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def main(dense: Path, out: Path, scheme: str, calibration: Path) -> None:
    published = AutoConfig.from_pretrained(dense).dtype
    # In 32 bits: rounding errors are then those of the scheme alone, and a CPU without 16-bit arithmetic (no AVX-512)
    # is 8 times as fast.
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    recipe = modifiers(scheme)
    if scheme == "int8":
        oneshot(model=model, recipe=recipe)
    else:
        tokenizer = AutoTokenizer.from_pretrained(dense)
        data = calibration_set(json.loads(calibration.read_text(encoding="utf-8")), tokenizer)
        oneshot(
            model=model,
            recipe=recipe,
            dataset=data,
            max_seq_length=SAMPLE_TOKENS,
            num_calibration_samples=len(data),
            shuffle_calibration_samples=False,
        )
    to_16_bit(model, torch.float16 if published == torch.float16 else torch.bfloat16)
    model.save_pretrained(out, save_compressed=True)


def end_with_parent() -> None:
    """End this process when the one that started it ends, even by SIGKILL: the pipe to our stdin closes then."""

    def wait() -> None:
        # Not through sys.stdin: a thread that holds its lock crashes the interpreter as it shuts down.
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
