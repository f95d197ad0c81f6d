"""Repeated audits: the servers differ in the flag alone, and every answer is counted."""

import pytest

from benchmarks.audit_runs import SET, UNSET, modes, summary


@pytest.mark.parametrize("dev", [True, False])
def test_the_servers_differ_in_the_flag_alone(dev):
    flagged, unset = modes(eager=True, dev=dev)
    assert (flagged.name, unset.name) == (SET, UNSET)
    assert flagged.options == unset.options
    assert flagged.environment == unset.environment | {"VLLM_BATCH_INVARIANT": "1"}
    assert flagged.environment["VLLM_SERVER_DEV_MODE"] == str(int(dev))


def test_rows_are_summed_over_audits():
    def row(axis, void=None):
        return {
            "axis": axis,
            "void": void,
            "cases": [{"cached": 64}, {"cached": None}],
            "tokens": 1,
            "logprobs": 700,
        }

    found = [{"rows": [row("batch"), row("cut")]}, {"rows": [row("batch", "why")]}]
    assert summary(found) == [
        ["batch", "2", "1", "4", "128", "2", "1,400"],
        ["cut", "1", "1", "2", "64", "1", "700"],
    ]
