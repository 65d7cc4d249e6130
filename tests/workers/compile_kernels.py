"""Compiles every Triton kernel to machine code of two GPU generations, which takes no GPU. Run as a program of its own:
the tests' process has Triton's interpreter in the compiler's place."""

from __future__ import annotations

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from workers import triton_kernels as kernels

CAPABILITIES = (80, 90)


def variants(dtype: str) -> list[tuple[object, dict[str, str], dict[str, object]]]:
    """Each kernel with the types of its pointers and floats, and its constants; all else is an int32."""
    x = f"*{dtype}"
    norm = {"x": x, "residual": x, "weight": x, "out": x, "total": x, "eps": "fp32"}
    rotation = dict.fromkeys(("q", "k", "v", "cos", "sin", "q_out", "key_pages", "value_pages"), x)
    return [
        (kernels._rms_norm, norm, {"add": True, "block": 4096}),
        (kernels._rms_norm, norm, {"add": False, "block": 128}),
        (kernels._rotate_and_store, {**rotation, "slots": "*i64"}, {"half": 64, "block": 64}),
        (kernels._rotate_and_store, {**rotation, "slots": "*i64"}, {"half": 48, "block": 64}),
        (kernels._silu_multiply, {"x": x, "out": x}, {"block": 1024}),
        (kernels._gumbel, {"noise": "*fp32", "high": "*i64", "low": "*i64", "ids": "*i64"}, {"block": 1024}),
    ]


def main() -> None:
    """Prints a JSON list of [kernel, capability, bytes of machine code, PTX]."""
    made = []
    for capability in CAPABILITIES:
        for dtype in ("bf16", "fp16", "fp32"):
            for kernel, types, constants in variants(dtype):
                names = kernel.arg_names
                signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
                source = ASTSource(kernel, signature, {(names.index(name),): at for name, at in constants.items()})
                asm = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm
                made.append([kernel.__name__, capability, len(asm["cubin"]), asm["ptx"]])
    print(json.dumps(made))


if __name__ == "__main__":
    main()
