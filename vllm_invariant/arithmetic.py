# In a vLLM branch: vllm/model_executor/layers/mamba/gdn/arithmetic.py.
"""What the scheduler and the cache need to know of a GDN layer's arithmetic.

An *arithmetic* is the order in which a GDN layer rounds.  Two engines with the same arithmetic
give the same bits; the scheduler and the prefix cache read only the fields below, so a new
arithmetic is a new row here and kernels behind the layer.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Arithmetic:
    """One order of rounding.

    Attributes:
        name: the value of ``additional_config["vllm_invariant"]["gdn_arithmetic"]``.
        grid: tokens between the positions at which the state is independent of earlier cuts.
        decode_equals_prefill: whether a token has the same bits computed by decode as by prefill.
            If not, decode-filled blocks are never published to the prefix cache, and a preempted
            request gets its generated tokens back by decode, one known token a step.

    """

    name: str
    grid: int
    decode_equals_prefill: bool


# Prefill by FLA's 64-token chunk kernels, decode by the packed recurrence.
CHUNK = Arithmetic(name="chunk", grid=64, decode_equals_prefill=False)

# Prefill, decode and verification by one recurrence, token by token.
RECURRENT = Arithmetic(name="recurrent", grid=1, decode_equals_prefill=True)

ARITHMETICS = {a.name: a for a in (CHUNK, RECURRENT)}
