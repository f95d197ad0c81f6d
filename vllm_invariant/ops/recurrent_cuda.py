# In a vLLM branch: vllm/_custom_ops.py.
"""The CUDA recurrence of ``csrc/recurrent.cu``: loading the library, checks, launch.

One token of one value head, with a state ``S`` of (V, K):

    S <- exp(g) S;   w = beta (v - S k);   S <- S + w k^T;   o = S q / sqrt(K)

where ``k`` and ``q`` are L2-normalised, ``g = -exp(A_log) softplus(a + dt_bias)``, ``beta = sigmoid(b)``.

The library has a plain C interface and is loaded with ctypes, so one binary serves every torch.  It is
not a torch operator: the only caller is a layer that ``torch.compile`` already sees as opaque.

Shape letters: N sequences, T tokens, W states kept a sequence, H key heads, G value heads (a multiple
of H), K = V = 128.
"""

import ctypes
from functools import lru_cache
from pathlib import Path

import torch

LIBRARY = Path(__file__).parent.parent / "_recurrent.so"
HEAD_DIM = 128
CAPABILITY = (9, 0)
ALIGNMENT = 16  # bytes; the kernel moves states and inputs 16 and 8 bytes at a time


class Arguments(ctypes.Structure):
    """``struct Arguments`` of ``csrc/recurrent.cuh``, field by field.  Strides are in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("mixed_qkv", "a", "b", "A_log", "dt_bias", "state", "out")),
        *((name, ctypes.c_void_p) for name in ("slots", "initial_slots", "num_accepted")),
        *((name, ctypes.c_void_p) for name in ("cu_seqlens", "has_initial_state")),
        *((name, ctypes.c_int64) for name in ("qkv_stride", "a_stride", "b_stride", "state_stride")),
        *((name, ctypes.c_int64) for name in ("out_stride", "slots_stride")),
        *((name, ctypes.c_int32) for name in ("sequences", "key_heads", "value_heads", "states_kept")),
        *((name, ctypes.c_int32) for name in ("longest", "A_log_is_fp32", "dt_bias_is_fp32", "ab_is_fp32")),
    )


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The compiled kernels.

    Raises:
        RuntimeError: if the library was not built, with how to build it.

    """
    if not LIBRARY.exists():
        raise RuntimeError(
            f"vllm_invariant/{LIBRARY.name} was not built: install this package with CUDA's nvcc 12.4 or newer "
            "on PATH or in CUDA_HOME, and without VLLM_INVARIANT_BUILD=0"
        )
    loaded = ctypes.CDLL(str(LIBRARY))
    loaded.recurrent_launch.argtypes = [ctypes.POINTER(Arguments), ctypes.c_int, ctypes.c_void_p]
    loaded.recurrent_launch.restype = ctypes.c_char_p
    return loaded


def is_available() -> bool:
    """The library is built and the current GPU is one it has machine code for."""
    return LIBRARY.exists() and torch.cuda.is_available() and torch.cuda.get_device_capability() == CAPABILITY


def recurrent_step(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor,
    *,
    slots: torch.Tensor,
    max_query_len: int,
    cu_seqlens: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    initial_slots: torch.Tensor | None = None,
    num_accepted: torch.Tensor | None = None,
) -> None:
    """The recurrence over N sequences, in place on ``state`` and ``out``.  One kernel launch, no allocation.

    A token's bits in ``out`` and ``state`` depend on its inputs and on the state before it, and on nothing
    else: not on N, not on where its sequence was cut, not on ``max_query_len``, not on which states are kept.

    Args:
        mixed_qkv: (T, 2 H K + G V) bfloat16, after the convolution: q heads, k heads, v heads.  Rows may be
            strided by a multiple of 8.
        a, b: (T, G) bfloat16 or float32, rows may be strided.
        A_log, dt_bias: (G,) float32 or bfloat16.
        state: (slots, G, V, K) float32; slots may be strided by a multiple of 4.
        out: (T, G, V) bfloat16, written; rows may be strided.
        slots: int32.  (N,): the slot a sequence's state is read from and its last state written to.
            (N, W), W >= 1: token ``j`` of a sequence writes its state to ``slots[n, j]`` (verification).
            A sequence whose slot is not positive (vLLM's null block) is padding: its rows of ``out`` become
            zeros and no state is touched.
        max_query_len: at least the longest sequence's tokens.  It picks a launch shape, never the bits.
        cu_seqlens: (N + 1,) int32, first row of each sequence; by default one row a sequence.
        has_initial_state: (N,) bool; a sequence without one starts from zeros.  All have one by default.
        initial_slots: (N,) int32, where to read states from if not from where they are written.
        num_accepted: (N,) int32, only with (N, W) slots: sequence ``n`` reads its state from
            ``slots[n, num_accepted[n] - 1]``.

    Raises:
        ValueError: for a shape, dtype, stride or device the kernel does not take.
        RuntimeError: if the library was not built, or the launch failed.

    """
    arguments = _arguments(
        mixed_qkv, a, b, A_log, dt_bias, state, out, slots, cu_seqlens, has_initial_state, initial_slots,
        num_accepted, max_query_len,
    )  # fmt: skip
    stream = torch.cuda.current_stream(state.device).cuda_stream
    error = library().recurrent_launch(ctypes.byref(arguments), state.device.index, stream)
    if error is not None:
        raise RuntimeError(f"the recurrent kernel did not start: {error.decode()}")
