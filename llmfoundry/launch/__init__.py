"""A run is started on a target, looked at and stopped there: one table of functions a target."""
