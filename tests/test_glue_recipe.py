"""The recipe is the paper's for every task, and every part of it can be changed."""

from dataclasses import fields

import pytest

from backsketch.programs.glue.recipe import Recipe, recipe_for
from backsketch.programs.glue.tasks import TASKS

BATCH = {"qqp": 32, "sst-2": 32, "wnli": 32}
LEARNING_RATE = {"rte": 2e-5, "sst-2": 2e-5}


@pytest.mark.parametrize("name", TASKS)
def test_the_papers_recipe(name):
    expected = Recipe(batch_size=BATCH.get(name, 16), learning_rate=LEARNING_RATE.get(name, 1e-5))
    assert recipe_for(TASKS[name]) == expected


def test_what_all_tasks_share():
    recipe = Recipe()
    assert (recipe.beta1, recipe.beta2, recipe.epsilon, recipe.weight_decay) == (0.9, 0.98, 1e-6, 0.1)
    assert (recipe.epochs, recipe.warmup, recipe.power, recipe.clip) == (10, 0.06, 1.0, 0.0)


@pytest.mark.parametrize("field", [field.name for field in fields(Recipe)])
def test_every_part_can_be_changed_and_none_changes_nothing(field):
    task = TASKS["cola"]
    value = 3 if isinstance(getattr(Recipe(), field), int) else 0.25
    assert getattr(recipe_for(task, **{field: value}), field) == value
    assert recipe_for(task, **{field: None}) == recipe_for(task)
    with pytest.raises(ValueError, match=f"{field} must be .*, got -1"):
        recipe_for(task, **{field: -1})


def test_a_learning_rate_of_zero_is_refused():
    with pytest.raises(ValueError, match="learning_rate must be above 0, got 0"):
        Recipe(learning_rate=0.0)


def test_steps_count_the_last_and_smaller_batch():
    assert Recipe(batch_size=16, epochs=3).steps(33) == 9


def test_an_unknown_part_is_named():
    with pytest.raises(ValueError, match="got momentum"):
        recipe_for(TASKS["cola"], momentum=0.9)
