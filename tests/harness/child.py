"""One engine in a process of its own.  Reads a job from standard input, writes what it saw to a file.

A job is a JSON object: ``model``, ``options``, ``rounds`` and ``out``, the file to write.  A round is a
list of asks run together, ``cold`` if the prefix cache is emptied before.  The environment decides
whether the flag is set.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.harness import ranks
from tests.harness.engine import Ask, Engine


def facts(engine: Engine) -> dict[str, Any]:
    """Which classes and modes the engine settled on; ranks must agree."""
    first, *others = engine.on_ranks(ranks.modes)
    assert all(other == first for other in others), "ranks differ"
    return {"scheduler": ranks.name_of(type(engine.scheduler)), "block": engine.block, **first}


def main() -> None:
    """Run the job."""
    job = json.load(sys.stdin)
    engine = Engine(Path(job["model"]), job["options"])
    rounds, mixed = [], []
    for each in job["rounds"]:
        if each["cold"]:
            engine.reset()
        run = engine.run([Ask(**{**ask, "prompt": tuple(ask["prompt"])}) for ask in each["asks"]])
        rounds.append([result.to_json() for result in run.results])
        mixed.append(run.record.mixed_steps(run.ids[0]))
    seen = {"facts": facts(engine), "rounds": rounds, "mixed": mixed}
    engine.close()
    Path(job["out"]).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
