"""Engines for the end-to-end determinism tests: one at a time, on each attention backend of the device."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gpu import CPU, GPU
from tests.harness import device
from tests.harness.engine import Engine, Engines
from tests.v1.determinism.settings import Settings

# vLLM reads some of these while it is imported, so a fixture would set them too late.
os.environ.update(device.ENVIRONMENT)

Build = Callable[..., Engine]

BACKENDS = [
    pytest.param("CPU_ATTN", marks=[pytest.mark.engine, *CPU]),
    pytest.param("FLASH_ATTN", marks=[pytest.mark.engine, *GPU]),
    pytest.param("TRITON_ATTN", marks=[pytest.mark.engine, *GPU]),
]


@pytest.fixture(scope="session")
def settings() -> Settings:
    """Sizes and options, from the environment."""
    return Settings.read()


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """An attention backend of this device."""
    return request.param


@pytest.fixture(scope="session")
def models(settings: Settings, checkpoint: Path) -> Iterator[Callable[[str | None], Engines]]:
    """The engine builder of a checkpoint, the random one for None."""
    builders: dict[str, Engines] = {}

    def get(model: str | None) -> Engines:
        name = model or str(checkpoint)
        return builders.setdefault(name, Engines(Path(name)))

    yield get
    for builder in builders.values():
        builder.close()


@pytest.fixture(scope="session")
def engine(models: Callable[[str | None], Engines], settings: Settings, backend: str) -> Build:
    """Builds, or finds, an engine of the suite's options and these further ones."""
    return lambda **options: models(settings.model).get(**settings.engine_options(backend), **options)


@pytest.fixture(scope="session")
def caching_engine(models: Callable[[str | None], Engines], settings: Settings, backend: str) -> Build:
    """The same for the prefix-cache tests."""
    options = settings.engine_options(backend) | {"enable_prefix_caching": True}
    return lambda **further: models(settings.prefix_cache_model).get(**options, **further)
