# In a vLLM branch: not needed (a tool for users).
"""``vllm-invariant doctor``: what this machine, this vLLM and this model would come to, without an engine."""

import contextlib
import importlib.metadata
import math
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from vllm_invariant import gate, grid, preflight, seams
from vllm_invariant.config import InvariantConfig
from vllm_invariant.ops import launch
from vllm_invariant.options import engine_args, reason

READY, REFUSED, COULD_NOT_RUN = 0, 1, 2
PACKAGES = ("torch", "triton", "transformers", "vllm-invariant")


@dataclass
class Findings:
    """What the doctor found.

    Attributes:
        versions: by package.
        device: in words.
        verdict: of the gate.
        moved: by seam, what does not fit; empty if it fits.
        refused: what would be refused for the model, in the words of the refusal.
        settings: what it would run with, by name.
        note: what else there is to say.

    """

    versions: dict[str, str]
    device: str
    verdict: gate.Verdict
    moved: dict[str, list[str]]
    refused: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def ready(self) -> bool:
        """Whether a server would start and keep the promise."""
        return self.verdict.ok and not any(self.moved.values()) and not self.refused


def versions() -> dict[str, str]:
    """Installed versions, by package.

    Raises:
        importlib.metadata.PackageNotFoundError: if there is no vLLM.

    """
    name, version = gate.installed_vllm()
    found = {"python": platform.python_version(), name: version}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def seams_in_place() -> dict[str, list[str]]:
    """By row of SEAMS.md, what is wrong with it."""
    found: dict[str, list[str]] = {seam.name: [] for seam in seams.SEAMS}
    for seam in seams.SEAMS:
        if (problem := seams.probe(seam)) is not None:
            found[seam.name].append(problem)
    return found


def _device() -> str:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return f"{current_platform.device_type}, {platform.machine()}, {os.cpu_count()} cores"
    capability = current_platform.get_device_capability()
    return f"{current_platform.get_device_name()}, SM{capability.major}{capability.minor}"


def _is_found() -> bool:
    """Whether vLLM will load the plugin."""
    wanted = os.environ.get("VLLM_PLUGINS")
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    names = {point.name for point in points if point.value.startswith("vllm_invariant.")}
    return bool(names if wanted is None else names & set(wanted.split(",")))


# --- a model ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _collecting(problems: list[str]) -> Iterator[None]:
    """Collect everything that would be refused, instead of the first only."""
    stock = preflight.check_engine

    def check_engine(vllm_config: Any) -> InvariantConfig:
        problems.extend(p for p in preflight.problems(vllm_config) if p not in problems)
        return InvariantConfig.from_additional_config(vllm_config.additional_config)

    preflight.check_engine = check_engine
    try:
        yield
    finally:
        preflight.check_engine = stock


def examine(model: str, arguments: list[str], found: Findings) -> None:
    """Make the engine's config, and no engine, and judge it.

    Args:
        model: checkpoint.
        arguments: engine options as on vLLM's command line.
        found: completed here.

    Raises:
        OSError: if the model cannot be read.

    """
    args = engine_args(model, arguments)
    try:
        with _collecting(found.refused):
            config = args.create_engine_config()
    except ValueError as error:
        why = reason(error)
        found.refused.append(why if why.startswith(preflight.FLAG) else f"by vLLM itself: {why}")
        return
    architecture = config.model_config.architecture
    if architecture not in preflight.ARCHITECTURES:
        if config.model_config.is_hybrid:
            found.refused += [p for p in preflight.problems(config) if architecture in p]
        found.note = f"{architecture} is not served by this package: stock vLLM decides about it"
        return
    found.settings = settings(config)
    problem = _launches(config)
    if problem:
        found.refused.append(problem)


def _options(config: Any) -> InvariantConfig:
    return InvariantConfig.from_additional_config(config.additional_config)


def _launches(config: Any) -> str | None:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    text, capability = config.model_config.hf_text_config, current_platform.get_device_capability()
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    key = launch.Key(
        (capability.major, capability.minor), dtype, text.linear_key_head_dim, text.linear_value_head_dim
    )
    try:
        launch.lookup(key)
    except ValueError as error:
        return str(error)
    return None


def settings(config: Any) -> dict[str, str]:
    """What an engine with this config would run with."""
    arithmetic, cache, scheduler = _options(config).arithmetic, config.cache_config, config.scheduler_config
    ranks = config.parallel_config.tensor_parallel_size
    block = hybrid_block(config.model_config.hf_text_config, cache.block_size, ranks)
    hits = "off: no prefix caching"
    if cache.enable_prefix_caching:
        hits = f"every {cache.prefix_match_unit or block} tokens"
    smallest = grid.min_budget(scheduler.max_num_seqs, arithmetic.grid)
    return {
        "arithmetic": f"{arithmetic.name}, a grid of {arithmetic.grid} tokens",
        "recurrent state": str(cache.mamba_ssm_cache_dtype),
        "block": f"{block} tokens",
        "cache hits": hits,
        "token budget": f"{scheduler.max_num_batched_tokens} a step (at least {smallest}), "
        f"up to {scheduler.max_num_seqs} requests",
    }


def hybrid_block(text: Any, step: int, ranks: int = 1) -> int:
    """Tokens of a block: the smallest multiple of ``step`` whose keys and values fill a state page.

    Args:
        text: the language model's config.
        step: the block size vLLM starts from, tokens.
        ranks: tensor-parallel size.  Both pages are a rank's share, and every rank has a key-value head.

    """
    keys = text.linear_num_key_heads * text.linear_key_head_dim // ranks
    values = text.linear_num_value_heads * text.linear_value_head_dim // ranks
    recurrent = 4 * values * text.linear_key_head_dim  # float32
    convolution = 2 * (text.linear_conv_kernel_dim - 1) * (2 * keys + values)  # bfloat16
    heads = max(text.num_key_value_heads // ranks, 1)
    a_token = 2 * 2 * heads * text.head_dim  # key and value, bfloat16
    return grid.round_block(math.ceil((recurrent + convolution) / a_token), step)


# --- the command ------------------------------------------------------------------------------------


def run(model: str | None, arguments: list[str], console: Console) -> int:
    """Look, and say what was found.

    Returns:
        0 ready, 1 something is refused, 2 it could not be found out.

    """
    flag = os.environ.get("VLLM_BATCH_INVARIANT", "0").strip() not in ("", "0")
    os.environ["VLLM_BATCH_INVARIANT"] = "1"  # what it would be like with the flag
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        found = Findings(versions(), _device(), gate.judge(), seams_in_place())
        if not _is_found():
            found.refused.append(
                "vLLM does not find the plugin: install this package, and name it in VLLM_PLUGINS"
            )
        if model is not None and found.verdict.ok and not any(found.moved.values()):
            examine(model, arguments, found)
    except importlib.metadata.PackageNotFoundError:
        console.print("[bold red]could not run[/]: vLLM is not installed")
        return COULD_NOT_RUN
    except (OSError, ImportError, ValueError) as error:
        console.print(f"[bold red]could not run[/]: {escape(reason(error))}", highlight=False, soft_wrap=True)
        return COULD_NOT_RUN
    console.print(screen(found, model, flag))
    return READY if found.ready else REFUSED


def screen(found: Findings, model: str | None, flag: bool) -> RenderableType:
    """Everything on one screen."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in found.versions.items()))
    table.add_row("device", escape(found.device))
    table.add_row("release and device", _mark(found.verdict.ok, found.verdict.reason))
    fits = sum(not problems for problems in found.moved.values())
    total = len(found.moved)
    table.add_row("seams", _mark(fits == total, f"{fits} of {total} in place"))
    for name, problems in found.moved.items():
        for problem in problems:
            table.add_row(f"  {name}", f"[red]moved[/]: {escape(problem)}")
    table.add_row("flag", "set" if flag else "not set: a server needs VLLM_BATCH_INVARIANT=1")
    for name, value in found.settings.items():
        table.add_row(name, escape(value))
    for i, problem in enumerate(found.refused):
        table.add_row("" if i else "refused", f"[red]{escape(problem)}[/]")
    if found.note:
        table.add_row("note", escape(found.note))
    if model is None:
        table.add_row("model", "none named, so nothing was judged but this machine")
    end = "[bold green]ready[/]" if found.ready else "[bold red]not ready[/]"
    return Group(table, end)


def _mark(good: bool, text: str) -> str:
    return f"[green]ok[/]: {escape(text)}" if good else f"[red]no[/]: {escape(text)}"
