# In a vLLM branch: not needed.
"""The ``vllm-invariant`` command.  Imports neither torch nor vLLM: each command loads what it needs."""

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


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
