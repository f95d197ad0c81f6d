"""What the chunk arithmetic relies on in stock's CPU convolution, and our acceptance of one token."""

import pytest
import torch

from tests.ops import cpu_kernels
from tests.tolerance import assert_bitwise, assert_close
from vllm_invariant.cpu_conv import accept_one_token
from vllm_invariant.ops import reference

TOKENS = 200

native = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="stock's C++ convolution needs AVX512-BF16"
)


def prefill(x, weight, pool, lengths, slots, continues, *, kernel=cpu_kernels.ops.causal_conv1d_fwd_cpu):
    """Convolve sequences laid end to end.  x: (tokens, channels); returns the same shape."""
    return kernel(
        x=x.transpose(0, 1),
        weight=cpu_kernels.ops.causal_conv1d_weight_pack(weight.clone()),
        bias=None,
        conv_states=pool,
        query_start_loc=cpu_kernels.int32(cpu_kernels.starts(lengths)),
        cache_indices=cpu_kernels.int32(slots),
        has_initial_state=torch.tensor(continues),
        silu_activation=True,
        is_weight_packed=True,
    ).transpose(0, 1)


def prefill_any(*args):
    return prefill(*args, kernel=accept_one_token(cpu_kernels.ops.causal_conv1d_fwd_cpu))


def prefill_in_torch(x, weight, pool, lengths, slots, continues):
    """Stock's fallback where there is no AVX512-BF16."""
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu

    return causal_conv1d_fn_cpu(
        x=x.transpose(0, 1),
        weight=weight,
        bias=None,
        conv_states=pool,
        query_start_loc=cpu_kernels.int32(cpu_kernels.starts(lengths)),
        cache_indices=cpu_kernels.int32(slots),
        has_initial_state=torch.tensor(continues),
        activation="silu",
    ).transpose(0, 1)


KERNELS = [
    pytest.param(prefill_any, marks=native, id="native"),
    pytest.param(prefill_in_torch, id="torch"),
]
each_kernel = pytest.mark.parametrize("run", KERNELS)


@each_kernel
def test_agrees_with_the_reference(run):
    x, weight = cpu_kernels.conv_inputs(TOKENS)
    pool = cpu_kernels.conv_pool(3)
    out = run(x, weight, pool, [TOKENS], [1], [False])
    expected, state = reference.causal_conv1d(x.float().unsqueeze(0), weight.float())
    assert_close(out, expected[0])
    assert_bitwise(pool[1], state[0].T.bfloat16(), "state")


@each_kernel
@pytest.mark.parametrize("cut", [1, 2, 3, 4, 64, 100, 197, 198, 199])
def test_may_be_cut_anywhere(run, cut):
    x, weight = cpu_kernels.conv_inputs(TOKENS)
    pool = cpu_kernels.conv_pool(3)
    whole = run(x, weight, pool, [TOKENS], [0], [False])
    head = run(x[:cut], weight, pool, [cut], [2], [False])
    tail = run(x[cut:], weight, pool, [TOKENS - cut], [2], [True])
    assert_bitwise(torch.cat([head, tail]), whole, "rows")
    assert_bitwise(pool[2], pool[0], "state")


@each_kernel
def test_takes_several_sequences_as_if_alone(run):
    x, weight = cpu_kernels.conv_inputs(TOKENS)
    lengths, slots = [63, 1, 100, 2, 34], [4, 0, 2, 1, 3]
    together, alone = cpu_kernels.conv_pool(5), cpu_kernels.conv_pool(5)
    out = run(x, weight, together, lengths, slots, [False] * 5)
    parts = [
        run(rows, weight, alone, [len(rows)], [slot], [False])
        for rows, slot in zip(x.split(lengths), slots, strict=True)
    ]
    assert_bitwise(out, torch.cat(parts), "rows")
    assert_bitwise(together, alone, "states")


def one_row_of_a_projection(x: torch.Tensor) -> torch.Tensor:
    """The last row of ``x`` as the layer has it: cut out of a wider projection, its stride kept."""
    row = torch.cat([x, x], dim=1)[-1:, : x.shape[1]].contiguous()
    assert row.stride(0) == 2 * x.shape[1]
    return row


@each_kernel
def test_takes_a_one_token_remainder(run):
    x, weight = cpu_kernels.conv_inputs(65)
    pool = cpu_kernels.conv_pool(4)
    whole = run(x, weight, pool, [65], [0], [False])
    run(x[:64], weight, pool, [64], [2], [False])
    others = pool[[1, 3]].clone()
    out = run(one_row_of_a_projection(x), weight, pool, [1], [2], [True])
    assert_bitwise(out, whole[64:], "row")
    assert_bitwise(pool[2], pool[0], "state")
    assert_bitwise(pool[[1, 3]], others, "slots of others")


@native
def test_stock_refuses_a_one_token_remainder():
    """The reason for `accept_one_token`: once this fails, the module can go."""
    x, weight = cpu_kernels.conv_inputs(65)
    with pytest.raises(RuntimeError, match="expect x to be transposed"):
        prefill(one_row_of_a_projection(x), weight, cpu_kernels.conv_pool(2), [1], [1], [False])


def decode(x, weight, pool, slots):
    """One token of each sequence.  x: (sequences, channels); returns the same shape."""
    return cpu_kernels.ops.causal_conv1d_update_cpu(
        x=x.clone(),
        conv_states=pool,
        weight=cpu_kernels.ops.causal_conv1d_weight_pack(weight.clone()),
        bias=None,
        silu_activation=True,
        conv_state_indices=cpu_kernels.int32(slots),
        is_weight_packed=True,
    )


def decode_in_torch(x, weight, pool, slots):
    """Stock's fallback where there is no AVX512-BF16."""
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_update_cpu

    return causal_conv1d_update_cpu(
        x=x.clone(),
        conv_state=pool,
        weight=weight,
        bias=None,
        activation="silu",
        conv_state_indices=cpu_kernels.int32(slots),
    )


@pytest.mark.parametrize(
    "run", [pytest.param(decode, marks=native, id="native"), pytest.param(decode_in_torch, id="torch")]
)
def test_decode_row_is_the_same_alone_and_in_company(run):
    x, weight = cpu_kernels.conv_inputs(9)
    together = cpu_kernels.conv_pool(10)
    together += torch.randn(10, 1, cpu_kernels.TAPS - 1).bfloat16()
    alone = together.clone(memory_format=torch.preserve_format)
    slots = [3, 1, 9, 2, 8, 4, 7, 5, 6]
    out = run(x, weight, together, slots)
    for row, slot in enumerate(slots):
        assert_bitwise(run(x[row : row + 1], weight, alone, [slot])[0], out[row], f"row {row}")
    assert_bitwise(alone, together, "states")
