"""The reference against programs nobody here wrote, and its own promise in bits."""

import pytest
import torch
import torch.nn.functional as F

from tests.ops.inputs import Shape, delta_rule, tokens_of
from tests.oracles import plain_transformers
from tests.tolerance import assert_bitwise, assert_close, differing
from vllm_invariant.ops import reference

FORMS = {
    "chunk": reference.chunk_gated_delta_rule,
    "recurrent": reference.recurrent_gated_delta_rule,
}
SHAPES = [
    Shape(1, 1, 1, 1, 32, 16),
    Shape(2, 63, 2, 2, 64, 64),
    Shape(2, 64, 1, 3, 32, 64),
    Shape(1, 65, 2, 4, 128, 128),
    Shape(1, 200, 1, 2, 64, 32),
]
each_form = pytest.mark.parametrize("form", FORMS)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are so small that a second thread only costs time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def repeated(inputs: list[torch.Tensor], shape: Shape) -> list[torch.Tensor]:
    """Key heads repeated, for programs that want as many of them as value heads."""
    q, k, *rest = inputs
    repeats = shape.value_heads // shape.key_heads
    return [q.repeat_interleave(repeats, 2), k.repeat_interleave(repeats, 2), *rest]


@each_shape
@pytest.mark.parametrize("with_state", [False, True])
def test_both_forms_are_the_same_mathematics(shape, with_state):
    inputs, state = delta_rule(shape)
    kwargs = {"initial_state": state if with_state else None, "normalise_qk": True, "dtype": torch.float64}
    chunk, chunk_state = reference.chunk_gated_delta_rule(*inputs, **kwargs)
    recurrent, recurrent_state = reference.recurrent_gated_delta_rule(*inputs, **kwargs)
    assert_close(chunk, recurrent)
    assert_close(chunk_state, recurrent_state)


@each_form
@each_shape
@pytest.mark.parametrize("with_state", [False, True])
def test_agrees_with_fla(form, shape, with_state):
    from fla.ops.gated_delta_rule import naive

    theirs = {
        "chunk": naive.naive_chunk_gated_delta_rule,
        "recurrent": naive.naive_recurrent_gated_delta_rule,
    }
    inputs, state = delta_rule(shape)
    inputs = [F.normalize(inputs[0], dim=-1), F.normalize(inputs[1], dim=-1), *inputs[2:]]
    initial = state if with_state else None
    out, final = FORMS[form](*inputs, initial_state=initial, scale=0.25)
    q, k, v, g, beta = repeated(inputs, shape)
    expected, expected_final = theirs[form](
        q=q, k=k, v=v, g=g, beta=beta, scale=0.25, initial_state=initial, output_final_state=True
    )
    assert_close(out, expected)
    assert_close(final, expected_final)


@each_form
@each_shape
@pytest.mark.parametrize("with_state", [False, True])
def test_agrees_with_transformers(form, shape, with_state):
    inputs, state = delta_rule(shape)
    initial = state if with_state else None
    out, final = FORMS[form](*inputs, initial_state=initial, normalise_qk=True)
    with plain_transformers() as qwen:
        theirs = {
            "chunk": qwen.torch_chunk_gated_delta_rule,
            "recurrent": qwen.torch_recurrent_gated_delta_rule,
        }
        expected, expected_final = theirs[form](
            *repeated(inputs, shape),
            initial_state=initial,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
    assert_close(out, expected)
    assert_close(final, expected_final)


def layer_by_reference(layer, hidden: torch.Tensor, form: str) -> torch.Tensor:
    """A transformers GDN layer's weights run through the reference.  hidden: (B, T, hidden_size)."""
    batch, tokens, _ = hidden.shape
    mixed, _ = reference.causal_conv1d(layer.in_proj_qkv(hidden), layer.conv1d.weight.squeeze(1))
    q, k, v = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    g, beta = reference.gating(layer.in_proj_a(hidden), layer.in_proj_b(hidden), layer.A_log, layer.dt_bias)
    core, _ = FORMS[form](
        q.view(batch, tokens, -1, layer.head_k_dim),
        k.view(batch, tokens, -1, layer.head_k_dim),
        v.view(batch, tokens, -1, layer.head_v_dim),
        g,
        beta,
        normalise_qk=True,
    )
    z = layer.in_proj_z(hidden).view_as(core)
    normed = reference.gated_rms_norm(core, z, layer.norm.weight, layer.norm.variance_epsilon)
    return layer.out_proj(normed.reshape(batch, tokens, -1))


@each_form
@pytest.mark.parametrize("tokens", [1, 65, 200])
@torch.no_grad()
def test_whole_layer_agrees_with_transformers(form, tokens):
    from transformers import Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        hidden_size=64,
        num_hidden_layers=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
    )
    torch.manual_seed(0)
    with plain_transformers() as qwen:
        layer = qwen.Qwen3_5GatedDeltaNet(config, layer_idx=0).float()
        layer.norm.weight.normal_(1.0, 0.2)
        layer.dt_bias.normal_()
        hidden = torch.randn(2, tokens, config.hidden_size)
        expected = layer(hidden)
    assert_close(layer_by_reference(layer, hidden, form), expected)


@pytest.mark.parametrize("tokens", [1, 2, 5, 70])
def test_conv_agrees_with_torch(tokens):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, tokens, 12, generator=generator)
    before = torch.randn(2, 3, 12, generator=generator)
    weight, bias = torch.randn(12, 4, generator=generator), torch.randn(12, generator=generator)
    out, state = reference.causal_conv1d(x, weight, bias, before)
    seen = torch.cat([before, x], dim=1)
    expected = F.silu(F.conv1d(seen.transpose(1, 2), weight.unsqueeze(1), bias, groups=12)).transpose(1, 2)
    assert_close(out, expected)
    assert_bitwise(state, seen[:, -3:], "conv state")


def test_gating_has_the_right_limits():
    a = torch.tensor([-60.0, 0.0, 60.0], dtype=torch.float64)
    g, beta = reference.gating(a, a, torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    assert_close(g, torch.tensor([0.0, -0.6931471805599453, -60.0], dtype=torch.float64), torch.float64)
    assert_close(beta, torch.tensor([0.0, 0.5, 1.0]), torch.float64)


@each_form
@pytest.mark.parametrize("cut", [1, 63, 64, 65, 100, 128, 192])
def test_cut(form, cut):
    """The recurrence may be cut anywhere, the chunk form on its grid and nowhere else."""
    inputs, state = delta_rule(Shape(1, 200, 1, 2, 64, 64))
    run = FORMS[form]
    whole, whole_state = run(*inputs, initial_state=state, normalise_qk=True)
    head, between = run(*tokens_of(inputs, 0, cut), initial_state=state, normalise_qk=True)
    tail, last = run(*tokens_of(inputs, cut), initial_state=between, normalise_qk=True)
    assert_bitwise(head, whole[:, :cut], "rows before the cut")
    if form == "recurrent" or cut % reference.CHUNK == 0:
        assert_bitwise(tail, whole[:, cut:], "rows after the cut")
        assert_bitwise(last, whole_state, "state")
    else:
        assert differing(tail, whole[:, cut:]) and differing(last, whole_state)


@each_form
def test_an_early_token_still_counts_at_the_end(form):
    """Otherwise the tests above could not see a wrong state."""
    inputs, _ = delta_rule(Shape(1, 200, 1, 2, 64, 64))
    other = [x.clone() for x in inputs]
    other[1][:, 3] += 1.0
    before, _ = FORMS[form](*inputs, normalise_qk=True)
    after, _ = FORMS[form](*other, normalise_qk=True)
    assert_bitwise(after[:, :3], before[:, :3], "tokens before the change")
    assert (after[:, -1] - before[:, -1]).abs().max() > 1e-3


def test_refuses_what_does_not_fit():
    inputs, state = delta_rule(Shape(1, 4, 2, 4, 8, 8))
    q, k, v, g, beta = inputs
    run = reference.chunk_gated_delta_rule
    with pytest.raises(ValueError, match="float32 or float64"):
        run(*inputs, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="do not fit"):
        run(q, k, v[:, :, :3], g[:, :, :3], beta[:, :, :3])
    with pytest.raises(ValueError, match=r"must be \(B, T, value heads\)"):
        run(q, k, v, g[:, :, :2], beta)
    with pytest.raises(ValueError, match="initial_state"):
        run(*inputs, initial_state=state[:, :2])
