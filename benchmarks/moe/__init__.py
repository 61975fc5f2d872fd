"""Mixtures of experts: the layer beside a dense one, a model beside DBRX: `make bench-moe`."""
