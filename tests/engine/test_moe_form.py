"""Axis form for mixtures of experts: the tests of `test_form`, for each model class."""

from collections.abc import Iterator

import pytest

from tests.engine.test_form import (
    RECURRENT,
    test_cuts_hits_and_company,  # noqa: F401  collected here, too, with this module's fixtures
    test_preemption_needs_no_replay,  # noqa: F401
    test_scored_in_any_cuts,  # noqa: F401
    test_scored_in_one_step,  # noqa: F401
)
from tests.gpu import CPU
from tests.harness import moe
from tests.harness.engine import Engines

pytestmark = [pytest.mark.engine, *CPU]  # refused on a GPU, where nobody has run it


@pytest.fixture(scope="module", params=list(moe.FAMILIES))
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines of one model class."""
    builder = Engines(moe.make(tmp_path_factory.mktemp("moe"), request.param))
    yield builder
    builder.close()


@pytest.fixture(scope="module")
def options() -> dict[str, object]:
    return RECURRENT
