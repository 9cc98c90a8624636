"""Stands for llama.cpp's two programs: prints what they print, with times that follow from the flags.

A call is noted in the file beside it; of the batched program the first is answered with nothing, which
happens to the real one when it ends before its log is written. Prefill takes 1 ms a token, a step 10 ms,
of several rows 2 ms a row; flash attention halves that, and the 8-bit cache cannot be had.
"""

import json
import sys
from pathlib import Path

# As printed by llama-bench, commit 0c1e57098, but for what follows from the flags.
BENCH = {
    "build_commit": "0c1e57098", "build_number": 1, "cpu_info": "AMD EPYC", "gpu_info": "", "backends": "CPU",
    "model_filename": "m.gguf", "model_type": "llama 256M Q4_1", "model_size": 96576768,
    "model_n_params": 134515008, "n_batch": 2048, "n_ubatch": 512, "n_threads": 2, "cpu_mask": "0x0",
    "cpu_strict": False, "poll": 50, "type_k": "f16", "type_v": "f16", "n_gpu_layers": -1, "n_cpu_moe": 0,
    "split_mode": "layer", "main_gpu": 0, "no_kv_offload": False, "flash_attn": 0, "devices": "auto",
    "tensor_split": "0.00", "tensor_buft_overrides": "none", "load_mode": "auto", "lazy_mode": "auto",
    "embeddings": False, "no_op_offload": 0, "no_host": False, "repack": True, "fit_target": 0,
    "fit_min_ctx": 0, "n_prompt": 32, "n_gen": 0, "n_depth": 0, "test_time": "2026-12-01T03:34:05Z",
    "avg_ns": 434794757, "stddev_ns": 0, "avg_ts": 73.6, "stddev_ts": 0, "samples_ns": [], "samples_ts": [],
}  # fmt: skip
# As printed by llama-batched-bench of the same commit.
BATCHED = {
    "n_kv_max": 1024, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0,
    "n_gpu_layers": -1, "n_threads": 2, "n_threads_batch": 2, "pp": 64, "tg": 4, "pl": 2, "n_kv": 136,
    "t_pp": 1.361231, "speed_pp": 94.032539, "t_tg": 0.224815, "speed_tg": 35.584816, "t": 1.586046,
    "speed": 85.747826,
}  # fmt: skip


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def main(name: str, given: list[str]) -> None:
    """Answer one call."""
    if "--version" in given:
        _say("version: 0.5.0-dev (build 1, commit 0c1e57098)\nbuilt with GNU 12.2.0 for Linux x86_64")
        return
    with (Path(name).parent / "calls").open("a") as calls:
        calls.write(" ".join([Path(name).name, *given]) + "\n")
    flags = dict(zip(given[::2], given[1::2], strict=False))
    if flags["-m"].endswith("absent.gguf") or "-ctk" in flags:
        _say("[" if Path(name).name == "llama-bench" else "")
        sys.exit(f"llama_bench: error: failed to load model '{flags['-m']}'")
    factor = 0.5 if flags.get("-fa") == "on" else 1.0
    if Path(name).name == "llama-batched-bench":
        tokens, cells = int(flags["-ntg"]), int(flags["-c"])
        if (Path(name).parent / "calls").read_text().count("batched") == 1:
            return
        _say("\nllama_batched_bench: a line that is no result")
        for rows in map(int, flags["-npl"].split(",")):
            assert cells % 256 == 0 and cells >= rows * (int(flags["-npp"]) + tokens)
            _say(json.dumps(BATCHED | {"pl": rows, "tg": tokens, "t_tg": factor * 0.002 * rows * tokens}))
        return
    prompt, gen = int(flags["-p"]), int(flags["-n"])
    seconds = factor * (prompt * 0.001 + gen * 0.01)
    _say(
        json.dumps(
            [
                BENCH
                | {"n_prompt": prompt, "n_gen": gen, "samples_ns": [int(seconds * 1e9)] * int(flags["-r"])}
            ]
        )
    )


if __name__ == "__main__":
    main(sys.argv[0], sys.argv[1:])
