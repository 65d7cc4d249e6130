#!/usr/bin/env python3
"""What each weight format costs in perplexity and brings in speed and memory.

    python scripts/bench_perplexity.py --model smollm2

Prints a table, and one JSON object on the last line. Perplexity is exp of the mean negative log probability of the
tokens of scripts/opticks.txt (Newton's Opticks, 1730, from its first experiment on; in the public domain) in windows of
--window tokens, as the engine gives them for prompts (`prompt_logprobs`); the first of each window is not counted.
tokens/s are those of one greedy request, medians of --repeats.

--off-grid measures a model that computes the same by other numbers: gains of norms moved into the linears behind them,
and rows scaled against the columns that they meet. A checkpoint that was int4 before (smollm2 is Q4_1) gets its own
steps back from int4, and only so changed does it show what int4 does to one that was not.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

from quadriga import LLM, SamplingParams
from workers.source import resolve_model

TEXT = Path(__file__).with_name("opticks.txt")
FORMATS = {
    "fp32": ("float32", None),
    "bf16": ("bfloat16", None),
    "int8": ("bfloat16", "int8"),
    "int4": ("bfloat16", "int4"),
}
WEIGHTS = "model.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--window", type=int, default=1024, help="tokens that are read together")
    parser.add_argument("--tokens", type=int, default=6144, help="of the text, at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--off-grid", action="store_true", help="change the weights, but not what they compute")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)

    with tempfile.TemporaryDirectory() as folder:
        model = str(moved(resolve_model(args.model), Path(folder)) if args.off_grid else args.model)
        rows = [measure(model, name, args) for name in args.formats]
    print(f"{'weights':8} {'perplexity':>10} {'change':>8} {'tokens/s':>9} {'weight MiB':>11}")
    for row in rows:
        row["change"] = round(row["perplexity"] / rows[0]["perplexity"] - 1, 5)
        print(
            f"{row['weights']:8} {row['perplexity']:10.4f} {row['change']:+8.2%} {row['tokens_per_s']:9.1f} "
            f"{row['weight_mib']:11.0f}"
        )
    print(json.dumps({"model": args.model, "off_grid": args.off_grid, "window": args.window, "formats": rows}))


def measure(model: str, name: str, args: argparse.Namespace) -> dict[str, object]:
    dtype, quantization = FORMATS[name]
    with LLM(model, dtype=dtype, quantization=quantization, prefix_caching=False) as llm:
        ids = llm.model.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[: args.tokens]
        windows = [ids[at : at + args.window] for at in range(0, len(ids), args.window)]
        scored = llm.generate(windows, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        logprobs = [entry.logprob for result in scored for entry in result.prompt_logprobs[1:]]
        speeds = [1 / llm.generate(ids[:16], stream_params()).mean_tbt_s for _ in range(args.repeats)]
        return {
            "weights": name,
            "perplexity": round(math.exp(-math.fsum(logprobs) / len(logprobs)), 5),
            "tokens": len(logprobs),
            "tokens_per_s": round(statistics.median(speeds), 1),
            "weight_mib": round(sum(worker.weight_bytes for worker in llm.workers) / 2**20, 1),
        }


def stream_params() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=129, ignore_eos=True)


def moved(folder: Path, to: Path) -> Path:
    """A copy of a Llama checkpoint of a single file that computes the same, with all linears' numbers changed."""
    for path in folder.iterdir():
        if path.name != WEIGHTS:
            (to / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / WEIGHTS)
    query_heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for layer in range(config["num_hidden_layers"]):
        part = {name: tensors[f"model.layers.{layer}.{name}.weight"] for name in LINEARS}
        for norm, behind in BEHIND_NORMS.items():
            gain = tensors[f"model.layers.{layer}.{norm}.weight"]
            for name in behind:
                part[name] *= gain
            gain.fill_(1)
        size = part["mlp.up_proj"].norm(dim=1)
        part["mlp.up_proj"] /= size[:, None]
        part["mlp.down_proj"] *= size
        size = part["self_attn.v_proj"].norm(dim=1)
        part["self_attn.v_proj"] /= size[:, None]
        met = size.view(kv_heads, 1, -1).expand(-1, query_heads // kv_heads, -1).flatten()
        part["self_attn.o_proj"] *= met
    save_file(tensors, to / WEIGHTS, {"format": "pt"})
    return to


BEHIND_NORMS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
LINEARS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


if __name__ == "__main__":
    main()
