"""The ledger's rules on layers of two or three operations, worked out by hand."""

from typing import Any

from sppo_hf.planning.ledger import Ledger, Training
from sppo_hf.planning.lora import LoraShape

WIDTH = 16


def ledger(**changes: Any) -> Ledger:
    training: dict[str, Any] = {"dtype_bytes": 2, "parameter_bytes": 2, **changes}
    return Ledger(Training(**training), WIDTH)


def test_a_product_saves_its_input_once_for_all_that_share_it() -> None:
    book = ledger()
    book.product(book.input, 10)
    book.product(book.view(book.input, WIDTH), 6)
    work = book.close()
    assert work.whole_bytes == WIDTH * 2
    assert work.forward_flops == 2 * WIDTH * 16
    assert work.input_gradient_flops == work.weight_gradient_flops == work.forward_flops
    assert work.skeleton_recompute_flops == 0, "both save their input, and nobody their output"
    assert work.total_weights == WIDTH * 16


def test_factors_are_saved_where_the_other_needs_a_gradient() -> None:
    book = ledger(input_requires_grad=False)
    trained = book.new(5, book.input, grad=True)
    constant = book.new(3, book.input)
    book.multiply(trained, constant)
    assert book.close().whole_bytes == 3 * 2


def test_a_frozen_product_saves_nothing_and_an_adapter_a_copy_in_its_dtype() -> None:
    book = ledger(lora=LoraShape(rank=3))
    book.linear(book.input, 10)
    assert book.close().whole_bytes == 0
    book = ledger(lora=LoraShape(rank=3))
    book.linear(book.input, 10, "q_proj")
    work = book.close()
    assert work.whole_bytes == WIDTH * 4 + 3 * 4
    assert work.adapter_weights == 3 * (WIDTH + 10)
    assert work.weight_gradient_flops == 2 * work.adapter_weights


def test_products_are_kept_if_a_saved_value_depends_on_them() -> None:
    book = ledger()
    hidden = book.product(book.input, 10)
    unused = book.product(book.input, 7)
    book.product(book.new(10, hidden), 4)
    book.add(book.view(unused, 7), unused)
    work = book.close()
    assert work.products_bytes - work.skeleton_bytes == 10 * 2
    assert work.products_recompute_flops == 0


def test_what_serves_only_what_is_never_saved_does_not_run_again() -> None:
    book = ledger()
    needed = book.product(book.input, 10)
    unused = book.product(book.input, 7)
    book.product(book.new(7, unused), 5)  # saves its input, which needs the one before
    late = book.product(needed, 4)
    book.add(late, late)
    work = book.close()
    assert work.skeleton_recompute_flops == 2 * WIDTH * (10 + 7)


def test_thin_products_run_again_and_pass_their_dependence_on() -> None:
    book = ledger()
    thick = book.product(book.input, 2)
    thin = book.product(thick, 10)
    book.save(book.new(10, thin))
    work = book.close()
    assert work.products_bytes - work.skeleton_bytes == 2 * 2
    assert work.products_recompute_flops == 2 * 2 * 10


def test_under_autocast_each_product_casts_its_own_input() -> None:
    book = ledger(parameter_bytes=4)
    book.product(book.input, 10)
    book.product(book.input, 6)
    work = book.close()
    assert work.whole_bytes == 2 * WIDTH * 2
    assert work.skeleton_bytes == WIDTH * 4


def test_attention_keeps_queries_result_and_sums() -> None:
    book = ledger()
    q, k = book.product(book.input, 8), book.product(book.input, 4)
    out = book.attention(q, k, book.view(k, 4), 6, heads=2)
    assert not out.products
    work = book.close()
    assert work.whole_bytes == WIDTH * 2 + 8 * 2 + 6 * 2 + 2 * 4
    assert work.skeleton_bytes == WIDTH * 2 + 6 * 2 + 2 * 4
    # Keys are in their store, and nothing that is saved depends on their product.
    assert work.products_bytes - work.skeleton_bytes == 8 * 2


def test_only_rows_of_active_experts_are_multiplied_and_all_are_weights() -> None:
    book = ledger()
    rows = book.new(2 * WIDTH, book.input)
    out = book.product(rows, 5, rows=2, matrices=8)
    assert out.elements == 10
    work = book.close()
    assert work.forward_flops == 2 * 2 * WIDTH * 5
    assert work.total_weights == 8 * WIDTH * 5
