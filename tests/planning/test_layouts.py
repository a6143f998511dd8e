"""What a search may choose from: nothing outside its space, nothing twice, cuts as they say."""

from sppo_hf.planning.chunk_bounds import PrefixCost
from sppo_hf.planning.layouts import Layout, SearchSpace, bounds_of
from tests.planning.shapes import gpt_shape


def found(space: SearchSpace, *, gpus: int = 8, rows: int = 8, layers: int = 8) -> list[Layout]:
    made = space.layouts(gpus=gpus, rows=rows, total_tokens=65_536, num_layers=layers)
    return list(made)


def test_only_what_is_allowed_and_nothing_twice() -> None:
    space = SearchSpace(
        schedules=("1f1b", "interleaved_seq1f1b"),
        virtual=(2,),
        partitions=("even", "bounded"),
        activation_rules=(("whole", "sppo"),),
        kv_tiers=("device", "host"),
        chunk_tokens=(8192, 16_384),
        max_units=16,
    )
    layouts = found(space)
    assert len(set(layouts)) == len(layouts)
    assert {x.schedule for x in layouts} == {"1f1b", "interleaved_seq1f1b"}
    assert {x.partition for x in layouts} == {"even", "bounded"}
    assert {(x.saved, x.offload) for x in layouts} == {("whole", "sppo")}
    assert {x.kv_tier for x in layouts} == {"device", "host"}
    assert {x.num_chunks for x in layouts} == {4, 8}
    for layout in layouts:
        assert layout.stages * layout.replicas == 8
        assert layout.num_chunks * 8 // layout.replicas <= 16
        assert layout.stages * layout.virtual <= 8
        assert layout.virtual == (2 if layout.schedule == "interleaved_seq1f1b" else 1)


def test_devices_may_stand_idle_where_that_makes_stages_equal() -> None:
    whole = {(x.stages, x.replicas) for x in found(SearchSpace(), gpus=16, rows=60, layers=10)}
    some = SearchSpace(min_device_share=0.9)
    more = {(x.stages, x.replicas) for x in found(some, gpus=16, rows=60, layers=10)}
    assert all(stages * replicas == 16 for stages, replicas in whole)
    # Five stages of two layers; three pipelines of them. Not seven stages, two of two layers.
    assert (5, 3) in more - whole
    assert whole < more
    assert all(stages * replicas >= 15 for stages, replicas in more)
    assert all(stages != 7 for stages, _ in more)


def test_a_single_chunk_is_cut_in_one_way() -> None:
    one = SearchSpace(partitions=("flops", "even"), chunk_tokens=(65_536, 65_536))
    assert {x.partition for x in found(one)} == {"flops"}
    two = SearchSpace(partitions=("flops", "even"), chunk_tokens=(32_768, 32_768))
    assert {x.partition for x in found(two)} == {"flops", "even"}


def test_bounded_chunks_are_neither_much_longer_nor_much_shorter_than_the_mean() -> None:
    curve, tokens, mean = PrefixCost.of(gpt_shape(4096, 32, 32)), 2**20, 2**14
    lengths = [end - start for start, end in bounds_of(curve, tokens, 64, "bounded")]
    equal = [end - start for start, end in bounds_of(curve, tokens, 64, "flops")]
    assert len(lengths) == 64
    assert sum(lengths) == tokens
    assert max(lengths) <= 2 * mean < max(equal)
    assert min(lengths) >= mean // 4 - 128
    assert lengths == sorted(lengths, reverse=True)
    even = {end - start for start, end in bounds_of(curve, tokens, 64, "even")}
    assert even == {mean}
