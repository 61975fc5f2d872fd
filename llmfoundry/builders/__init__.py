"""From a recipe to the objects of a run; `trainer.build_trainer` shows all of it in order."""
