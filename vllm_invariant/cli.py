# In a vLLM branch: not needed.
"""The ``vllm-invariant`` command.  Imports neither torch nor vLLM: each command loads what it needs."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

AXES = ("batch", "company", "cut", "hit", "history", "boot", "mode")


@app.callback()
def main() -> None:
    """Bitwise batch-invariant serving of Gated-DeltaNet hybrids on stock vLLM."""


@app.command()
def demo() -> None:
    """Serve a tiny model and compare every answer, bit for bit, on every axis.

    Needs no checkpoint and no network.  Exits 0 only if no bit differs and the prefix cache was hit.
    """
    from rich.console import Console

    from vllm_invariant.demo.run import run

    raise typer.Exit(run(Console()))


def _axes(names: list[str] | None) -> list[str]:
    for name in names or ():
        if name not in AXES:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(AXES)}")
    return names or []


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def audit(
    context: typer.Context,
    checkpoint: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Serve this and audit it; vLLM's options follow it."),
    ] = None,
    base_url: Annotated[str | None, typer.Option(help="Audit the server that runs here.")] = None,
    model: Annotated[str, typer.Option(help="The name it serves, if it serves several.")] = "",
    axis: Annotated[
        list[str] | None, typer.Option(callback=_axes, help="Ask this axis only; may be repeated.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=4, help="Tokens to generate for each request.")] = 32,
    prompt_seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    block: Annotated[
        int | None, typer.Option(min=1, help="KV cache block, if the server does not tell.")
    ] = None,
    budget: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an engine step, if it does not tell.")
    ] = None,
    grid: Annotated[
        int | None, typer.Option(min=1, help="Where prefill may be cut, if not every 64.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds one answer may take.")] = 300.0,
    save: Annotated[Path | None, typer.Option(help="Keep the answers, to compare with later.")] = None,
    against: Annotated[Path | None, typer.Option(help="Compare with answers that --save kept.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write the report as JUnit XML.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as one web page.")] = None,
    key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", hidden=True)] = "none",
) -> None:
    """Check on a server that answers do not depend, in any bit, on what else it does.

    Asks the same requests alone, in a batch, in company, on cache hits, after aborts, and in another
    process.  Exits 0 if all are equal and every path was taken, 1 on differences, 2 if it could not
    run, 3 if some axis was not exercised.  The API key comes from OPENAI_API_KEY.
    """
    from rich.console import Console

    from vllm_invariant.audit import run
    from vllm_invariant.audit.geometry import Sizes
    from vllm_invariant.audit.server import Launch
    from vllm_invariant.audit.traffic import Address

    if (base_url is None) == (checkpoint is None):
        raise typer.BadParameter("give either a MODEL or --base-url")
    if checkpoint is not None and checkpoint.startswith("-"):
        raise typer.BadParameter(f"give MODEL before vLLM's options, such as {checkpoint}")
    if base_url is not None and context.args:
        raise typer.BadParameter(f"unknown with --base-url: {' '.join(context.args)}")
    wish = run.Wish(
        address=Address(run.root(base_url), model, key, timeout) if base_url else None,
        launch=Launch(checkpoint, tuple(context.args), run.flag()) if checkpoint else None,
        sizes=Sizes(block, budget, grid),
        axes=tuple(axis or ()),
        tokens=tokens,
        seed=prompt_seed,
        against=against,
        save=save,
        json=json,
        junit=junit,
        html=html,
        command=run.command(),
    )
    raise typer.Exit(run.audit(wish, Console()))
