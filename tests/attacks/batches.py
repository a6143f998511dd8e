"""Odd batches: what the converted model makes of them, and what the unmodified one does.

Right is the unmodified model's loss and gradients, or its kind of error. A clear refusal is right
as well: there is much that makes no sense chunk by chunk.
"""

import copy
import functools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sppo_hf import SPPOConfig, SPPOError
from sppo_hf.engine.convert import convert
from sppo_hf.testing.tiny_models import VOCAB_SIZE, build_tiny_model, make_batch
from tests.attacks.outcomes import Case, Outcome

T = 13
ROWS = 2
SETTINGS = (
    {"chunk_lengths": (5, 1, 7)},
    {"num_chunks": 2, "recompute": "full", "offload": "full", "loss_tile_tokens": 3},
)

_WHOLE = (torch.int32, torch.int64)

Batch = dict[str, Any]
Change = Callable[[Batch], Any]


def _set(name: str, value: Any) -> Change:
    return lambda batch: batch.__setitem__(name, value)


def _map(name: str, change: Callable[[Tensor], Any]) -> Change:
    return lambda batch: batch.__setitem__(name, change(batch[name]))


def _mask(*lengths: int, dtype: torch.dtype = torch.long) -> Tensor:
    return (torch.arange(T) < torch.tensor(lengths)[:, None]).to(dtype)


def _left(batch: Batch) -> None:
    batch["attention_mask"] = _mask(T, 9).flip(1)


def _embeds(batch: Batch) -> None:
    generator = torch.Generator().manual_seed(3)
    del batch["input_ids"]
    batch["inputs_embeds"] = torch.randn(ROWS, T, 32, generator=generator)


def _restarts(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def _packed_row(**more: Any) -> Change:
    def change(batch: Batch) -> None:
        batch.update({name: batch[name][:1] for name in ("input_ids", "labels")}, **more)

    return change


def _dtypes(name: str) -> dict[str, Change]:
    dtypes = (torch.int32, torch.int16, torch.uint8, torch.bool, torch.float32, torch.bfloat16)
    return {f"{name} {d}": _map(name, lambda x, d=d: x.to(d)) for d in (*dtypes, torch.complex64)}


def _types(name: str) -> dict[str, Change]:
    return {
        f"{name} list": _map(name, lambda x: x.tolist()),
        f"{name} numpy": _map(name, lambda x: x.numpy()),
        f"{name} None": _set(name, None),
        f"{name} text": _set(name, "tokens"),
        f"{name} number": _set(name, 3),
        f"{name} meta": _map(name, lambda x: x.to("meta")),
    }


def _shapes(name: str) -> dict[str, Change]:
    return {
        f"{name} one row": _map(name, lambda x: x[:1]),
        f"{name} more rows": _map(name, lambda x: torch.cat([x, x[:1]])),
        f"{name} shorter": _map(name, lambda x: x[:, :-1]),
        f"{name} longer": _map(name, lambda x: torch.cat([x, x[:, :1]], 1)),
        f"{name} flat": _map(name, lambda x: x[0]),
        f"{name} scalar": _map(name, lambda x: x[0, 0]),
        f"{name} deep": _map(name, lambda x: x[None]),
        f"{name} turned": _map(name, lambda x: x.T),
        f"{name} strided": _map(name, lambda x: torch.stack([x, x], -1)[..., 0]),
        f"{name} no rows": _map(name, lambda x: x[:0]),
        f"{name} no tokens": _map(name, lambda x: x[:, :0]),
    }


def _both(change: Callable[[Tensor], Tensor]) -> Change:
    def apply(batch: Batch) -> None:
        for name in ("input_ids", "labels"):
            if isinstance(batch.get(name), Tensor):
                batch[name] = change(batch[name])

    return apply


def _tokens() -> dict[str, Change]:
    return {
        "one token": _both(lambda x: x[:, :1]),
        "two tokens": _both(lambda x: x[:, :2]),
        "one row": _both(lambda x: x[:1]),
        "no rows": _both(lambda x: x[:0]),
        "no tokens": _both(lambda x: x[:, :0]),
        "no batch": lambda batch: batch.clear(),
        "token too large": _map("input_ids", lambda x: x.index_fill(1, _at(4), VOCAB_SIZE)),
        "token negative": _map("input_ids", lambda x: x.index_fill(1, _at(4), -1)),
        "inputs_embeds": _embeds,
        "both inputs": _set("inputs_embeds", torch.zeros(ROWS, T, 32)),
        "embeds of other width": lambda b: (_embeds(b), _map("inputs_embeds", _narrow)(b)),
        "embeds float64": lambda b: (_embeds(b), _map("inputs_embeds", Tensor.double)(b)),
        "embeds flat": lambda b: (_embeds(b), _map("inputs_embeds", lambda x: x[0])(b)),
        "embeds NaN": lambda b: (_embeds(b), _map("inputs_embeds", lambda x: x * torch.nan)(b)),
    }


def _at(token: int) -> Tensor:
    return torch.tensor([token])


def _narrow(x: Tensor) -> Tensor:
    return x[..., :-1]


def _labels() -> dict[str, Change]:
    return {
        "labels all ignored": _map("labels", lambda x: x * 0 - 100),
        "labels one": _map("labels", lambda x: x.index_fill(1, torch.arange(1, T), -100)),
        "labels last": _map("labels", lambda x: x.index_fill(1, torch.arange(T - 1), -100)),
        "label too large": _map("labels", lambda x: x.index_fill(1, _at(4), VOCAB_SIZE)),
        "label negative": _map("labels", lambda x: x.index_fill(1, _at(4), -7)),
        "shift_labels": _set("shift_labels", torch.arange(ROWS * T).view(ROWS, T) % VOCAB_SIZE),
        "shift_labels alone": lambda b: b.update(shift_labels=b.pop("labels")),
        "shift_labels shorter": lambda b: b.update(shift_labels=b["labels"][:, 1:]),
        "ignore_index": _set("ignore_index", 5),
        "ignore_index text": _set("ignore_index", "5"),
    }


def _masks() -> dict[str, Change]:
    masks = {
        "bool": _mask(T, 9, dtype=torch.bool),
        "long": _mask(T, 9),
        "float": _mask(T, 9, dtype=torch.float32),
        "byte": _mask(T, 9, dtype=torch.uint8),
        "twos": 2 * _mask(T, 9),
        "ones": _mask(T, T),
        "short rows": _mask(3, 9),
        "one token": _mask(1, T),
        "empty row": _mask(T, 0),
        "zeros": _mask(0, 0),
        "negative": -_mask(T, 9),
        "hole": _mask(T, T).index_fill(1, _at(4), 0),
        "causal": torch.ones(ROWS, 1, T, T).tril().bool(),
        "three dims": torch.ones(ROWS, T, T).tril().bool(),
        "one row": _mask(9),
        "shorter": _mask(T, 9)[:, :-1],
        "flat": _mask(9)[0],
        "list": _mask(T, 9).tolist(),
        "text": "causal",
    }
    return {f"mask {name}": _set("attention_mask", mask) for name, mask in masks.items()} | {
        "mask left": _left
    }


def _positions() -> dict[str, Change]:
    counted = torch.arange(T).expand(ROWS, -1)
    positions = {
        "counted": counted,
        "one row": counted[:1],
        "three rows": torch.arange(T).expand(3, -1),
        "shifted": counted + 5,
        "packed": _restarts(4, 9),
        "packed rows": _restarts(4, 9).expand(ROWS, -1).clone(),
        "packed otherwise": torch.cat([_restarts(4, 9), _restarts(7, 5, 1)]),
        "packed by ones": _restarts(*[1] * T),
        "zeros": counted * 0,
        "reversed": counted.flip(1),
        "negative": counted - 20,
        "gap": counted + (counted > 5),
        "float": counted.float(),
        "int32": counted.int(),
        "bool": counted.bool(),
        "huge": counted + 10**6,
        "flat": counted[0],
        "scalar": counted[0, 0],
        "shorter": counted[:, :-1],
        "longer": torch.arange(T + 1)[None],
        "no rows": counted[:0],
        "three dims": counted.expand(3, -1, -1),
        "list": counted.tolist(),
        "text": "0",
    }
    return {f"positions {name}": _set("position_ids", x) for name, x in positions.items()}


def _offsets() -> dict[str, Change]:
    def given(q: Any, k: Any = None) -> Change:
        k = q if k is None else k
        return _packed_row(cu_seq_lens_q=q, cu_seq_lens_k=k, max_length_q=9, max_length_k=9)

    ends = torch.tensor([0, 4, T])
    return {
        "offsets": given(ends),
        "offsets int32": given(ends.int()),
        "offsets of one": given(torch.tensor([0, T])),
        "offsets twice": given(torch.tensor([0, 4, 4, T])),
        "offsets empty": given(torch.tensor([], dtype=torch.int32)),
        "offsets one number": given(torch.tensor([0])),
        "offsets float": given(ends.float()),
        "offsets bool": given(ends.bool()),
        "offsets complex": given(ends.to(torch.complex64)),
        "offsets scalar": given(ends[0]),
        "offsets two dims": given(ends[None]),
        "offsets list": given([0, 4, T]),
        "offsets text": given("0"),
        "offsets short": given(torch.tensor([0, 4])),
        "offsets past": given(torch.tensor([0, 4, T + 1])),
        "offsets falling": given(torch.tensor([0, 9, 4, T])),
        "offsets negative": given(torch.tensor([0, -4, T])),
        "offsets late": given(torch.tensor([1, 4, T])),
        "offsets of keys differ": given(ends, torch.tensor([0, 5, T])),
        "offsets of keys are of a type": given(ends, "0"),
        "offsets of two rows": _set("cu_seq_lens_q", ends),
        "offsets of keys alone": _set("cu_seq_lens_k", ends),
    }


def _others() -> dict[str, Change]:
    numbers = {
        **{"int": 7, "float": 7.5, "zero": 0, "negative": -3, "text": "7", "NaN": float("nan")},
        **{"tensor": torch.tensor(7), "float tensor": torch.tensor(7.0), "list": [7]},
        **{"one-dim": torch.tensor([7]), "two": torch.tensor([7, 8]), "huge": 10**30},
    }
    return {
        **{f"items {name}": _set("num_items_in_batch", x) for name, x in numbers.items()},
        "use_cache": _set("use_cache", True),
        "return_dict": _set("return_dict", False),
        "hidden states": _set("output_hidden_states", True),
        "attentions": _set("output_attentions", True),
        "logits_to_keep": _set("logits_to_keep", 3),
        "logits_to_keep tensor": _set("logits_to_keep", torch.tensor([1, 2])),
        "logits_to_keep text": _set("logits_to_keep", "3"),
        "unknown": _set("nonsense", 3),
        "unknown tensor": _set("nonsense", torch.zeros(ROWS, T)),
    }


KINDS: dict[str, Change] = {
    "plain": lambda batch: None,
    **_tokens(),
    **_dtypes("input_ids"),
    **_types("input_ids"),
    **_shapes("input_ids"),
    **_labels(),
    **_dtypes("labels"),
    **_types("labels"),
    **_shapes("labels"),
    **_masks(),
    **_positions(),
    **_offsets(),
    **_others(),
}


@functools.lru_cache(maxsize=1)
def _models() -> tuple[nn.Module, ...]:
    """The unmodified model, and converted ones."""
    plain = build_tiny_model("llama", num_hidden_layers=2, dtype=torch.float32).train()
    # With a cache Transformers does not look for documents in the positions.
    plain.config.use_cache = False
    made = [
        convert(copy.deepcopy(plain), SPPOConfig(min_offload_size=1, show_plan=False, **settings))
        for settings in SETTINGS
    ]
    return plain, *made


def _run(model: nn.Module, batch: Batch) -> tuple[float, list[Tensor]]:
    model.zero_grad()
    output = model(**batch)
    loss = output[0] if isinstance(output, tuple) else output.loss
    if loss is None:
        return 0.0, [output.logits.detach()]
    if not isinstance(loss, Tensor) or loss.ndim:
        return 0.0, [torch.as_tensor(loss).detach()]
    loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return loss.item(), [grad.clone() for grad in grads]


def _answer(model: nn.Module, batch: Batch) -> tuple[float, list[Tensor]] | Exception:
    try:
        return _run(model, batch)
    except Exception as error:  # noqa: BLE001 - which one is what is asked
        return error


def _as_unmodified(batch: Batch) -> Batch:
    """Return the batch for the unmodified model, which ignores offsets on a CPU."""
    if isinstance(batch.get("shift_labels"), Tensor) and "labels" not in batch:
        batch = {**batch, "labels": batch["shift_labels"]}  # or it computes no loss
    ends = batch.get("cu_seq_lens_q")
    if not isinstance(ends, Tensor) or ends.ndim != 1 or ends.dtype not in _WHOLE:
        return batch
    lengths = ends.diff().tolist()
    if min(lengths, default=-1) < 0 or sum(lengths) != T:
        return batch
    offsets = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    others = {name: x for name, x in batch.items() if name not in offsets}
    return {**others, "position_ids": _restarts(*lengths), "attention_mask": None}


def _same(ours: tuple[float, list[Tensor]], theirs: tuple[float, list[Tensor]]) -> bool:
    mine, other = torch.tensor(ours[0]), torch.tensor(theirs[0])
    if not torch.allclose(mine, other, rtol=1e-4, atol=1e-6, equal_nan=True):
        return False
    if not other.isfinite():
        return True  # where a NaN ends up is nobody's promise
    pairs = list(zip(ours[1], theirs[1], strict=True))
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
        for a, b in pairs
    )


def _batch(names: tuple[str, ...], seed: int) -> Batch:
    batch: Batch = dict(make_batch(rows=ROWS, tokens=T, seed=seed))
    batch.pop("attention_mask", None)
    for name in names:
        KINDS[name](batch)
    return batch


def _judge(which: int, names: tuple[str, ...], seed: int) -> tuple[Outcome, str]:
    plain, *made = _models()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            batch = _batch(names, seed)
        except (AttributeError, KeyError, TypeError, IndexError, RuntimeError):
            return Outcome.RIGHT, "these two do not go together"
        theirs, ours = _answer(plain, _as_unmodified(batch)), _answer(made[which], batch)
    if isinstance(ours, SPPOError):
        return Outcome.REFUSED, f"{type(ours).__name__}: {ours}"
    if isinstance(ours, Exception):
        # Of two faults either may be found first.
        alone = [_answer(plain, _as_unmodified(_batch((name,), seed))) for name in names]
        alike = isinstance(theirs, Exception) and type(ours) in map(type, (theirs, *alone))
        said = f"{type(ours).__name__}: {ours}; unmodified: {theirs!r}"
        return (Outcome.RIGHT if alike else Outcome.RAW), said[:300]
    if isinstance(theirs, Exception):
        return Outcome.WRONG, f"accepted; unmodified: {theirs!r}"[:300]
    right = _same(ours, theirs)
    return (Outcome.RIGHT if right else Outcome.WRONG), f"loss {ours[0]}, {theirs[0]}"


def cases(count: int, seed: int) -> Iterator[Case]:
    """Every kind alone first, then two kinds at once; the settings in turn."""
    draw = random.Random(seed)
    singles = [(name,) for name in KINDS]
    draw.shuffle(singles)
    for index in range(count):
        names = singles[index] if index < len(singles) else tuple(draw.sample(list(KINDS), 2))
        which = index % len(SETTINGS)
        attempt = functools.partial(_judge, which, names, draw.randrange(1000))
        yield Case(f"batches: {' and '.join(names)}, settings {which}", attempt)
    # Whatever came before, the next batch is right.
    for which in range(len(SETTINGS)):
        yield Case(
            "batches: a plain one after all", functools.partial(_judge, which, ("plain",), 1)
        )
