"""Examples are read whole, split cleanly and shown with the right passages; a position belongs to the run."""

import json
import re

import pytest

from reference_impl.config import Config
from reference_impl.data import load_split, passages_for
from reference_impl.order import SampleOrder, positions_of
from reference_impl.records import RecordError, fingerprint, read_records
from reference_impl.stdlib_docs import package_of, stdlib_examples

GOOD = {"query": "q", "pos_doc": ["p1", "p2"], "neg_doc": ["n"]}


def test_jsonl_and_json_hold_the_same_records(tmp_path):
    other = {"question": "r", "pos_doc": "p", "neg_doc": []}
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD) + "\n\n" + json.dumps(other) + "\n")
    (tmp_path / "a.json").write_text(json.dumps({"data": [GOOD, other]}))
    lines, listed = read_records(tmp_path / "a.jsonl"), read_records(tmp_path / "a.json")
    assert [(e.query, e.positive, e.negatives) for e in lines] == [
        ("q", "p1", ("n",)),
        ("q", "p2", ("n",)),
        ("r", "p", ()),
    ]
    assert fingerprint(lines) == fingerprint(listed)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "must be an object"),
        ('{"pos_doc": "p"}', "'query'"),
        ('{"query": "q"}', "'pos_doc'"),
        ('{"query": "q", "pos_doc": []}', "'pos_doc' is empty"),
        ('{"query": "q", "pos_doc": "p", "neg_doc": "n"}', "'neg_doc'"),
        ('{"query": "q", "pos_doc": "p", "neg_doc": [3]}', "'neg_doc'"),
    ],
)
def test_a_malformed_record_names_file_and_line(tmp_path, line, said):
    (tmp_path / "bad.jsonl").write_text(json.dumps(GOOD) + "\n" + line + "\n")
    with pytest.raises(RecordError, match=rf"bad\.jsonl:2: .*{said}"):
        read_records(tmp_path / "bad.jsonl")


def test_other_malformed_files_are_named(tmp_path):
    with pytest.raises(RecordError, match=r"absent\.jsonl"):
        read_records(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(RecordError, match="no records"):
        read_records(tmp_path / "empty.jsonl")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(RecordError, match="top-level 'data'"):
        read_records(tmp_path / "list.json")
    (tmp_path / "item.json").write_text(json.dumps({"data": [GOOD, 3]}))
    with pytest.raises(RecordError, match=re.escape("data[1]")):
        read_records(tmp_path / "item.json")


@pytest.fixture(scope="module")
def split():
    return load_split(Config())


def test_the_standard_library_gives_a_few_thousand_pairs(split):
    assert len(split.train) + len(split.evaluation) > 2000
    assert split.identity == load_split(Config()).identity


def test_no_package_is_on_both_sides(split):
    assert split.evaluation
    assert not {package_of(e) for e in split.train} & {package_of(e) for e in split.evaluation}
    assert load_split(Config(seed=1)).identity != split.identity


def test_hard_negatives_come_from_the_same_module(tmp_path):
    (tmp_path / "m.py").write_text(
        "\n".join(
            f'def f{i}():\n    """Summary number {i}.\n\n    {"The rest of the text " * 3}{i}.\n    """' for i in range(4)
        )
    )
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_text((tmp_path / "m.py").read_text())
    examples = stdlib_examples(tmp_path)
    assert [e.query for e in examples] == [f"Summary number {i}." for i in range(4)]
    assert {e.source for e in examples} == {"m"}
    assert set(examples[0].negatives) == {e.positive for e in examples[1:]}


def test_passages_are_one_positive_then_distinct_negatives(split):
    for index in range(50):
        example = split.train[index]
        shown = passages_for(split.train, index, count=6, hard=2, key="0/0")
        assert shown[0] == example.positive and len(set(shown)) == 6
        assert sum(passage in example.negatives for passage in shown[1:]) >= min(2, len(example.negatives))
        assert shown == passages_for(split.train, index, count=6, hard=2, key="0/0")
        assert shown[0] == passages_for(split.train, index, count=6, hard=2, key="0/1")[0]


def test_a_lone_record_repeats_its_negative_and_without_one_is_refused(tmp_path):
    (tmp_path / "one.jsonl").write_text(json.dumps({"query": "q", "pos_doc": "p", "neg_doc": ["n"]}))
    assert passages_for(read_records(tmp_path / "one.jsonl"), 0, count=4, hard=2, key="") == ["p", "n", "n", "n"]
    (tmp_path / "one.jsonl").write_text(json.dumps({"query": "q", "pos_doc": "p"}))
    with pytest.raises(ValueError, match="no negative"):
        passages_for(read_records(tmp_path / "one.jsonl"), 0, count=4, hard=2, key="")


def test_every_epoch_uses_every_sample_once():
    order = SampleOrder(11, seed=3)
    epochs = [[order.sample(p) for p in range(11 * e, 11 * e + 11)] for e in range(3)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert [order.epoch(p) for p in (0, 10, 11, 22)] == [0, 0, 1, 2]


@pytest.mark.parametrize("worlds", [(1, 1, 1), (2, 4, 1), (3, 2, 5)])
def test_a_changed_world_loses_and_repeats_no_position(worlds):
    start, used = 0, []
    for world in worlds:
        for micro in range(2):
            for rank in range(world):
                used += positions_of(rank, world, start=start, batch_size=3, micro_batch=micro)
        start += 2 * world * 3
    assert used == list(range(start))


def test_nothing_to_order_is_refused():
    with pytest.raises(ValueError, match="empty"):
        SampleOrder(0)
