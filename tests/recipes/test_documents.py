"""Documents from every source, in the same order every time, and never on both sides of a split."""

import json
from importlib import metadata

import pytest

from sppo_hf.errors import ConfigError

pytest.importorskip("datasets", reason="needs the extra `recipes`")

from datasets import Dataset

from recipes.documents import (
    installed_packages,
    load_documents,
    local_documents,
    split_documents,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture
def few_packages(monkeypatch):
    """A fifth of the packages that are installed, which are found in another order each time."""
    found = sorted(metadata.distributions(), key=lambda package: package.name)[::5]

    def turned():
        found.reverse()
        return list(found)

    monkeypatch.setattr("recipes.documents.metadata.distributions", turned)


def documents(*texts):
    return Dataset.from_list([{"name": str(i), "text": text} for i, text in enumerate(texts)])


def test_installed_packages_are_one_document_each_with_file_headers():
    found = installed_packages(["PyYAML", "rich"])

    assert [name.split("==")[0] for name in found["name"]] == ["pyyaml", "rich"]
    rich = found["text"][1]
    headers = [line[8:] for line in rich.splitlines() if line.startswith("# file: ")]
    assert "rich/align.py" in headers
    assert headers == sorted(headers)
    assert all(header.startswith("rich/") for header in headers)


@pytest.mark.usefixtures("few_packages")
def test_installed_packages_come_in_the_same_order_every_time():
    first, second = load_documents("installed-packages"), installed_packages()

    assert first["name"] == second["name"]
    assert first["text"] == second["text"]
    assert len(set(first["name"])) == len(first["name"]) > 5


@pytest.mark.usefixtures("few_packages")
def test_installed_packages_respect_both_limits():
    limited = installed_packages(max_document_chars=30_000, min_document_chars=25_000)

    sizes = [len(text) for text in limited["text"]]
    assert max(sizes) == 30_000
    assert min(sizes) >= 25_000


def test_tests_of_installed_packages_are_left_out():
    text = installed_packages(["numpy"], max_document_chars=50_000_000)["text"][0]

    assert "# file: numpy/__init__.py" in text
    assert "# file: numpy/tests/" not in text


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(ConfigError, match="no-such-package"):
        installed_packages(["rich", "no_such_package"])


def test_a_folder_of_text_files_is_one_document_a_file_in_path_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "picture.txt").write_bytes(b"\xff\xfe\x00\x81")
    (tmp_path / "ignored.bin").write_text("not text by its name")

    found = local_documents(tmp_path)

    assert found["name"] == ["a.txt", "b/two.md"]
    assert found["text"] == ["first", "second"]


def test_a_single_file_is_read_whatever_its_suffix(tmp_path):
    (tmp_path / "NOTES").write_text("one\n\ntwo")
    assert local_documents(tmp_path / "NOTES")["text"] == ["one\n\ntwo"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("column", ["text", "content"])
def test_tables_are_one_document_a_row(tmp_path, suffix, column):
    rows = [{column: "first", "stars": 3}, {column: "", "stars": 1}, {column: "second", "stars": 2}]
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        Dataset.from_list(rows).to_parquet(path)

    for source in (path, tmp_path):
        found = load_documents(str(source))
        assert found["text"] == ["first", "second"]
        assert set(found.column_names) == {"name", "text"}


def test_an_unusual_text_column_must_be_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prose": "a"}\n{"prose": "b"}\n')

    with pytest.raises(ConfigError, match=r"\['prose'\].*text_column"):
        local_documents(path)
    assert local_documents(path, text_column="prose")["text"] == ["a", "b"]


@pytest.mark.parametrize("source", ["./nowhere", "/nowhere/at/all", "rows.jsonl"])
def test_a_path_that_is_not_there_is_not_taken_for_a_hub_id(source):
    with pytest.raises(ConfigError, match="no such file or folder"):
        load_documents(source)


def test_a_folder_without_text_says_what_was_looked_for(tmp_path):
    (tmp_path / "a.bin").write_text("x")
    with pytest.raises(ConfigError, match=r"\.jsonl.*\.txt.*1 files"):
        local_documents(tmp_path)


def test_mixed_tables_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.csv").write_text("text\nb\n")
    with pytest.raises(ConfigError, match="mixes"):
        local_documents(tmp_path)


def test_no_text_is_on_both_sides_of_a_split():
    # Ten texts, each three times: a split by rows would put copies on both sides.
    repeated = documents(*(f"text {i % 10}" for i in range(30)))

    split = split_documents(repeated, held_out_fraction=0.3, seed=1)

    train, held_out = set(split.train["text"]), set(split.held_out["text"])
    assert not train & held_out
    assert len(train) == 7
    assert len(held_out) == 3


def test_a_split_depends_on_the_seed_and_on_nothing_else():
    many = documents(*(f"text {i}" for i in range(50)))
    names = [split_documents(many, seed=seed).held_out["name"] for seed in (0, 0, 1)]

    assert names[0] == names[1] != names[2]


def test_two_documents_are_enough_and_one_is_not():
    split = split_documents(documents("a", "b"), held_out_fraction=0.9)
    assert (len(split.train), len(split.held_out)) == (1, 1)
    with pytest.raises(ConfigError, match="1 distinct document"):
        split_documents(documents("a", "a"))


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1])
def test_an_impossible_fraction_is_refused(fraction):
    with pytest.raises(ConfigError, match="held_out_fraction"):
        split_documents(documents("a", "b"), held_out_fraction=fraction)
