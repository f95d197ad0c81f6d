"""What a server tells about itself is found, and what it does not tell is left open."""

import asyncio

import pytest

from tests.audit.fake import Behaviour, serving
from vllm_invariant.audit.counters import parse
from vllm_invariant.audit.geometry import Geometry, Sizes
from vllm_invariant.audit.survey import survey
from vllm_invariant.audit.traffic import Address


def look(behaviour: Behaviour, sizes: Sizes | None = None):
    with serving(behaviour) as (url, _):
        return asyncio.run(survey(Address(url), sizes or Sizes()))


def test_a_vllm_server_tells_everything():
    seen = look(Behaviour())
    assert seen.geometry == Geometry(max_len=2048, grid=64, block=64, unit=64, budget=128)
    assert (seen.address.model, seen.address.top) == ("fake", 20)
    assert (seen.facts.version, seen.facts.flag, seen.facts.device) == ("0.0", True, "none")
    assert seen.facts.started == 1000.0 and seen.facts.mode["async scheduling"] == "False"
    assert len(seen.text) == 30_000


def test_another_server_tells_little():
    seen = look(Behaviour(dev=False, metrics=False, tokenizes=False))
    assert seen.geometry == Geometry(max_len=2048) and seen.text == []
    assert (seen.facts.flag, seen.facts.mode, seen.facts.started) == (None, None, None)


def test_sizes_given_by_hand_come_first():
    seen = look(Behaviour(), Sizes(block=32, budget=256, grid=16))
    assert (seen.geometry.block, seen.geometry.budget, seen.geometry.grid) == (32, 256, 16)


def test_hits_land_on_blocks_unless_something_finer_is_set():
    assert look(Behaviour(unit=None)).geometry.unit == 64


METRICS = """
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.5e+09
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="320",prefix_match_unit="None"} 1.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0"} 64.0
vllm:prefix_cache_hits_total{engine="1"} 128.0
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="32.0"} 4.0
vllm:iteration_tokens_total_bucket{engine="0",le="64.0"} 5.0
vllm:iteration_tokens_total_bucket{engine="0",le="128.0"} 7.0
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf"} 8.0
vllm:iteration_tokens_total_bucket{engine="1",le="64.0"} 5.0
vllm:iteration_tokens_total_bucket{engine="1",le="+Inf"} 6.0
"""


def test_counters_are_summed_over_engines():
    found = parse(METRICS)
    assert (found.hits, found.wide, found.started) == (192.0, 4.0, 1.5e9)
    assert found.cache["block_size"] == "320"


def test_a_page_without_them_counts_nothing():
    assert parse("").wide == 0.0
    with pytest.raises(ValueError):
        parse("no metrics {")
