"""Memory that a recipe needs, before it is built, and how it is computed in what there is."""
