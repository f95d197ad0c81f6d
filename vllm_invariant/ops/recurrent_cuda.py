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
        RuntimeError: if the library was not built, with how to build it, or is of another release.

    """
    if not LIBRARY.exists():
        raise RuntimeError(
            f"vllm_invariant/{LIBRARY.name} was not built: install vllm-invariant with CUDA's nvcc on PATH "
            "or in CUDA_HOME, without build isolation and without VLLM_INVARIANT_BUILD=0"
        )
    return load(LIBRARY)


def load(path: Path) -> ctypes.CDLL:
    """A library with the C interface of ``csrc/recurrent.cu``.

    Raises:
        RuntimeError: if it passes its arguments in another layout.

    """
    loaded = ctypes.CDLL(str(path))
    if loaded.recurrent_arguments_size() != ctypes.sizeof(Arguments):
        raise RuntimeError(f"{path.name} is of another release: install vllm-invariant again")
    loaded.recurrent_shape.argtypes = [ctypes.c_int]
    loaded.recurrent_shape.restype = ctypes.c_char_p
    loaded.recurrent_launch.argtypes = [ctypes.POINTER(Arguments), *[ctypes.c_int] * 2, ctypes.c_void_p]
    loaded.recurrent_launch.restype = ctypes.c_char_p
    return loaded


def is_available() -> bool:
    """The library is built and the current GPU is one it has machine code for."""
    return LIBRARY.exists() and torch.cuda.is_available() and torch.cuda.get_device_capability() == CAPABILITY


def shapes() -> list[str]:
    """Names of the launch shapes in the library."""
    found: list[str] = []
    while (name := library().recurrent_shape(len(found))) is not None:
        found.append(name.decode())
    return found


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
    shape: int = -1,
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

        shape: index of a launch shape (`shapes`), for tests and benchmarks; negative lets the library choose.
            It moves no bit.

    Raises:
        ValueError: for a shape, dtype, stride or device the kernel does not take.
        RuntimeError: if the library was not built, or the launch failed.

    """
    arguments = _tokens_and_states(mixed_qkv, a, b, A_log, dt_bias, state, out)
    sequences = _sequences(
        arguments, state.device, slots, cu_seqlens, has_initial_state, initial_slots, num_accepted
    )
    if cu_seqlens is None and sequences != len(mixed_qkv):
        raise ValueError(f"without cu_seqlens {len(mixed_qkv)} rows need as many slots, not {sequences}")
    if sequences == 0 or len(mixed_qkv) == 0:
        return
    arguments.longest = 1 if cu_seqlens is None else max_query_len
    error = library().recurrent_launch(ctypes.byref(arguments), shape, *_device_and_stream(state))
    if error is not None:
        raise RuntimeError(f"the recurrent kernel did not start: {error.decode()}")


def _device_and_stream(state: torch.Tensor) -> tuple[int, int]:
    """Where to launch: ordinal of the GPU, and the caller's stream on it."""
    return state.device.index, torch.cuda.current_stream(state.device).cuda_stream


def _tokens_and_states(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor,
) -> Arguments:
    """Check the tensors of tokens and states, and describe them."""
    (tokens, channels), heads, dim = mixed_qkv.shape, state.shape[1], HEAD_DIM
    key_heads = (channels // dim - heads) // 2
    if channels != (2 * key_heads + heads) * dim or key_heads < 1 or heads % key_heads:
        raise ValueError(f"{channels} channels and {heads} value heads do not fit heads of {dim}")
    floats = (torch.float32, torch.bfloat16)
    for name, x, shape, dtypes in (
        ("mixed_qkv", mixed_qkv, (tokens, channels), (torch.bfloat16,)),
        ("a", a, (tokens, heads), floats),
        ("b", b, (tokens, heads), (a.dtype,)),
        ("A_log", A_log, (heads,), floats),
        ("dt_bias", dt_bias, (heads,), floats),
        ("state", state, (len(state), heads, dim, dim), (torch.float32,)),
        ("out", out, (tokens, heads, dim), (torch.bfloat16,)),
    ):
        _check(name, x, shape, dtypes, state.device)
    for name, x in (("mixed_qkv", mixed_qkv), ("state", state), ("out", out)):
        if x.data_ptr() % ALIGNMENT or x.stride(0) * x.element_size() % ALIGNMENT:
            raise ValueError(f"rows of {name} must be aligned to {ALIGNMENT} bytes")
    return Arguments(
        mixed_qkv=mixed_qkv.data_ptr(),
        a=a.data_ptr(),
        b=b.data_ptr(),
        A_log=A_log.data_ptr(),
        dt_bias=dt_bias.data_ptr(),
        state=state.data_ptr(),
        out=out.data_ptr(),
        qkv_stride=mixed_qkv.stride(0),
        a_stride=a.stride(0),
        b_stride=b.stride(0),
        state_stride=state.stride(0),
        out_stride=out.stride(0),
        key_heads=key_heads,
        value_heads=heads,
        A_log_is_fp32=A_log.dtype == torch.float32,
        dt_bias_is_fp32=dt_bias.dtype == torch.float32,
        ab_is_fp32=a.dtype == torch.float32,
    )


def _sequences(
    arguments: Arguments,
    device: torch.device,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    has_initial_state: torch.Tensor | None,
    initial_slots: torch.Tensor | None,
    num_accepted: torch.Tensor | None,
) -> int:
    """Check the tensors of sequences, put them into ``arguments``, and return the number of sequences."""
    sequences = len(slots)
    kept = slots.shape[1] if slots.dim() == 2 else 0
    if (num_accepted is not None) != (kept > 0):
        raise ValueError("num_accepted and slots of (N, W) go together")
    for name, x, shape, dtype in (
        ("slots", slots, (sequences, kept) if kept else (sequences,), torch.int32),
        ("cu_seqlens", cu_seqlens, (sequences + 1,), torch.int32),
        ("has_initial_state", has_initial_state, (sequences,), torch.bool),
        ("initial_slots", initial_slots, (sequences,), torch.int32),
        ("num_accepted", num_accepted, (sequences,), torch.int32),
    ):
        if x is not None:
            _check(name, x, shape, (dtype,), device)
            setattr(arguments, name, x.data_ptr())
    arguments.slots_stride = slots.stride(0)
    arguments.sequences = sequences
    arguments.states_kept = kept
    return sequences


def _check(
    name: str, x: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Refuse a tensor of another shape, dtype or device, or with gaps inside a row."""
    if x.shape != shape or x.dtype not in dtypes or x.device != device:
        raise ValueError(
            f"{name} must be {shape} {dtypes[0]} on {device}, not {tuple(x.shape)} {x.dtype} on {x.device}"
        )
    dense = x if x.dim() == 1 else x[:1].squeeze(0)
    if x.numel() and not dense.is_contiguous():
        raise ValueError(f"{name} may be strided in its first axis only, not by {x.stride()}")
