"""GGUF files become safetensors folders: converted once through transformers, then loaded as any other model.

Quantised values need more than 16 bits to be exact, so the folder holds fp32, and its configuration asks for bf16 as
the dtype to run in.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

from attention.shared_work import LockTimeout, cache_root, only_one
from workers.gguf_header import HeaderError, read_header

logger = logging.getLogger("quadriga.gguf")

_FORMAT = 1  # raise it when the conversion changes, so that old folders are not used
LOCK_SECONDS = 3600.0  # what another process gets for the conversion; one that dies frees the lock, one that hangs not
_HEAD_BYTES, _SAMPLE_BYTES, _SAMPLES = 16 << 20, 64 << 10, 64


class ConversionError(ValueError):
    """A GGUF file that cannot be read."""


def converted_folder(path: Path) -> Path:
    """The safetensors folder of a GGUF file, made now if it is not there. Safe to call from several processes.

    Raises ConversionError when the file cannot be read, or another process converts it for too long.
    """
    key = _fingerprint(path)
    root = cache_root() / "gguf"
    made = next(root.glob(f"*-{key}"), None)
    if made is not None:
        return made
    folder = root / f"{path.stem}-{key}"
    root.mkdir(parents=True, exist_ok=True)
    try:
        with only_one(root / f".{key}.lock", LOCK_SECONDS, f"converting {path}"):
            if not folder.is_dir():
                _convert(path, folder)
    except LockTimeout as error:
        raise ConversionError(str(error)) from None
    return folder


def _fingerprint(path: Path) -> str:
    """Identifies the file by its size, its head and samples throughout: a second copy needs no second conversion."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{_FORMAT}:{size}".encode())
    with open(path, "rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        for sample in range(_SAMPLES):
            file.seek(size * sample // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _convert(path: Path, folder: Path) -> None:
    logger.info("converting %s once to %s", path.name, folder)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        _write_model(path, partial)
        os.replace(partial, folder)  # a folder is there whole or not at all
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_model(path: Path, folder: Path) -> None:
    try:
        read_header(path).check_sizes()
    except HeaderError as error:
        raise ConversionError(f"cannot read GGUF file {path}: {error}") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except Exception as error:
        raise ConversionError(f"cannot read GGUF file {path}: {type(error).__name__}: {error}") from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the saved weights are plain
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = folder / "config.json"
    content = json.loads(config.read_text())
    content["dtype"] = "bfloat16"
    config.write_text(json.dumps(content, indent=2))
