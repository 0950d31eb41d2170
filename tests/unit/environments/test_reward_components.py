import math

import pytest

from rl.environments.reward_components import weigh_group
from rl.environments.reward_function import Fault

WEIGHTS = {"a": 0.7, "b": 0.3}


def test_the_reward_is_the_weighted_sum():
    (first, second) = weigh_group([{"a": 1.0, "b": 0.0}, {"b": -2.0, "a": 3.0}], WEIGHTS)
    assert first.reward == 0.7 and first.components == {"a": 1.0, "b": 0.0}
    assert second.reward == pytest.approx(1.5)


def test_without_weights_numbers_stay_and_components_weigh_one_each():
    assert [weighed.reward for weighed in weigh_group([2.0, -1.0], {})] == [2.0, -1.0]
    (weighed,) = weigh_group([{"a": 1.0, "b": 0.5}], {})
    assert weighed.reward == 1.5 and weighed.components == {"a": 1.0, "b": 0.5}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": 1.0}, "component 'b' is missing; it has 'a'"),
        ({}, "component 'a', 'b' is missing; it has none"),
        ({"a": 1.0, "b": 1.0, "c": 1.0}, "component 'c' has no weight"),
        ({"a": 1.0, "b": Fault("returned None")}, "component 'b': returned None"),
        (1.0, "returned the number 1.0, expected the components 'a', 'b'"),
        (Fault("returned nan"), "returned nan"),
    ],
)
def test_a_sample_without_a_component_is_unscored_and_its_siblings_are_not(value, words):
    good, bad = weigh_group([{"a": 1.0, "b": 1.0}, value], WEIGHTS)
    assert good.reward == 1.0 and not good.fault
    assert math.isnan(bad.reward) and words in bad.fault and bad.components == {}


def test_without_weights_the_components_are_those_of_the_group():
    good, bad = weigh_group([{"a": 1.0, "b": 1.0}, {"a": 1.0}], {})
    assert good.reward == 2.0 and "component 'b' is missing" in bad.fault
    (empty,) = weigh_group([{}], {})
    assert empty.fault == "returned a mapping without components"
