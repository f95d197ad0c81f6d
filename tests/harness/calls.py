"""Every Python call that an engine makes for the same requests, counted.  A program: MODEL OUT OPTIONS."""

import cProfile
import json
import pstats
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.harness.prompts import prompt

LENGTHS = (5, 100, 300, 700)


def counted(model: str, options: dict[str, Any]) -> Counter[str]:
    """Calls by function, of requests that the engine has seen the like of."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, enforce_eager=True, enable_prefix_caching=False, async_scheduling=False, **options)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, detokenize=False)
    profile = cProfile.Profile()
    for warm in (True, True, False):
        asked = [{"prompt_token_ids": prompt(n, seed=95 + warm)} for n in LENGTHS]
        if not warm:
            profile.enable()
        llm.generate(asked, params, use_tqdm=False)
    profile.disable()
    found: Counter[str] = Counter()
    for (file, line, name), (_, calls, *_) in pstats.Stats(profile).stats.items():
        found[re.sub(r" at 0x\w+", "", f"{file}:{line}:{name}")] += calls
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(counted(sys.argv[1], json.loads(sys.argv[3]))))
