"""One activation with more than 2^31 elements, against the same sequence in small chunks.

Only the last tokens have labels, so all of loss and gradients hang on the rows past the limit: an
index that wraps around cannot hide behind the many rows before it. The CPU runs the same body with
few tokens.
"""

import pytest
import torch

from sppo_hf import SPPOConfig
from sppo_hf.engine.convert import convert, get_engine, revert
from sppo_hf.testing.tiny_models import build_tiny_model

LABELLED = 256
LIMIT = 2**31


def _step(model, batch, **settings):
    model.zero_grad()
    convert(model, SPPOConfig(show_plan=False, **settings))
    loss = model(**batch).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    counters = dict(get_engine(model).counters)
    revert(model)
    return loss.detach(), gradients, counters


def check(device, dtype, *, tokens, width, recompute, tolerance):
    """One chunk of all tokens against 16 chunks."""
    torch.manual_seed(0)
    model = build_tiny_model(
        "llama",
        dtype=dtype,
        intermediate_size=width,
        num_hidden_layers=1,
        max_position_embeddings=tokens,
    )
    model.to(device).train()
    ids = torch.randint(0, 97, (1, tokens), device=device)
    labels = ids.clone()
    labels[:, :-LABELLED] = -100
    batch = {"input_ids": ids, "labels": labels}
    fixed = {"recompute": recompute, "offload": "none", "loss_tile_tokens": 1024}
    seen = []
    handle = model.model.layers[0].mlp.down_proj.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].numel())
    )
    expected_loss, expected, counters = _step(model, batch, num_chunks=16, **fixed)
    assert counters["attention_forwards"] == 16
    pieces = seen.copy()
    seen.clear()
    loss, gradients, counters = _step(model, batch, num_chunks=1, **fixed)
    handle.remove()
    assert counters["attention_forwards"] == 1
    torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=0)
    for name, gradient in gradients.items():
        error = (gradient.double() - expected[name].double()).norm()
        assert error <= tolerance * expected[name].double().norm(), name
        assert expected[name].norm() > 0
    return max(seen), max(pieces)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_past_the_limit_on_cuda(recompute):
    # Gate, up, their product and the activation, 4.1 GiB each in 16 bits, and their gradients.
    needed_bytes = 50 * 2**30
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < needed_bytes:
        pytest.skip("needs 50 GiB of free device memory")
    width = 16384
    tokens = LIMIT // width + 2 * LABELLED
    # Attention over so many keys is a mean, whose 16-bit gradients are small differences; what is
    # looked for is of the order of the gradients themselves.
    one, pieces = check(
        "cuda", torch.bfloat16, tokens=tokens, width=width, recompute=recompute, tolerance=0.1
    )
    # Every labelled row lies past the limit.
    assert one - LABELLED * width > LIMIT > pieces
    torch.cuda.empty_cache()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_same_with_few_tokens_on_the_cpu(recompute):
    one, pieces = check(
        "cpu", torch.float32, tokens=1600, width=96, recompute=recompute, tolerance=1e-4
    )
    assert one == 1600 * 96
    assert pieces < one / 4
