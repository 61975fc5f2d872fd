"""Speed and memory beside others, in one run, as ratios: `make bench`, `make bench-moe`."""
