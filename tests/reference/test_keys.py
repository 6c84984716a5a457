"""Names map once, both ways, and nothing falls through."""

import pytest

from reference_impl.keys import LEGACY_NORM_RULES, KeyMapping, KeyMappingError, Rule, base_model_rule, rules_for

PUBLISHED = ["embeddings.word.weight", "layer.0.LayerNorm.gamma", "layer.0.LayerNorm.beta", "pooler.dense.weight"]


def bert_like() -> KeyMapping:
    return rules_for(PUBLISHED, base_prefix="bert", heads=["classifier"])


def test_mapping_and_inverse_are_idempotent_and_undo_each_other():
    mapping = bert_like()
    for name in PUBLISHED:
        target = mapping.map(name)
        assert target.startswith("bert.") and mapping.map(target) == target
        assert mapping.inverse(target) == name and mapping.inverse(name) == name
    assert mapping.map("classifier.weight") == "classifier.weight"
    assert len({mapping.map(name) for name in PUBLISHED}) == len(PUBLISHED)


def test_published_names_that_fit_already_need_no_rule():
    names = ["bert.embeddings.word.weight", "classifier.weight"]
    mapping = rules_for(names, base_prefix="bert", heads=["classifier"])
    assert mapping.rules == [] and [mapping.inverse(name) for name in names] == names


def test_installing_a_rule_twice_is_once():
    mapping = KeyMapping()
    rule = base_model_rule("bert", ["classifier"])
    assert mapping.install(rule) is True and mapping.install(rule) is False
    assert mapping.rules == [rule]
    with pytest.raises(KeyMappingError, match="already renamed"):
        mapping.install(Rule(rule.pattern, "other.", undo=r"^other\.", redo=""))


def test_rules_apply_in_order():
    first, second = Rule(r"^a\.", "b.", undo=r"^b\.", redo="a."), Rule(r"^b\.", "c.", undo=r"^c\.", redo="b.")
    mapping = KeyMapping([first, second])
    assert mapping.map("a.x") == "c.x" and mapping.inverse("c.x") == "a.x"


def test_missing_and_unexpected_names_are_reported_and_refused():
    report = bert_like().plan(
        PUBLISHED, ["bert.embeddings.word.weight", "bert.extra.weight", "classifier.weight"], fresh=["^classifier"]
    )
    assert report.missing == ["bert.extra.weight"] and report.initialised == ["classifier.weight"]
    assert report.unexpected == PUBLISHED[1:]
    with pytest.raises(KeyMappingError, match=r"my/model: 3 tensors.*gamma.*1 parameters.*extra"):
        report.refuse_losses("my/model")


def test_declared_names_may_be_dropped_but_a_fitting_one_never_is():
    report = KeyMapping().plan(["a.position_ids", "b.position_ids"], ["b.position_ids"], ignored=["position_ids$"])
    assert report.ignored == ["a.position_ids"] and report.renamed == {"b.position_ids": "b.position_ids"}
    report.refuse_losses("fine")


def test_two_names_for_one_parameter_are_refused():
    with pytest.raises(KeyMappingError, match="both map to"):
        KeyMapping(LEGACY_NORM_RULES).plan(["x.LayerNorm.gamma", "x.LayerNorm.weight"], ["x.LayerNorm.weight"])


def test_planning_changes_nothing_it_is_given():
    published, parameters = tuple(PUBLISHED), ("bert.pooler.dense.weight",)
    bert_like().plan(published, parameters)
    assert published == tuple(PUBLISHED) and parameters == ("bert.pooler.dense.weight",)
