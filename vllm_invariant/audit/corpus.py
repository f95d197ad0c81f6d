# In a vLLM branch: tests/v1/determinism/utils.py.
"""English text that ships with Python: its licence, and the docstrings of its library."""

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

MODULES = (
    "argparse",
    "asyncio.events",
    "asyncio.streams",
    "collections",
    "concurrent.futures.thread",
    "configparser",
    "csv",
    "datetime",
    "decimal",
    "difflib",
    "doctest",
    "email.message",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "http.client",
    "http.server",
    "inspect",
    "io",
    "ipaddress",
    "json",
    "logging",
    "multiprocessing.pool",
    "optparse",
    "pathlib",
    "pickle",
    "random",
    "shutil",
    "socket",
    "socketserver",
    "ssl",
    "statistics",
    "string",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "unittest.case",
    "unittest.mock",
    "urllib.request",
    "xml.dom.minidom",
    "zipfile",
)


def licence() -> str:
    """Python's licence, or an empty string where the distribution left it out."""
    folders = (Path(inspect.__file__).parent, Path(sys.base_prefix))
    for path in (folder / name for folder in folders for name in ("LICENSE.txt", "LICENSE")):
        if path.is_file():
            return path.read_text(errors="replace")
    return ""


def _documented(owner: ModuleType | type) -> Iterator[tuple[str, object]]:
    """Public members that ``owner`` itself defines, and then those of its classes, by name."""
    for name, member in sorted(vars(owner).items()):
        if name.startswith("_") or not (inspect.isclass(member) or inspect.isroutine(member)):
            continue
        if getattr(member, "__module__", None) not in (getattr(owner, "__module__", None), owner.__name__):
            continue
        yield f"{owner.__name__}.{name}", member
        if inspect.isclass(member):
            yield from _documented(member)


def docstrings(module: str) -> str:
    """The docstrings of a module, of its classes and of its functions, each under its name."""
    found = importlib.import_module(module)
    parts = [(module, found), *_documented(found)]
    return "\n\n".join(f"{name}\n{doc}" for name, member in parts if (doc := inspect.getdoc(member)))


def corpus() -> list[str]:
    """The licence first, then one text a module, longest first.

    The same Python gives the same texts: nothing in them depends on the machine.
    """
    texts = sorted((docstrings(module) for module in MODULES), key=len, reverse=True)
    return [text for text in (licence(), *texts) if text.strip()]
