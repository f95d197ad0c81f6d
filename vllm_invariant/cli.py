# In a vLLM branch: not needed.
"""The ``vllm-invariant`` command.  Imports neither torch nor vLLM: each command loads what it needs."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

ENGINE_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
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


@app.command(context_settings=ENGINE_OPTIONS)
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


def _model_first(model: str | None) -> str | None:
    """An unknown option counts as an argument, so it would be taken for the model."""
    if model is not None and model.startswith("-"):
        raise typer.BadParameter(f"the model comes first, before {model}")
    return model


@app.command(context_settings=ENGINE_OPTIONS)
def trace(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(callback=_model_first, help="Checkpoint.  Other options go to the engine.")
    ],
    prompt_ids: Annotated[str, typer.Option(help="Token ids: 1,2,3 or @file.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 8,
    company: Annotated[
        list[str] | None,
        typer.Option("--with", help="Requests in the same steps: ids, or @file, one JSON request a line."),
    ] = None,
    after: Annotated[
        list[str] | None, typer.Option(help="Requests that run before it; written like --with.")
    ] = None,
    hit: Annotated[bool, typer.Option("--hit", help="On a prefix-cache hit of its own prompt.")] = False,
    cut: Annotated[int | None, typer.Option(min=1, help="Token budget of a step.")] = None,
    alone: Annotated[bool, typer.Option("--alone", help="Alone again, in another process.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result here.")] = None,
) -> None:
    """Run one request two ways and name the first layer, operation, token and tensor that differ.

    Run A is the request alone, from an empty cache; run B is what the options say.  Exits 0 if every bit
    is the same, 1 if not, 2 if it could not be found out.
    """
    from rich.console import Console

    from vllm_invariant.trace import plan
    from vllm_invariant.trace.run import run

    try:
        ask = plan.Ask(plan.read_ids(prompt_ids), max_tokens)
        way = plan.second_way(
            ask,
            alone=alone,
            hit=hit,
            cut=cut,
            company=plan.read_asks(company or (), max_tokens),
            after=plan.read_asks(after or (), max_tokens),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(run(model, context.args, ask, way, Console(), json_file))


@app.command(context_settings=ENGINE_OPTIONS)
def doctor(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(callback=_model_first, help="Checkpoint.  Other options go to the engine.")
    ] = None,
) -> None:
    """Say what this machine and this model would come to, without starting an engine.

    Exits 0 if ready, 1 if something is refused, 2 if it could not be found out.
    """
    from rich.console import Console

    from vllm_invariant.doctor import run

    raise typer.Exit(run(model, context.args, Console()))
