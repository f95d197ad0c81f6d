# In a vLLM branch: not needed (vLLM reads its own command line).
"""vLLM's engine options, for commands that pass them through."""

from collections.abc import Mapping, Sequence
from typing import Any


def engine_args(
    model: str,
    arguments: Sequence[str],
    defaults: Mapping[str, Any] | None = None,
    fixed: Mapping[str, Any] | None = None,
) -> Any:
    """vLLM's own engine arguments from its own command line.

    Args:
        model: checkpoint.
        arguments: ``--option value`` words, as for ``vllm serve``.
        defaults: fields to set where the words do not.
        fixed: fields to set whatever the words say.

    Returns:
        vLLM's ``EngineArgs``.

    Raises:
        ValueError: on words vLLM does not know.

    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> Any:
            raise ValueError(f"engine options: {message}")

    parser = EngineArgs.add_cli_args(Parser(add_help=False))
    parser.set_defaults(**(defaults or {}))
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *arguments]))
    for name, value in (fixed or {}).items():
        setattr(args, name, value)
    return args


def reason(error: BaseException) -> str:
    """An error's message, without the decoration of a config class that raised it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    words = next((line for line in lines if line.startswith("Value error, ")), lines[0])
    return words.removeprefix("Value error, ").split(" [type=")[0]
