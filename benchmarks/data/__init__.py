"""Sample order, loaders, preparation and the wait for data: `make bench-data`."""
