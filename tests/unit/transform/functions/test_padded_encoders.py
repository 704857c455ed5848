"""Encoders in inference, where eager computes on nested tensors: what is padded is zero in the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functionalize import capture, functionalize

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
F, T = False, True
ALIGNED, OTHER = torch.tensor([[F, F, T], [F, T, T]]), torch.tensor([[T, F, F], [F, T, F]])
EMPTY = torch.tensor([[F, F, F], [T, T, T]])


def _encoder(**options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return nn.TransformerEncoder(layer, 2, **options).eval()


ENCODERS: dict[str, Callable[[], nn.TransformerEncoder]] = {
    "plain": _encoder,
    "norm": lambda: _encoder(norm=nn.LayerNorm(4)),
    "unchecked": lambda: _encoder(mask_check=False),
    "padded": lambda: _encoder(enable_nested_tensor=False),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("mask", [ALIGNED, EMPTY], ids=["aligned", "empty"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("how", ["captured", "functionalized"])
def test_what_is_padded_is_as_in_eager(how: str, name: str, grad: bool, mask: Tensor) -> None:
    encoder, x = ENCODERS[name](), torch.randn(2, 3, 4)
    if name == "padded" and not grad:
        mask = ALIGNED  # where nothing is left of a sequence torch's fused kernel gives NaN, and others zeros

    def program(x: Tensor, mask: Tensor) -> Any:
        return encoder(x, src_key_padding_mask=mask)

    with torch.set_grad_enabled(grad):
        expected = program(x, mask)
        call = capture(program, (x, mask)) if how == "captured" else functionalize(program)
        torch.testing.assert_close(call(x, mask), expected, equal_nan=True)
    assert not any(module._forward_hooks for module in encoder.modules())


def test_whether_the_padding_comes_last_is_asked_of_each_call() -> None:
    encoder, x = _encoder(), torch.randn(2, 3, 4)
    with torch.no_grad():
        program = capture(lambda x, mask: encoder(x, src_key_padding_mask=mask), (x, ALIGNED))
        for mask in (OTHER, ALIGNED, EMPTY):
            torch.testing.assert_close(program(x, mask), encoder(x, src_key_padding_mask=mask))
    assert [[decision.answer for decision in variant.decisions] for variant in program.variants] == [[True], [False]]


def test_a_shared_layer_gives_zeros_at_its_last_turn() -> None:
    encoder, x = _encoder(), torch.randn(2, 3, 4)
    encoder.layers = nn.ModuleList([encoder.layers[0]] * 3)
    with torch.no_grad():
        program = capture(encoder, (x,), {"src_key_padding_mask": ALIGNED})
        torch.testing.assert_close(program(x, src_key_padding_mask=ALIGNED), encoder(x, src_key_padding_mask=ALIGNED))


def test_decoders_see_the_zeros() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(4, 2, 1, 1, 8, batch_first=True).eval()
    source, target = torch.randn(2, 3, 4), torch.randn(2, 2, 4)
    with torch.no_grad():
        program = capture(model, (source, target), {"src_key_padding_mask": ALIGNED})
        found = program(source, target, src_key_padding_mask=ALIGNED)
        torch.testing.assert_close(found, model(source, target, src_key_padding_mask=ALIGNED))


def test_nothing_of_torchs_is_replaced_afterwards() -> None:
    asked = torch.overrides.has_torch_function
    with pytest.raises(RuntimeError, match="of the program"):
        functionalize(_raises)(torch.zeros(2))
    assert torch.overrides.has_torch_function is asked


def _raises(x: Tensor) -> Tensor:
    assert torch.overrides.has_torch_function((x,))
    raise RuntimeError("of the program")
