"""Stock's refusal is found among everything else an engine prints."""

from vllm_invariant.demo.refusal import find_refusal

REFUSAL = "RuntimeError: VLLM batch_invariant mode is not supported for GDN_ATTN."


def test_the_refusal_loses_the_loggers_prefix():
    output = f"INFO start\n(Worker pid=1) ERROR [executor.py:9] {REFUSAL}\n[rank0]: cleanup\n"
    assert find_refusal(output) == REFUSAL


def test_the_last_one_is_taken():
    assert find_refusal(f"{REFUSAL}\n[rank0]: {REFUSAL} Again\n") == f"{REFUSAL} Again"


def test_another_error_is_no_refusal():
    assert find_refusal("RuntimeError: Engine core initialization failed.\n") is None
