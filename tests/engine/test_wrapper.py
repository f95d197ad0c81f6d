"""Text requests to the wrapper that released checkpoints use: a vision tower beside the language model."""

from collections.abc import Iterator

import pytest

from tests.harness.compare import assert_same
from tests.harness.engine import Engines, asks
from tests.harness.prompts import prompt
from vllm_invariant.demo.checkpoint import Shape, make_checkpoint

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=["dense", "moe"])
def wrappers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines on a wrapper's checkpoint."""
    shape = Shape(vision=True, family=request.param)
    made = Engines(make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "wrapper", shape))
    yield made
    made.close()


def test_images_are_refused(wrappers: Engines) -> None:
    """Only text was shown."""
    with pytest.raises(ValueError, match=r"image and video input .* use --language-model-only"):
        wrappers.config()


def test_text_in_a_batch_and_on_hits(wrappers: Engines) -> None:
    """Alone and cold, then in a batch, then on hits."""
    engine = wrappers.get(language_model_only=True)
    requests = asks([prompt(n, seed=n) for n in (3, 65, engine.block - 1, engine.block + 37, 700)])
    alone = engine.alone(requests)
    engine.reset()
    batch = engine.run(requests)
    assert_same(alone, batch.results, "in a batch")
    hits = [result for request in requests for result in engine.run([request]).results]
    assert [r.cached for r in hits][1:] == [64, 256, engine.block, 640]
    assert_same(alone, hits, "on hits")
