#!/usr/bin/env bash
# Five-shot GSM8K of a real checkpoint by lm-eval, by stock vLLM without the flag and by ours under it.
#
#   MODEL=Qwen/Qwen3.5-0.8B bash benchmarks/gsm8k.sh
#
# Needs lm-eval (pip install "lm-eval[vllm]"), the checkpoint, and the data set, which lm-eval fetches.
#
#   LIMIT    examples; all 1,319 by default
#   RESULTS  folder of the results
#   ARGS     further model arguments, for example ",max_model_len=8192,gpu_memory_utilization=0.8"
set -euo pipefail

: "${MODEL:?a checkpoint}" "${RESULTS:=benchmarks/results/gsm8k}" "${LIMIT:=}" "${ARGS:=,max_model_len=4096}"

evaluate() { # NAME VARIABLE=VALUE...
    env -u VLLM_BATCH_INVARIANT -u VLLM_PLUGINS "${@:2}" \
        lm_eval --model vllm --model_args "pretrained=$MODEL,dtype=bfloat16,seed=0$ARGS" \
        --tasks gsm8k --num_fewshot 5 --batch_size auto ${LIMIT:+--limit "$LIMIT"} --output_path "$RESULTS/$1"
}

evaluate stock VLLM_PLUGINS=
evaluate ours VLLM_BATCH_INVARIANT=1 VLLM_PLUGINS=vllm_invariant

python3 - "$RESULTS" <<'PYTHON'
import json, pathlib, sys

print("| | flexible extract | strict match |\n|---|---:|---:|")
for name in ("stock", "ours"):
    latest = max(pathlib.Path(sys.argv[1], name).rglob("results_*.json"), key=lambda p: p.stat().st_mtime)
    scores = json.loads(latest.read_text())["results"]["gsm8k"]
    figures = (scores[f"exact_match,{kind}"] for kind in ("flexible-extract", "strict-match"))
    print(f"| {name} | " + " | ".join(f"{x:.4f}" for x in figures) + " |")
PYTHON
