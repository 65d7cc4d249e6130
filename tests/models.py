"""Tiny random models, a byte-level tokenizer, and what transformers says they should answer.

The weights are drawn so that every part counts: attention is sharp enough that order and positions matter, norms and
biases are far from one and zero, and logits lie far enough apart that rounding does not decide.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCAB_SIZE = 301
KINDS = ("llama", "llama3", "mistral", "qwen2", "qwen3", "smollm3", "mha")

# Specials of the byte tokenizer; ids below 256 are the bytes themselves, ids from 260 on have no text.
END, USER, ASSISTANT, PAD = "<|end|>", "<|user|>", "<|assistant|>", "<|pad|>"
END_ID, USER_ID, ASSISTANT_ID, PAD_ID = range(256, 260)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{% else %}<|assistant|>{% endif %}"
    "{{ message['content'] }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Configuration class, and what the kind changes in the sizes above.
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 8}),
    "llama3": ("LlamaConfig", {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE}),
    "mistral": ("MistralConfig", {"head_dim": 8, "num_hidden_layers": 2, "sliding_window": 8}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 8, "num_hidden_layers": 2}),
    # Rotary embedding in layers 0, 1 and 3 only.
    "smollm3": (
        "SmolLM3Config",
        {"num_hidden_layers": 4, "no_rope_layer_interval": 3, "tie_word_embeddings": True},
    ),
    "mha": ("LlamaConfig", {"head_dim": 8, "num_hidden_layers": 2, "num_key_value_heads": 6}),
}


def make_tiny_model(kind: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Saves a random model of one of KINDS in `folder` and returns the folder.

    overrides: fields of its transformers configuration, or `dtype`, the name of the dtype to save in.
    """
    import torch
    import transformers

    config_class, changes = _KINDS[kind]
    dtype = getattr(torch, overrides.pop("dtype", "float32"))
    config = getattr(transformers, config_class)(**{**_SIZES, **changes, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_weights(name, noise))
    model.to(dtype).save_pretrained(folder)
    return Path(folder)


def _weights(name: str, noise: Any) -> Any:
    """Standard normal noise, shifted and scaled to suit the parameter of that name."""
    if name.endswith("norm.weight"):
        return 1.0 + 0.25 * noise
    if name.endswith(".bias"):
        return 0.2 * noise
    if "embed_tokens" in name or "lm_head" in name:
        return 0.7 * noise  # logits with a standard deviation of about 5
    gain = {"q_proj": 2.0, "o_proj": 4.0, "down_proj": 6.0}
    return noise * gain.get(name.split(".")[-2], 1.0) / noise.shape[-1] ** 0.5


def make_byte_tokenizer(folder: Path, eos_token: str | None = None, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Writes a tokenizer whose ids below 256 are the bytes of UTF-8 text. Returns the folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {character: byte for byte, character in _byte_characters().items()}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in (END, USER, ASSISTANT, PAD)])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "eos_token": eos_token}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def load_reference(folder: Path) -> Any:
    """The transformers model of a folder, in fp32. Fails when the checkpoint does not fit it exactly."""
    import torch
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    problems = {name: found for name, found in info.items() if found}
    assert not problems, f"{folder} does not load cleanly: {problems}"
    return model.eval()


def greedy(folder: Path, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
    """The model's own `max_tokens` likeliest tokens one after the other, end tokens included."""
    import torch

    model = load_reference(folder)
    # Taken from both places, as `generate` falls back from one to the other.
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    prompt = torch.tensor([list(prompt_ids)])
    with torch.inference_mode():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            use_cache=True,
        )
    return output[0, len(prompt_ids) :].tolist()


def last_logits(folder: Path, ids: Sequence[int]) -> Any:
    """The model's logits [vocab] in fp32 after the last of `ids`."""
    import torch

    with torch.inference_mode():
        return load_reference(folder)(torch.tensor([list(ids)])).logits[0, -1]
