#!/usr/bin/env bash
# Time to first token on a shared 2,000-token prefix, at concurrency 1 and 16, from a server that is running.
#
#   BASE_URL=http://127.0.0.1:8000 TAG=on bash benchmarks/run_gdn_prefix_cache_bench.sh
#
# Start the server with VLLM_BATCH_INVARIANT=1, once with --enable-prefix-caching and once with
# --no-enable-prefix-caching, and give each run its TAG.  `python -m benchmarks.run_prefix_cache` does all of
# that, and compares whole-block hits with hits on the grid.
#
#   MODEL    name in requests, and the tokenizer; the server's first model by default
#   RESULTS  folder of the JSON results
set -euo pipefail

: "${BASE_URL:=http://127.0.0.1:8000}" "${TAG:=on}" "${RESULTS:=benchmarks/results/prefix-cache}"
: "${PREFIX:=2000}" "${SUFFIX:=64}" "${OUTPUT:=64}" "${BENCH:=vllm bench serve}"

for concurrency in 1 16; do
    # One request beforehand puts the prefix into the cache, if there is one.
    $BENCH --base-url "$BASE_URL" ${MODEL:+--model "$MODEL"} \
        --dataset-name prefix_repetition --num-prompts $((16 + 3 * concurrency)) \
        --prefix-repetition-num-prefixes 1 --prefix-repetition-prefix-len "$PREFIX" \
        --prefix-repetition-suffix-len "$SUFFIX" --prefix-repetition-output-len "$OUTPUT" \
        --num-warmups 1 --max-concurrency "$concurrency" --ignore-eos --temperature 0 --seed "$concurrency" \
        --save-result --result-dir "$RESULTS" --result-filename "$TAG-c$concurrency.json"
done

python3 - "$RESULTS" "$TAG" <<'PYTHON'
import json, pathlib, sys

folder, tag = pathlib.Path(sys.argv[1]), sys.argv[2]
print("| prefix cache | c | mean TTFT (ms) | median TTFT (ms) | mean TPOT (ms) |\n|---|---:|---:|---:|---:|")
for concurrency in (1, 16):
    r = json.loads((folder / f"{tag}-c{concurrency}.json").read_text())
    assert r["completed"] and not r["failed"], f"{r['failed']} requests failed"
    figures = (r["mean_ttft_ms"], r["median_ttft_ms"], r["mean_tpot_ms"])
    print(f"| {tag} | {concurrency} | " + " | ".join(f"{x:.1f}" for x in figures) + " |")
PYTHON
